"""Transactions that no Kafka coordinator knows of: our batches, our markers, a real broker, a stock consumer.

Each test states one fact that the coordinator builds on; if a broker release changes one, it fails here first.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, ConsumerGroupTopicPartitions, KafkaError
from confluent_kafka import TopicPartition as StockPartition
from confluent_kafka.admin import AdminClient

from oncebox.wire import (
    EARLIEST,
    LATEST,
    OFFSETS_TOPIC,
    CommittedOffset,
    ErrorCode,
    GroupMember,
    KafkaSettings,
    Record,
    TopicPartition,
    TxnMarker,
    Wire,
    encode_batch,
    frequent,
    offsets_partition,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from oncebox.local import LocalKafka
    from oncebox.wire import Appended
    from tests.support.kafka import TopicFactory

NONE = ErrorCode.NONE
# What a group's coordinator says that does not know yet that it is.
MOMENTARY = {ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.NOT_COORDINATOR}
TRANSACTIONAL_ID = "any"  # brokers ask for one, but never compare it with the producer id


class Talker:
    """One producer id and what a coordinator and its client would do with it, told step by step."""

    def __init__(self, wire: Wire, producer_id: int) -> None:
        self.wire = wire
        self.producer_id = producer_id

    async def append(
        self, partition: TopicPartition, epoch: int, sequence: int, *values: bytes, transactional: bool = True
    ) -> Appended:
        batch = encode_batch(
            [Record(key=None, value=value) for value in values],
            producer_id=self.producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            transactional=transactional,
        )
        transactional_id = TRANSACTIONAL_ID if transactional else None
        answer = await self.wire.produce(
            leader(self.wire, partition), {partition: batch}, transactional_id=transactional_id
        )
        return answer[partition]

    async def mark(
        self, partition: TopicPartition, epoch: int, *, committed: bool = True, coordinator_epoch: int = 0
    ) -> ErrorCode:
        marker = TxnMarker(
            producer_id=self.producer_id,
            producer_epoch=epoch,
            committed=committed,
            partitions=(partition,),
            coordinator_epoch=coordinator_epoch,
        )
        answer = await self.wire.write_txn_markers(leader(self.wire, partition), [marker])
        return answer[self.producer_id][partition]


def leader(wire: Wire, partition: TopicPartition) -> int:
    node_id = wire.leader_id(partition)
    assert node_id is not None
    return node_id


async def until(ask: Any, good: Any, *, timeout_s: float = 60) -> Any:
    """Ask again until the answer is good, where a cluster needs a moment: a new leader, a coordinator that loads."""
    async with asyncio.timeout(timeout_s):
        while not good(answer := await ask()):  # noqa: ASYNC110  # a broker sets no event
            await asyncio.sleep(0.05)
        return answer


async def new_producer_id(wire: Wire, node_id: int | None = None) -> int:
    identity = await until(lambda: wire.init_producer_id(node_id=node_id), lambda answer: not answer.error.retriable)
    assert identity.error is NONE
    return int(identity.producer_id)


async def know(wire: Wire, topic: str) -> list[TopicPartition]:
    """The topic's partitions, once each has a leader that knows that it leads."""

    async def ready() -> list[TopicPartition]:
        found = (await wire.metadata([topic])).topics[topic].partitions
        partitions = [TopicPartition(topic, index) for index in sorted(found)]
        for partition in partitions:
            node_id = wire.leader_id(partition)
            if node_id is None or (await wire.list_offsets(node_id, {partition: LATEST}))[partition].error:
                return []
        return partitions

    found: list[TopicPartition] = await until(ready, bool)
    return found


async def end_offsets(wire: Wire, partition: TopicPartition) -> tuple[int, int]:
    """The end of the log, and what read_committed readers see of it."""
    node_id = leader(wire, partition)
    end = await wire.list_offsets(node_id, {partition: LATEST})
    stable = await wire.list_offsets(node_id, {partition: LATEST}, read_committed=True)
    assert end[partition].error is stable[partition].error is NONE
    return end[partition].offset, stable[partition].offset


