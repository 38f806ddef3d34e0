"""Who may do what, as the rules file says it: like Kafka's ACLs, by literal name or prefix, default deny. Pure.

A denial wins over whatever allows the same. Reads the file only in `read_policy`; a file with a mistake is refused
whole, and never half understood. One vocabulary for all services, so that they can share a file.
"""

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

PRINCIPALS_KEPT_MAX = 10_000
ANONYMOUS = "anonymous"
# Everybody who has shown an identity; of names: all of them.
EVERYTHING = "*"


class Permission(StrEnum):
    """What a rule can allow; the value is what it is about, for people. Text, for it is looked up with every call."""

    USE_ID = "transactional id"
    READ_ID = "transactional id, for reading"
    WRITE_TOPIC = "topic"
    READ_GROUP = "group"
    ADMIN_READ = "admin: read"
    ADMIN_WRITE = "admin: write"
    PEER = "peer"
    READ_RELAY = "relay, for reading"
    CONTROL_RELAY = "relay"


class Need(NamedTuple):
    """What a request needs to be allowed. Permissions that are about no name have an empty one."""

    permission: Permission
    name: str = ""


class PolicyError(Exception):
    """The rules file cannot be used; the text says where and why."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


Name = Annotated[str, Field(min_length=1, max_length=512)]


class Prefix(_Part):
    prefix: Name


Names = tuple[Name | Prefix, ...]


class Rule(_Part):
    """For these principals; a name is meant literally, {prefix: …} all that begin so, "*" all."""

    principals: Annotated[tuple[Name, ...], Field(min_length=1)]
    effect: Literal["allow", "deny"] = "allow"
    transactional_ids: Names = ()
    readable_transactional_ids: Names = ()
    topics: Names = ()
    groups: Names = ()
    admin: Literal["none", "read", "write"] = "none"
    peer: bool = False
    relays: Names = ()
    readable_relays: Names = ()

    @model_validator(mode="after")
    def _kinds(self) -> "Rule":
        for principal in self.principals:
            if principal not in {EVERYTHING, ANONYMOUS} and not principal.startswith(("cert:", "token:")):
                raise ValueError(f"{principal!r} is no principal: cert:NAME, token:NAME, anonymous or *")
        return self


class _File(_Part):
    rules: tuple[Rule, ...]


class _Matches:
    """Names by literal and prefix."""

    __slots__ = ("_all", "_literals", "_prefixes")

    def __init__(self, names: Iterable[str | Prefix]) -> None:
        known = list(names)
        self._all = EVERYTHING in known
        self._literals = frozenset(name for name in known if isinstance(name, str))
        self._prefixes = tuple(name.prefix for name in known if isinstance(name, Prefix))

    def __contains__(self, name: str) -> bool:
        return self._all or name in self._literals or name.startswith(self._prefixes)


def _granted(rule: Rule) -> dict[Permission, tuple[str | Prefix, ...]]:
    everything = (EVERYTHING,)
    # Another instance hands on what it has let through; it has the same privilege in Kafka as this one.
    handed_on = everything if rule.peer else ()
    granted: dict[Permission, tuple[str | Prefix, ...]] = {
        Permission.USE_ID: (*rule.transactional_ids, *handed_on),
        Permission.READ_ID: (*rule.transactional_ids, *rule.readable_transactional_ids, *handed_on),
        Permission.WRITE_TOPIC: (*rule.topics, *handed_on),
        Permission.READ_GROUP: (*rule.groups, *handed_on),
        Permission.PEER: handed_on,
        Permission.READ_RELAY: (*rule.relays, *rule.readable_relays),
        Permission.CONTROL_RELAY: rule.relays,
    }
    reads = rule.admin in ({"read", "write"} if rule.effect == "allow" else {"read"})
    writes = rule.admin == "write" or (rule.effect == "deny" and rule.admin == "read")
    if reads:
        granted[Permission.ADMIN_READ] = everything
        if rule.effect == "allow":
            # Who may list everything may also look at one.
            granted[Permission.READ_ID] = everything
    if writes:
        granted[Permission.ADMIN_WRITE] = everything
    return granted


class Policy:
    """The rules, compiled for each principal when it is first asked about."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = tuple(rules)
        self._compiled: dict[str, dict[Permission, tuple[_Matches, _Matches]]] = {}

    def allows(self, principal: str, need: Need) -> bool:
        compiled = self._compiled.get(principal)
        if compiled is None:
            if len(self._compiled) >= PRINCIPALS_KEPT_MAX:
                self._compiled.clear()
            compiled = self._compiled[principal] = self._compile(principal)
        allowed, denied = compiled[need.permission]
        return need.name in allowed and need.name not in denied

    def _compile(self, principal: str) -> dict[Permission, tuple[_Matches, _Matches]]:
        whose = {principal} if principal == ANONYMOUS else {principal, EVERYTHING}
        names: dict[tuple[str, Permission], list[Any]] = {
            (effect, permission): [] for effect in ("allow", "deny") for permission in Permission
        }
        for rule in self._rules:
            if whose.intersection(rule.principals):
                for permission, granted in _granted(rule).items():
                    names[rule.effect, permission].extend(granted)
        return {
            permission: (_Matches(names["allow", permission]), _Matches(names["deny", permission]))
            for permission in Permission
        }


def read_policy(file: Path) -> Policy:
    try:
        with open(file, encoding="utf-8") as stream:
            document = yaml.safe_load(stream)
        return Policy(_File.model_validate(document).rules)
    except OSError as error:
        raise PolicyError(f"{file}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise PolicyError(f"{file}{line}: not YAML: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise PolicyError(f"{file}: not a text file in UTF-8") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"] if part != "Prefix")
        raise PolicyError(f"{file}: {where or 'rules'}: {first['msg'].removeprefix('Value error, ')}") from None
