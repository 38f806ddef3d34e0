"""The one gate: who calls, what every call needs, and whether it may. Unary calls, the opening of streams, and each
message on a stream pass here, before anything is looked up or asked; so a refusal tells nothing of what exists.

With rules nothing is allowed that they do not allow, and a method that this table does not know is nobody's. The
gateway asks with `current()` and GATEWAY, as the session does with SESSION.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from coordinator.api.needs import GATEWAY, METHODS, SESSION, Needs
from coordinator.api.rules import shown
from coordinator.config import CoordinatorSettings
from coordinator.core.commands import ErrorCode, Refused
from oncebox.access.callers import Bucket, Callers, TooManyFailuresError, host_of
from oncebox.access.identity import UnidentifiedError
from oncebox.access.permissions import ANONYMOUS, Need, Permission, Policy, read_policy

__all__ = ["GATEWAY", "METHODS", "SESSION", "Access", "Gate", "Pass", "current", "set_current"]

logger = logging.getLogger(__name__)

DECISIONS_KEPT_MAX = 10_000

_CODES = {
    Permission.USE_ID: ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    Permission.READ_ID: ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    Permission.WRITE_TOPIC: ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    Permission.READ_GROUP: ErrorCode.GROUP_AUTHORIZATION_FAILED,
}


class Access:
    """One principal, and what it may do: shared by all its calls."""

    def __init__(self, principal: str, gate: "Gate") -> None:
        self.principal = principal
        self._gate = gate
        self._policy = gate.policy
        self._decided: dict[Need, bool] = {}
        self._under_way = 0
        self._bucket = Bucket(gate.rate_per_s, gate.now_s())

    def refusal(self, needs: Mapping[str, Needs], name: str, request: Any) -> Refused | None:
        """Why this call or message is refused; None: it may go on."""
        if not self._bucket.take(self._gate.now_s()):
            self._gate.throttled += 1
            return Refused(
                code=ErrorCode.THROTTLING_QUOTA_EXCEEDED,
                message=f"{shown(self.principal)} makes more than {self._gate.rate_per_s} calls a second; "
                "send the call again, more slowly",
                retriable=True,
            )
        policy = self._gate.policy
        if policy is None:
            return None
        if policy is not self._policy:
            self._policy = policy
            self._decided.clear()
        asked = needs.get(name)
        if asked is None:
            return Refused(code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED, message="nobody may make this call")
        for need in asked(request):
            allowed = self._decided.get(need)
            if allowed is None:
                allowed = self._decide(policy, need)
            if not allowed:
                return self._denied(need)
        return None

    def crowded(self) -> Refused | None:
        """Why one more call of this principal is refused while so many are under way."""
        if self._under_way < self._gate.calls_max:
            return None
        self._gate.throttled += 1
        return Refused(
            code=ErrorCode.THROTTLING_QUOTA_EXCEEDED,
            message=f"{shown(self.principal)} has {self._under_way} calls and streams open, and may have no more; "
            "share streams (Session), or send the call again later",
            retriable=True,
        )

    @property
    def is_busy(self) -> bool:
        return self._under_way > 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """While a call is under way."""
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    def _decide(self, policy: Policy, need: Need) -> bool:
        if len(self._decided) >= DECISIONS_KEPT_MAX:
            self._decided.clear()
        allowed = self._decided[need] = policy.allows(self.principal, need)
        if not allowed:
            logger.warning("%s is denied: %s %s", shown(self.principal), need.permission.value, shown(need.name))
        return allowed

    def _denied(self, need: Need) -> Refused:
        self._gate.denied[need.permission] += 1
        about = f" {shown(need.name)}" if need.name else ""
        return Refused(
            code=_CODES.get(need.permission, ErrorCode.CLUSTER_AUTHORIZATION_FAILED),
            message=f"no rule allows {shown(self.principal)} this: {need.permission.value}{about}. "
            "The coordinator's rules file (rules_location) says who may do what",
        )


class Pass:
    """An admitted call: the access of its principal, for as long as its identity is good."""

    __slots__ = ("_expires_at_s", "access")

    def __init__(self, access: Access, expires_at_s: float | None) -> None:
        self.access = access
        self._expires_at_s = expires_at_s

    @property
    def is_expired(self) -> bool:
        return self._expires_at_s is not None and self._expires_at_s <= time.time()


class Gate:
    """Admits calls. Built once from the settings; `reload` takes changed rules and keys."""

    def __init__(self, settings: CoordinatorSettings, now_s: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self.now_s = now_s
        self.rate_per_s = settings.limits.calls_per_second_per_principal
        self.calls_max = settings.limits.calls_per_principal
        self.policy: Policy | None = read_policy(settings.rules_location) if settings.rules_location else None
        self._callers = Callers(settings.tls, settings.tokens, now_s)
        self._accesses: dict[str, Access] = {}
        # For the metrics.
        self.unidentified = 0
        self.throttled = 0
        self.denied: Counter[Permission] = Counter()

    def reload(self) -> None:
        """PolicyError or KeysError: what cannot be read leaves the former in place."""
        if self._settings.rules_location:
            self.policy = read_policy(self._settings.rules_location)
        self._callers.reload()

    def admit(self, context: Any) -> Pass | Refused:
        try:
            identity = self._callers.identify(context)
        except UnidentifiedError as error:
            self.unidentified += 1
            return Refused(code=ErrorCode.SASL_AUTHENTICATION_FAILED, message=str(error))
        except TooManyFailuresError as error:
            self.throttled += 1
            return Refused(code=ErrorCode.THROTTLING_QUOTA_EXCEEDED, message=str(error), retriable=True)
        # Strangers share a name, but not the limits: those go by where they call from.
        is_known = identity.principal != ANONYMOUS
        key = identity.principal if is_known else f"{ANONYMOUS} {host_of(context)}"
        access = self._accesses.get(key)
        if access is None:
            if len(self._accesses) >= DECISIONS_KEPT_MAX:
                # Those with calls under way are kept: their counts must not begin anew.
                self._accesses = {name: each for name, each in self._accesses.items() if each.is_busy}
            access = self._accesses[key] = Access(identity.principal, self)
        return Pass(access, identity.expires_at_s)


_current: ContextVar[Pass] = ContextVar("oncebox-pass")


def current() -> Pass:
    """Of the call that is being served."""
    return _current.get()


def set_current(admitted: Pass) -> None:
    _current.set(admitted)
