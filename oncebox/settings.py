"""Settings of a service: one typed model, read from a YAML file, environment variables and flags.
A flag wins over a variable, a variable over the file, the file over the default. What is wrong is told with the
field, where it was set and what is allowed; a secret is never told. Only load() reads files and the environment.
"""

import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FilePath, SecretStr, ValidationError, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings import SettingsError as UndecodableError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from oncebox.dsn import problem_of

if TYPE_CHECKING:
    from oncebox import wire

NESTED = "__"
REFERENCE = re.compile(r"\$\{(\w+)\}")
SERVER = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:,/\[\]]+):([0-9]{1,5})")

Place = tuple[str | int, ...]  # of a value: ("kafka", "sasl_password")


class SettingsError(Exception):
    """What is wrong with the settings, a line for each problem."""


@dataclass(frozen=True, slots=True)
class Variable:
    """Marks a field that all services also take from this one environment variable."""

    name: str


class Section(BaseModel):
    """A group of fields under one name."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ServiceSettings(BaseSettings):
    """Base of each service's model; its own env_prefix (ONCEBOX_RELAY_) belongs into its model_config."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        extra="forbid", frozen=True, env_nested_delimiter=NESTED
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        del settings_cls, env_settings, dotenv_settings, file_secret_settings  # load() reads, not the constructor
        return (init_settings,)


def _server_list(servers: str) -> str:
    for server in servers.split(","):
        match = SERVER.fullmatch(server.strip())
        if not match or not 0 < int(match[2]) < 65536:
            raise ValueError("should be host:port, or several with commas between")
    return servers


class KafkaSection(Section):
    """How to reach the brokers. The fields of wire.KafkaSettings that a user may set, and mean the same."""

    # host:port, or several with commas between.
    bootstrap_servers: Annotated[str, AfterValidator(_server_list), Variable("ONCEBOX_BOOTSTRAP_SERVERS")]
    # Whether brokers want encryption (SSL), a name and password (SASL), or both.
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    # With SASL_*: all three.
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = None
    # Of this service, at the brokers.
    sasl_username: str | None = None
    # Better as a variable than in the file.
    sasl_password: SecretStr | None = None
    # Who signs the brokers' certificates; empty: the system's authorities.
    ssl_ca_location: FilePath | None = None
    # The client's own, where brokers ask for one.
    ssl_certificate_location: FilePath | None = None
    # Its key.
    ssl_key_location: FilePath | None = None
    # Of that key, if it has one.
    ssl_key_password: SecretStr | None = None
    # none: the broker's certificate may be for another name.
    ssl_endpoint_identification_algorithm: Literal["https", "none"] = "https"

    @model_validator(mode="after")
    def _whole(self) -> "KafkaSection":
        sasl = (self.sasl_mechanism, self.sasl_username, self.sasl_password)
        if self.security_protocol.startswith("SASL") and not all(sasl):
            raise ValueError(f"{self.security_protocol} needs sasl_mechanism, sasl_username and sasl_password")
        if not self.security_protocol.startswith("SASL") and any(sasl):
            raise ValueError("sasl_* needs security_protocol SASL_SSL or SASL_PLAINTEXT")
        if not self.security_protocol.endswith("SSL") and (self.ssl_ca_location or self.ssl_certificate_location):
            raise ValueError("ssl_* needs security_protocol SSL or SASL_SSL")
        if bool(self.ssl_certificate_location) != bool(self.ssl_key_location):
            raise ValueError("ssl_certificate_location and ssl_key_location need each other")
        return self


def _readable(dsn: SecretStr) -> SecretStr:
    if problem := problem_of(dsn.get_secret_value()):
        raise ValueError(problem)
    return dsn


class PostgresSection(Section):
    """How to reach the database."""

    # postgresql://user:password@host/database; from another machine with ?sslmode=verify-full.
    dsn: Annotated[SecretStr, AfterValidator(_readable), Variable("ONCEBOX_DSN")]


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ServerTlsSection(Section):
    """Certificates in PEM files, read anew when they change."""

    # The server's, with the chain up to its authority.
    certificate_location: FilePath
    # Without a password.
    key_location: FilePath
    # Clients must then show a certificate that one of these authorities has signed.
    client_ca_location: FilePath | None = None
    # Which name of a client's certificate is its principal, cert:NAME.
    principal_from: Literal["common_name", "spiffe_id", "dns"] = "common_name"


class TokensSection(Section):
    """Bearer tokens (JWT) as identity: token:NAME. Signed with RSA, EC or Ed25519; never with a shared secret."""

    # A JSON Web Key Set, or one public key in PEM; read anew on SIGHUP.
    keys_location: FilePath
    # What a token's aud must hold.
    audience: Annotated[str, Field(min_length=1)]
    # What its iss must be.
    issuer: Annotated[str, Field(min_length=1)]
    # Which claim is the principal.
    principal_claim: Annotated[str, Field(min_length=1)] = "sub"
    # How far clocks may differ.
    leeway_s: Annotated[int, Field(ge=0, le=300)] = 30


