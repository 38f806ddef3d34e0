"""A real server on loopback over the real core in memory, a client of it, and what its answers say."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any

import grpc
import pytest

from coordinator.api.errors import DETAILS_KEY
from coordinator.api.front import address_of
from coordinator.api.rules import TopicDeniedError
from coordinator.api.server import Api, Service
from coordinator.config import CoordinatorSettings
from coordinator.core.commands import Refused
from coordinator.core.records import Outcome
from coordinator.gateway.holders import Holders
from coordinator.gateway.stream import TransactStream
from coordinator.hanging import Hanging
from coordinator.open_transactions import Found, PartitionDescription
from coordinator.peers import PeerServicer
from coordinator.steady_clock import SteadyClock
from oncebox.errors import UsageError
from oncebox.settings import KafkaSection
from oncebox.v1 import admin_pb2_grpc, coordinator_pb2, coordinator_pb2_grpc, gateway_pb2, status_pb2, transaction_pb2
from oncebox.v1.gateway_pb2_grpc import GatewayServicer, add_GatewayServicer_to_server
from oncebox.v1.peer_pb2_grpc import add_PeersServicer_to_server
from oncebox.wire import offsets_partition
from tests.support.memory_calls import MemoryCalls


class FixedTopics:
    """A cluster whose topics the test names; `hidden` ones are learnt by a refresh, `stale` ones too old to be used."""

    def __init__(self) -> None:
        self.counts = {"orders": 8, "payments": 2, "__consumer_offsets": 50}
        self.hidden: dict[str, int] = {}
        self.denied: set[str] = set()
        self.stale: set[str] = set()
        self.refreshed: list[frozenset[str]] = []

    def partition_count(self, topic: str, *, however_old: bool = False) -> int | None:
        return self.counts.get(topic) if however_old or topic not in self.stale else None

    def topic_id(self, topic: str, *, however_old: bool = False) -> bytes | None:
        known = self.partition_count(topic, however_old=however_old) is not None
        return topic.encode().ljust(16, b".")[:16] if known else None

    def offsets_partition(self, group_id: str) -> int | None:
        count = self.counts.get("__consumer_offsets")
        return offsets_partition(group_id, count) if count else None

    async def refresh(self, topics: Collection[str]) -> None:
        self.refreshed.append(frozenset(topics))
        for topic in self.denied.intersection(topics):
            raise TopicDeniedError(topic)
        # What was asked for may be old again when the answer is here: a slow broker.
        self.counts.update({name: self.hidden[name] for name in topics if name in self.hidden})


class FixedHanging(Hanging):
    """What the search would find, as the test tells it: the search itself is tested on a real broker."""

    def __init__(self) -> None:
        self.found: Found | Refused = Found(hanging=(), unexamined=())
        self.described: PartitionDescription | Refused = PartitionDescription(
            offset_stable=0, offset_high_watermark=0, open=()
        )
        self.asked: list[tuple[object, object]] = []

    async def describe(self, topic: str, partition: int) -> PartitionDescription | Refused:
        self.asked.append((topic, partition))
        return self.described

    async def find(self, topics: frozenset[str], *, end: bool) -> Found | Refused:
        self.asked.append((topics, end))
        return self.found


class MemoryGateway(GatewayServicer):
    """The gateway's streams with nothing behind them: what is let through ends where a producer would be made."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self._holders = Holders(self._new_producer, 10)

    def _new_producer(self, request: gateway_pb2.Open, _address: str) -> Any:
        self.asked.append(request)
        raise UsageError("nothing is behind it")

    async def Transact(self, _requests: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        stream = TransactStream(context, address_of(context), self._holders, window_bytes=1_024, grace_max_ms=0)
        await stream.run()

    async def CommitBatch(self, request: gateway_pb2.CommitBatchRequest, context: Any) -> Any:  # noqa: N802
        self.asked.append(request)
        return gateway_pb2.CommitBatchResponse()


class Bench:
    """All that a test of the API needs in one place."""

    def __init__(
        self, settings: CoordinatorSettings, open_channel: Callable[[str], Any] = grpc.aio.insecure_channel
    ) -> None:
        self.settings = settings
        self.topics = FixedTopics()
        self.hanging = FixedHanging()
        self.peers = PeerServicer("memory", "here:1", list)
        self.gateway = MemoryGateway()
        self.feed: dict[tuple[str, int], Outcome] = {}
        # Of the last transaction begun.
        self.grant = transaction_pb2.Grant()
        self.api = Api(settings)
        self.calls = MemoryCalls(address=self.api.address)
        self.channel: Any = open_channel(self.api.address)
        self.coordinator: Any = coordinator_pb2_grpc.CoordinatorStub(self.channel)
        self.admin: Any = admin_pb2_grpc.AdminStub(self.channel)

    async def start(self) -> None:
        await self.api.start(
            calls=self.calls,
            topics=self.topics,
            find_in_feed=self._find_in_feed,
            hanging=self.hanging,
            now_ms=SteadyClock().now_ms,
            services=[
                Service("oncebox.v1.Peers", lambda server: add_PeersServicer_to_server(self.peers, server)),
                Service("oncebox.v1.Gateway", lambda server: add_GatewayServicer_to_server(self.gateway, server)),
            ],
        )

    async def stop(self) -> None:
        await self.channel.close()
        await self.api.stop(within_s=5)

    async def _find_in_feed(self, transactional_id: str, number: int) -> Outcome | None:
        return self.feed.get((transactional_id, number))

    async def init(self, transactional_id: str = "tid", **fields: Any) -> coordinator_pb2.InitProducerResponse:
        fields = {"transaction_timeout_ms": 60_000, "instance": "test", **fields}
        request = coordinator_pb2.InitProducerRequest(transactional_id=transactional_id, **fields)
        response: coordinator_pb2.InitProducerResponse = await self.coordinator.InitProducer(request)
        return response

    async def begin(
        self, transactional_id: str = "tid", topic: str = "orders", partitions: Iterable[int] = (0, 1)
    ) -> transaction_pb2.Grant:
        """Init and AddPartitions; the grant of an ONGOING transaction."""
        granted = await self.init(transactional_id)
        response = await self.coordinator.AddPartitions(
            coordinator_pb2.AddPartitionsRequest(
                transactional_id=transactional_id, grant=granted.grant, partitions=[on(topic, *partitions)]
            )
        )
        self.grant = response.grant
        return self.grant


def settings_for_tests(**fields: Any) -> CoordinatorSettings:
    kafka = KafkaSection(bootstrap_servers="localhost:9092")
    return CoordinatorSettings(kafka=kafka, listen_port=0, http_port=0, **fields)


def on(topic: str, *partitions: int) -> transaction_pb2.TopicPartitions:
    return transaction_pb2.TopicPartitions(topic=topic, partitions=partitions)


def written(topic: str, partition: int, offset_first: int = 0, count: int = 1) -> transaction_pb2.Written:
    run = transaction_pb2.Run(offset_first=offset_first, offset_next=offset_first + count)
    return transaction_pb2.Written(topic=topic, partition=partition, record_count=count, runs=[run])


def commit(
    grant: transaction_pb2.Grant, *entries: transaction_pb2.Written, transactional_id: str = "tid", **fields: Any
) -> coordinator_pb2.EndRequest:
    return coordinator_pb2.EndRequest(
        transactional_id=transactional_id,
        grant=grant,
        result=transaction_pb2.COMMITTED,
        contents=coordinator_pb2.Contents(written=entries),
        **fields,
    )


def abort(grant: transaction_pb2.Grant, transactional_id: str = "tid") -> coordinator_pb2.EndRequest:
    return coordinator_pb2.EndRequest(transactional_id=transactional_id, grant=grant, result=transaction_pb2.ABORTED)


async def refused_by(call: Awaitable[Any]) -> tuple[grpc.StatusCode, transaction_pb2.Error]:
    """The status and the typed error of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    metadata = dict(caught.value.trailing_metadata() or ())
    error = transaction_pb2.Error()
    if DETAILS_KEY in metadata:
        status = status_pb2.Status.FromString(metadata[DETAILS_KEY])
        assert status.code == caught.value.code().value[0]
        error.ParseFromString(status.details[0].value)
    return caught.value.code(), error


async def code_of(call: Awaitable[Any]) -> str:
    _, error = await refused_by(call)
    return transaction_pb2.ErrorCode.Name(error.code)


async def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for is in another process's or gRPC's hands
            await asyncio.sleep(0.005)
