"""The end of transactions that nobody knows, and the search for them, on brokers of the test's own."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from coordinator.core.apply import PartitionState, apply
from coordinator.core.commands import Refused
from coordinator.hanging import NATIVE_LOG, Hanging, ask_peer
from coordinator.log import codec
from coordinator.open_transactions import Kind
from coordinator.shard import ShardState
from oncebox.session import open_plain_channel
from oncebox.v1 import manifest_pb2, peer_pb2
from oncebox.wire import (
    ActiveProducer,
    ClusterMetadata,
    ErrorCode,
    ListedOffset,
    NativeTransactions,
    OutcomeUnknownError,
    PartitionMetadata,
    PartitionProducers,
    TopicMetadata,
    TopicPartition,
    TxnMarker,
)
from tests.support.memory_calls import MemoryCalls
from tests.unit.api.bench import Bench, settings_for_tests
from tests.unit.core.states import id_state, transaction

TOPIC = "t"
HOUR_MS = 3_600_000
BROKER = 1


class Brokers:
    """One topic, with an open transaction of a producer id of its own on each partition."""

    def __init__(self, partitions: int) -> None:
        self.open = {TopicPartition(TOPIC, index): 100 + index for index in range(partitions)}
        # Markers for these are not answered.
        self.mute: set[TopicPartition] = set()
        # Partitions led by another broker than BROKER.
        self.led_by: dict[int, int] = {}
        # Nothing at all is answered by these.
        self.silent: set[int] = set()

    def _ask(self, broker: int) -> None:
        if broker in self.silent:
            raise OutcomeUnknownError(f"broker {broker} does not answer")

    async def metadata(self, topics: Collection[str] | None) -> ClusterMetadata:
        def described(name: str, count: int) -> TopicMetadata:
            partitions = {
                index: PartitionMetadata(
                    error=ErrorCode.NONE,
                    leader_id=self.led_by.get(index, BROKER),
                    leader_epoch=0,
                    replica_ids=(),
                    in_sync_ids=(),
                    offline_ids=(),
                )
                for index in range(count)
            }
            return TopicMetadata(error=ErrorCode.NONE, topic_id=UUID(int=1), is_internal=False, partitions=partitions)

        names = {TOPIC: len(self.open)} if topics is None else dict.fromkeys(topics, len(self.open))
        brokers: Any = dict.fromkeys((BROKER, *self.led_by.values(), *self.silent))
        return ClusterMetadata(
            cluster_id=None,
            controller_id=None,
            brokers=brokers,
            topics={name: described(name, 0 if name == NATIVE_LOG else count) for name, count in names.items()},
        )

    def leader_id(self, _partition: TopicPartition) -> int:
        return BROKER

    async def describe_producers(
        self, broker: int, partitions: Iterable[TopicPartition], **_: Any
    ) -> Mapping[TopicPartition, PartitionProducers]:
        self._ask(broker)

        def described(producer_id: int) -> ActiveProducer:
            return ActiveProducer(
                producer_id=producer_id,
                producer_epoch=0,
                last_sequence=0,
                last_timestamp_ms=0,
                coordinator_epoch=-1,
                txn_start_offset=0,
            )

        return {
            where: PartitionProducers(
                error=ErrorCode.NONE,
                error_message=None,
                producers=(described(self.open[where]),) if where in self.open else (),
            )
            for where in partitions
        }

    async def list_offsets(self, broker: int, timestamps: Iterable[TopicPartition], **_: Any) -> Any:
        self._ask(broker)
        return {where: ListedOffset(error=ErrorCode.NONE, offset=5, timestamp_ms=0) for where in timestamps}

    async def may_describe_transactions(self, broker: int, **_: Any) -> bool:
        self._ask(broker)
        return True

    async def list_transactions(self, broker: int, **_: Any) -> NativeTransactions:
        self._ask(broker)
        return NativeTransactions(error=ErrorCode.NONE, transactions=())

    async def write_txn_markers(self, _broker: int, markers: Sequence[TxnMarker], **_: Any) -> Any:
        (marker,) = markers
        (where,) = marker.partitions
        if where in self.mute:
            raise OutcomeUnknownError("no answer")
        del self.open[where]
        return {marker.producer_id: {where: ErrorCode.NONE}}


class Scene:
    def __init__(self, partitions: int) -> None:
        self.brokers = Brokers(partitions)
        self.now_ms = 10 * HOUR_MS
        self.held: list[int] = []
        # Of what the feed was searched for commits.
        self.searched: list[set[int]] = []
        wire: Any = self.brokers
        self.hanging = Hanging(
            wire=wire,
            calls=MemoryCalls(partition_count=1),
            list_open=self.list_open,
            find_manifests=self.find_manifests,
            own_topics=frozenset(),
            age_min_ms=HOUR_MS,
            now_ms=lambda: self.now_ms,
        )

    async def list_open(self, _address: str, request: peer_pb2.ListOpenRequest) -> peer_pb2.ListOpenResponse:
        held = [each for each in self.held if each in request.producer_ids]
        return peer_pb2.ListOpenResponse(log_partitions=[0], held=held)

    async def find_manifests(self, producers: frozenset[tuple[int, int]]) -> Sequence[manifest_pb2.Manifest]:
        self.searched.append({producer_id for producer_id, _ in producers})
        return []

    async def sweep(self) -> set[int]:
        """The producer ids whose transactions it has ended."""
        swept = await self.hanging.sweep()
        assert not isinstance(swept, Refused), swept
        self.now_ms += HOUR_MS
        return {entry.producer_id for entry in swept if entry.ended}


async def test_a_marker_that_is_not_answered_is_no_word_on_those_before_and_after_it() -> None:
    scene = Scene(partitions=3)
    scene.brokers.mute = {TopicPartition(TOPIC, 1)}
    found = await scene.hanging.find(frozenset({TOPIC}), end=True)
    assert not isinstance(found, Refused), found
    assert [(entry.partition, entry.ended) for entry in found.hanging] == [(0, True), (1, False), (2, True)]


async def test_the_feed_is_not_searched_again_for_what_is_known_not_to_be_ours() -> None:
    scene = Scene(partitions=2)
    scene.held = [101]
    assert await scene.sweep() == set()
    assert await scene.sweep() == {101}
    assert scene.searched == [{100, 101}, {100, 101}]
    for _ in range(3):
        assert await scene.sweep() == set()
        assert scene.hanging.swept == 1
    assert scene.searched == [{100, 101}, {100, 101}]
    # One that is new is looked for, and ended, as ever.
    scene.brokers.open[TopicPartition(TOPIC, 1)] = 102
    scene.held = [102]
    assert await scene.sweep() == set()
    assert scene.searched[2:] == [{102}]
    assert await scene.sweep() == {102}
    # Whoever asks for it is told of the first, too, and may have it ended.
    found = await scene.hanging.find(frozenset({TOPIC}), end=True)
    assert not isinstance(found, Refused), found
    assert [(entry.producer_id, entry.ended) for entry in found.hanging] == [(100, True)]


async def test_who_blocks_a_partition_is_told_while_a_broker_that_does_not_lead_it_is_silent() -> None:
    scene = Scene(partitions=2)
    scene.brokers.led_by = {1: 2}
    scene.brokers.silent = {2}
    described = await scene.hanging.describe(TOPIC, 0)
    assert not isinstance(described, Refused), described
    # The silent one may know it to be Kafka's own: ask again.
    assert [(entry.producer_id, entry.kind) for entry in described.open] == [(100, Kind.UNKNOWN)]
    assert isinstance(await scene.hanging.describe(TOPIC, 1), Refused)
    scene.brokers.silent = set()
    for partition in (0, 1):
        described = await scene.hanging.describe(TOPIC, partition)
        assert not isinstance(described, Refused), described
        assert [(entry.producer_id, entry.kind) for entry in described.open] == [(100 + partition, Kind.HANGING)]


async def test_nothing_is_ended_while_a_broker_does_not_say_what_is_kafkas_own() -> None:
    scene = Scene(partitions=1)
    scene.brokers.silent = {2}
    refused = await scene.hanging.find(frozenset({TOPIC}), end=True)
    assert isinstance(refused, Refused)
    assert refused.retriable
    assert "no answer from broker 2" in refused.message
    assert scene.brokers.open


def leading(names: Iterable[str]) -> Any:
    """A shard that serves ids with an open transaction each: of the producer ids from 100 on."""

    async def confirm() -> bool:
        return True

    ids = PartitionState(unpack=codec.decode_id)
    for producer_id, name in enumerate(names, start=100):
        apply(ids, id_state(transaction(producer_id=producer_id), transactional_id=name))
    return SimpleNamespace(partition=0, state=ShardState.SERVING, ids=ids, confirm=confirm)


async def test_an_instance_with_many_open_transactions_says_which_are_its_own() -> None:
    bench = Bench(settings_for_tests())
    await bench.start()
    try:
        names = [f"{number:0500}" for number in range(10_000)]
        assert sum(map(len, names)) > bench.settings.limits.message_bytes
        bench.peers._shards = lambda: [leading(names)]
        brokers = Brokers(3)
        brokers.open[TopicPartition(TOPIC, 2)] = stranger = 1_000_000
        wire: Any = brokers
        hanging = Hanging(
            wire=wire,
            calls=MemoryCalls(address=bench.api.address, partition_count=1),
            list_open=partial(ask_peer, open_plain_channel),
            find_manifests=Scene(0).find_manifests,
            own_topics=frozenset(),
            age_min_ms=HOUR_MS,
            now_ms=lambda: 10 * HOUR_MS,
        )
        found = await hanging.find(frozenset(), end=False)
        assert not isinstance(found, Refused), found
        assert [entry.producer_id for entry in found.hanging] == [stranger]
    finally:
        await bench.stop()


async def test_more_producer_ids_than_one_question_takes_are_asked_for_in_several() -> None:
    scene = Scene(3)
    asked: list[list[int]] = []

    async def list_open(_address: str, request: peer_pb2.ListOpenRequest) -> peer_pb2.ListOpenResponse:
        asked.append(list(request.open_of))
        # It has lost its partition by the time of the second question.
        return peer_pb2.ListOpenResponse(log_partitions=[0] if len(asked) == 1 else [])

    scene.hanging._list_open = list_open
    assert not isinstance(await scene.hanging.find(frozenset(), end=False), Refused)
    assert asked == [[100, 101, 102]]
    asked.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coordinator.hanging.PRODUCER_IDS_PER_REQUEST", 2)
        refused = await scene.hanging.find(frozenset(), end=False)
    assert asked == [[100, 101], [102]]
    assert isinstance(refused, Refused)
    assert "log partition 0" in refused.message
