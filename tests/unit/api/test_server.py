"""The server itself: health, readiness, reflection, and a stop that cuts nobody off."""

import asyncio
import logging
import urllib.error
import urllib.request
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coordinator.api.server import LAST_ANSWERS_S, Api, PortTakenError, Service
from coordinator.steady_clock import SteadyClock
from oncebox.settings import is_loopback
from oncebox.v1 import admin_pb2, peer_pb2, peer_pb2_grpc, transaction_pb2
from oncebox.v1 import coordinator_pb2 as pb
from tests.unit.api.bench import Bench, eventually, refused_by, settings_for_tests

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(bench: Bench, service: str = "") -> int:
    stub: Any = health_pb2_grpc.HealthStub(bench.channel)
    status: int = (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status
    return status


async def get(bench: Bench, path: str, method: str = "GET") -> tuple[int, bytes]:
    url = f"http://127.0.0.1:{bench.api.http_port}{path}"

    def fetch() -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=60) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    return await asyncio.to_thread(fetch)


async def test_not_serving_until_it_is_ready(bench: Bench):
    assert await health(bench) == NOT_SERVING
    assert await health(bench, "oncebox.v1.Coordinator") == NOT_SERVING
    # Who looks for the cause may ask.
    assert await health(bench, "oncebox.v1.Admin") == SERVING
    assert (await get(bench, "/ready"))[0] == 503
    await bench.api.set_ready(is_ready=True)
    assert await health(bench) == await health(bench, "oncebox.v1.Coordinator") == SERVING
    assert await get(bench, "/ready") == (200, b"ready\n")
    await bench.api.set_ready(is_ready=False)
    assert await health(bench) == NOT_SERVING


async def test_pages(bench: Bench):
    assert await get(bench, "/live") == (200, b"live\n")
    assert await get(bench, "/live?verbose=1") == (200, b"live\n")
    assert await get(bench, "/live", "HEAD") == (200, b"")
    assert (await get(bench, "/live", "POST"))[0] == 405
    assert (await get(bench, "/etc/passwd"))[0] == 404


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n", b"GET\r\n\r\n", b"GET /live", b"x" * 20_000, bytes(range(256))])
async def test_pages_survive_whatever_is_sent(bench: Bench, caplog: pytest.LogCaptureFixture, sent):
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.api.http_port)
    writer.write(sent)
    writer.write_eof()
    try:
        answer = await asyncio.wait_for(reader.read(), 20)
        assert not answer or answer.startswith(b"HTTP/1.1 40")
    except ConnectionError:
        pass
    writer.close()
    assert await get(bench, "/live") == (200, b"live\n")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def reflected(bench: Bench) -> set[str]:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(bench.channel)
    stream = stub.ServerReflectionInfo()
    await stream.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    await stream.done_writing()
    response = await stream.read()
    return {service.name for service in response.list_services_response.service}


async def test_reflection_is_off(bench: Bench):
    status, _ = await refused_by(reflected(bench))
    assert status is grpc.StatusCode.UNIMPLEMENTED


async def test_reflection_by_switch():
    bench = Bench(settings_for_tests(reflection=True))
    await bench.start()
    try:
        assert {"oncebox.v1.Coordinator", "oncebox.v1.Admin", "grpc.health.v1.Health"} <= await reflected(bench)
    finally:
        await bench.stop()


