"""Who may ask a relay for its status, and who may control it: every method by every kind of caller, each by itself.

The table says who is let through; all others must be refused before anything is asked of the database.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from oncebox.channels import SecureChannel
from oncebox.session import open_plain_channel
from oncebox.v1 import relay_pb2
from oncebox.v1.relay_pb2_grpc import RelayStub
from relay import server as relay_server
from relay.access import METHODS
from relay.server import RelayServer
from relay.service import Relay
from tests.support.certificates import AUDIENCE, ISSUER, Authority, claims, public_pem, token
from tests.unit.relay.test_listening import settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

# On a busy machine a handshake takes its time; a connection that is given up would look like a refusal.
CONNECT_TIMEOUT_MS = 20_000
RULES = """\
rules:
  - principals: ["cert:operator"]
    relays: [a]
  - principals: ["cert:auditor"]
    readable_relays: [a]
  - principals: ["cert:lead"]
    relays: [{prefix: a}]
  - principals: ["cert:viewer"]
    readable_relays: [{prefix: a}]
  - principals: ["cert:neighbour"]
    relays: [ab, A, {prefix: aa}]
    readable_relays: [ab]
  - principals: ["cert:everywhere"]
    relays: ["*"]
  - principals: ["cert:suspended"]
    relays: ["*"]
  - principals: ["cert:suspended"]
    effect: deny
    relays: [a]
  - principals: ["cert:blinded"]
    relays: ["*"]
  - principals: ["cert:blinded"]
    effect: deny
    readable_relays: [a]
  - principals: ["cert:coordinator-admin"]
    admin: write
    peer: true
  - principals: ["token:operator"]
    relays: [ab]
"""
CALLERS = (
    *("operator", "auditor", "lead", "viewer", "neighbour", "everywhere", "suspended", "blinded"),
    *("coordinator-admin", "stranger"),
)
# Of the relay `a` and of the relay `ab`.
READERS = {
    "a": {"operator", "auditor", "lead", "viewer", "everywhere"},
    "ab": {"lead", "viewer", "neighbour", "everywhere", "suspended", "blinded"},
}
CONTROLLERS = {
    "a": {"operator", "lead", "everywhere"},
    "ab": {"lead", "neighbour", "everywhere", "suspended", "blinded"},
}
ALLOWED = {"GetStatus": READERS, "Pause": CONTROLLERS, "Resume": CONTROLLERS}


class Database:
    """Stands for the relay's tables: notes what is asked of them."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, _settings: Any) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def set_paused(self, *, paused: bool) -> None:
        self.asked.append("Pause" if paused else "Resume")

    def status(self) -> None:
        self.asked.append("GetStatus")


class Ground:
    def __init__(self, folder: Path, database: Database) -> None:
        self.authority = Authority(folder)
        self._server = self.authority.issue("relay")
        self.rules = folder / "rules.yaml"
        self.rules.write_text(RULES)
        self.database = database

    def channel(self, name: str, **fields: Any) -> SecureChannel:
        pair = self.authority.issue(name)
        shown = {"certificate_location": str(pair.certificate), "key_location": str(pair.key)}
        return self.anonymous(**{**shown, **fields})

    def anonymous(self, **fields: Any) -> SecureChannel:
        given = {"ca_location": str(self.authority.ca), "connect_timeout_ms": CONNECT_TIMEOUT_MS}
        return SecureChannel(**{**given, **fields})

    @asynccontextmanager
    async def serving(self, name: str, *, mutual: bool = True, **fields: Any) -> AsyncIterator[RelayServer]:
        tls = {"certificate_location": self._server.certificate, "key_location": self._server.key}
        given = {"tls": tls | ({"client_ca_location": self.authority.ca} if mutual else {})}
        ports = {"listen_port": 0, "http_port": 0}
        serving = RelayServer(Relay(settings(name=name, **{**given, "rules_location": self.rules, **ports, **fields})))
        await serving.start()
        try:
            yield serving
        finally:
            await serving.stop()


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    database = Database()
    monkeypatch.setattr(relay_server, "Control", database)
    return Ground(tmp_path, database)


async def refusal(channel: Any, method: str, **call: Any) -> grpc.aio.AioRpcError | None:
    """None: let through."""
    request = getattr(relay_pb2, f"{method}Request")()
    try:
        await getattr(RelayStub(channel), method)(request, timeout=60, **call)
    except grpc.aio.AioRpcError as error:
        return error
    return None


