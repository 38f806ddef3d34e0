"""Whole transactions, each once and in order, however their manifests and records come, and over any restart."""

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncebox.reader.assembly import Assembly
from oncebox.reader.ranges import Ranges
from oncebox.reader.types import CommittedTransaction, FeedTooShortError, PartitionPosition, Position, Record
from oncebox.v1 import manifest_pb2, transaction_pb2
from oncebox.wire import TopicPartition
from tests.unit.client.histories import IDS, OTHER, TOPIC, HeldBack, History, goes_before, name_of

if TYPE_CHECKING:
    from oncebox.reader.gathering import Gathering

TOPIC_IDS = {TOPIC: IDS[TOPIC].hex()}
P = TopicPartition(TOPIC, 0)


class Reading:
    """A reader in small steps, beside a history that goes on meanwhile."""

    def __init__(self, history: History, starts: dict[TopicPartition, int], held_back: HeldBack | None = None) -> None:
        self.history = history
        self.held_back = held_back
        self.read: list[CommittedTransaction] = []
        partitions = {where: PartitionPosition(next_offset=start) for where, start in starts.items()}
        self.position = Position(feed=dict.fromkeys(range(len(history.feeds)), 0), partitions=partitions)
        self.restart()

    def restart(self) -> None:
        self.position = Position.from_json(self.position.to_json())
        self.assembly = Assembly(self.position.partitions, self.position.feed, TOPIC_IDS)
        if self.held_back is not None:
            self.assembly.hold_back(*self.held_back)
        self.at = {where: position.next_offset for where, position in self.position.partitions.items()}
        self.feed_at = dict(self.position.feed)
        self.ends: dict[int, int] | None = None
        self.waiting: list[Gathering] = []
        # Of transactions that were unloaded.
        self.kept: dict[object, dict[TopicPartition, list[Record]]] = {}

    def step(self, random: Random) -> None:
        move = random.randrange(13)
        if move < 4:
            self.read_topic(random.choice(list(self.at)), random.randrange(1, 6))
        elif move < 7:
            self.read_feed(random.randrange(len(self.feed_at)), random.randrange(1, 4))
        elif move == 7:
            self.check()
        elif move < 11:
            self.take(random.randrange(4))
        elif move == 11:
            self.unload()
        elif random.random() < 0.3:
            self.snapshot()
            self.restart()

    def read_topic(self, where: TopicPartition, count: int) -> None:
        stable = self.history.stable(where)
        records = self.history.visible(where, self.at[where], stable)[:count]
        if records:
            self.at[where] = records[-1].offset + 1
            self.assembly.records(where, records)
        else:
            self.at[where] = max(stable, self.at[where])
            self.assembly.position(where, self.at[where])

    def read_feed(self, partition: int, count: int) -> None:
        feed, at = self.history.feeds[partition], self.feed_at[partition]
        for offset in range(at, min(at + count, len(feed))):
            self.assembly.manifest(partition, offset, feed[offset])
            self.feed_at[partition] = offset + 1
        self.assembly.feed_position(partition, self.feed_at[partition])

    def check(self) -> None:
        if self.ends is not None:
            self.assembly.ends_known(self.ends)
            self.ends = None
        elif self.assembly.wants_check:
            self.assembly.begin_check()
            self.ends = {index: len(feed) for index, feed in enumerate(self.history.feeds)}

    def take(self, count: int) -> None:
        self.waiting += self.assembly.release()
        for _ in range(min(count, len(self.waiting))):
            item = self.waiting.pop(0)
            self.assembly.done(item)
            transaction = item.transaction()
            kept = self.kept.pop((transaction.transactional_id, transaction.number), {})
            assert transaction.unloaded == {where: records[-1].offset for where, records in kept.items()}
            for where, records in transaction.records.items():
                kept.setdefault(where, []).extend(records)
            self.read.append(replace(transaction, records=kept))

    def unload(self) -> None:
        part = self.assembly.unload(1)
        if part is not None:
            kept = self.kept.setdefault((part.transactional_id, part.number), {})
            for where, records in part.records.items():
                kept.setdefault(where, []).extend(records)
                first = self.assembly.first_unloaded(where, records[-1].offset)
                assert first is None or first <= records[0].offset

    def snapshot(self) -> None:
        self.position = Position(feed=self.assembly.feed_positions(), partitions=self.assembly.positions())

    def finish(self) -> None:
        for where in self.at:
            for _ in range(len(self.history.logs[where]) + 1):
                self.read_topic(where, 10)
        for partition in self.feed_at:
            self.read_feed(partition, 10_000)
        for _ in range(4):
            self.check()
        self.take(10_000)


