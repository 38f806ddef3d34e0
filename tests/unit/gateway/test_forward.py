"""How a batch is handed on to the instance that leads its id."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from coordinator.api.errors import abort_as
from coordinator.config import CoordinatorSettings
from coordinator.gateway import convert
from coordinator.gateway.service import Gateway
from oncebox.settings import KafkaSection
from oncebox.v1 import gateway_pb2 as pb
from oncebox.v1 import transaction_pb2
from oncebox.v1.gateway_pb2_grpc import GatewayServicer, add_GatewayServicer_to_server
from oncebox.wire import KafkaSettings

REQUEST = pb.CommitBatchRequest(transactional_id="t", request_id="r", metadata=b"m")


class Leader(GatewayServicer):
    Transact: Any = None

    async def CommitBatch(  # noqa: N802 - gRPC names methods as the .proto file does
        self, request: pb.CommitBatchRequest, context: Any
    ) -> pb.CommitBatchResponse:
        if request.request_id == "nobody":
            refused = convert.refusal("nobody leads it", transaction_pb2.COORDINATOR_NOT_AVAILABLE)
            await abort_as(grpc.StatusCode.UNAVAILABLE, context, refused)
        return pb.CommitBatchResponse()


@asynccontextmanager
async def leader() -> AsyncIterator[str]:
    server = grpc.aio.server()
    add_GatewayServicer_to_server(Leader(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


class AbortedError(Exception):
    pass


class Caller:
    """Stands in for gRPC's context."""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def time_remaining(self) -> float:
        return 30.0

    async def abort(self, code: grpc.StatusCode, _told: str, _details: object) -> None:
        raise AbortedError(code)


def gateway(open_channel: Callable[[str], grpc.aio.Channel]) -> Gateway:
    nobody: Any = SimpleNamespace()
    return Gateway(
        nobody,
        CoordinatorSettings(kafka=KafkaSection(bootstrap_servers="127.0.0.1:9")),
        address="127.0.0.1:1",
        kafka=KafkaSettings(bootstrap_servers="127.0.0.1:9"),
        wire=nobody,
        feed=nobody,
        open_channel=open_channel,
        now_ms=lambda: 0,
    )


async def test_a_channel_that_reaches_nobody_is_opened_anew():
    """The certificates with which it was opened may have expired: it would be refused for ever."""
    caller: Any = Caller()
    async with asyncio.timeout(30), leader() as second:
        async with leader() as first:
            addresses = [first, second]
            mine = gateway(lambda _: grpc.aio.insecure_channel(addresses.pop(0)))
            for _ in range(2):
                await mine._forward(REQUEST, caller, "leader")
        with pytest.raises(AbortedError):
            await mine._forward(REQUEST, caller, "leader")
        await mine._forward(REQUEST, caller, "leader")
        assert not addresses
        await mine.close(within_s=10)


async def test_who_answers_is_asked_on_the_same_channel_again():
    caller: Any = Caller()
    async with asyncio.timeout(30), leader() as only:
        addresses = [only]
        mine = gateway(lambda _: grpc.aio.insecure_channel(addresses.pop()))
        refused = pb.CommitBatchRequest(transactional_id="t", request_id="nobody", metadata=b"m")
        with pytest.raises(AbortedError):
            await mine._forward(refused, caller, "leader")
        await mine._forward(REQUEST, caller, "leader")
        await mine.close(within_s=10)