class Peers(peer_pb2_grpc.PeersServicer):
    def Follow(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def ListOpen(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise ValueError("password=hunter2")


async def test_other_services_share_the_port_and_its_guard():
    bench = Bench(settings_for_tests())
    peers = Service("oncebox.v1.Peers", lambda server: peer_pb2_grpc.add_PeersServicer_to_server(Peers(), server))
    await bench.api.start(
        calls=bench.calls,
        topics=bench.topics,
        find_in_feed=bench._find_in_feed,
        hanging=bench.hanging,
        now_ms=SteadyClock().now_ms,
        services=[peers],
    )
    try:
        assert await health(bench, "oncebox.v1.Peers") == SERVING
        stub: Any = peer_pb2_grpc.PeersStub(bench.channel)
        call = stub.ListOpen(peer_pb2.ListOpenRequest())
        status, _ = await refused_by(call)
        assert status is grpc.StatusCode.INTERNAL
        assert "hunter2" not in await call.details()
    finally:
        await bench.stop()


async def test_a_port_in_use_is_told(bench: Bench):
    with pytest.raises(PortTakenError, match="Set listen_port to another"):
        Api(settings_for_tests().model_copy(update={"listen_port": bench.api.port}))


async def test_a_port_in_use_for_http_is_told(bench: Bench):
    """Also where the rest of it listens already."""
    other = Bench(settings_for_tests().model_copy(update={"http_port": bench.api.http_port}))
    with pytest.raises(PortTakenError, match=f"127.0.0.1:{bench.api.http_port} for HTTP.* Set http_port to another"):
        await other.start()
    await other.stop()


async def test_the_address_for_others():
    api = Api(settings_for_tests(advertised_address="coordinator.example:7171"))
    assert api.address == "coordinator.example:7171"
    assert Api(settings_for_tests()).address.startswith("127.0.0.1:")
    assert Api(settings_for_tests(listen_host="::1")).address.startswith("[::1]:")


def test_loopback():
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "coordinator.example", ""))


async def test_a_stop_lets_calls_finish_and_ends_streams(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    bench = Bench(settings_for_tests())
    await bench.start()
    bench.calls.gated |= {"slow", "slow too"}
    unary = asyncio.create_task(bench.init("slow"))
    session = bench.coordinator.Session()
    init = pb.InitProducerRequest(transactional_id="slow too", transaction_timeout_ms=60_000)
    await session.write(pb.SessionRequests(requests=[pb.SessionRequest(request_id=1, init_producer=init)]))
    watch = bench.admin.WatchTransactions(admin_pb2.WatchTransactionsRequest())
    stub: Any = health_pb2_grpc.HealthStub(bench.channel)
    watched_health = stub.Watch(health_pb2.HealthCheckRequest())
    assert (await watched_health.read()).status == NOT_SERVING
    await eventually(lambda: len(bench.calls.calls_made) == 2 and bench.calls.watcher_count == 1)

    stopping = asyncio.create_task(bench.api.stop(within_s=60))
    status, error = await refused_by(watch.read())
    assert status is grpc.StatusCode.UNAVAILABLE
    assert error.code == transaction_pb2.COORDINATOR_NOT_AVAILABLE
    assert error.retriable
    # As long as somebody waits for an answer it goes on, well beyond the moment it grants to the last bytes.
    await asyncio.wait({stopping}, timeout=2 * LAST_ANSWERS_S)
    assert not stopping.done()
    monkeypatch.setattr("coordinator.api.server.LAST_ANSWERS_S", 5.0)  # a busy machine takes longer over them
    bench.calls.gate.set()
    assert (await unary).grant.number >= 1
    (answer,) = (await session.read()).responses
    assert (answer.request_id, answer.HasField("init_producer")) == (1, True)
    status, error = await refused_by(session.read())
    assert status is grpc.StatusCode.UNAVAILABLE
    assert "going down" in error.message
    # A watcher of the health service does not hold it up for the whole time allowed.
    async with asyncio.timeout(30):
        await stopping
    assert bench.calls.watcher_count == 0
    await bench.channel.close()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_stop_waits_only_so_long():
    bench = Bench(settings_for_tests())
    await bench.start()
    bench.calls.gated.add("slow")
    unary = asyncio.create_task(bench.init("slow"))
    await eventually(lambda: len(bench.calls.calls_made) == 1)
    async with asyncio.timeout(60):
        await bench.api.stop(within_s=0.2)
    status, _ = await refused_by(unary)
    assert status in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
    await bench.channel.close()