def identifies(tls: ServerTlsSection | None, tokens: TokensSection | None) -> bool:
    """Whether a service that is set up like this asks who calls."""
    return tokens is not None or (tls is not None and tls.client_ca_location is not None)


def check_listening(settings: Any) -> None:
    """For the validators of services that listen. ValueError: it could be reached by whom nobody meant."""
    has_identity = identifies(settings.tls, settings.tokens)
    # /metrics may listen elsewhere.
    http_host = getattr(settings, "http_host", "") or settings.listen_host
    for name, host in (("listen_host", settings.listen_host), ("http_host", http_host)):
        if not is_loopback(host) and not settings.insecure_listen and not (settings.tls and has_identity):
            raise ValueError(
                f"{name} {host} is reachable from other machines, without TLS and an identity of clients: set tls with "
                "client_ca_location or tokens, listen on 127.0.0.1, or set insecure_listen if the network is trusted"
            )
    if settings.tokens and not settings.tls:
        raise ValueError("tokens need tls: without encryption whoever listens could use them")
    if settings.rules_location and not has_identity:
        raise ValueError("rules_location needs to know who calls: set tls.client_ca_location or tokens")


def kafka_settings(section: KafkaSection, *, client_id: str = "oncebox") -> "wire.KafkaSettings":
    """For the clients: Wire itself, wire.aiokafka_options and wire.librdkafka_config."""
    from oncebox import wire

    values = section.model_dump(exclude_none=True)
    plain: dict[str, Any] = {
        name: value.get_secret_value() if isinstance(value, SecretStr) else str(value) for name, value in values.items()
    }
    return wire.KafkaSettings(client_id=client_id, **plain)


Model = TypeVar("Model", bound=ServiceSettings)


def load(model: type[Model], *, file: Path | None = None, flags: Mapping[str, object] | None = None) -> Model:
    """Flags are keyed by the field's dotted path; None is a flag not given. A flag is told by the last part of its
    path: "kafka.bootstrap_servers" is --bootstrap-servers.
    """
    document = _read(file) if file else _Document(name="")
    given = {path: value for path, value in (flags or {}).items() if value is not None}
    values = document.values
    _check_variables(model)
    for place, variable in _variables(model):
        if variable in os.environ:
            _merge(values, _nested(place, os.environ[variable]))
    try:
        _merge(values, EnvSettingsSource(model)())
    except UndecodableError as error:
        own = _own_variable(model, (str(error).split('"')[1],))  # its text quotes the field's name
        suspects = [name for name in sorted(os.environ) if name.upper().startswith(own)]
        raise SettingsError(f"{' or '.join(suspects)}: a list or section should be JSON here") from None
    for path, value in given.items():
        _merge(values, _nested(tuple(path.split(".")), value))
    _open_sections(model, values)
    try:
        return model(**values)
    except ValidationError as error:
        problems = [_problem(model, document, given, detail) for detail in error.errors(include_url=False)]
        raise SettingsError("\n".join(problems)) from None


@dataclass(slots=True)
class _Document:
    name: str
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[Place, int] = field(default_factory=dict)
    substituted: set[Place] = field(default_factory=set)  # may be secret


def _read(file: Path) -> _Document:
    document = _Document(name=str(file))
    try:
        with open(file, encoding="utf-8") as stream:
            loader = yaml.SafeLoader(stream)
            root = loader.get_single_node()
            values = _build(loader, root, (), document) if root else {}
    except yaml.MarkedYAMLError as error:
        # Not str(error): it quotes the line, which may hold a secret.
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SettingsError(f"{file}{line}: not YAML: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise SettingsError(f"{file}: not a text file in UTF-8") from None
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}") from None
    if not isinstance(values, dict):
        raise SettingsError(f"{file}: should be names with values (name: value)")
    document.values = values
    return document


def _build(loader: yaml.SafeLoader, node: Node, place: Place, document: _Document) -> Any:
    """The value of a node; notes the line of each, and puts the environment's values for ${NAME}."""
    document.lines.setdefault(place, node.start_mark.line + 1)
    if isinstance(node, MappingNode):
        built = {}
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node))
            document.lines[*place, key] = key_node.start_mark.line + 1
            if key in built:
                raise SettingsError(f"{_where_in_file(document, (*place, key))}: {_dotted((*place, key))} twice")
            built[key] = _build(loader, value_node, (*place, key), document)
        return built
    if isinstance(node, SequenceNode):
        return [_build(loader, item, (*place, index), document) for index, item in enumerate(node.value)]
    if isinstance(node, ScalarNode) and REFERENCE.search(node.value):
        document.substituted.add(place)
        try:
            return REFERENCE.sub(lambda match: os.environ[match[1]], node.value)
        except KeyError as error:
            where = _where_in_file(document, place)
            raise SettingsError(f"{where}: {_dotted(place)}: the variable {error.args[0]} is not set") from None
    return loader.construct_object(node)


