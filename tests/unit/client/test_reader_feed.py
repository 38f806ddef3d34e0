"""Which commits there are is known as far as the feed has been read: all its partitions, up to ends of that moment."""

import asyncio
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

import oncebox.reader.reader as module
from oncebox.reader import PartitionPosition, TransactionReader, read_transactions
from oncebox.reader.assembly import Assembly
from oncebox.reader.ends import _asked_once, first_since
from oncebox.wire import LATEST, ErrorCode, ListedOffset, OutcomeUnknownError, TopicPartition
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
    answers: list[dict[int, int] | None] = [None, {0: 1, 1: 1}]

    async def ends_of(_wire: object, topic: str, feed: Collection[int]) -> dict[int, int] | None:
        assert (topic, {*feed}) == ("feed", {0, 1})
        return answers.pop(0)

    monkeypatch.setattr(module, "ends_of", ends_of)
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


async def test_ends_that_are_not_reached_are_asked_for_again(monkeypatch: pytest.MonkeyPatch):
    """What was appended there and never acknowledged is cut off when another broker leads: nobody would ever read it.
    And ends that run ahead of a slow reader do not keep it from those that it has reached.
    """
    monkeypatch.setattr(module, "ENDS_VALID_S", 0.0)
    reader = reader_of_two_feed_partitions()
    assembly = reader._assembly
    asked: asyncio.Queue[None] = asyncio.Queue()
    answers = iter([{0: 5, 1: 0}, {0: 3, 1: 7}])

    async def ends_of(*_: object) -> dict[int, int]:
        asked.put_nowait(None)
        return next(answers, {0: 9, 1: 9})

    monkeypatch.setattr(module, "ends_of", ends_of)
    assembly.records(CHILD, [record(0, CHILD)])
    checking = asyncio.create_task(reader._check())
    try:
        async with asyncio.timeout(60):
            for _ in range(3):
                await asked.get()
            reader._advance()
            assert reader.take(records_max=10, bytes_max=10_000) == []
            assembly.feed_position(0, 3)
            reader._advance()
            assert len(reader.take(records_max=10, bytes_max=10_000)) == 1
            # A later record is settled by later ends alone.
            assembly.records(CHILD, [record(1, CHILD)])
            for _ in range(3):
                await asked.get()
            reader._advance()
            assert reader.take(records_max=10, bytes_max=10_000) == []
    finally:
        checking.cancel()
        await asyncio.gather(checking, return_exceptions=True)
        await reader._wire.close()


class Replicas:
    """Where the log of a feed of one partition ends on each of its brokers; None: it hangs; an error: it answers so."""

    def __init__(self, *ends: int | ErrorCode | None) -> None:
        self.ends = ends

    def replica_ids(self, _where: TopicPartition) -> tuple[int, ...]:
        return tuple(range(len(self.ends)))

    async def list_offsets(
        self, broker_id: int, wanted: dict[TopicPartition, int], *, of_replica: bool
    ) -> dict[TopicPartition, ListedOffset]:
        assert of_replica
        end = self.ends[broker_id]
        if end is None:
            await asyncio.sleep(3_600)
        if isinstance(end, ErrorCode):
            return {where: ListedOffset(error=end, offset=-1, timestamp_ms=-1) for where in wanted}
        if end == -1:
            raise OutcomeUnknownError("no answer")
        return {where: ListedOffset(error=ErrorCode.NONE, offset=end or 0, timestamp_ms=-1) for where in wanted}


NOT_THERE = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


@pytest.mark.parametrize(
    ("replicas", "end"),
    [
        (Replicas(4), 4),
        (Replicas(-1), None),
        (Replicas(4, 6), 6),
        (Replicas(4, -1), None),
        (Replicas(4, 6, None), 6),
        (Replicas(None, 4, 6), 6),
        (Replicas(4, NOT_THERE, -1), None),
        (Replicas(4, 4, 6, 4, -1), 6),
        (Replicas(4, 4, 6, -1, NOT_THERE), None),
        (Replicas(), None),
    ],
)
async def test_all_replicas_but_one_have_to_answer(replicas: Any, end: int | None):
    where = TopicPartition("feed", 0)
    found = await _asked_once(replicas, [where], LATEST)
    assert (None if found is None else max(found[where])) == end


class Since(Replicas):
    """Which offset each broker says is the first since a time; -1: it knows of none."""

    async def list_offsets(
        self, broker_id: int, wanted: dict[TopicPartition, int], *, of_replica: bool
    ) -> dict[TopicPartition, ListedOffset]:
        offset = self.ends[broker_id]
        assert of_replica
        assert set(wanted.values()) == {1_000}
        return {where: ListedOffset(error=ErrorCode.NONE, offset=offset or 0, timestamp_ms=-1) for where in wanted}


@pytest.mark.parametrize(
    ("replicas", "first"),
    [(Since(-1), -1), (Since(7), 7), (Since(-1, 7), 7), (Since(7, 5), 5), (Since(-1, -1), -1), (Since(0, -1), 0)],
)
async def test_nothing_that_one_of_the_replicas_has_is_left_out(replicas: Any, first: int):
    assert await first_since(replicas, "feed", 0, 1_000) == first
