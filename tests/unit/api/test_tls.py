"""TLS on the way in: without a good certificate no call gets through; certificates change under load."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from coordinator.instance import peer_channel
from coordinator.peers import RECONNECT_S
from oncebox.certificates import ServerCertificates, TlsError
from oncebox.channels import SecureChannel
from oncebox.v1 import coordinator_pb2 as pb
from oncebox.v1.coordinator_pb2_grpc import CoordinatorStub
from tests.support.certificates import Authority
from tests.unit.api.bench import Bench, eventually, refused_by, settings_for_tests
from tests.unit.api.secure import Ground

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.certificates import Pair

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    return Ground(tmp_path)


async def find(channel: Any, timeout_s: float = 30.0) -> pb.FindCoordinatorResponse:
    async with channel:
        request = pb.FindCoordinatorRequest(transactional_id="a")
        found: pb.FindCoordinatorResponse = await CoordinatorStub(channel).FindCoordinator(request, timeout=timeout_s)
        return found


async def test_a_client_with_a_good_certificate(ground: Ground):
    async with ground.serving() as bench:
        assert (await find(ground.caller("owner")(bench.api.address))).address == bench.api.address


async def test_plaintext_is_refused(ground: Ground):
    async with ground.serving() as bench:
        status, _ = await refused_by(find(grpc.aio.insecure_channel(bench.api.address)))
        assert status is UNAVAILABLE
        assert not bench.calls.calls_made


@pytest.mark.parametrize("shown", ["nothing", "of another authority", "expired"])
async def test_wrong_certificates_are_refused(ground: Ground, shown: str):
    pair: Pair | None = None
    if shown == "of another authority":
        pair = Authority(ground.folder, "stranger").issue("owner")
    elif shown == "expired":
        pair = ground.authority.issue("owner", valid=-dt.timedelta(hours=1), file="expired")
    async with ground.serving() as bench:
        status, _ = await refused_by(find(ground.channel(pair)(bench.api.address)))
        assert status is UNAVAILABLE
        # Honest ones are served all the same.
        assert await find(ground.caller("owner")(bench.api.address))


async def test_a_client_refuses_a_server_of_another_authority(ground: Ground):
    stranger = Authority(ground.folder, "stranger")
    async with ground.serving() as bench:
        channel = ground.channel(ground.authority.issue("owner"), ca_location=str(stranger.ca))
        status, _ = await refused_by(find(channel(bench.api.address)))
        assert status is UNAVAILABLE


async def test_a_client_refuses_a_server_by_another_name(ground: Ground):
    async with ground.serving() as bench:
        channel = ground.channel(ground.authority.issue("owner"), server_name="elsewhere.example")
        assert (await refused_by(find(channel(bench.api.address))))[0] is UNAVAILABLE


async def test_certificates_change_under_load_without_an_error(ground: Ground):
    """The authority itself is replaced: connections that are open go on, new ones need the new one."""
    old = ground.caller("owner")
    newcomer = Authority(ground.folder, "next")
    both = ground.folder / "both.pem"
    both.write_bytes(ground.authority.ca.read_bytes() + newcomer.ca.read_bytes())
    async with ground.serving(old) as bench:
        stopped = asyncio.Event()
        calls = 0

        async def load() -> None:
            nonlocal calls
            while not stopped.is_set():
                await bench.coordinator.FindCoordinator(pb.FindCoordinatorRequest(transactional_id="a"))
                # Each opens a connection of its own: one handshake each.
                await find(ground.channel(ground.authority.issue("owner"), ca_location=str(both))(bench.api.address))
                calls += 1

        loading = asyncio.create_task(load())
        await eventually(lambda: calls >= 3)
        # First clients trust both, then the server shows the new one.
        replace(ground.server, newcomer.issue("server", file="new"))
        before = calls
        await eventually(lambda: calls >= before + 5 or loading.done())
        stopped.set()
        await loading
        assert await find(
            ground.channel(ground.authority.issue("owner"), ca_location=str(newcomer.ca))(bench.api.address)
        )
        status, _ = await refused_by(find(ground.caller("owner")(bench.api.address)))
        assert status is UNAVAILABLE
        # The connection from before the change is still good.
        await bench.coordinator.FindCoordinator(pb.FindCoordinatorRequest(transactional_id="a"))


def replace(old: Pair, new: Pair) -> None:
    os.replace(new.key, old.key)
    os.replace(new.certificate, old.certificate)


def test_what_does_not_fit_together_is_not_used(ground: Ground, caplog: pytest.LogCaptureFixture):
    certificates = ServerCertificates(ground.tls())
    before = certificates._material
    # As in the midst of a rotation: the key is there, its certificate not yet.
    other = ground.authority.issue("server", file="other")
    os.replace(other.key, ground.server.key)
    certificates.reload()
    assert certificates._material is before
    assert "is not the key of" in caplog.text
    os.replace(other.certificate, ground.server.certificate)
    certificates.reload()
    assert certificates._material is not before


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("certificate", b"nonsense", "no certificate in PEM"),
        ("key", b"nonsense", "no private key in PEM"),
        ("ca", b"nonsense", "no certificates in PEM"),
    ],
)
def test_files_that_cannot_be_used_are_told(ground: Ground, file, content, told):
    path = ground.authority.ca if file == "ca" else getattr(ground.server, file)
    path.write_bytes(content)
    with pytest.raises(TlsError, match=told):
        ServerCertificates(ground.tls())


def test_an_expired_certificate_is_no_start(ground: Ground):
    ground.server = ground.authority.issue("late", valid=-dt.timedelta(hours=1))
    with pytest.raises(TlsError, match="has expired"):
        ServerCertificates(ground.tls())


def test_instances_show_each_other_their_certificate_or_token(ground: Ground):
    tls = ground.tls()
    shown = peer_channel(settings_for_tests(tls=tls))
    assert isinstance(shown, SecureChannel)
    # Else a busy instance is taken for one that is gone.
    assert shown.connect_timeout_ms == RECONNECT_S * 1_000
    assert (shown.ca_location, shown.certificate_location) == (str(ground.authority.ca), str(ground.server.certificate))
    token = ground.folder / "token"
    token.touch()
    with_token = peer_channel(settings_for_tests(tls=tls, peer_token_location=token))
    assert isinstance(with_token, SecureChannel)
    assert with_token.token_location == str(token)


async def test_connections_come_anew_after_their_age(ground: Ground):
    """So a certificate that is not renewed stops working, also for clients that never hang up."""
    from coordinator.config import Limits

    limits = Limits(connection_age_ms=500, connection_age_grace_ms=30_000)
    handshakes = 0
    async with ground.serving(limits=limits) as bench:
        assert bench.api.certificates is not None
        reload = bench.api.certificates.reload

        def counted() -> None:
            nonlocal handshakes
            handshakes += 1
            reload()

        bench.api.certificates.reload = counted  # type: ignore[method-assign]
        async with asyncio.timeout(60):
            while handshakes < 2:
                await bench.coordinator.FindCoordinator(pb.FindCoordinatorRequest(transactional_id="a"))
                await asyncio.sleep(0.05)
        assert isinstance(bench, Bench)
