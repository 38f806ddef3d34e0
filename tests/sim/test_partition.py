"""The simulated partition: its rules one by one, and side by side with a real broker's."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

import pytest

from oncebox.wire import KafkaSettings, Record, TopicPartition, TxnMarker, Wire, encode_batch
from oncebox.wire.errors import ErrorCode
from proof.sim.partition import Partition
from tests.integration.test_wire_transactions import committed_values, end_offsets, know, leader, until

if TYPE_CHECKING:
    from oncebox.local import LocalKafka
    from oncebox.wire import Appended
    from tests.support.kafka import TopicFactory

NONE = ErrorCode.NONE
FENCED = ErrorCode.INVALID_PRODUCER_EPOCH
GAP = ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


class Talk:
    """Short words for one producer id's doings."""

    def __init__(self, producer_id: int = 7) -> None:
        self.partition = Partition("p")
        self.producer_id = producer_id

    def append(self, epoch: int, sequence: int, *values: str, transactional: bool = True) -> tuple[ErrorCode, int]:
        error, batch = self.partition.append(
            producer_id=self.producer_id,
            epoch=epoch,
            sequence=sequence,
            records=list(values) or ["x"],
            transactional=transactional,
        )
        return error, batch.offset if batch else -1

    def mark(self, epoch: int, *, commit: bool = True, coordinator_epoch: int = 0, version: int = 2) -> ErrorCode:
        error, _ = self.partition.mark(
            producer_id=self.producer_id,
            epoch=epoch,
            commit=commit,
            coordinator_epoch=coordinator_epoch,
            transaction_version=version,
        )
        return error

    def visible(self) -> list[str]:
        self.partition.replicate()
        return [value for _, value in self.partition.read_committed(0)]


def test_a_repeat_is_acknowledged_with_its_first_offset_whatever_its_bytes() -> None:
    talk = Talk()
    assert talk.append(0, 0, "a") == (NONE, 0)
    assert talk.append(0, 0, "b") == (NONE, 0)
    assert talk.partition.offset_next == 1


def test_repeats_are_known_for_five_batches() -> None:
    talk = Talk()
    for sequence in range(6):
        talk.append(0, sequence)
    assert talk.append(0, 1) == (NONE, 1)
    assert talk.append(0, 0)[0] is GAP


def test_gaps_are_refused_and_a_new_epoch_starts_at_0() -> None:
    talk = Talk()
    talk.append(0, 0)
    assert talk.append(0, 2)[0] is GAP
    assert talk.append(2, 1)[0] is GAP
    assert talk.append(2, 0)[0] is NONE
    assert talk.append(0, 1)[0] is FENCED


def test_a_producer_that_is_not_known_starts_anywhere() -> None:
    assert Talk().append(0, 5)[0] is NONE


def test_markers_end_what_is_open_and_fence() -> None:
    talk = Talk()
    talk.append(0, 0, "a")
    assert talk.visible() == []
    assert talk.mark(1) is NONE
    assert talk.visible() == ["a"]
    assert talk.append(0, 1)[0] is FENCED
    talk.append(2, 0, "b")
    assert talk.mark(3, commit=False) is NONE
    assert talk.visible() == ["a"]


def test_a_repeated_marker_ends_the_next_transaction_only_at_an_equal_epoch_and_version_1() -> None:
    talk = Talk()
    talk.append(0, 0)
    assert talk.mark(1) is NONE
    assert talk.mark(1) is NONE
    talk.append(1, 0)
    assert talk.mark(1, version=2) is FENCED
    assert talk.mark(1, version=1) is NONE
    talk.append(2, 0)
    assert talk.mark(1, version=1) is FENCED


def test_an_older_coordinator_is_refused() -> None:
    talk = Talk()
    talk.mark(1, coordinator_epoch=5)
    assert talk.mark(3, coordinator_epoch=4) is ErrorCode.TRANSACTION_COORDINATOR_FENCED


def test_what_is_not_replicated_may_be_lost_and_is_not_remembered() -> None:
    talk = Talk()
    talk.append(0, 0, "a")
    talk.partition.replicate()
    talk.append(0, 1, "b")
    talk.mark(1)
    assert talk.partition.last_stable_offset == 0
    assert talk.partition.lose_suffix()
    assert talk.append(0, 1, "c") == (NONE, 1)
    talk.mark(1)
    assert talk.visible() == ["a", "c"]


