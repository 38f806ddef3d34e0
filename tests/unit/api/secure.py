"""A server with TLS, identity and rules, and callers with all kinds of credentials."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from coordinator.config import TlsSection
from oncebox.channels import SecureChannel
from oncebox.settings import TokensSection
from tests.support.certificates import AUDIENCE, ISSUER, Authority, Pair
from tests.unit.api.bench import Bench, settings_for_tests

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CONNECT_TIMEOUT_MS = 20_000
RULES = """\
rules:
  - principals: ["cert:owner", "token:owner"]
    transactional_ids: [a, {prefix: own-}]
    topics: [orders, {prefix: pay}]
    groups: [g]
  - principals: ["cert:neighbour"]
    transactional_ids: [ab, b]
    topics: [orders]
  - principals: ["cert:auditor"]
    readable_transactional_ids: [a]
  - principals: ["cert:operator"]
    admin: read
  - principals: ["cert:admin"]
    admin: write
  - principals: ["cert:instance"]
    peer: true
  - principals: ["cert:suspended"]
    transactional_ids: ["*"]
    topics: ["*"]
    admin: write
  - principals: ["cert:suspended"]
    effect: deny
    transactional_ids: [a]
    admin: read
"""


class Ground:
    """Certificates and settings of one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder)
        self.server = self.authority.issue("server")
        self.rules = folder / "rules.yaml"
        self.rules.write_text(RULES)

    def tls(self, *, mutual: bool = True) -> TlsSection:
        return TlsSection(
            certificate_location=self.server.certificate,
            key_location=self.server.key,
            client_ca_location=self.authority.ca if mutual else None,
        )

    def tokens(self, keys: Path) -> TokensSection:
        return TokensSection(keys_location=keys, audience=AUDIENCE, issuer=ISSUER)

    def caller(self, name: str) -> SecureChannel:
        """One with a good certificate for this name."""
        return self.channel(self.authority.issue(name))

    def channel(self, pair: Pair | None = None, **fields: Any) -> SecureChannel:
        shown = {"certificate_location": str(pair.certificate), "key_location": str(pair.key)} if pair else {}
        # Nobody here tries again, as producers do: a busy machine gets the time that it takes.
        given = {"ca_location": str(self.authority.ca), "connect_timeout_ms": CONNECT_TIMEOUT_MS, **shown, **fields}
        return SecureChannel(**given)

    @asynccontextmanager
    async def serving(self, channel: Any = None, **fields: Any) -> AsyncIterator[Bench]:
        fields = {"tls": self.tls(), "rules_location": self.rules, **fields}
        bench = Bench(settings_for_tests(**fields), channel or self.caller("owner"))
        await bench.start()
        try:
            yield bench
        finally:
            await bench.stop()
