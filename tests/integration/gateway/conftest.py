"""What the gateway's tests share: a client with nothing but the generated stubs."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from oncebox.v1 import gateway_pb2 as pb
from oncebox.v1 import status_pb2, transaction_pb2
from oncebox.v1.gateway_pb2_grpc import GatewayStub
from tests.support.coordinator import Coordinators

ANSWER_S = 60


@pytest.fixture
def one(shared_coordinator: Coordinators) -> Coordinators:
    return shared_coordinator


def fresh(what: str) -> str:
    return f"{what}-{uuid.uuid4().hex[:8]}"


class Client:
    """One Transact stream."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self.stream: Any = GatewayStub(self.channel).Transact()
        self._ids = 0

    async def put(self, **request: Any) -> int:
        self._ids += 1
        await self.stream.write(pb.TransactRequest(request_id=self._ids, **request))
        return self._ids

    async def get(self) -> pb.TransactResponse:
        answer: pb.TransactResponse = await asyncio.wait_for(self.stream.read(), ANSWER_S)
        assert answer is not grpc.aio.EOF, "the stream has ended"
        return answer

    async def ask(self, **request: Any) -> Any:
        request_id = await self.put(**request)
        answer = await self.get()
        assert answer.request_id == request_id
        return getattr(answer, answer.WhichOneof("response") or "")

    async def open(self, transactional_id: str, **fields: Any) -> pb.Opened:
        opened: pb.Opened = await self.ask(open=pb.Open(transactional_id=transactional_id, **fields))
        assert isinstance(opened, pb.Opened), opened
        return opened

    async def transact(self, topic: str, *values: bytes, end: str = "commit") -> transaction_pb2.Outcome:
        await self.ask(begin=pb.Begin())
        await self.ask(send=pb.Send(records=[pb.Record(topic=topic, value=value) for value in values]))
        message = pb.Commit() if end == "commit" else pb.AbortTransaction()
        outcome: transaction_pb2.Outcome = await self.ask(**{end: message})
        return outcome

    async def lose(self) -> None:
        """As a client that dies: the connection breaks."""
        await self.channel.close()


@asynccontextmanager
async def client(one: Coordinators, transactional_id: str = "", **fields: Any) -> AsyncIterator[Client]:
    new = Client(one.addresses[0])
    try:
        if transactional_id:
            await new.open(transactional_id, **fields)
        yield new
    finally:
        await new.channel.close()


def detail_of(error: grpc.aio.AioRpcError) -> transaction_pb2.Error:
    """The typed error inside a refused call."""
    packed = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    return transaction_pb2.Error.FromString(status_pb2.Status.FromString(packed).details[0].value)