def judge(reading: Reading, starts: dict[TopicPartition, int]) -> None:
    history = reading.history
    expected = history.expected(starts)
    names = [name_of(transaction) for transaction in reading.read]
    assert len(names) == len(set(names)), "read twice"
    assert {name_of(t): {w: list(r) for w, r in t.records.items()} for t in reading.read} == expected
    assert all(t.metadata == b"m" for t in reading.read if t.transactional_id is not None)
    before = goes_before(history.spans(starts), expected, reading.held_back)
    for index, name in enumerate(names):
        assert not before[name] & set(names[index + 1 :]), f"{name} was read too early"
    assert reading.assembly.pending_count == 0
    for where, position in reading.assembly.positions().items():
        assert position == PartitionPosition(next_offset=max(len(history.logs[where]), starts[where]))
        assert reading.assembly.buffered_by_partition()[where] == 0
    assert reading.assembly.feed_positions() == {index: len(feed) for index, feed in enumerate(history.feeds)}


@settings(max_examples=1_500, deadline=None)
@given(seed=st.integers(0, 2**64), from_start=st.booleans())
def test_every_transaction_is_read_once_whole_and_in_order(seed: int, from_start: bool):
    random = Random(seed)
    history = History(random, partitions=random.randint(1, 3), feeds=random.randint(1, 2))
    for _ in range(random.randrange(30)):
        history.step()
    starts = {
        where: 0 if from_start else random.randrange(len(history.logs[where]) + 1) for where in history.partitions
    }
    reading = Reading(history, starts)
    for _ in range(random.randrange(60)):
        if random.random() < 0.4:
            history.step()
        reading.step(random)
    history.finish()
    reading.finish()
    judge(reading, starts)


@settings(max_examples=500, deadline=None)
@given(seed=st.integers(0, 2**64))
def test_a_partition_that_is_held_back_comes_after_what_others_had_before(seed: int):
    random = Random(seed)
    history = History(random, partitions=random.randint(2, 3), feeds=random.randint(1, 2))
    for _ in range(random.randrange(10, 40)):
        history.step()
    late, *others = random.sample(history.partitions, len(history.partitions))
    ends = {where: random.randrange(len(history.logs[where]) + 1) for where in others}
    starts = dict.fromkeys(history.partitions, 0)
    reading = Reading(history, starts, (late, ends))
    for _ in range(random.randrange(60)):
        if random.random() < 0.4:
            history.step()
        reading.step(random)
    history.finish()
    reading.finish()
    judge(reading, starts)


@pytest.mark.long
@settings(max_examples=3_000, deadline=None)
@given(seed=st.integers(0, 2**64))
def test_the_same_over_long_histories(seed: int):
    random = Random(seed)
    history = History(random, partitions=random.randint(1, 4), feeds=random.randint(1, 3))
    starts = dict.fromkeys(history.partitions, 0)
    reading = Reading(history, starts)
    for _ in range(300):
        if random.random() < 0.5:
            history.step()
        reading.step(random)
    history.finish()
    reading.finish()
    judge(reading, starts)


# --- single rules ---------------------------------------------------------------------------------------------------


def record(offset: int, where: TopicPartition = P, timestamp_ms: int = 0) -> Record:
    return Record(*where, offset, timestamp_ms, None, b"%d" % offset, ())


def manifest(number: int, *runs: tuple[int, int], topic: str = TOPIC, **fields) -> manifest_pb2.Manifest:
    written = transaction_pb2.Written(
        topic=topic,
        partition=fields.pop("partition", 0),
        runs=[transaction_pb2.Run(offset_first=first, offset_next=after) for first, after in runs],
        topic_id=fields.pop("topic_id", IDS[topic]),
    )
    fields = {"transactional_id": "t", "part_count": 1, **fields}
    return manifest_pb2.Manifest(number=number, written=[written], **fields)


def assembly(start: int = 0) -> Assembly:
    return Assembly({P: PartitionPosition(next_offset=start)}, {0: 0}, TOPIC_IDS)


def taken(one: Assembly) -> list[tuple[object, ...]]:
    items = list(one.release())
    for item in items:
        one.done(item)
    return [name_of(item.transaction()) for item in items]


def test_a_hole_at_the_end_of_a_range_waits_for_the_position():
    one = assembly()
    one.manifest(0, 0, manifest(1, (0, 3)))
    one.records(P, [record(0)])
    assert taken(one) == []
    one.position(P, 2)
    assert taken(one) == []
    one.position(P, 3)
    assert taken(one) == [("t", 1)]


def test_an_uncovered_record_waits_for_the_feeds_end_taken_after_it_came():
    one = assembly()
    one.feed_position(0, 7)
    one.records(P, [record(0)])
    assert one.wants_check
    one.begin_check()
    one.records(P, [record(1)])  # came later: not settled by this check
    one.ends_known({0: 8})
    assert taken(one) == []
    one.feed_position(0, 8)
    assert taken(one) == [(TOPIC, 0, 0)]
    assert one.wants_check


