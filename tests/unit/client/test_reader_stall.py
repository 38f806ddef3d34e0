"""A reader whose buffer is full reads on where something is waited for: else both would wait for ever."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from confluent_kafka import KafkaError

import oncebox.reader.reader as module
from oncebox.reader import PartitionPosition, read_transactions
from oncebox.reader.assembly import Assembly
from oncebox.reader.gathering import Gathering
from oncebox.reader.source import records_by_partition
from oncebox.v1 import manifest_pb2
from oncebox.wire import TopicPartition
from tests.unit.client.histories import IDS, TOPIC
from tests.unit.client.test_assembly import manifest, record

A, B, C = (TopicPartition(TOPIC, index) for index in range(3))


class Message:
    """As the consumer's."""

    def __init__(self, where: TopicPartition, offset: int, error: KafkaError | None = None) -> None:
        self._where = where
        self._offset = offset
        self._error = error

    def topic(self) -> str:
        return self._where.topic

    def partition(self) -> int:
        return self._where.partition

    def offset(self) -> int:
        return self._offset

    def error(self) -> KafkaError | None:
        return self._error

    def timestamp(self) -> tuple[int, int]:
        return 0, 0

    def key(self) -> None:
        return None

    def value(self) -> bytes:
        return b"x"

    def headers(self) -> None:
        return None


class StubConsumer:
    """Has the record that is missing on B, and gives what is assigned and not paused."""

    def __init__(self, left: Sequence[TopicPartition] = (B, C), unassigned: Sequence[TopicPartition] = ()) -> None:
        self.paused: set[TopicPartition] = set()
        self.unassigned = set(unassigned)
        self.left = [Message(where, 0) for where in left]
        self.all_read = asyncio.Event()

    async def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        self.unassigned -= positions.keys()

    async def pause(self, partitions: set[TopicPartition]) -> None:
        self.paused |= partitions

    async def resume(self, partitions: set[TopicPartition]) -> None:
        self.paused -= set(partitions)

    async def poll(self) -> list[Message]:
        await asyncio.sleep(0)
        withheld = self.paused | self.unassigned
        found = [each for each in self.left if TopicPartition(each.topic(), each.partition()) not in withheld]
        self.left = [each for each in self.left if each not in found]
        if not self.left:
            self.all_read.set()
        return found


def with_one_on_b(told: manifest_pb2.Manifest) -> manifest_pb2.Manifest:
    told.written.add(topic=TOPIC, partition=1, topic_id=IDS[TOPIC]).runs.add(offset_first=0, offset_next=1)
    return told


async def test_it_goes_on_with_what_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "STALL_S", 0.01)
    reader = read_transactions([TOPIC], "localhost:9092", buffer_bytes=100)
    start = PartitionPosition(next_offset=0)
    reader._assembly = assembly = Assembly({A: start, B: start, C: start}, {0: 0}, {TOPIC: IDS[TOPIC].hex()})
    consumer: Any = StubConsumer()
    reader._records = consumer
    # The first has offsets 0 and 2 on A, and one on B that has not come. The second stands between them, and is whole.
    assembly.manifest(0, 0, with_one_on_b(manifest(1, (0, 1), (2, 3), transactional_id="first")))
    assembly.manifest(0, 1, manifest(1, (1, 2), transactional_id="second"))
    assembly.feed_position(0, 2)
    assembly.records(A, [record(0, A), record(1, A), record(2, A)])
    reader._advance()
    assert not reader._room.is_set()
    reading = asyncio.create_task(reader._read_records())
    try:
        async with asyncio.timeout(60):
            while not await reader.wait_until_whole(A, 0, 1):
                assert assembly.needed_for(A, 0) == {B}
        assert consumer.paused == {A, C}
        assert [len(each.records) for each in reader.take(records_max=10, bytes_max=10_000)] == [1, 2]
        # And everywhere, once there is room.
        await asyncio.wait_for(consumer.all_read.wait(), 60)
    finally:
        reading.cancel()
        await asyncio.wait([reading])
        await reader._wire.close()


async def test_it_goes_on_with_what_comes_to_be_waited_for_while_there_is_little_room(monkeypatch: pytest.MonkeyPatch):
    """Less than the buffer waits, more than the half of it; and the commit is known only after all was held back."""
    monkeypatch.setattr(module, "STALL_S", 0.01)
    reader = read_transactions([TOPIC], "localhost:9092", buffer_bytes=10_000)
    start = PartitionPosition(next_offset=0)
    reader._assembly = assembly = Assembly({A: start, B: start, C: start}, {0: 0, 1: 0}, {TOPIC: IDS[TOPIC].hex()})
    consumer: Any = StubConsumer([B], unassigned=[B])
    reader._records = consumer
    assembly.manifest(0, 0, manifest(1, (0, 60), partition=2, transactional_id="first"))
    assembly.feed_position(0, 1)
    assembly.records(C, [record(offset, C) for offset in range(60)])
    assembly.records(A, [record(offset, A) for offset in range(40)])
    assert 5_000 < assembly.buffered_by_partition()[A] < 10_000
    reader._advance()
    reading = asyncio.create_task(reader._read_records())
    try:
        async with asyncio.timeout(60):
            while consumer.paused != {A, B, C}:  # noqa: ASYNC110 - the stub has no event for it
                await asyncio.sleep(0.01)
        consumer.unassigned.clear()
        assert len(reader.take(records_max=100, bytes_max=100_000)) == 1
        assembly.manifest(1, 0, with_one_on_b(manifest(1, (0, 40), transactional_id="second")))
        assembly.feed_position(1, 1)
        reader._advance()
        await asyncio.wait_for(consumer.all_read.wait(), 60)
        await asyncio.wait_for(reader.wait(60), 60)
        assert [each.records.keys() for each in reader.take(records_max=100, bytes_max=100_000)] == [{A, B}]
    finally:
        reading.cancel()
        await asyncio.wait([reading])
        await reader._wire.close()


