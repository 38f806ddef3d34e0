"""Which commits there are is known as far as the feed has been read: all its partitions, up to ends of that moment."""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

import oncebox.reader.source as module
from oncebox.errors import BrokersUnavailableError
from oncebox.reader import PartitionPosition, TransactionReader, read_transactions
from oncebox.reader.assembly import Assembly
from oncebox.wire import TopicPartition
from tests.unit.client.histories import IDS, TOPIC
from tests.unit.client.test_assembly import manifest, record

CHILD, PARENT = (TopicPartition(TOPIC, index) for index in range(2))


def reader_of_two_feed_partitions() -> TransactionReader:
    reader = read_transactions([TOPIC], "localhost:9092", feed_topic="feed")
    start = PartitionPosition(next_offset=0)
    reader._assembly = Assembly({CHILD: start, PARENT: start}, {0: 0, 1: 0}, {TOPIC: IDS[TOPIC].hex()})
    given: Any = SimpleNamespace(feed={0: 0, 1: 0}, cut_feed=set())
    reader._start = given
    return reader


async def test_a_commit_in_a_part_of_the_feed_that_is_read_late_is_pending_once_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
):
    reader = reader_of_two_feed_partitions()
    assembly = reader._assembly
    answers: list[Any] = [BrokersUnavailableError("nobody"), {0: 1, 1: 1}]

    async def list_offsets(_wire: object, feed: Collection[TopicPartition], _time: int) -> dict[TopicPartition, int]:
        assert {*feed} == {TopicPartition("feed", 0), TopicPartition("feed", 1)}
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return {TopicPartition("feed", index): end for index, end in answer.items()}

    monkeypatch.setattr(module, "list_offsets", list_offsets)
    # The child is told of in the one, the parent in the other.
    assembly.manifest(1, 0, manifest(1, (0, 1), transactional_id="child"))
    assembly.feed_position(1, 1)
    assembly.records(CHILD, [record(0, CHILD)])
    assembly.records(PARENT, [record(0, PARENT)])
    reader._advance()
    assert len(reader.take(records_max=10, bytes_max=10_000)) == 1
    assert not reader.is_pending(reader.mark()), "as far as has been read"
    assert await reader.feed_ends() is None
    ends = await reader.feed_ends()
    assert ends == {0: 1, 1: 1}
    assert not reader.has_read_feed(ends)
    assembly.manifest(0, 0, manifest(1, (0, 1), partition=1, transactional_id="parent"))
    assembly.feed_position(0, 1)
    reader._advance()
    assert reader.has_read_feed(ends)
    mark = reader.mark()
    assert reader.is_pending(mark)
    assert len(reader.take(records_max=10, bytes_max=10_000)) == 1
    assert not reader.is_pending(mark)
    await reader._wire.close()
