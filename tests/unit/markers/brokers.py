"""Brokers in memory under a clock that jumps: what Kafka does with markers, and every way it can fail to.

The state per partition and producer follows Kafka's ProducerAppendInfo: epochs, coordinator epochs, the open
transaction. Real brokers are in tests/integration/test_markers*.py; here are the faults that need a minute or a bug.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import defaultdict
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from coordinator.core.owed import Debt
from coordinator.core.records import Contents, Grant, Run, Transaction, Written
from coordinator.core.records import TopicPartition as CorePartition
from coordinator.core.state import TransactionState
from coordinator.markers.writer import MarkerWriter
from oncebox.wire import (
    ActiveProducer,
    ClusterMetadata,
    ErrorCode,
    OutcomeUnknownError,
    PartitionProducers,
    TopicMetadata,
    TopicPartition,
    TxnMarker,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Sequence
    from uuid import UUID

T = TypeVar("T")
LATENCY_S = 0.001


class _JumpingSelector(selectors.SelectSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everything waits and nothing is due: a deadlock")
        self.now_s += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only when nothing else is left to do."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


@dataclass
class State:
    epoch: int = -1
    coordinator_epoch: int = -1
    open_epoch: int | None = None


@dataclass(frozen=True)
class Sent:
    node_id: int
    lane: str
    markers: tuple[TxnMarker, ...]
    at_s: float

    @property
    def partitions(self) -> list[TopicPartition]:
        return [partition for marker in self.markers for partition in marker.partitions]


@dataclass
class MemoryBrokers:
    """Implements coordinator.markers.port.Brokers."""

    brokers: dict[int, str] = field(default_factory=lambda: {1: "b1", 2: "b2", 3: "b3"})
    # The truth; `known` is what the client has heard of it.
    leaders: dict[TopicPartition, int] = field(default_factory=dict)
    known: dict[TopicPartition, int] = field(default_factory=dict)
    states: dict[TopicPartition, dict[int, State]] = field(default_factory=lambda: defaultdict(dict))
    # What stands in each partition: (producer id, epoch, commit).
    logs: dict[TopicPartition, list[tuple[int, int, bool]]] = field(default_factory=lambda: defaultdict(list))
    sent: list[Sent] = field(default_factory=list)
    # Faults.
    unanswered: Callable[[Sent], bool] = lambda _sent: False
    answers_lost: Callable[[Sent], bool] = lambda _sent: False
    refuse: Callable[[Sent, TopicPartition, int], ErrorCode | None] = lambda _sent, _partition, _producer_id: None
    down: set[int] = field(default_factory=set)
    # Partitions that a broker does not know to exist; by default those without a leader in the truth.
    stale: dict[int, set[TopicPartition]] = field(default_factory=dict)
    under_way: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    metadata_requests: int = 0
    topic_ids: dict[str, UUID] = field(default_factory=dict)

    def add(self, *partitions: TopicPartition, leader: int = 1, known: bool = True) -> None:
        for partition in partitions:
            self.leaders[partition] = leader
            if known:
                self.known[partition] = leader

    def write(self, partition: TopicPartition, producer_id: int, epoch: int) -> None:
        """A transactional batch."""
        state = self.states[partition].setdefault(producer_id, State())
        if epoch < state.epoch:
            raise AssertionError("fenced")
        state.epoch = state.open_epoch = epoch

    def leader_id(self, partition: TopicPartition) -> int | None:
        return self.known.get(partition)

    async def metadata(self, topics: Collection[str] | None, *, timeout_ms: int) -> ClusterMetadata:
        self.metadata_requests += 1
        await asyncio.sleep(LATENCY_S)
        for partition in [each for each in self.known if topics is None or each.topic in topics]:
            del self.known[partition]
        self.known |= {
            partition: leader
            for partition, leader in self.leaders.items()
            if (topics is None or partition.topic in topics) and leader not in self.down
        }
        told = {
            topic: TopicMetadata(error=ErrorCode.NONE, topic_id=topic_id, is_internal=False, partitions={})
            for topic, topic_id in self.topic_ids.items()
            if topics is None or topic in topics
        }
        return ClusterMetadata(cluster_id=None, controller_id=None, brokers={}, topics=told)

    async def write_txn_markers(
        self, node_id: int, markers: Sequence[TxnMarker], *, timeout_ms: int, lane: str
    ) -> dict[int, dict[TopicPartition, ErrorCode]]:
        sent = Sent(node_id, lane, tuple(markers), asyncio.get_running_loop().time())
        self.sent.append(sent)
        assert len({marker.producer_id for marker in markers}) == len(markers)
        key = (node_id, lane)
        self.under_way[key] += 1
        assert self.under_way[key] == 1, f"two requests under way on {key}"
        try:
            await self._reach(node_id, timeout_ms, hang=self.unanswered(sent))
            answer = {
                marker.producer_id: {
                    partition: self._append(sent, partition, marker) for partition in marker.partitions
                }
                for marker in markers
            }
            if self.answers_lost(sent):
                await asyncio.sleep(timeout_ms / 1000)
                raise OutcomeUnknownError("lost")
            return answer
        finally:
            self.under_way[key] -= 1

    def _append(self, sent: Sent, partition: TopicPartition, marker: TxnMarker) -> ErrorCode:
        refusal = self.refuse(sent, partition, marker.producer_id)
        if refusal is not None:
            return refusal
        if self.leaders.get(partition) != sent.node_id:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        state = self.states[partition].setdefault(marker.producer_id, State())
        # An equal epoch is refused only where it would end an open transaction (KIP-1228, KAFKA-19999).
        ends_another = marker.producer_epoch == state.open_epoch and marker.transaction_version >= 2
        if marker.producer_epoch < state.epoch or ends_another:
            return ErrorCode.INVALID_PRODUCER_EPOCH
        if marker.coordinator_epoch < state.coordinator_epoch:
            return ErrorCode.TRANSACTION_COORDINATOR_FENCED
        state.epoch, state.coordinator_epoch, state.open_epoch = marker.producer_epoch, marker.coordinator_epoch, None
        self.logs[partition].append((marker.producer_id, marker.producer_epoch, marker.committed))
        return ErrorCode.NONE

    async def describe_producers(
        self, node_id: int, partitions: Iterable[TopicPartition], *, timeout_ms: int, lane: str
    ) -> dict[TopicPartition, PartitionProducers]:
        await self._reach(node_id, timeout_ms)
        return {partition: self._describe(node_id, partition) for partition in partitions}

    def _describe(self, node_id: int, partition: TopicPartition) -> PartitionProducers:
        error = ErrorCode.NONE
        if partition not in self.leaders or partition in self.stale.get(node_id, ()):
            error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        producers = tuple(
            ActiveProducer(
                producer_id=producer_id,
                producer_epoch=state.epoch,
                last_sequence=0,
                last_timestamp_ms=0,
                coordinator_epoch=state.coordinator_epoch,
                txn_start_offset=None if state.open_epoch is None else 0,
            )
            for producer_id, state in self.states[partition].items()
        )
        return PartitionProducers(error=error, error_message=None, producers=() if error else producers)

    async def _reach(self, node_id: int, timeout_ms: int, *, hang: bool = False) -> None:
        if node_id not in self.brokers:
            raise OutcomeUnknownError(f"broker {node_id} refuses connections")
        if hang or node_id in self.down:
            await asyncio.sleep(timeout_ms / 1000)
            raise OutcomeUnknownError(f"broker {node_id}: no answer within {timeout_ms} ms")
        await asyncio.sleep(LATENCY_S)


def debt(
    producer_id: int,
    partitions: Iterable[TopicPartition],
    *,
    marker_epoch: int = 1,
    commit: bool = True,
    topic_id: UUID | None = None,
    is_old: bool = False,
) -> Debt:
    """`topic_id`: of the topics that were written to."""
    grant = Grant(number=1, producer_id=producer_id, epoch=marker_epoch - 1)
    owed = frozenset(CorePartition(*partition) for partition in partitions)
    id_bytes = topic_id.bytes if topic_id else b""
    return Debt(
        transactional_id=f"id-{producer_id}",
        number=1,
        producer_id=producer_id,
        marker_epoch=marker_epoch,
        commit=commit,
        partitions=owed,
        decision=1,
        transaction=Transaction(
            grant=grant,
            state=TransactionState.PREPARE_COMMIT if commit else TransactionState.PREPARE_ABORT,
            partitions=owed,
            groups=frozenset(),
            started_at_ms=0,
            contents=Contents(
                written=tuple(
                    Written(topic=p.topic, partition=p.partition, record_count=1, runs=(Run(0, 1),), topic_id=id_bytes)
                    for p in owed
                )
            ),
        ),
        is_old=is_old,
    )


class Told:
    """What `paid` was called with, and when."""

    def __init__(self) -> None:
        self.times: dict[tuple[int, TopicPartition], float] = {}

    def of(self, producer_id: int) -> Callable[[CorePartition], None]:
        def paid(partition: CorePartition) -> None:
            key = (producer_id, TopicPartition(*partition))
            assert key not in self.times, "told twice"
            self.times[key] = asyncio.get_running_loop().time()

        return paid


@asynccontextmanager
async def writing(brokers: MemoryBrokers) -> AsyncIterator[MarkerWriter]:
    writer = MarkerWriter(brokers, jitter=lambda: 1.0)
    try:
        yield writer
    finally:
        await writer.close()


async def until_settled(writer: MarkerWriter, *, within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while unsettled(writer):  # noqa: ASYNC110 - time is virtual: this costs none
            await asyncio.sleep(0.05)


def unsettled(writer: MarkerWriter) -> int:
    status = writer.status()
    return status.waiting + status.in_flight + status.retrying