def test_a_marker_counts_for_readers_once_it_is_replicated() -> None:
    talk = Talk()
    talk.append(0, 0, "a")
    talk.partition.replicate()
    talk.mark(1)
    assert list(talk.partition.read_committed(0)) == []
    assert talk.visible() == ["a"]


def test_compaction_keeps_the_last_record_of_each_key() -> None:
    partition = Partition("p")
    records = [(b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"a", b"3")]
    for sequence, record in enumerate(records):
        partition.append(producer_id=1, epoch=0, sequence=sequence, records=[record], transactional=False)
    partition.replicate()
    partition.compact(3)
    assert list(partition.read(0, 4)) == [(1, (b"b", b"1")), (2, (b"a", b"2")), (3, (b"a", b"3"))]


# --- side by side with a real broker ----------------------------------------------------------------------------------


class Both:
    """Does the same on both, and compares what they say."""

    def __init__(self, wire: Wire, where: TopicPartition, producer_ids: list[int]) -> None:
        self._wire = wire
        self._where = where
        self._talks = {producer_id: Talk(producer_id) for producer_id in producer_ids}
        self.partition = Partition("p")
        for talk in self._talks.values():
            talk.partition = self.partition

    async def append(self, producer_id: int, epoch: int, sequence: int, values: list[str]) -> None:
        batch = encode_batch(
            [Record(key=None, value=value.encode()) for value in values],
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            transactional=True,
        )

        async def produce() -> Appended:
            node_id = leader(self._wire, self._where)
            return (await self._wire.produce(node_id, {self._where: batch}, transactional_id="any"))[self._where]

        # A busy broker may lose touch with its controller for a moment.
        real: Appended = await until(produce, lambda answer: not answer.error.retriable)
        simulated, offset = self._talks[producer_id].append(epoch, sequence, *values)
        assert simulated is real.error, (producer_id, epoch, sequence)
        assert real.error or offset == real.base_offset

    async def mark(self, marker: TxnMarker) -> None:
        async def write() -> ErrorCode:
            answer = await self._wire.write_txn_markers(leader(self._wire, self._where), [marker])
            return answer[marker.producer_id][self._where]

        real: ErrorCode = await until(write, lambda error: not error.retriable)
        simulated = self._talks[marker.producer_id].mark(
            marker.producer_epoch,
            commit=marker.committed,
            coordinator_epoch=marker.coordinator_epoch,
            version=marker.transaction_version,
        )
        assert simulated is real, marker


@pytest.mark.parametrize("seed", range(4))
async def test_a_real_broker_answers_the_same(kafka: LocalKafka, new_topic: TopicFactory, seed: int) -> None:
    """Random batches and markers of some producer ids: the same errors, offsets, stable offset and readers' view."""
    rng = Random(seed)
    async with Wire(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as wire:
        (where,) = await know(wire, new_topic())
        producer_ids = [(1 << 61) + 10 * seed + index for index in range(3)]
        both = Both(wire, where, producer_ids)
        for number in range(250):
            producer_id = rng.choice(producer_ids)
            known = both.partition.producers.get(producer_id)
            epoch = max((known.epoch if known else 0) + rng.choice((*[0] * 17, -1, 1, 2)), 0)
            earlier = [
                batch for batch in both.partition.batches if batch.producer_id == producer_id and batch.commit is None
            ]
            if earlier and rng.random() < 0.2:
                again = rng.choice(earlier[-8:])
                await both.append(producer_id, again.epoch, again.sequence, ["other bytes"] * len(again.records))
            elif rng.random() < 0.75:
                expected = known.sequence_next if known and known.epoch == epoch else 0
                sequence = max(expected + rng.choice((-6, -2, -1, 0, 0, 0, 0, 0, 0, 1)), 0)
                await both.append(producer_id, epoch, sequence, [f"{number}.{n}" for n in range(rng.choice((1, 1, 2)))])
            else:
                marker = TxnMarker(
                    producer_id=producer_id,
                    producer_epoch=epoch,
                    committed=rng.random() < 0.5,
                    partitions=(where,),
                    coordinator_epoch=rng.choice((3, 3, 3, 4, 2)),
                    transaction_version=rng.choice((1, 2)),
                )
                await both.mark(marker)
        both.partition.replicate()
        assert await end_offsets(wire, where) == (both.partition.offset_next, both.partition.last_stable_offset)
    (values,) = await asyncio.to_thread(committed_values, kafka.bootstrap_servers, where)
    assert [value.decode() for value in values] == [value for _, value in both.partition.read_committed(0)]
