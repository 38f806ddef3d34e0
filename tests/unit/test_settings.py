"""Settings from file, variables and flags: who wins, and what is told when something is wrong."""

import os
import traceback
from typing import Annotated, Any

import pytest
from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from oncebox import wire
from oncebox.settings import (
    KafkaSection,
    PostgresSection,
    ServiceSettings,
    SettingsError,
    kafka_settings,
    load,
)

SECRET = "hunter2-and-more"


class RelayLike(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="ONCEBOX_TESTED_")

    kafka: KafkaSection
    postgres: PostgresSection
    port: Annotated[int, Field(ge=0, le=65535)] = 50051
    tables: list[str] = Field(default_factory=list)


class Small(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="ONCEBOX_SMALL_")

    postgres: PostgresSection | None = None
    batch_rows: int = 1000


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("ONCEBOX_"):
            monkeypatch.delenv(name)

    def set_all(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "relay.yaml"
        path.write_text(text)
        return path

    return write


WHOLE = f"""\
kafka:
  bootstrap_servers: file:1
postgres:
  dsn: postgresql://user:{SECRET}@host/db
port: 1
"""


def problem(**sources: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        load(RelayLike, **sources)
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    return str(caught.value)


def test_each_source_wins_over_the_next(file, environment):
    path = file(WHOLE)
    assert load(RelayLike, file=path).port == 1
    environment(ONCEBOX_TESTED_PORT="2")
    assert load(RelayLike, file=path).port == 2
    assert load(RelayLike, file=path, flags={"port": 3}).port == 3
    assert load(RelayLike, file=path, flags={"port": None}).port == 2


def test_the_default_is_last(file):
    assert load(RelayLike, file=file(WHOLE.replace("port: 1", ""))).port == 50051
    assert load(Small).postgres is None
    assert load(Small, file=file("")).batch_rows == 1000


def test_nested_fields_merge_one_by_one(file, environment):
    environment(ONCEBOX_TESTED_KAFKA__SASL_USERNAME="ann")
    text = WHOLE.replace(
        "file:1", "file:1\n  security_protocol: SASL_PLAINTEXT\n  sasl_password: x\n  sasl_mechanism: PLAIN"
    )
    loaded = load(RelayLike, file=file(text), flags={"kafka.bootstrap_servers": "flag:1"})
    assert loaded.kafka.bootstrap_servers == "flag:1"
    assert loaded.kafka.sasl_username == "ann"
    assert loaded.kafka.sasl_mechanism == "PLAIN"


def test_the_variables_that_all_services_share(file, environment):
    environment(ONCEBOX_BOOTSTRAP_SERVERS="shared:1", ONCEBOX_DSN="dbname=shared")
    loaded = load(RelayLike, file=file(WHOLE))
    assert loaded.kafka.bootstrap_servers == "shared:1"
    assert loaded.postgres.dsn.get_secret_value() == "dbname=shared"
    environment(ONCEBOX_TESTED_KAFKA__BOOTSTRAP_SERVERS="own:1")
    assert load(RelayLike).kafka.bootstrap_servers == "own:1"
    assert load(RelayLike, flags={"kafka.bootstrap_servers": "flag:1"}).kafka.bootstrap_servers == "flag:1"
    postgres = load(Small).postgres
    assert postgres is not None
    assert postgres.dsn.get_secret_value() == "dbname=shared"


def test_lists_come_as_json_from_variables_and_as_yaml_from_the_file(file, environment):
    assert load(RelayLike, file=file(WHOLE + "tables: [a, b]\n")).tables == ["a", "b"]
    environment(ONCEBOX_TESTED_TABLES='["c"]')
    assert load(RelayLike, file=file(WHOLE + "tables: [a, b]\n")).tables == ["c"]
    environment(ONCEBOX_TESTED_TABLES="c,d")
    assert problem(file=file(WHOLE)) == "ONCEBOX_TESTED_TABLES: a list or section should be JSON here"


def test_references_to_variables_in_the_file(file, environment):
    environment(PASSWORD=SECRET, PORT="7")
    text = WHOLE.replace(SECRET, "${PASSWORD}").replace("port: 1", "port: ${PORT}")
    loaded = load(RelayLike, file=file(text))
    assert loaded.postgres.dsn.get_secret_value() == f"postgresql://user:{SECRET}@host/db"
    assert loaded.port == 7


def test_what_a_variable_holds_is_not_yaml(file, environment):
    environment(VALUE="a: [${PORT}]")
    assert load(RelayLike, file=file(WHOLE + "tables: ['${VALUE}']")).tables == ["a: [${PORT}]"]


def test_a_reference_to_nothing_is_told(file):
    path = file(WHOLE.replace("port: 1", "port: ${NO_SUCH}"))
    assert problem(file=path) == f"{path}, line 5: port: the variable NO_SUCH is not set"


def test_a_wrong_value_is_told_with_its_line(file):
    path = file(WHOLE.replace("port: 1", "port: many"))
    assert problem(file=path).startswith(f"{path}, line 5: port = 'many': should be a valid integer")


def test_a_wrong_value_is_told_with_its_variable(file, environment):
    path = file(WHOLE)
    environment(ONCEBOX_TESTED_PORT="70000")
    assert problem(file=path) == "ONCEBOX_TESTED_PORT: port = '70000': should be less than or equal to 65535"
    environment(ONCEBOX_TESTED_PORT="1", ONCEBOX_BOOTSTRAP_SERVERS="nowhere")
    assert problem(file=path) == (
        "ONCEBOX_BOOTSTRAP_SERVERS: kafka.bootstrap_servers = 'nowhere': "
        "should be host:port, or several with commas between"
    )
    environment(ONCEBOX_TESTED_KAFKA='{"bootstrap_servers": "x"}')
    assert problem(file=path).startswith("ONCEBOX_TESTED_KAFKA: kafka.bootstrap_servers = 'x'")


def test_a_wrong_value_is_told_with_its_flag(file):
    flags = {"port": -1, "kafka.bootstrap_servers": "x"}
    told = problem(file=file(WHOLE), flags=flags).splitlines()
    assert told[0].startswith("--bootstrap-servers: kafka.bootstrap_servers = 'x': should be host:port")
    assert told[1] == "--port: port = -1: should be greater than or equal to 0"


def test_what_is_allowed_is_told(file):
    path = file(WHOLE.replace("file:1", "file:1\n  security_protocol: TLS"))
    assert problem(file=path) == (
        f"{path}, line 3: kafka.security_protocol = 'TLS': should be 'PLAINTEXT', 'SSL', 'SASL_PLAINTEXT' or 'SASL_SSL'"
    )


def test_a_missing_value_is_told_with_all_ways_to_set_it():
    assert problem() == (
        "kafka.bootstrap_servers is missing: set ONCEBOX_BOOTSTRAP_SERVERS or "
        "ONCEBOX_TESTED_KAFKA__BOOTSTRAP_SERVERS, the flag --bootstrap-servers, "
        "or kafka.bootstrap_servers in the file\n"
        "postgres.dsn is missing: set ONCEBOX_DSN or ONCEBOX_TESTED_POSTGRES__DSN, "
        "the flag --dsn, or postgres.dsn in the file"
    )


def test_an_empty_section_is_as_a_missing_one(file):
    assert "kafka.bootstrap_servers is missing" in problem(file=file("kafka:\npostgres:\n  dsn: dbname=x\n"))


def test_an_unknown_name_is_told_with_the_nearest(file):
    path = file(WHOLE + "prot: 1\n")
    assert problem(file=path) == f"{path}, line 6: prot is unknown; did you mean port?"
    path = file(WHOLE.replace("file:1", f"file:1\n  sasl_pasword: {SECRET}"))
    assert problem(file=path) == f"{path}, line 3: kafka.sasl_pasword is unknown; did you mean sasl_password?"
    path = file(WHOLE + "zzz: 1\n")
    assert problem(file=path) == f"{path}, line 6: zzz is unknown; known are kafka, postgres, port, tables"


def test_an_unknown_variable_is_told_with_the_nearest(file, environment):
    environment(ONCEBOX_TESTED_PROT="1", ONCEBOX_OTHER_X="1")
    assert problem(file=file(WHOLE)) == "ONCEBOX_TESTED_PROT: prot is unknown; did you mean ONCEBOX_TESTED_PORT?"


def test_an_unknown_nested_variable_is_told(file, environment):
    environment(ONCEBOX_TESTED_KAFKA__BOOTSTRAP_SERVER="a:1")
    assert problem(file=file(WHOLE)) == (
        "ONCEBOX_TESTED_KAFKA__BOOTSTRAP_SERVER: kafka.bootstrap_server is unknown; did you mean bootstrap_servers?"
    )


def test_an_unknown_flag_is_told(file):
    assert problem(file=file(WHOLE), flags={"prot": 1}) == "--prot: prot is unknown; did you mean port?"


def test_a_wrong_secret_is_not_told(file, environment):
    environment(PASSWORD=SECRET)
    path = file(WHOLE.replace("dsn: postgresql", f"dsn: [{SECRET}]\n  #"))
    assert problem(file=path) == f"{path}, line 4: postgres.dsn: should be a valid string"
    path = file(WHOLE.replace("port: 1", "port: ${PASSWORD}"))
    assert problem(file=path).startswith(f"{path}, line 5: port: should be a valid integer")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("port: 1\nport: 2\n", ", line 2: port twice"),
        (f"port: [{SECRET}\n", ", line 2: not YAML: "),
        ("- a\n", ": should be names with values (name: value)"),
        ("a: \x00\n", ": not a text file in UTF-8"),
        ("a: !!python/name:os.system\n", ", line 1: not YAML: "),
    ],
)
def test_a_broken_file_is_told(file, text, told):
    path = file(text)
    assert problem(file=path).startswith(f"{path}{told}")


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    assert problem(file=tmp_path / "none.yaml") == f"{tmp_path / 'none.yaml'}: No such file or directory"
    assert problem(file=tmp_path) == f"{tmp_path}: Is a directory"
    (tmp_path / "latin").write_bytes(b"a: \xe9\n")
    assert problem(file=tmp_path / "latin") == f"{tmp_path / 'latin'}: not a text file in UTF-8"


