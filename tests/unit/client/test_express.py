"""The quick way gives what the assembly gives: each transaction once and whole, after those before it."""

from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from oncebox.reader.assembly import Assembly
from oncebox.reader.express import Express
from oncebox.reader.ranges import Ranges
from oncebox.reader.types import PartitionPosition, Position
from oncebox.wire import TopicPartition
from tests.unit.client.histories import TOPIC, History, name_of
from tests.unit.client.test_assembly import TOPIC_IDS, P, Reading, judge, manifest, record

Q = TopicPartition(TOPIC, 1)


class QuickReading(Reading):
    """Takes the quick way wherever it can."""

    assembly: Assembly | Express  # type: ignore[assignment]
    waiting: list[Any]

    def restart(self) -> None:
        super().restart()
        self.assembly = Express(self.position.partitions, self.position.feed, TOPIC_IDS)
        self.bulks = getattr(self, "bulks", 0)

    def take(self, count: int) -> None:
        if isinstance(self.assembly, Express):
            self.waiting += self.assembly.release()
            if self.assembly.is_beyond:
                self.leave()
            else:
                self.take_bulks(count)
                return
        super().take(count)
        if not self.waiting and not self.kept and self.ends is None and isinstance(self.assembly, Assembly):
            self.assembly = Express.after(self.assembly) or self.assembly

    def finish(self) -> None:
        super().finish()
        # Once it is left, the records without a commit are looked for anew.
        for _ in range(4):
            self.check()
            self.take(10_000)

    def leave(self) -> None:
        assert isinstance(self.assembly, Express)
        self.assembly = self.assembly.hand_over()
        self.waiting = []
        self.ends = None

    def take_bulks(self, count: int) -> None:
        for _ in range(min(count, len(self.waiting))):
            bulk = self.waiting.pop(0)
            self.assembly.done(bulk)
            self.read += [replace(each.transaction(), unloaded={}) for each in bulk.transactions()]
            self.bulks += 1

    def unload(self) -> None:
        if isinstance(self.assembly, Express):
            self.leave()
        super().unload()


class SlowReading(QuickReading):
    """Leaves most of what is released where it is for long, and looks at its position all the time."""

    def restart(self) -> None:
        super().restart()
        self.seen = self.position

    def step(self, random: Random) -> None:
        move = random.randrange(100)
        if move < 30:
            self.read_topic(random.choice(list(self.at)), 1)
        elif move < 50:
            self.read_feed(random.randrange(len(self.feed_at)), random.randrange(1, 8))
        elif move < 80:
            self.take(0)
        elif move < 84:
            self.take(random.randrange(1, 4))
        else:
            self.look()
            if move < 86 and isinstance(self.assembly, Express):
                self.leave()
                self.look()
            elif move == 86:
                self.snapshot()
                self.restart()

    def look(self) -> None:
        """What was done once stays so, and what was not taken is not."""
        before = self.seen
        self.seen = Position(feed=self.assembly.feed_positions(), partitions=self.assembly.positions())
        assert all(self.seen.feed[partition] >= at for partition, at in before.feed.items())
        for where, at in before.partitions.items():
            now = self.seen.partitions[where]
            assert now.next_offset >= at.next_offset
            done = Ranges([(0, now.next_offset), *now.done])
            assert all(offset in done for first, after in at.done for offset in range(first, after))
            waiting = [record for item in self.waiting for record in item.records.get(where, ())]
            assert not any(record.offset in done for record in waiting)


def read_all(random: Random, *, is_common: bool, from_start: bool) -> QuickReading:
    history = History(random, partitions=random.randint(1, 3), feeds=random.randint(1, 2), is_common=is_common)
    return read_through(random, history, QuickReading, from_start=from_start)


def read_through(
    random: Random, history: History, kind: type[QuickReading], *, from_start: bool, steps: tuple[int, int] = (30, 90)
) -> QuickReading:
    for _ in range(random.randrange(steps[0])):
        history.step()
    starts = {
        where: 0 if from_start else random.randrange(len(history.logs[where]) + 1) for where in history.partitions
    }
    reading = kind(history, starts)
    for _ in range(random.randrange(steps[1])):
        if random.random() < 0.4:
            history.step()
        reading.step(random)
    history.finish()
    reading.finish()
    judge(reading, starts)
    return reading


