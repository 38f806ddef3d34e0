"""Who may ask a relay for its status, and who may control it. Every call passes here before anything is looked up.

With rules nothing is allowed that they do not allow, and a method that this table does not know is nobody's. What
needs the database instead of this port (rewind, rebuild, dead letters) is the database's to allow.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import grpc

from oncebox.access.callers import Callers, TooManyFailuresError
from oncebox.access.identity import KeysError, UnidentifiedError
from oncebox.access.permissions import Need, Permission, Policy, PolicyError, read_policy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from relay.config import RelaySettings

logger = logging.getLogger(__name__)

_RELAY = "/oncebox.v1.Relay/"
# Who controls is told the status, too.
_CONTROL = (Permission.CONTROL_RELAY, Permission.READ_RELAY)
METHODS: Mapping[str, tuple[Permission, ...]] = {
    f"{_RELAY}GetStatus": (Permission.READ_RELAY,),
    f"{_RELAY}Pause": _CONTROL,
    f"{_RELAY}Resume": _CONTROL,
}


class RefusedError(Exception):
    """A call that is not made; the text may be told to the caller."""

    def __init__(self, status: Any, message: str) -> None:
        super().__init__(message)
        self.status = status


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """PolicyError or KeysError: the files that the settings name cannot be used."""

    def __init__(self, settings: RelaySettings) -> None:
        self._name = settings.name
        self._rules_location = settings.rules_location
        self._policy: Policy | None = read_policy(settings.rules_location) if settings.rules_location else None
        self._callers = Callers(settings.tls, settings.tokens)
        # For the metrics.
        self.refused = 0

    def reload(self) -> None:
        """What cannot be used is told in the log, and leaves the former in place."""
        try:
            if self._rules_location:
                self._policy = read_policy(self._rules_location)
            self._callers.reload()
        except (PolicyError, KeysError) as error:
            logger.error("not used: %s", error)  # noqa: TRY400 - no trace needed

    def admit(self, method: str, context: Any) -> str:
        """The caller's principal. RefusedError: it may not."""
        try:
            principal = self._callers.identify(context).principal
        except UnidentifiedError as error:
            raise RefusedError(grpc.StatusCode.UNAUTHENTICATED, str(error)) from None
        except TooManyFailuresError as error:
            raise RefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from None
        if self._policy is None:
            return principal
        needed = METHODS.get(method)
        if needed is None:
            raise RefusedError(grpc.StatusCode.PERMISSION_DENIED, "nobody may make this call")
        for permission in needed:
            if not self._policy.allows(principal, Need(permission, self._name)):
                logger.warning("%a is denied: %s %a", principal, permission.value, self._name)
                raise RefusedError(
                    grpc.StatusCode.PERMISSION_DENIED,
                    f"no rule allows {principal!a} this: {permission.value} {self._name!a}. "
                    "The relay's rules file (rules_location) says who may do what",
                )
        return principal

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        method, behaviour = details.method, handler.unary_unary

        async def admitted(request: Any, context: Any) -> Any:
            try:
                principal = self.admit(method, context)
            except RefusedError as error:
                self.refused += 1
                await context.abort(error.status, str(error))
            if METHODS.get(method) == _CONTROL:
                logger.info("%a asks for %s", principal, method.removeprefix(_RELAY))
            return await behaviour(request, context)

        return handler._replace(unary_unary=admitted)
