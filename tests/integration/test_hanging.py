"""Open transactions on a real broker: whose they are, and the end of those that nobody knows."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka import TopicPartition as StockPartition

from coordinator.core.commands import ErrorCode, Refused
from coordinator.core.records import Result
from coordinator.hanging import Hanging
from coordinator.open_transactions import Kind, Open
from oncebox.v1 import manifest_pb2, peer_pb2, transaction_pb2
from oncebox.wire import (
    OFFSETS_TOPIC,
    CommittedOffset,
    KafkaSettings,
    Record,
    TopicPartition,
    TxnMarker,
    Wire,
    encode_batch,
)
from tests.support.memory_calls import MemoryCalls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from oncebox.local import LocalKafka
    from tests.support.kafka import TopicFactory

HOUR_MS = 3_600_000


class Scene:
    """A real broker with open transactions; the log partitions' and the feed's answers are told by the test."""

    def __init__(self, wire: Wire, topic: str) -> None:
        self.wire = wire
        self.partition = TopicPartition(topic, 0)
        self.known: list[peer_pb2.OpenProducer] = []
        self.answering = [0, 1, 2, 3]
        # Producer ids that ids of the log have, or had.
        self.held: list[int] = []
        self.manifests: list[manifest_pb2.Manifest] = []
        self.now_ms = time.time_ns() // 1_000_000
        # What happens between the look at the partition and the answers of the log partitions.
        self.meanwhile: Any = None
        self.hanging = Hanging(
            wire=wire,
            calls=MemoryCalls(partition_count=4),
            list_open=self.list_open,
            find_manifests=self.find_manifests,
            own_topics=frozenset(),
            age_min_ms=HOUR_MS,
            now_ms=lambda: self.now_ms,
        )

    async def list_open(self, _address: str, request: peer_pb2.ListOpenRequest) -> peer_pb2.ListOpenResponse:
        if self.meanwhile is not None:
            await self.meanwhile()
        held = [each for each in self.held if each in request.producer_ids]
        return peer_pb2.ListOpenResponse(log_partitions=self.answering, open=self.known, held=held)

    async def find_manifests(self, producers: frozenset[tuple[int, int]]) -> Sequence[manifest_pb2.Manifest]:
        return [each for each in self.manifests if (each.producer_id, each.epoch) in producers]

    @property
    def leader(self) -> int:
        leader = self.wire.leader_id(self.partition)
        assert leader is not None
        return leader

    async def open(self, producer_id: int, epoch: int = 0, *, age_ms: int = 2 * HOUR_MS) -> int:
        """Writes one record of a transaction that nobody ends; its offset."""
        record = Record(key=None, value=b"open", timestamp_ms=self.now_ms - age_ms)
        batch = encode_batch(
            [record], producer_id=producer_id, producer_epoch=epoch, base_sequence=0, transactional=True
        )
        answer = await self.wire.produce(self.leader, {self.partition: batch}, transactional_id="any")
        assert not answer[self.partition].error
        return answer[self.partition].base_offset

    async def mark(self, producer_id: int, epoch: int) -> None:
        marker = TxnMarker(
            producer_id=producer_id,
            producer_epoch=epoch,
            committed=True,
            partitions=(self.partition,),
            coordinator_epoch=0,
        )
        answer = await self.wire.write_txn_markers(self.leader, [marker])
        assert not answer[producer_id][self.partition]

    async def find(self, *, end: bool = False) -> tuple[Open, ...]:
        found = await self.hanging.find(frozenset({self.partition.topic}), end=end)
        assert not isinstance(found, Refused), found
        assert not found.unexamined
        return found.hanging

    async def sweep_only_here(self) -> None:
        """Other tests' topics are none of this one's business."""
        others = (await self.wire.metadata(None)).topics.keys() - {self.partition.topic}
        self.hanging._own_topics = frozenset(others)

    async def sweep(self) -> list[Open]:
        found = await self.hanging.sweep()
        assert not isinstance(found, Refused), found
        return list(found)

    async def described(self) -> tuple[int, int, list[Open]]:
        described = await self.hanging.describe(*self.partition)
        assert not isinstance(described, Refused), described
        return described.offset_stable, described.offset_high_watermark, list(described.open)


@pytest.fixture
async def scene(kafka: LocalKafka, new_topic: TopicFactory) -> AsyncIterator[Scene]:
    topic = new_topic(config={"message.timestamp.type": "CreateTime"})
    async with Wire(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as wire:
        scene = Scene(wire, topic)
        async with asyncio.timeout(60):
            while wire.leader_id(scene.partition) is None:
                await wire.metadata([topic])
        yield scene


@pytest.fixture
def producer_id() -> int:
    """Far above Kafka's own range, and new in each test."""
    return 2**62 + uuid.uuid4().int % 2**40


