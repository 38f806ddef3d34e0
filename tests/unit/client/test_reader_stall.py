"""A reader whose buffer is full reads on where something is waited for: else both would wait for ever."""

import asyncio
import sys
from typing import Any

import pytest
from confluent_kafka import KafkaError

import oncebox.reader.reader as module
from oncebox.reader import PartitionPosition, read_transactions
from oncebox.reader.assembly import Assembly
from oncebox.reader.gathering import Gathering
from oncebox.reader.source import records_by_partition
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
    """Has the record that is missing on B, and gives what is not paused."""

    def __init__(self) -> None:
        self.paused: set[TopicPartition] = set()
        self.left = [Message(B, 0), Message(C, 0)]
        self.all_read = asyncio.Event()

    async def pause(self, partitions: set[TopicPartition]) -> None:
        self.paused |= partitions

    async def resume(self, partitions: set[TopicPartition]) -> None:
        self.paused -= set(partitions)

    async def poll(self) -> list[Message]:
        await asyncio.sleep(0)
        found = [each for each in self.left if TopicPartition(each.topic(), each.partition()) not in self.paused]
        self.left = [each for each in self.left if each not in found]
        if not self.left:
            self.all_read.set()
        return found


async def test_it_goes_on_with_what_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "STALL_S", 0.01)
    reader = read_transactions([TOPIC], "localhost:9092", buffer_bytes=100)
    start = PartitionPosition(next_offset=0)
    reader._assembly = assembly = Assembly({A: start, B: start, C: start}, {0: 0}, {TOPIC: IDS[TOPIC].hex()})
    consumer: Any = StubConsumer()
    reader._records = consumer
    # The first has offsets 0 and 2 on A, and one on B that has not come. The second stands between them, and is whole.
    first = manifest(1, (0, 1), (2, 3), transactional_id="first")
    first.written.add(topic=TOPIC, partition=1, topic_id=IDS[TOPIC]).runs.add(offset_first=0, offset_next=1)
    assembly.manifest(0, 0, first)
    assembly.manifest(0, 1, manifest(1, (1, 2), transactional_id="second"))
    assembly.feed_position(0, 2)
    assembly.records(A, [record(0, A), record(1, A), record(2, A)])
    reader._advance()
    assert not reader._room.is_set()
    reading = asyncio.create_task(reader._read_records())
    try:
        async with asyncio.timeout(10):
            while not await reader.wait_until_whole(A, 0, 1):
                assert assembly.needed_for(A, 0) == {B}
        assert consumer.paused == {A, C}
        assert [len(each.records) for each in reader.take(records_max=10, bytes_max=10_000)] == [1, 2]
        # And everywhere, once there is room.
        await asyncio.wait_for(consumer.all_read.wait(), 10)
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
