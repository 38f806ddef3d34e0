"""Limits on what a caller may take: the greedy are stopped, the honest stay served."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
from cryptography.hazmat.primitives.asymmetric import ec

from coordinator.api import session as session_module
from coordinator.config import Limits
from oncebox.v1 import admin_pb2, transaction_pb2
from oncebox.v1 import coordinator_pb2 as pb
from oncebox.v1.admin_pb2_grpc import AdminStub
from oncebox.v1.coordinator_pb2_grpc import CoordinatorStub
from tests.support.certificates import claims, public_pem, token
from tests.unit.api.bench import Bench, refused_by, settings_for_tests
from tests.unit.api.secure import Ground

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

FIND = pb.FindCoordinatorRequest(transactional_id="a")


def name_of(error: transaction_pb2.Error) -> str:
    return transaction_pb2.ErrorCode.Name(error.code)


async def test_one_principal_cannot_take_all_the_calls(tmp_path: Path):
    ground = Ground(tmp_path)
    async with (
        ground.serving(limits=Limits(calls_per_principal=2), rules_location=None) as bench,
        ground.caller("greedy")(bench.api.address) as channel,
    ):
        stub: Any = AdminStub(channel)
        watches = [stub.WatchTransactions(admin_pb2.WatchTransactionsRequest()) for _ in range(2)]
        for watch in watches:
            await watch.initial_metadata()
        status, error = await refused_by(stub.ListLeaders(admin_pb2.ListLeadersRequest()))
        assert (status, name_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "THROTTLING_QUOTA_EXCEEDED")
        assert error.retriable
        await bench.coordinator.FindCoordinator(FIND)
        watches[0].cancel()
        async with asyncio.timeout(30):
            while True:  # its end is noticed in a moment
                try:
                    await stub.ListLeaders(admin_pb2.ListLeadersRequest())
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.01)
        watches[1].cancel()


async def test_too_many_calls_a_second_are_told_to_slow_down():
    bench = Bench(settings_for_tests(limits=Limits(calls_per_second_per_principal=5)))
    await bench.start()
    bench.api.gate.now_s = lambda: 0.0
    try:
        calls = [bench.coordinator.FindCoordinator(FIND) for _ in range(30)]
        codes = [await call.code() for call in calls]
        assert codes.count(grpc.StatusCode.OK) == 10
        assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 20
    finally:
        await bench.stop()


async def test_messages_of_a_session_count_as_calls():
    bench = Bench(settings_for_tests(limits=Limits(calls_per_second_per_principal=5)))
    await bench.start()
    bench.api.gate.now_s = lambda: 0.0
    try:
        session = bench.coordinator.Session()
        outcome = pb.GetOutcomeRequest(transactional_id="tid", number=1)
        requests = [pb.SessionRequest(request_id=each, get_outcome=outcome) for each in range(1, 41)]
        await session.write(pb.SessionRequests(requests=requests))
        names: list[str] = []
        while len(names) < 40:
            names += [name_of(each.error) for each in (await session.read()).responses]
        assert names.count("THROTTLING_QUOTA_EXCEEDED") >= 25
        session.cancel()
    finally:
        await bench.stop()


async def test_a_client_that_reads_no_answers_is_read_no_further(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """Else what it leaves unread would fill the memory."""
    monkeypatch.setattr(session_module, "UNREAD_MAX", 50)
    unread = 0
    write = session_module._Session._write

    def watched(session: Any, response: Any) -> None:
        nonlocal unread
        write(session, response)
        unread = max(unread, len(session._ready))

    monkeypatch.setattr(session_module._Session, "_write", watched)
    session = bench.coordinator.Session()
    request = pb.InitProducerRequest(transactional_id="x" * 500, transaction_timeout_ms=0, instance="i")
    message = pb.SessionRequests(
        requests=[pb.SessionRequest(request_id=each, init_producer=request) for each in range(1, 101)]
    )
    with suppress(TimeoutError):
        while True:
            async with asyncio.timeout(2 if unread > 50 else 30):  # until it is read no further
                await session.write(message)
    assert 50 < unread < 50 + 2 * bench.settings.limits.requests_per_session
    # Others are served meanwhile.
    await bench.coordinator.FindCoordinator(FIND, timeout=30)
    session.cancel()


async def test_connections_that_say_nothing_are_closed():
    bench = Bench(settings_for_tests(limits=Limits(handshake_timeout_ms=2_000)))
    await bench.start()
    try:
        silent = [await asyncio.open_connection("127.0.0.1", bench.api.port) for _ in range(50)]
        await bench.coordinator.FindCoordinator(FIND, timeout=30)
        for reader, writer in silent:
            async with asyncio.timeout(30):
                while await reader.read(4096):
                    pass
            writer.close()
    finally:
        await bench.stop()


async def test_more_connections_than_allowed_harm_nobody_who_is_there():
    bench = Bench(settings_for_tests(limits=Limits(connections=5, handshake_timeout_ms=10_000)))
    await bench.start()
    try:
        await bench.coordinator.FindCoordinator(FIND, timeout=30)
        crowd = [await asyncio.open_connection("127.0.0.1", bench.api.port) for _ in range(40)]
        await bench.coordinator.FindCoordinator(FIND, timeout=30)
        for _, writer in crowd:
            writer.close()
    finally:
        await bench.stop()


async def test_tokens_over_the_wire(tmp_path: Path):
    ground = Ground(tmp_path)
    key = ec.generate_private_key(ec.SECP256R1())
    keys = tmp_path / "keys.pem"
    keys.write_bytes(public_pem(key))
    own = tmp_path / "token"
    own.write_text(token(key, claims("owner")))
    fields = {"tls": ground.tls(mutual=False), "tokens": ground.tokens(keys)}
    async with ground.serving(ground.channel(token_location=str(own)), **fields) as bench:
        assert await bench.coordinator.FindCoordinator(FIND)
        own.write_text("not.a.token")
        status, error = await refused_by(bench.coordinator.FindCoordinator(FIND))
        assert (status, name_of(error)) == (grpc.StatusCode.UNAUTHENTICATED, "SASL_AUTHENTICATION_FAILED")
        async with ground.channel()(bench.api.address) as channel:
            status, _ = await refused_by(CoordinatorStub(channel).FindCoordinator(FIND))
            assert status is grpc.StatusCode.UNAUTHENTICATED
            # Two tokens, of which one might be good.
            doubled = (("authorization", "Bearer x"), ("authorization", f"Bearer {token(key, claims('owner'))}"))
            status, _ = await refused_by(CoordinatorStub(channel).FindCoordinator(FIND, metadata=doubled))
            assert status is grpc.StatusCode.UNAUTHENTICATED


async def test_who_sends_many_bad_tokens_waits_and_who_is_known_does_not(tmp_path: Path):
    ground = Ground(tmp_path)
    key = ec.generate_private_key(ec.SECP256R1())
    keys = tmp_path / "keys.pem"
    keys.write_bytes(public_pem(key))
    fields = {"tls": ground.tls(mutual=False), "tokens": ground.tokens(keys)}
    async with (
        ground.serving(ground.channel(token=token(key, claims("owner"))), **fields) as bench,
        ground.channel()(bench.api.address) as channel,
    ):
        await bench.coordinator.FindCoordinator(FIND)
        stub: Any = CoordinatorStub(channel)
        bench.api.gate._callers._now_s = lambda: 0.0
        bad = [stub.FindCoordinator(FIND, metadata=(("authorization", f"Bearer x.y.{each}"),)) for each in range(100)]
        codes = [await call.code() for call in bad]
        assert codes.count(grpc.StatusCode.UNAUTHENTICATED) == 40
        assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 60
        await bench.coordinator.FindCoordinator(FIND)


async def test_a_session_ends_with_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ground = Ground(tmp_path)
    key = ec.generate_private_key(ec.SECP256R1())
    keys = tmp_path / "keys.pem"
    keys.write_bytes(public_pem(key))
    ends_at = int(time.time()) + 600
    channel = ground.channel(token=token(key, claims("owner", exp=ends_at)))
    tokens = ground.tokens(keys).model_copy(update={"leeway_s": 0})
    async with ground.serving(channel, tls=ground.tls(mutual=False), tokens=tokens) as bench:
        session = bench.coordinator.Session()
        outcome = pb.SessionRequest(request_id=1, get_outcome=pb.GetOutcomeRequest(transactional_id="a", number=1))
        await session.write(pb.SessionRequests(requests=[outcome]))
        assert name_of((await session.read()).responses[0].error) == "INVALID_PRODUCER_ID_MAPPING"
        later = SimpleNamespace(time=lambda: ends_at + 1.0, monotonic=time.monotonic)
        monkeypatch.setattr("coordinator.api.auth.time", later)
        await session.write(pb.SessionRequests(requests=[outcome]))
        status, _ = await refused_by(session.read())
        assert status is grpc.StatusCode.UNAUTHENTICATED


def test_a_token_is_not_shown_by_its_settings():
    from oncebox.channels import SecureChannel

    assert "hunter2" not in repr(SecureChannel(token="hunter2"))