def committed_values(bootstrap_servers: str, *partitions: TopicPartition) -> list[list[bytes]]:
    """What a stock librdkafka consumer returns per partition, up to where read_committed lets it read."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": f"reader-{uuid.uuid4()}",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    values: dict[Any, list[Any]] = {partition: [] for partition in partitions}
    try:
        consumer.assign([StockPartition(*partition, OFFSET_BEGINNING) for partition in partitions])
        reading = set(values)
        while reading:
            message = consumer.poll(30)
            assert message is not None, "the consumer got nothing for 30 s"
            source: Any = (message.topic(), message.partition())
            if error := message.error():
                assert error.code() == KafkaError._PARTITION_EOF
                reading.remove(source)
            else:
                values[source].append(message.value())
    finally:
        consumer.close()
    return list(values.values())


@pytest.fixture
async def wire(kafka: LocalKafka) -> AsyncIterator[Wire]:
    async with Wire(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as wire:
        yield wire


@pytest.fixture
async def partitions(wire: Wire, new_topic: TopicFactory) -> tuple[TopicPartition, TopicPartition]:
    first, second = await know(wire, new_topic(partitions=2))
    return first, second


@pytest.fixture
async def talker(wire: Wire) -> Talker:
    return Talker(wire, await new_producer_id(wire))


@pytest.fixture(params=[1, 2])
def marker_version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Both versions of WriteTxnMarkers, on a broker that would take the newer."""
    version: int = request.param
    if version == 1:
        monkeypatch.setattr(frequent, "WRITE_TXN_MARKERS_V2", frequent.WRITE_TXN_MARKERS_V1)
    return version


async def test_a_stock_consumer_returns_exactly_what_was_committed(
    kafka: LocalKafka, wire: Wire, partitions: tuple[TopicPartition, TopicPartition], marker_version: int
) -> None:
    """Two transactions interleaved on two partitions, one committed, one aborted; then a third that stays open."""
    first, second = partitions
    good, bad = Talker(wire, await new_producer_id(wire)), Talker(wire, 2**62 + 2**20 + 3)
    for partition in partitions:
        assert (await good.append(partition, 0, 0, b"a", b"b")).error is NONE
        assert (await bad.append(partition, 0, 0, b"x")).error is NONE
        assert (await good.append(partition, 0, 2, b"c")).error is NONE
    assert committed_values(kafka.bootstrap_servers, *partitions) == [[], []]
    for partition in partitions:
        assert await bad.mark(partition, 1, committed=False) is NONE
        assert await good.mark(partition, 1) is NONE
    assert committed_values(kafka.bootstrap_servers, *partitions) == [[b"a", b"b", b"c"]] * 2
    assert (await good.append(first, 2, 0, b"d")).error is NONE
    assert (await bad.append(first, 2, 0, b"e")).error is NONE
    assert await bad.mark(first, 3) is NONE
    # "e" is committed, but behind the open "d": readers wait at the last stable offset.
    assert committed_values(kafka.bootstrap_servers, first) == [[b"a", b"b", b"c"]]
    assert await good.mark(first, 3) is NONE
    assert committed_values(kafka.bootstrap_servers, first, second) == [
        [b"a", b"b", b"c", b"d", b"e"],
        [b"a", b"b", b"c"],
    ]


async def test_one_request_ends_many_producers_on_many_partitions(
    kafka: LocalKafka, wire: Wire, partitions: tuple[TopicPartition, TopicPartition]
) -> None:
    talkers = [Talker(wire, await new_producer_id(wire)) for _ in range(10)]
    for number, talker in enumerate(talkers):
        for partition in partitions:
            assert (await talker.append(partition, 0, 0, b"%d" % number)).error is NONE
    markers = [
        TxnMarker(
            producer_id=talker.producer_id,
            producer_epoch=1,
            committed=number % 2 == 0,
            partitions=partitions,
            coordinator_epoch=0,
        )
        for number, talker in enumerate(talkers)
    ]
    answer = await wire.write_txn_markers(leader(wire, partitions[0]), markers)
    assert answer == {talker.producer_id: dict.fromkeys(partitions, NONE) for talker in talkers}
    assert committed_values(kafka.bootstrap_servers, *partitions) == [[b"0", b"2", b"4", b"6", b"8"]] * 2


@pytest.mark.parametrize("transactional", [True, False])
async def test_a_repeated_batch_is_acknowledged_and_not_stored(
    talker: Talker, partitions: tuple[TopicPartition, TopicPartition], transactional: bool
) -> None:
    partition = partitions[0]
    first = await talker.append(partition, 0, 0, b"a", b"b", transactional=transactional)
    second = await talker.append(partition, 0, 2, b"c", transactional=transactional)
    assert (first.base_offset, second.base_offset) == (0, 2)
    again = await talker.append(partition, 0, 0, b"a", b"b", transactional=transactional)
    assert (again.error, again.base_offset) == (NONE, 0)
    # Only producer id, epoch and sequence are compared: other bytes are acknowledged, and lost.
    other = await talker.append(partition, 0, 2, b"z", transactional=transactional)
    assert (other.error, other.base_offset) == (NONE, 2)
    assert (await end_offsets(talker.wire, partition))[0] == 3