@settings(max_examples=700, deadline=None)
@given(seed=st.integers(0, 2**64), from_start=st.booleans())
def test_all_kinds_of_histories(seed: int, from_start: bool):
    read_all(Random(seed), is_common=False, from_start=from_start)


@settings(max_examples=700, deadline=None)
@given(seed=st.integers(0, 2**64))
def test_histories_of_the_common_kind(seed: int):
    read_all(Random(seed), is_common=True, from_start=True)


@settings(max_examples=1_500, deadline=None)
@given(seed=st.integers(0, 2**64), partitions=st.integers(1, 2), compacted=st.sampled_from([0.3, 0.6]))
def test_what_is_released_may_wait_while_positions_are_taken(seed: int, partitions: int, compacted: float):
    random = Random(seed)
    history = History(random, partitions=partitions, feeds=3, is_common=True, compacted=(0, compacted, 1))
    read_through(random, history, SlowReading, from_start=True, steps=(150, 300))


def test_histories_of_the_common_kind_take_the_quick_way():
    read = bulks = 0
    for seed in range(200):
        reading = read_all(Random(seed), is_common=True, from_start=True)
        read += len(reading.read)
        bulks += reading.bulks
    assert read > bulks > read // 4


# --- single rules ---------------------------------------------------------------------------------------------------


def express(*starts: int) -> Express:
    partitions = {TopicPartition(TOPIC, index): PartitionPosition(next_offset=at) for index, at in enumerate(starts)}
    return Express(partitions, {0: 0}, TOPIC_IDS)


def taken(one: Express) -> list[list[tuple[object, ...]]]:
    bulks = list(one.release())
    for bulk in bulks:
        one.done(bulk)
    return [[name_of(each.transaction()) for each in bulk.transactions()] for bulk in bulks]


def test_what_is_whole_leaves_together_and_in_order():
    one = express(0)
    for number, first in ((1, 0), (2, 4), (3, 8)):
        one.manifest(0, number, manifest(number, (first, first + 3)))
    one.records(P, [record(offset) for offset in (0, 1, 2, 4, 5, 6, 8)])
    assert taken(one) == [[("t", 1), ("t", 2)]]
    assert one.positions() == {P: PartitionPosition(next_offset=8)}
    one.records(P, [record(9), record(10)])
    assert taken(one) == [[("t", 3)]]
    assert one.positions() == {P: PartitionPosition(next_offset=11)}


def test_what_waits_is_no_obstacle_for_what_only_overlaps():
    one = express(0, 0)
    one.manifest(0, 0, manifest(1, (0, 1), (4, 5), transactional_id="a"))
    one.manifest(0, 1, manifest(1, (1, 3), transactional_id="b"))
    one.manifest(0, 2, manifest(1, (5, 6), transactional_id="c"))
    one.manifest(0, 3, manifest(1, (0, 2), partition=1, transactional_id="d"))
    one.records(P, [record(offset) for offset in range(4) if offset != 3])
    assert taken(one) == [[("b", 1)]]
    assert one.positions()[P] == PartitionPosition(next_offset=0, done=((1, 3),))
    assert [each.offset for each in one.waiting(P, 3)] == [0]
    one.records(P, [record(4), record(5)])
    assert taken(one) == [[("a", 1), ("c", 1)]]
    assert one.positions()[P] == PartitionPosition(next_offset=6)
    assert one.pending_count == 1


def test_what_stands_behind_one_that_is_not_whole_waits():
    one = express(0, 0)
    both = manifest(1, (0, 2), transactional_id="a")
    both.written.add().CopyFrom(manifest(1, (0, 2), partition=1).written[0])
    one.manifest(0, 0, both)
    one.manifest(0, 1, manifest(1, (3, 4), transactional_id="b"))
    one.records(P, [record(0), record(1), record(3)])
    assert taken(one) == []
    one.records(Q, [record(0, Q), record(1, Q)])
    assert taken(one) == [[("a", 1), ("b", 1)]]