def _sections(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, info in model.model_fields.items():
        for kind in (info.annotation, *get_args(info.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield name, kind


def _variables(model: type[BaseModel], place: Place = ()) -> Iterator[tuple[Place, str]]:
    """The fields that have a variable common to all services."""
    for name, info in model.model_fields.items():
        for mark in info.metadata:
            if isinstance(mark, Variable):
                yield (*place, name), mark.name
    for name, section in _sections(model):
        yield from _variables(section, (*place, name))


def _check_variables(model: type[ServiceSettings]) -> None:
    """A misspelt variable would otherwise be ignored."""
    prefix = model.model_config.get("env_prefix", "").upper()
    for variable in sorted(os.environ):
        name = variable.upper().removeprefix(prefix).lower()
        if variable.upper().startswith(prefix) and name.split(NESTED)[0] not in model.model_fields:
            raise SettingsError(f"{variable}: {_unknown(model, (name,), prefix)}")


def _open_sections(model: type[BaseModel], values: dict[str, Any]) -> None:
    """An absent section becomes an empty one, so that its missing fields are told by name."""
    for name, section in _sections(model):
        if model.model_fields[name].is_required() and values.get(name) is None:
            values[name] = {}
        if isinstance(values.get(name), dict):
            _open_sections(section, values[name])


def _problem(
    model: type[ServiceSettings], document: _Document, flags: Mapping[str, object], detail: ErrorDetails
) -> str:
    place, dotted = detail["loc"], _dotted(detail["loc"])
    if detail["type"] == "missing":
        return f"{dotted} is missing: set {_ways(model, place)}"
    where = _where(model, document, flags, place)
    if detail["type"] == "extra_forbidden":
        return f"{where}: {_unknown(model, place)}"
    told = f"{where}: {dotted}"
    value = detail["input"]
    if isinstance(value, str | int | float) and not _secret(model, place) and place not in document.substituted:
        told += f" = {value!r}"
    return f"{told}: {detail['msg'].removeprefix('Value error, ').removeprefix('Input ')}"


def _where(model: type[ServiceSettings], document: _Document, flags: Mapping[str, object], place: Place) -> str:
    """The highest-ranking source that set this place, or the section around it."""
    if _dotted(place) in flags:
        return _flag(place)
    shared = {at: name for at, name in _variables(model) if at == place}
    around = [place[:end] for end in range(len(place), 0, -1)]
    for variable in (*(_own_variable(model, at) for at in around), *shared.values()):
        if variable in os.environ:
            return variable
    return _where_in_file(document, place) if document.name else "settings"


def _where_in_file(document: _Document, place: Place) -> str:
    around = (place[:end] for end in range(len(place), -1, -1))
    return f"{document.name}, line {next((document.lines[at] for at in around if at in document.lines), 1)}"


def _unknown(model: type[BaseModel], place: Place, prefix: str = "") -> str:
    for part in place[:-1]:
        model = dict(_sections(model)).get(str(part), model)
    name = str(place[-1])
    near = get_close_matches(name, model.model_fields, n=1)
    known = [prefix + (each.upper() if prefix else each) for each in near or model.model_fields]
    hint = f"did you mean {known[0]}?" if near else f"known are {', '.join(known)}"
    return f"{_dotted(place)} is unknown; {hint}"


def _secret(model: type[BaseModel], place: Place) -> bool:
    sections = dict(_sections(model))
    if len(place) > 1 and place[0] in sections:
        return _secret(sections[str(place[0])], place[1:])
    annotation = model.model_fields[str(place[0])].annotation if place[0] in model.model_fields else None
    return SecretStr in {annotation, *get_args(annotation)}


def _ways(model: type[ServiceSettings], place: Place) -> str:
    shared = [name for at, name in _variables(model) if at == place]
    variables = " or ".join([*shared, _own_variable(model, place)])
    return f"{variables}, the flag {_flag(place)}, or {_dotted(place)} in the file"


def _own_variable(model: type[ServiceSettings], place: Place) -> str:
    return (model.model_config.get("env_prefix", "") + NESTED.join(map(str, place))).upper()


def _flag(place: Place) -> str:
    return f"--{str(place[-1]).replace('_', '-')}"


def _dotted(place: Place) -> str:
    return ".".join(map(str, place))


def _nested(place: Place, value: object) -> dict[str, Any]:
    for part in reversed(place):
        value = {part: value}
    return value  # type: ignore[return-value]  # a place has at least one part


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, Mapping) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value