def committed(kafka: LocalKafka, topic: str, count: int) -> list[bytes | None]:
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": "x", "enable.partition.eof": True})
    consumer.assign([StockPartition(topic, 0, 0)])
    try:
        values: list[bytes | None] = []
        while True:
            message = consumer.poll(60)
            assert message is not None
            if message.error():
                return values
            values.append(message.value())
            assert len(values) <= count
    finally:
        consumer.close()


async def test_a_transaction_that_nobody_knows_is_found_and_aborted(scene: Scene, producer_id: int, kafka: LocalKafka):
    offset = await scene.open(producer_id)
    found = await scene.find()
    assert [(each.producer_id, each.epoch, each.offset_first) for each in found] == [(producer_id, 0, offset)]
    assert (found[0].kind, found[0].ends_as, found[0].ended) == (Kind.HANGING, Result.ABORTED, False)
    assert found[0].age_ms == 2 * HOUR_MS
    stable, high, opened = await scene.described()
    assert (stable, high, len(opened)) == (offset, offset + 1, 1)

    (ended,) = await scene.find(end=True)
    assert ended.ended
    stable, high, opened = await scene.described()
    assert stable == high == offset + 2
    assert not opened
    assert committed(kafka, scene.partition.topic, 0) == []
    assert await scene.find() == ()
    # Fenced: a late write of the same transaction comes to nothing.
    with pytest.raises(AssertionError):
        await scene.open(producer_id)


async def test_it_is_committed_if_the_feed_says_so(scene: Scene, producer_id: int, kafka: LocalKafka):
    offset = await scene.open(producer_id, epoch=4)
    topic = (await scene.wire.metadata([scene.partition.topic])).topics[scene.partition.topic]
    assert topic.topic_id is not None
    run = transaction_pb2.Run(offset_first=offset, offset_next=offset + 1)
    entry = transaction_pb2.Written(
        topic=scene.partition.topic, record_count=1, runs=[run], topic_id=topic.topic_id.bytes
    )
    manifest = manifest_pb2.Manifest(
        transactional_id="tid", number=9, producer_id=producer_id, epoch=4, written=[entry]
    )
    scene.manifests = [manifest]
    (ended,) = await scene.find(end=True)
    assert (ended.ends_as, ended.ended, ended.transactional_id) == (Result.COMMITTED, True, "tid")
    assert committed(kafka, scene.partition.topic, 1) == [b"open"]


async def test_a_commit_of_a_topic_deleted_since_does_not_count(scene: Scene, producer_id: int):
    offset = await scene.open(producer_id)
    run = transaction_pb2.Run(offset_first=offset, offset_next=offset + 1)
    entry = transaction_pb2.Written(
        topic=scene.partition.topic, record_count=1, runs=[run], topic_id=b"of the old topic"
    )
    scene.manifests = [manifest_pb2.Manifest(producer_id=producer_id, written=[entry])]
    assert [each.ends_as for each in await scene.find()] == [Result.ABORTED]