async def test_it_reads_a_new_partition_that_is_waited_for_while_nothing_is_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "STALL_S", 0.01)
    reader = read_transactions([TOPIC], "localhost:9092", buffer_bytes=100)
    start = PartitionPosition(next_offset=0)
    reader._assembly = assembly = Assembly({A: start}, {0: 0}, {TOPIC: IDS[TOPIC].hex()})
    consumer: Any = StubConsumer([B], unassigned=[B])
    reader._records = consumer
    assembly.manifest(0, 0, manifest(1, (0, 1), transactional_id="first"))
    assembly.records(A, [record(0, A), record(1, A)])
    reader._advance()
    reading = asyncio.create_task(reader._read_records())
    try:
        async with asyncio.timeout(60):
            while A not in consumer.paused:  # noqa: ASYNC110 - the stub has no event for it
                await asyncio.sleep(0.01)
            assembly.manifest(0, 1, with_one_on_b(manifest(1, (1, 2), transactional_id="second")))
            while not await reader.wait_until_whole(A, 1, 1):
                pass
        assert not consumer.left
        assert len(reader.take(records_max=100, bytes_max=100_000)) == 2
    finally:
        reading.cancel()
        await asyncio.wait([reading])
        await reader._wire.close()


@pytest.mark.parametrize("partitions", [[A], [A, B]])
async def test_it_waits_for_the_feed_where_no_partition_is_ahead_of_the_others(partitions: list[TopicPartition]):
    reader = read_transactions([TOPIC], "localhost:9092", buffer_bytes=10_000)
    start = PartitionPosition(next_offset=0)
    reader._assembly = assembly = Assembly(dict.fromkeys(partitions, start), {0: 0}, {TOPIC: IDS[TOPIC].hex()})
    consumer: Any = StubConsumer([], unassigned=partitions)
    reader._records = consumer
    for where in partitions:
        assembly.records(where, [record(offset, where) for offset in range(60)])
    reader._advance()
    reader._room.set()  # as it is opened: nothing has been given out
    reading = asyncio.create_task(reader._read_records())
    try:
        async with asyncio.timeout(10):
            while consumer.paused != set(partitions):  # noqa: ASYNC110 - the stub has no event for it
                await asyncio.sleep(0.01)
        # The first commit that the feed tells goes further than what has been read.
        consumer.left = [Message(A, 60)]
        consumer.unassigned.clear()
        assembly.manifest(0, 0, manifest(1, (0, 61), transactional_id="first"))
        if B in partitions:
            assembly.manifest(0, 1, manifest(1, (0, 60), partition=1, transactional_id="second"))
        assembly.feed_position(0, 2)
        reader._advance()
        left = set(partitions)
        async with asyncio.timeout(10):
            while left:
                await reader.wait(1)
                left.difference_update(*(each.records for each in reader.take(records_max=1_000, bytes_max=1_000_000)))
            # And everywhere, once there is room.
            while consumer.paused:  # noqa: ASYNC110 - the stub has no event for it
                await asyncio.sleep(0.01)
    finally:
        reading.cancel()
        await asyncio.wait([reading])
        await reader._wire.close()


async def test_what_was_handed_out_is_not_kept():
    reader = read_transactions([TOPIC], "localhost:9092")
    reader._assembly = assembly = Assembly({A: PartitionPosition(next_offset=0)}, {0: 0}, {TOPIC: IDS[TOPIC].hex()})
    reader._is_open = True
    value = bytes(100)
    held = sys.getrefcount(value)
    for number in (1, 2):
        assembly.manifest(0, number, manifest(number, (number, number + 1)))
        assembly.records(A, [record(number, A)._replace(value=value)])
    reader._advance()
    assert sys.getrefcount(value) == held + 2
    assert (await anext(reader)).records[A][0].value is value
    (taken,) = reader.take(records_max=10, bytes_max=10_000)
    assert isinstance(taken, Gathering)
    taken.forget()
    assert sys.getrefcount(value) == held
    await reader._wire.close()


def test_runs_of_records_and_ends_between_them():
    end = KafkaError(KafkaError._PARTITION_EOF)
    messages = [Message(A, 0), Message(A, 2), Message(B, 5), Message(B, 7, end), Message(B, 8), Message(A, 3, end)]
    told = [(where, [each.offset for each in run], end) for where, run, end in records_by_partition(messages)]
    assert told == [(A, [0, 2], 0), (B, [5], 0), (B, [], 7), (B, [8], 0), (A, [], 3)]
    assert list(records_by_partition([])) == []