@pytest.mark.parametrize("transactional", [True, False])
async def test_a_gap_in_the_sequence_is_refused(
    talker: Talker, partitions: tuple[TopicPartition, TopicPartition], transactional: bool
) -> None:
    partition = partitions[0]
    assert (await talker.append(partition, 0, 0, b"a", transactional=transactional)).error is NONE
    refused = await talker.append(partition, 0, 2, b"c", transactional=transactional)
    assert refused.error is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert (await talker.append(partition, 0, 1, b"b", transactional=transactional)).error is NONE


async def test_a_gap_is_not_noticed_where_the_producer_is_unknown(
    talker: Talker, partitions: tuple[TopicPartition, TopicPartition]
) -> None:
    """Why a client keeps one batch under way until a partition has acknowledged the first of a transaction."""
    assert (await talker.append(partitions[0], 0, 7, b"h")).error is NONE


async def test_an_old_epoch_is_refused(talker: Talker, partitions: tuple[TopicPartition, TopicPartition]) -> None:
    partition = partitions[0]
    assert (await talker.append(partition, 2, 0, b"a")).error is NONE
    assert (await talker.append(partition, 0, 0, b"old")).error is ErrorCode.INVALID_PRODUCER_EPOCH
    assert await talker.mark(partition, 0) is ErrorCode.INVALID_PRODUCER_EPOCH
    # Once the transaction has ended, its own epoch is old too: a late produce cannot open the next one.
    assert await talker.mark(partition, 3) is NONE
    assert (await talker.append(partition, 2, 1, b"late")).error is ErrorCode.INVALID_PRODUCER_EPOCH


async def test_a_new_epoch_starts_at_sequence_zero(
    talker: Talker, partitions: tuple[TopicPartition, TopicPartition]
) -> None:
    partition = partitions[0]
    assert (await talker.append(partition, 0, 0, b"a")).error is NONE
    assert await talker.mark(partition, 1) is NONE
    assert (await talker.append(partition, 2, 1, b"b")).error is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert (await talker.append(partition, 2, 0, b"b")).error is NONE


async def test_an_idempotent_writer_with_a_higher_epoch_fences_the_lower(
    wire: Wire, partitions: tuple[TopicPartition, TopicPartition]
) -> None:
    """How a new leader of a log partition fences the old one; producer ids far above Kafka's own range."""
    partition = partitions[0]
    log = Talker(wire, 2**62 + 7 + 3 * 2**20)
    for sequence in range(3):
        assert (await log.append(partition, 4, sequence, b"old leader", transactional=False)).error is NONE
    assert (await log.append(partition, 5, 0, b"new leader", transactional=False)).error is NONE
    fenced = await log.append(partition, 4, 3, b"old leader", transactional=False)
    assert fenced.error is ErrorCode.INVALID_PRODUCER_EPOCH
    assert (await log.append(partition, 5, 1, b"new leader", transactional=False)).error is NONE
    # Per partition: elsewhere the old epoch still counts.
    assert (await log.append(partitions[1], 4, 0, b"old leader", transactional=False)).error is NONE


async def test_a_repeated_marker_is_harmless_while_nothing_is_open(
    talker: Talker, partitions: tuple[TopicPartition, TopicPartition], marker_version: int
) -> None:
    partition = partitions[0]
    assert (await talker.append(partition, 0, 0, b"a")).error is NONE
    assert await talker.mark(partition, 1) is NONE
    assert await talker.mark(partition, 1) is NONE
    assert await end_offsets(talker.wire, partition) == (3, 3)


async def test_a_late_marker_ends_the_next_transaction_if_the_epoch_is_raised_by_one_only(
    talker: Talker, partitions: tuple[TopicPartition, TopicPartition], marker_version: int
) -> None:
    partition = partitions[0]
    assert (await talker.append(partition, 0, 0, b"a")).error is NONE
    assert await talker.mark(partition, 1) is NONE
    assert (await talker.append(partition, 1, 0, b"b")).error is NONE
    late = await talker.mark(partition, 1)
    if marker_version == 1:
        assert late is NONE
        assert await end_offsets(talker.wire, partition) == (4, 4)
    else:
        assert late is ErrorCode.INVALID_PRODUCER_EPOCH
        assert await end_offsets(talker.wire, partition) == (3, 2)