async def test_nothing_is_ended_unless_every_log_partition_has_answered(scene: Scene, producer_id: int):
    await scene.open(producer_id)
    scene.answering = [0, 1, 3]
    refused = await scene.hanging.find(frozenset({scene.partition.topic}), end=True)
    assert isinstance(refused, Refused)
    assert refused.code is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert "log partition 2" in refused.message
    # Still to be looked at, with no more said than is known.
    _, _, (shown,) = await scene.described()
    assert shown.kind is Kind.UNKNOWN


async def test_an_instance_that_does_not_answer(scene: Scene, producer_id: int):
    await scene.open(producer_id)

    async def unreachable() -> None:
        raise ConnectionError

    scene.meanwhile = unreachable
    refused = await scene.hanging.find(frozenset({scene.partition.topic}), end=True)
    assert isinstance(refused, Refused)
    assert "log partition 0, log partition 1" in refused.message


async def test_ours_and_young_ones_are_left_alone(scene: Scene, producer_id: int):
    await scene.open(producer_id)
    await scene.open(producer_id + 1, age_ms=HOUR_MS // 2)
    scene.known = [peer_pb2.OpenProducer(transactional_id="tid", number=5, producer_id=producer_id)]
    assert await scene.find(end=True) == ()
    _, _, (ours, young) = await scene.described()
    assert (ours.kind, ours.transactional_id, ours.number) == (Kind.ONCEBOX, "tid", 5)
    assert young.kind is Kind.UNKNOWN


async def test_kafkas_own_are_shown_and_left_alone(scene: Scene, kafka: LocalKafka):
    name = f"native-{uuid.uuid4().hex[:8]}"
    named = {"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": name}
    producer = Producer({**named, "transaction.timeout.ms": 600_000})  # Kafka does not end it before the test does
    await asyncio.to_thread(producer.init_transactions, 60)
    producer.begin_transaction()
    producer.produce(scene.partition.topic, b"native", timestamp=scene.now_ms - 2 * HOUR_MS)
    await asyncio.to_thread(producer.flush, 60)
    assert await scene.find(end=True) == ()
    _, _, (native,) = await scene.described()
    assert (native.kind, native.transactional_id) == (Kind.NATIVE, name)
    await asyncio.to_thread(producer.commit_transaction, 60)
    # A commit is answered before its marker is written; a successor is not let in before that.
    successor = Producer(named)
    await asyncio.to_thread(successor.init_transactions, 60)
    assert committed(kafka, scene.partition.topic, 1) == [b"native"]


async def test_as_long_as_kafkas_own_may_be_hidden_only_what_the_feed_knows_is_ended(
    scene: Scene, producer_id: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Brokers do not list the transactions of ids that our principal may not describe."""

    async def may_not(*_: object, **__: object) -> bool:
        return False

    monkeypatch.setattr(scene.wire, "may_describe_transactions", may_not)
    offset = await scene.open(producer_id)
    assert [(each.kind, each.ended) for each in await scene.find(end=True)] == [(Kind.HANGING, False)]
    assert "not ended, it may be of Kafka's own" in caplog.text
    await scene.sweep_only_here()
    assert await scene.sweep() == []
    scene.now_ms += HOUR_MS
    assert [each.ended for each in await scene.sweep()] == [False]
    assert scene.hanging.swept == 1
    topic = (await scene.wire.metadata([scene.partition.topic])).topics[scene.partition.topic]
    assert topic.topic_id is not None
    run = transaction_pb2.Run(offset_first=offset, offset_next=offset + 1)
    entry = transaction_pb2.Written(
        topic=scene.partition.topic, record_count=1, runs=[run], topic_id=topic.topic_id.bytes
    )
    scene.manifests = [manifest_pb2.Manifest(producer_id=producer_id, written=[entry])]
    assert [(each.ends_as, each.ended) for each in await scene.sweep()] == [(Result.COMMITTED, True)]


async def test_group_offsets_that_nobody_ends_are_found_among_all_topics(scene: Scene, producer_id: int):
    group_id = f"group-{uuid.uuid4().hex[:8]}"

    async def is_committed() -> bool:
        coordinator = await scene.wire.find_group_coordinator(group_id)
        if coordinator.node_id is None:
            return False
        answer = await scene.wire.txn_offset_commit(
            coordinator.node_id,
            {scene.partition: CommittedOffset(offset=5)},
            group_id=group_id,
            transactional_id="any",
            producer_id=producer_id,
            producer_epoch=0,
        )
        return not any(answer.values())

    async with asyncio.timeout(60):
        while not await is_committed():  # noqa: ASYNC110 - the broker loads the group
            await asyncio.sleep(0.1)
    scene.now_ms += 2 * HOUR_MS
    found = await scene.hanging.find(frozenset(), end=False)
    assert not isinstance(found, Refused), found
    (ours,) = [each for each in found.hanging if each.producer_id == producer_id]
    assert ours.topic == OFFSETS_TOPIC
    scene.partition = TopicPartition(ours.topic, ours.partition)
    await scene.mark(producer_id, 1)


async def test_what_ends_meanwhile_is_not_ended_again(scene: Scene, producer_id: int, kafka: LocalKafka):
    """Its owner commits and begins the next between our looking and our asking who knows it."""
    await scene.open(producer_id)

    async def commit_and_begin() -> None:
        scene.meanwhile = None
        await scene.mark(producer_id, 1)
        await scene.open(producer_id, epoch=2)

    scene.meanwhile = commit_and_begin
    (found,) = await scene.find(end=True)
    assert (found.epoch, found.ended) == (0, False)
    _, _, (still,) = await scene.described()
    assert still.epoch == 2
    await scene.mark(producer_id, 3)
    assert committed(kafka, scene.partition.topic, 2) == [b"open", b"open"]


async def test_the_sweep_is_patient(scene: Scene, producer_id: int):
    """Records may be stamped with any time: what looks old may have been written just now."""
    scene.held = [producer_id]
    await scene.open(producer_id)
    await scene.sweep_only_here()
    assert await scene.sweep() == []
    scene.now_ms += HOUR_MS - 1
    assert await scene.sweep() == []
    scene.now_ms += 1
    assert [each.ended for each in await scene.sweep()] == [True]
    assert await scene.sweep() == []


async def test_the_sweep_leaves_alone_what_may_be_of_another_oncebox(
    scene: Scene, producer_id: int, caplog: pytest.LogCaptureFixture
):
    """One with a log of its own on the same brokers: what it has prepared is open for as long as it likes."""
    await scene.open(producer_id)
    await scene.sweep_only_here()
    assert await scene.sweep() == []
    scene.now_ms += HOUR_MS
    scene.answering = [0, 1, 2]
    assert isinstance(await scene.hanging.sweep(), Refused)
    scene.answering = [0, 1, 2, 3]
    for _ in range(2):
        assert await scene.sweep() == []
    told = [record.message for record in caplog.records if "no id of ours has this producer id" in record.message]
    assert len(told) == 1
    assert f"oncebox txn hanging --topic {scene.partition.topic} --end" in told[0]
    assert scene.hanging.swept == 1
    (found,) = await scene.find(end=True)
    assert found.ended  # a person says that it is nobody's


async def test_places_that_do_not_exist(scene: Scene):
    for refused in [
        await scene.hanging.describe("nowhere", 0),
        await scene.hanging.describe(scene.partition.topic, 5),
        await scene.hanging.find(frozenset({"nowhere"}), end=True),
    ]:
        assert isinstance(refused, Refused)
        assert refused.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def test_the_top_epoch_can_be_ended_too(scene: Scene, producer_id: int):
    await scene.open(producer_id, epoch=32_767)
    (ended,) = await scene.find(end=True)
    assert (ended.epoch, ended.ended) == (32_767, True)