def test_a_record_that_no_commit_covers_is_left_to_an_assembly():
    one = express(0)
    one.manifest(0, 0, manifest(1, (0, 1)))
    one.records(P, [record(0), record(1)])
    one.manifest(0, 1, manifest(2, (2, 3)))
    one.records(P, [record(2)])
    assert taken(one) == [[("t", 1)]]
    assert one.wants_check
    one.begin_check()
    one.ends_known({0: 2})
    assert taken(one) == []
    assert one.pending_count == 1, "it is not left before the feed has been read so far"
    one.feed_position(0, 2)
    assert taken(one) == []
    assert one.is_beyond
    assembly = one.hand_over()
    assert [name_of(item.transaction()) for item in assembly.release()] == []
    assembly.begin_check()
    assembly.ends_known({0: 2})
    assert [name_of(item.transaction()) for item in assembly.release()] == [(*P, 1), ("t", 2)]


def test_what_was_not_taken_comes_again():
    one = express(0)
    one.manifest(0, 0, manifest(1, (0, 2)))
    one.records(P, [record(0), record(1)])
    assert len(list(one.release())) == 1
    position = Position(feed=one.feed_positions(), partitions=one.positions())
    assert position == Position(feed={0: 0}, partitions={P: PartitionPosition(next_offset=0)})
    again = one.hand_over()
    assert [name_of(item.transaction()) for item in again.release()] == [("t", 1)]


def test_what_compaction_has_left_nothing_of_is_not_done_before_what_was_released_before_it():
    """The range of the first goes over the second one's: with it done, a position would have passed over both."""
    one = express(3)
    one.manifest(0, 0, manifest(1, (3, 5), (7, 9), transactional_id="empty"))
    one.manifest(0, 1, manifest(1, (5, 7), transactional_id="between"))
    one.records(P, [record(5), record(6)])
    (between,) = one.release()
    one.position(P, 9)
    (empty,) = one.release()
    assert not empty.records
    assert one.positions() == {P: PartitionPosition(next_offset=5)}
    one.done(between)
    one.done(empty)
    assert not empty.transactions()
    assert one.positions() == {P: PartitionPosition(next_offset=9)}
    assert one.pending_count == 0


def test_what_compaction_has_left_nothing_of_is_done_at_once_where_nothing_was_released_before_it():
    one = express(0)
    one.manifest(0, 0, manifest(1, (0, 2)))
    one.feed_position(0, 1)
    one.position(P, 2)
    assert taken(one) == []
    assert one.positions() == {P: PartitionPosition(next_offset=2)}
    assert one.feed_positions() == {0: 1}


def test_a_position_does_not_fall_with_a_release():
    one = express(0)
    one.manifest(0, 0, manifest(1, (0, 3)))
    one.records(P, [record(2)])
    before = one.positions()
    assert before == {P: PartitionPosition(next_offset=2)}
    assert len(list(one.release())) == 1
    assert one.positions() == before


def test_what_was_done_before_a_restart_is_not_waited_for():
    start = PartitionPosition(next_offset=0, done=((5, 7),))
    one = Express({P: start, Q: start}, {0: 0}, TOPIC_IDS)
    both = manifest(1, (5, 7), transactional_id="done")
    both.written.add().CopyFrom(manifest(1, (5, 7), partition=1).written[0])
    one.manifest(0, 0, both)
    assert one.pending_count == 0
    one.manifest(0, 1, manifest(1, (8, 9), transactional_id="behind"))
    # Of the other partition nothing has come yet.
    one.records(P, [record(5), record(6), record(8)])
    assert taken(one) == [[("behind", 1)]]


def test_a_topic_that_may_have_been_made_again_is_looked_at_first():
    assembly = Assembly({P: PartitionPosition(next_offset=0)}, {0: 0}, TOPIC_IDS)
    assert Express.after(assembly) is not None
    assembly.manifest(0, 0, manifest(1, (0, 3), topic_id=b"\7" * 16))
    assert Express.after(assembly) is None
    assembly.strange_topics.clear()
    quick = Express.after(assembly)
    assert quick is not None
    # What is looked at already when one goes on for the other is known to both.
    quick.manifest(0, 1, manifest(2, (0, 3), topic_id=b"\7" * 16))
    assert assembly.strange_topics == quick.hand_over().strange_topics == {TOPIC}