async def test_a_late_marker_is_refused_if_the_epoch_is_raised_by_two(
    talker: Talker, partitions: tuple[TopicPartition, TopicPartition], marker_version: int
) -> None:
    partition = partitions[0]
    assert (await talker.append(partition, 0, 0, b"a")).error is NONE
    assert await talker.mark(partition, 1) is NONE
    assert (await talker.append(partition, 2, 0, b"b")).error is NONE
    assert await talker.mark(partition, 1) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert await end_offsets(talker.wire, partition) == (3, 2)
    assert await talker.mark(partition, 3) is NONE


async def test_a_marker_where_nothing_is_open_takes_an_offset_and_fences(
    kafka: LocalKafka, talker: Talker, partitions: tuple[TopicPartition, TopicPartition], marker_version: int
) -> None:
    partition = partitions[0]
    assert await talker.mark(partition, 5) is NONE
    assert await end_offsets(talker.wire, partition) == (1, 1)
    assert (await talker.append(partition, 4, 0, b"a")).error is ErrorCode.INVALID_PRODUCER_EPOCH
    assert committed_values(kafka.bootstrap_servers, partition) == [[]]


async def test_a_lower_coordinator_epoch_is_refused_per_producer_and_partition(
    wire: Wire, partitions: tuple[TopicPartition, TopicPartition], marker_version: int
) -> None:
    one, other = Talker(wire, await new_producer_id(wire)), Talker(wire, await new_producer_id(wire))
    for talker in (one, other):
        for partition in partitions:
            assert (await talker.append(partition, 0, 0, b"a")).error is NONE
    assert await one.mark(partitions[0], 1, coordinator_epoch=7 * 32768 + 2) is NONE
    assert (await one.append(partitions[0], 2, 0, b"b")).error is NONE
    deposed = await one.mark(partitions[0], 3, coordinator_epoch=7 * 32768 + 1)
    assert deposed is ErrorCode.TRANSACTION_COORDINATOR_FENCED
    assert await one.mark(partitions[1], 1, coordinator_epoch=1) is NONE
    assert await other.mark(partitions[0], 1, coordinator_epoch=1) is NONE
    assert await one.mark(partitions[0], 3, coordinator_epoch=7 * 32768 + 2) is NONE


async def test_an_open_transaction_is_seen_on_its_partition_and_unknown_to_kafkas_coordinator(
    talker: Talker, partitions: tuple[TopicPartition, TopicPartition]
) -> None:
    wire, partition = talker.wire, partitions[0]
    assert (await talker.append(partition, 0, 0, b"a", b"b")).error is NONE
    assert await talker.mark(partition, 1, coordinator_epoch=9) is NONE
    assert (await talker.append(partition, 2, 0, b"c", b"d")).error is NONE
    (state,) = (await wire.describe_producers(leader(wire, partition), [partition]))[partition].producers
    assert (state.producer_id, state.producer_epoch, state.last_sequence) == (talker.producer_id, 2, 1)
    assert (state.coordinator_epoch, state.txn_start_offset) == (9, 3)
    native = await wire.list_transactions(leader(wire, partition), producer_ids=[talker.producer_id])
    assert (native.error, native.transactions) == (NONE, ())
    assert await talker.mark(partition, 3, committed=False, coordinator_epoch=9) is NONE
    (state,) = (await wire.describe_producers(leader(wire, partition), [partition]))[partition].producers
    assert state.txn_start_offset is None
    first = await wire.list_offsets(leader(wire, partition), {partition: EARLIEST})
    assert first[partition].offset == 0