def test_a_value_can_be_named_and_used_again(file):
    assert load(RelayLike, file=file(WHOLE + "tables: [&name orders, *name]\n")).tables == ["orders", "orders"]


def test_secrets_are_not_printed(file):
    loaded = load(RelayLike, file=file(WHOLE))
    assert SECRET not in f"{loaded} {loaded!r} {loaded.model_dump()} {loaded.model_dump_json()}"


def test_settings_do_not_change(file):
    loaded = load(RelayLike, file=file(WHOLE))
    with pytest.raises(ValueError, match="frozen"):
        loaded.port = 2
    with pytest.raises(ValueError, match="frozen"):
        loaded.kafka.sasl_username = "x"


def test_the_constructor_reads_nothing(environment):
    environment(ONCEBOX_SMALL_BATCH_ROWS="5", ONCEBOX_DSN="x")
    assert Small() == Small(batch_rows=1000, postgres=None)


@pytest.mark.parametrize("servers", ["a:1", "a:1,b:2", "a:1, b:2", "[::1]:9092", "10.0.0.1:65535"])
def test_server_lists(servers):
    assert KafkaSection(bootstrap_servers=servers).bootstrap_servers == servers


@pytest.mark.parametrize("servers", ["", "a", "a:", ":1", "a:0", "a:65536", "a:1,", "PLAINTEXT://a:1", "::1:9092"])
def test_wrong_server_lists(servers):
    with pytest.raises(ValueError, match="should be host:port"):
        KafkaSection(bootstrap_servers=servers)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"security_protocol": "SASL_SSL", "sasl_username": "a"}, "SASL_SSL needs sasl_mechanism, sasl_username"),
        ({"sasl_username": "a"}, "needs security_protocol SASL_SSL or SASL_PLAINTEXT"),
        ({"security_protocol": "SASL_PLAINTEXT", "ssl_ca_location": __file__}, "needs sasl_mechanism"),
        ({"ssl_ca_location": __file__}, "needs security_protocol SSL or SASL_SSL"),
        ({"security_protocol": "SSL", "ssl_key_location": __file__}, "need each other"),
        ({"security_protocol": "SSL", "ssl_ca_location": "/no/such"}, "Path does not point to a file"),
    ],
)
def test_kafka_fields_that_do_not_fit_together(fields, told):
    with pytest.raises(ValueError, match=told):
        KafkaSection(bootstrap_servers="a:1", **fields)