def test_the_tables_name_every_method_there_is():
    methods = relay_pb2.DESCRIPTOR.services_by_name["Relay"].methods
    assert not any(method.client_streaming or method.server_streaming for method in methods)
    assert {f"/oncebox.v1.Relay/{method.name}" for method in methods} == set(METHODS)
    assert {method.name for method in methods} == set(ALLOWED)


@pytest.mark.parametrize("name", ["a", "ab"])
async def test_every_call_by_every_caller(ground: Ground, name: str):
    async with ground.serving(name) as serving:
        for caller in CALLERS:
            async with ground.channel(caller)(serving.address) as channel:
                for method, allowed in ALLOWED.items():
                    ground.database.asked.clear()
                    refused = await refusal(channel, method)
                    assert (refused is None) == (caller in allowed[name]), f"{method} of {name} by {caller}: {refused}"
                    if refused is None:
                        assert method in ground.database.asked
                    else:
                        assert refused.code() is grpc.StatusCode.PERMISSION_DENIED
                        assert f"no rule allows 'cert:{caller}' this: relay" in (refused.details() or "")
                        assert not ground.database.asked
        refusals = sum(caller not in allowed[name] for allowed in ALLOWED.values() for caller in CALLERS)
        assert f'oncebox_relay_refused_calls_total{{relay="{name}"}} {refusals}.0' in page(serving)


def page(serving: RelayServer) -> str:
    return serving._page("/metrics")[1].decode()


def signing(folder: Path) -> tuple[Any, dict[str, Any]]:
    """A key that signs tokens, and the settings of a relay that takes them."""
    key = ec.generate_private_key(ec.SECP256R1())
    keys = folder / "keys.pem"
    keys.write_bytes(public_pem(key))
    return key, {"keys_location": keys, "audience": AUDIENCE, "issuer": ISSUER}


async def test_a_token_is_another_principal_than_a_certificate_of_that_name(ground: Ground, tmp_path: Path):
    key, tokens = signing(tmp_path)
    good, foreign = token(key, claims("operator")), token(key, claims("operator", aud="another"))
    async with (
        ground.serving("ab", mutual=False, tokens=tokens) as serving,
        ground.anonymous()(serving.address) as channel,
    ):
        assert await refusal(channel, "Pause", metadata=(("authorization", f"Bearer {good}"),)) is None
        assert ground.database.asked
        ground.database.asked.clear()
        for metadata in ((), (("authorization", f"Bearer {foreign}"),)):
            refused = await refusal(channel, "GetStatus", metadata=metadata)
            assert refused is not None
            assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
        assert not ground.database.asked


async def test_whoever_guesses_tokens_has_to_wait(ground: Ground, tmp_path: Path):
    _, tokens = signing(tmp_path)
    async with (
        ground.serving("a", mutual=False, tokens=tokens) as serving,
        ground.anonymous()(serving.address) as channel,
    ):
        serving.gate._callers._now_s = lambda: 0.0
        codes = []
        for number in range(42):
            refused = await refusal(channel, "GetStatus", metadata=(("authorization", f"Bearer {number}"),))
            assert refused is not None
            codes.append(refused.code())
        assert codes == [grpc.StatusCode.UNAUTHENTICATED] * 40 + [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2


async def test_changed_rules_hold_for_open_connections_and_bad_ones_change_nothing(ground: Ground):
    async with ground.serving("a") as serving, ground.channel("operator")(serving.address) as channel:
        assert await refusal(channel, "Pause") is None
        ground.rules.write_text("rules: [{principals: ['cert:operator'], readable_relays: [a]}]")
        serving.gate.reload()
        assert await refusal(channel, "Pause")
        assert await refusal(channel, "GetStatus") is None
        ground.rules.write_text("rules: [{principals: ['cert:operator'], relay: [a]}]")
        serving.gate.reload()
        assert await refusal(channel, "GetStatus") is None
        ground.rules.write_text("rules: []")
        serving.gate.reload()
        assert await refusal(channel, "GetStatus")


async def test_without_rules_everybody_who_is_let_in_may_do_everything(ground: Ground):
    async with (
        ground.serving("a", rules_location=None) as serving,
        ground.channel("stranger")(serving.address) as channel,
    ):
        assert [await refusal(channel, method) for method in ALLOWED] == [None, None, None]
    async with (
        ground.serving("a", rules_location=None, tls=None) as serving,
        open_plain_channel(serving.address, connect_timeout_ms=CONNECT_TIMEOUT_MS) as channel,
    ):
        assert [await refusal(channel, method) for method in ALLOWED] == [None, None, None]