class Group:
    """A consumer group, its coordinator, and the partition its offsets are written to."""

    def __init__(self, wire: Wire, bootstrap_servers: str, group_id: str) -> None:
        self.wire = wire
        self.bootstrap_servers = bootstrap_servers
        self.group_id = group_id
        self.coordinator_id = -1
        self.partition = TopicPartition(OFFSETS_TOPIC, -1)

    async def find(self) -> None:
        coordinator = await until(
            lambda: self.wire.find_group_coordinator(self.group_id), lambda answer: not answer.error.retriable
        )
        assert coordinator.error is NONE
        self.coordinator_id = coordinator.node_id
        partitions = await know(self.wire, OFFSETS_TOPIC)
        self.partition = partitions[offsets_partition(self.group_id, len(partitions))]

    async def commit(
        self, talker: Talker, epoch: int, partition: TopicPartition, offset: int, member: GroupMember | None = None
    ) -> ErrorCode:
        answer = await until(
            lambda: self.wire.txn_offset_commit(
                self.coordinator_id,
                {partition: CommittedOffset(offset=offset, metadata="note")},
                group_id=self.group_id,
                member=member,
                transactional_id=TRANSACTIONAL_ID,
                producer_id=talker.producer_id,
                producer_epoch=epoch,
            ),
            lambda answer: answer[partition] not in MOMENTARY,
        )
        error: ErrorCode = answer[partition]
        return error

    async def committed(self, partition: TopicPartition) -> int:
        """What any consumer of the group would resume from; -1001 is librdkafka's word for none."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers})
        asked = ConsumerGroupTopicPartitions(self.group_id, [StockPartition(*partition)])
        answer = admin.list_consumer_group_offsets([asked], require_stable=False)[self.group_id]
        found = (await asyncio.to_thread(answer.result, 60)).topic_partitions
        offset: int = found[0].offset
        return offset


@pytest.fixture
async def group(wire: Wire, kafka: LocalKafka) -> Group:
    group = Group(wire, kafka.bootstrap_servers, f"group-{uuid.uuid4()}")
    await group.find()
    return group


async def test_group_offsets_are_published_by_the_marker(
    talker: Talker, group: Group, partitions: tuple[TopicPartition, TopicPartition], marker_version: int
) -> None:
    partition = partitions[0]
    assert await group.commit(talker, 0, partition, 5) is NONE
    assert await group.committed(partition) == -1001
    assert await talker.mark(group.partition, 1) is NONE
    assert await until(lambda: group.committed(partition), lambda offset: offset != -1001) == 5


async def test_an_abort_drops_group_offsets(
    talker: Talker, group: Group, partitions: tuple[TopicPartition, TopicPartition], marker_version: int
) -> None:
    partition = partitions[0]
    assert await group.commit(talker, 0, partition, 5) is NONE
    assert await talker.mark(group.partition, 1) is NONE
    assert await group.commit(talker, 2, partition, 9) is NONE
    assert await talker.mark(group.partition, 3, committed=False) is NONE
    assert await until(lambda: group.committed(partition), lambda offset: offset != -1001) == 5
    # The aborted 9 has not come late either: a third commit is what is seen next.
    assert await group.commit(talker, 4, partition, 7) is NONE
    assert await talker.mark(group.partition, 5) is NONE
    assert await until(lambda: group.committed(partition), lambda offset: offset != 5) == 7


async def test_an_old_epoch_may_not_commit_offsets(
    talker: Talker, group: Group, partitions: tuple[TopicPartition, TopicPartition]
) -> None:
    assert await talker.mark(group.partition, 3) is NONE
    assert await group.commit(talker, 2, partitions[0], 5) is ErrorCode.INVALID_PRODUCER_EPOCH


async def test_a_stale_group_member_is_refused(
    talker: Talker, group: Group, partitions: tuple[TopicPartition, TopicPartition]
) -> None:
    """KIP-447: the broker fences a member that lost its place, without any help of a coordinator."""
    partition = partitions[0]
    consumer = Consumer({"bootstrap.servers": group.bootstrap_servers, "group.id": group.group_id})
    joined: list[Any] = []
    try:
        consumer.subscribe([partition.topic], on_assign=lambda _, assigned: joined.extend(assigned))
        while not joined:
            await asyncio.to_thread(consumer.poll, 0.1)
        member_id = consumer.memberid()
        current = GroupMember(member_id=member_id, generation_id=1)
        assert await group.commit(talker, 0, partition, 5, current) is NONE
        stale = GroupMember(member_id=member_id, generation_id=0)
        assert await group.commit(talker, 0, partition, 6, stale) is ErrorCode.ILLEGAL_GENERATION
        stranger = GroupMember(member_id="nobody", generation_id=1)
        assert await group.commit(talker, 0, partition, 6, stranger) is ErrorCode.UNKNOWN_MEMBER_ID
    finally:
        consumer.close()
