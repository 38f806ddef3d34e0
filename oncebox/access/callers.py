"""Who makes a call: its bearer token or its certificate, whichever the service asks for. Guessing has its price.

Knows nothing of what a caller may do; oncebox.access.permissions does.
"""

import time
from collections.abc import Callable
from typing import Any

from oncebox.access.identity import Identity, Tokens, UnidentifiedError, anonymous, certificate_identity
from oncebox.settings import ServerTlsSection, TokensSection, identifies

HOSTS_KEPT_MAX = 10_000
BURST_S = 2.0
# Tokens that are not good, from one host.
FAILURES_PER_S = 20


class TooManyFailuresError(Exception):
    """Of one host; the text may be told to the caller."""


class Bucket:
    """Fills with time: short bursts pass, a steady excess does not."""

    __slots__ = ("_filled_at_s", "_left", "_rate_per_s")

    def __init__(self, rate_per_s: int, now_s: float) -> None:
        self._rate_per_s = rate_per_s
        self._left = rate_per_s * BURST_S
        self._filled_at_s = now_s

    def take(self, now_s: float) -> bool:
        self.fill(now_s)
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def fill(self, now_s: float) -> bool:
        """Whether there is something in it."""
        most = self._rate_per_s * BURST_S
        self._left = min(self._left + (now_s - self._filled_at_s) * self._rate_per_s, most)
        self._filled_at_s = now_s
        return self._left >= 1


class Callers:
    def __init__(
        self,
        tls: ServerTlsSection | None,
        tokens: TokensSection | None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tls = tls
        self._tokens = Tokens(tokens) if tokens else None
        self._needs_identity = identifies(tls, tokens)
        self._now_s = now_s
        self._failures: dict[str, Bucket] = {}

    def reload(self) -> None:
        """KeysError: the keys cannot be read, and the former stay."""
        if self._tokens is not None:
            self._tokens.reload()

    def identify(self, context: Any) -> Identity:
        """Of a call's gRPC context. UnidentifiedError, TooManyFailuresError."""
        host = host_of(context)
        try:
            return self._identify(context, host)
        except UnidentifiedError:
            if len(self._failures) >= HOSTS_KEPT_MAX:
                self._failures.clear()
            self._failures.setdefault(host, Bucket(FAILURES_PER_S, self._now_s())).take(self._now_s())
            raise

    def _identify(self, context: Any, host: str) -> Identity:
        if self._tokens is not None:
            headers = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
            if len(headers) > 1:
                raise UnidentifiedError("there is more than one authorization header")
            if headers:
                header = str(headers[0])
                # A signature takes long to look at: who sends many bad ones waits, who is known does not.
                failures = self._failures.get(host)
                if failures is not None and not failures.fill(self._now_s()) and not self._tokens.knows(header):
                    raise TooManyFailuresError(
                        "too many tokens that are not good came from where you are; send the call again later"
                    )
                return self._tokens.identify(header)
        if self._tls is not None and self._tls.client_ca_location is not None:
            identity = certificate_identity(context.auth_context(), self._tls.principal_from)
            if identity is not None:
                return identity
        if self._needs_identity:
            raise UnidentifiedError("a bearer token is needed: send it as `authorization: Bearer …`")
        return anonymous()


def host_of(context: Any) -> str:
    """Where a call comes from, without the port."""
    host: str = context.peer().rpartition(":")[0]
    return host