def test_fields_that_do_not_fit_together_are_told_with_their_section(file):
    path = file(WHOLE.replace("file:1", f"file:1\n  sasl_password: {SECRET}"))
    assert problem(file=path) == f"{path}, line 1: kafka: sasl_* needs security_protocol SASL_SSL or SASL_PLAINTEXT"


def test_kafka_settings_for_the_clients():
    section = KafkaSection(
        bootstrap_servers="a:1",
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="SCRAM-SHA-512",
        sasl_username="ann",
        sasl_password=SecretStr(SECRET),
    )
    settings = kafka_settings(section, client_id="relay")
    assert SECRET not in repr(settings)
    config = wire.librdkafka_config(settings)
    assert config["bootstrap.servers"] == "a:1"
    assert config["client.id"] == "relay"
    assert config["security.protocol"] == "SASL_PLAINTEXT"
    assert config["sasl.mechanism"] == "SCRAM-SHA-512"
    assert config["sasl.password"] == SECRET
    options = wire.aiokafka_options(settings)
    assert options["sasl_plain_username"] == "ann"
    assert options["sasl_plain_password"] == SECRET


def test_plain_kafka_settings_are_the_clients_defaults():
    settings = kafka_settings(KafkaSection(bootstrap_servers="a:1"))
    assert settings == wire.KafkaSettings(bootstrap_servers="a:1")