def test_topics_that_are_not_read_and_other_incarnations_do_not_count():
    one = assembly()
    one.manifest(0, 0, manifest(1, (0, 3), topic=OTHER))
    assert not one.strange_topics
    one.manifest(0, 1, manifest(2, (0, 3), topic_id=b"\7" * 16))
    assert one.strange_topics == {TOPIC}
    assert one.pending_count == 0
    one.feed_position(0, 2)
    assert one.feed_positions() == {0: 2}


def test_a_partition_that_a_manifest_names_first_is_read_from_its_begin():
    one = assembly()
    one.manifest(0, 0, manifest(1, (0, 2), partition=5))
    new = TopicPartition(TOPIC, 5)
    assert one.new_partitions == {new}
    one.records(new, [record(0, new), record(1, new)])
    assert taken(one) == [("t", 1)]


def test_a_circle_is_released_together_once_all_of_it_is_whole():
    """1 stands before 2 on one partition, behind it on the other."""
    other = TopicPartition(TOPIC, 1)
    one = Assembly({w: PartitionPosition(next_offset=0) for w in (P, other)}, {0: 0}, TOPIC_IDS)
    for number, (here, there) in ((1, (0, 1)), (2, (1, 0))):
        both = manifest(number, (here, here + 1), transactional_id=f"t{number}")
        both.written.add(topic=TOPIC, partition=1, topic_id=IDS[TOPIC]).runs.add(
            offset_first=there, offset_next=there + 1
        )
        one.manifest(0, number, both)
    one.records(P, [record(0), record(1)])
    one.records(other, [record(0, other)])
    assert taken(one) == []
    one.records(other, [record(1, other)])
    assert taken(one) == [("t1", 1), ("t2", 2)]


def test_what_the_first_in_line_waits_for_must_be_read_on():
    other = TopicPartition(TOPIC, 1)
    one = Assembly({w: PartitionPosition(next_offset=0) for w in (P, other)}, {0: 0}, TOPIC_IDS)
    both = manifest(1, (0, 1))
    both.written.add(topic=TOPIC, partition=1, topic_id=IDS[TOPIC]).runs.add(offset_first=0, offset_next=1)
    one.manifest(0, 0, both)
    one.manifest(0, 1, manifest(2, (1, 9)))
    one.records(P, [record(offset) for offset in range(5)])
    assert one.needed() == {other}
    assert one.buffered_by_partition()[P] > 0 == one.buffered_by_partition()[other]


def test_a_partition_of_which_nothing_has_been_read_is_needed_for_the_next_commit_of_an_id():
    other = TopicPartition(TOPIC, 1)
    start = PartitionPosition(next_offset=0)
    one = Assembly({P: start, other: start}, {0: 0}, TOPIC_IDS)
    one.manifest(0, 0, manifest(1, (0, 1), partition=1))
    one.manifest(0, 1, manifest(2, (0, 1)))
    one.records(P, [record(0)])
    # The second is whole, and waits for the first, which has not begun.
    assert taken(one) == []
    assert one.needed() == {other}
    one.records(other, [record(0, other)])
    assert [number for _, number in taken(one)] == [1, 2]


def test_a_feed_that_has_forgotten_its_begin_tells_so_instead_of_guessing():
    one = assembly()
    one.horizon_ms = 1_000
    one.records(P, [record(0, timestamp_ms=999)])
    one.begin_check()
    with pytest.raises(FeedTooShortError, match=f"{TOPIC}:0 offset 0"):
        one.ends_known({0: 0})
    one = assembly()
    with pytest.raises(FeedTooShortError, match="first parts"):
        one.manifest(0, 5, manifest(1, (0, 2), part=1, part_count=2))


def test_from_the_first_commit_after_the_forgotten_ones_on_all_is_known():
    one = assembly()
    one.horizon_ms = 1_000
    one.manifest(0, 0, manifest(1, (3, 4), started_at_ms=1_000))
    one.feed_position(0, 1)
    one.records(P, [record(0, timestamp_ms=2_000), record(3), record(4, timestamp_ms=5)])
    one.begin_check()
    one.ends_known({0: 1})
    assert taken(one) == [(TOPIC, 0, 0), ("t", 1), (TOPIC, 0, 4)]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8))), st.integers(0, 50))
def test_ranges_are_sets(pairs: list[tuple[int, int]], cut: int):
    ranges = Ranges()
    members: set[int] = set()
    for first, length in pairs:
        ranges.add(first, first + length)
        members |= set(range(first, first + length))
    assert {offset for offset in range(60) if offset in ranges} == members
    above = ranges.above(cut)
    assert {offset for first, after in above for offset in range(first, after)} == {m for m in members if m >= cut}
    assert all(left[1] < right[0] for left, right in pairwise(above))
    ranges.drop_below(cut)
    assert all(offset in ranges for offset in members if offset >= cut)
