"""The quick way to whole transactions, for who takes many at a time. Pure, like assembly.py, and by the same rules.

All that has become whole leaves together, as one bulk: so nothing has to be known of the order inside of it. Only what
is common is done here. Whatever else comes (records without a commit, commits in parts, too much that waits) is left to
an assembly, which goes on from the position: see hand_over().
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING

from oncebox.reader.assembly import Assembly
from oncebox.reader.gathering import size_of
from oncebox.reader.lanes import Bulk, Commit, Lane, offset_of
from oncebox.reader.ranges import lower_ends
from oncebox.reader.types import PartitionPosition
from oncebox.wire import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from oncebox.reader.types import Record
    from oncebox.v1 import manifest_pb2

# What may wait here for the rest of its transactions: each look goes through all of it, and it may leave all at once.
# Of a long feed one partition comes after the other, and meanwhile much is read that waits for the last of them.
WAITING_RUNS_MAX = 20_000
WAITING_BYTES_MAX = 32 * 1024 * 1024


class Express:
    def __init__(
        self,
        partitions: Mapping[TopicPartition, PartitionPosition],
        feed: Mapping[int, int],
        topic_ids: Mapping[str, str],
    ) -> None:
        """As an assembly's."""
        self.topic_ids = dict(topic_ids)
        self.new_partitions: set[TopicPartition] = set()
        self.strange_topics: set[str] = set()
        # Something has come that is not for here.
        self.is_beyond = False
        self._ids = {topic: bytes.fromhex(topic_id) for topic, topic_id in topic_ids.items()}
        self._lanes: dict[TopicPartition, Lane] = {}
        self._of_topic: dict[str, dict[int, Lane]] = {topic: {} for topic in topic_ids}
        self._feed = dict(feed)
        self._feed_undone: dict[int, deque[Commit]] = {partition: deque() for partition in feed}
        # Commits that are not done, in the order in which they came; and what came since it is beyond this.
        self._known: dict[tuple[str, int], Commit] = {}
        self._left: list[tuple[int, int, manifest_pb2.Manifest]] = []
        self._last_of_id: dict[str, Commit] = {}
        # Released and not done; and ranges of what is done that are not noted with their lanes yet.
        self._undone: deque[Bulk] = deque()
        self._noted_later: list[Mapping[TopicPartition, Sequence[tuple[int, int]]]] = []
        self._looks = 0
        self._marks: dict[TopicPartition, int] | None = None
        self._ends: Mapping[int, int] | None = None
        for where, start in partitions.items():
            self.add_partition(where, start)

    def add_partition(self, where: TopicPartition, start: PartitionPosition) -> None:
        lane = self._lanes[where] = Lane(where, start)
        self._of_topic[where.topic][where.partition] = lane

    # --- what comes -------------------------------------------------------------------------------------------------

    def manifest(self, feed_partition: int, feed_offset: int, part: manifest_pb2.Manifest) -> None:
        if self.is_beyond or part.part_count != 1:
            self._leave(feed_partition, feed_offset, part)
            return
        transactional_id = part.transactional_id
        key = (transactional_id, part.number)
        if key in self._known:
            return  # a repeat
        commit = Commit(key, feed_partition, feed_offset, part, self._last_of_id.get(transactional_id))
        runs = places = commit.places
        is_late = False
        for entry in part.written:
            told = entry.runs
            lane = self._lane_of(entry.topic, entry.partition, entry.topic_id)
            if lane is None or not told:
                continue
            run = told[0]
            first, after = run.offset_first, run.offset_next
            is_late = is_late or first < lane.position or first in lane.skip
            if len(told) > 1:
                runs = [*runs, *((lane, run.offset_first, run.offset_next) for run in told)]
                after = runs[-1][2]
            elif runs is not places:
                runs.append((lane, first, after))
            places.append((lane, first, after))
        if is_late:
            gone = [self._is_gone(*run) for run in runs]
            if None in gone or (True in gone and False in gone):
                # Some of it does not count: not of this kind.
                self._leave(feed_partition, feed_offset, part)
                return
            if gone[0]:
                return  # it was done before
        if not runs:
            return  # nothing of it is for us
        for lane, first, after in runs:
            lane.ahead.append((first, after, commit))
            lane.is_sorted = False
        self._known[key] = self._last_of_id[transactional_id] = commit
        self._feed_undone[feed_partition].append(commit)

    def _leave(self, feed_partition: int, feed_offset: int, part: manifest_pb2.Manifest) -> None:
        self.is_beyond = True
        self._left.append((feed_partition, feed_offset, part))

    def _lane_of(self, topic: str, index: int, topic_id: bytes) -> Lane | None:
        lanes = self._of_topic.get(topic)
        if lanes is None:
            return None
        if topic_id != self._ids[topic]:
            self.strange_topics.add(topic)
            return None
        if index not in lanes:
            where = TopicPartition(topic, index)
            self.new_partitions.add(where)
            self.add_partition(where, PartitionPosition(next_offset=0))
        return lanes[index]

    def _is_gone(self, lane: Lane, first: int, after: int) -> bool | None:
        """Whether this range was done before; None: only a part of it."""
        if first >= lane.position and first not in lane.skip:
            return False
        self._note_done()
        frontier = self._frontier(lane)
        if after <= frontier or first in lane.done:
            return True
        return False if first >= frontier else None

    def feed_position(self, feed_partition: int, position: int) -> None:
        self._feed[feed_partition] = max(self._feed[feed_partition], position)

    def records(self, where: TopicPartition, records: Sequence[Record]) -> None:
        """In the order of their offsets."""
        lane = self._lanes[where]
        end = records[-1].offset + 1
        if lane.skip or records[0].offset < lane.position:
            records = [each for each in records if each.offset >= lane.position and each.offset not in lane.skip]
        lane.records += records
        lane.buffered += size_of(records)
        self.position(where, end)

    def position(self, where: TopicPartition, position: int) -> None:
        """Everything below has been read."""
        lane = self._lanes[where]
        lane.position = max(lane.position, position)
        if lane.skip:
            lane.skip.drop_below(lane.position)

    # --- records that no manifest covers ----------------------------------------------------------------------------

    @property
    def has_undetermined(self) -> bool:
        return any(lane.uncovered != inf for lane in self._lanes.values())

    @property
    def wants_check(self) -> bool:
        return self._marks is None and self.has_undetermined

    @property
    def is_checking(self) -> bool:
        return self._marks is not None

    def begin_check(self) -> None:
        self._marks = {where: lane.position for where, lane in self._lanes.items() if lane.uncovered != inf}

    def ends_known(self, ends: Mapping[int, int]) -> None:
        self._ends = lower_ends(self._ends, ends)

    def drop_check(self) -> None:
        self._marks = self._ends = None

    def _has_uncovered(self) -> bool:
        """A record that no commit covers, though the feed has been read past an end that was taken after it came."""
        if self._marks is None or self._ends is None:
            return False
        if any(self._feed.get(partition, 0) < end for partition, end in self._ends.items()):
            return False
        marks, self._marks, self._ends = self._marks, None, None
        return any(self._lanes[where].uncovered < mark for where, mark in marks.items())

    # --- what is whole ----------------------------------------------------------------------------------------------

    def release(self) -> Iterator[Bulk]:
        """What has become whole. To be told done() when it is handed on."""
        if sum(lane.buffered for lane in self._lanes.values()) > WAITING_BYTES_MAX:
            self.is_beyond = True
        if self.is_beyond:
            return
        for lane in self._lanes.values():
            lane.look()
        if self._has_uncovered():
            self.is_beyond = True
            return
        commits = self._whole()
        if commits:
            bulk = self._bulk(commits)
            # Its ranges may go over those of earlier ones, so that it must not be done before them, also where
            # compaction has left nothing of it.
            if bulk.records or any(not each.is_done for each in self._undone):
                self._undone.append(bulk)
                yield bulk
            else:
                self.done(bulk)
        if sum(len(lane.begun) for lane in self._lanes.values()) > WAITING_RUNS_MAX:
            self.is_beyond = True

    def _whole(self) -> list[Commit]:
        """All that is complete and has nothing before it but what is among them, too."""
        self._looks += 1
        look = self._looks
        whole: list[Commit] = []
        for lane in self._lanes.values():
            for _, _, commit in lane.begun:
                if commit.look == look:
                    continue
                commit.look = look
                for other, _, after in commit.places:
                    if after > other.position:
                        _hold(commit)
                        break
                else:
                    commit.is_released = True
                    whole.append(commit)
        while True:
            free: list[Commit] = []
            for commit in whole:
                previous = commit.previous
                if previous is None or previous.is_released:
                    for lane, first, _ in commit.places:
                        if first > lane.limit:
                            break
                    else:
                        free.append(commit)
                        continue
                commit.is_released = False
                _hold(commit)
            if len(free) == len(whole):
                return free
            whole = free

    def _bulk(self, commits: list[Commit]) -> Bulk:
        bulk = Bulk(commits, self.topic_ids)
        for commit in commits:
            commit.previous = None
        for where, lane in self._lanes.items():
            taken, ranges = lane.take()
            if ranges:
                bulk.ranges[where] = ranges
            if taken:
                bulk.records[where] = taken
                # (What is left is mostly less.)
                left = size_of(lane.records)
                bulk.sizes[where], lane.buffered = lane.buffered - left, left
        return bulk

    def done(self, bulk: Bulk) -> None:
        """Its reader has it: a position taken from now on is behind it."""
        bulk.is_done = True
        self._noted_later.append(bulk.ranges)
        for commit in bulk.commits:
            commit.is_done = True
            del self._known[commit.key]
            transactional_id = commit.key[0]
            if self._last_of_id.get(transactional_id) is commit:
                del self._last_of_id[transactional_id]

    # --- where it stands --------------------------------------------------------------------------------------------

    def feed_positions(self) -> dict[int, int]:
        """Never past a commit that is not done."""
        found = {}
        for partition, at in self._feed.items():
            undone = self._feed_undone[partition]
            while undone and undone[0].is_done:
                undone.popleft()
            found[partition] = min(at, undone[0].feed_offset) if undone else at
        for partition, offset, _ in self._left:
            found[partition] = min(found[partition], offset)
        return found

    def positions(self) -> dict[TopicPartition, PartitionPosition]:
        self._note_done()
        found = {}
        for where, lane in self._lanes.items():
            frontier = self._frontier(lane)
            found[where] = PartitionPosition(next_offset=frontier, done=lane.done.above(frontier))
        return found

    def _frontier(self, lane: Lane) -> int:
        """Everything below is done. It never falls: so it is told by the same records before and after a release."""
        while self._undone and self._undone[0].is_done:
            self._undone.popleft()
        firsts = [bulk.records[lane.where][0].offset for bulk in self._undone if lane.where in bulk.records]
        return min(lane.records[0].offset if lane.records else lane.position, *firsts, lane.position)

    def _note_done(self) -> None:
        """Most of what is done lies below the frontier by the time somebody asks."""
        if not self._noted_later:
            return
        frontiers = {where: self._frontier(lane) for where, lane in self._lanes.items()}
        for each in self._noted_later:
            for where, ranges in each.items():
                for first, after in reversed(ranges):
                    if after <= frontiers[where]:
                        break
                    self._lanes[where].done.add(first, after)
        for where, frontier in frontiers.items():
            self._lanes[where].done.drop_below(frontier)
        self._noted_later = []

    def waiting(self, where: TopicPartition, below: int) -> Iterator[Record]:
        """What has been read of this partition below this offset and is not done."""
        released = [bulk.records.get(where, ()) for bulk in self._undone if not bulk.is_done]
        for records in (*released, self._lanes[where].records):
            for record in records:
                if record.offset >= below:
                    break
                yield record

    def knows(self, where: TopicPartition) -> bool:
        return where in self._lanes

    def partitions(self) -> Iterable[TopicPartition]:
        return self._lanes.keys()

    def buffered_by_partition(self) -> dict[TopicPartition, int]:
        """Bytes of records that have come and are not released."""
        return {where: lane.buffered for where, lane in self._lanes.items()}

    @property
    def pending_count(self) -> int:
        """Commits that are known and not done."""
        return len(self._known)

    @classmethod
    def after(cls, assembly: Assembly) -> Express | None:
        """Goes on where an assembly has nothing left to do that is not for here."""
        if not assembly.is_settled:
            return None
        express = cls(assembly.positions(), assembly.feed_positions(), assembly.topic_ids)
        express.strange_topics = assembly.strange_topics
        return express

    def hand_over(self) -> Assembly:
        """All that is not done, to go on with: what was released and not taken comes again."""
        records = {where: lane.records for where, lane in self._lanes.items()}
        for bulk in self._undone:
            if not bulk.is_done:
                for where, some in bulk.records.items():
                    records[where] = sorted([*some, *records[where]], key=offset_of)
        for where, lane in self._lanes.items():
            lane.records = records[where]
        self._undone.clear()
        assembly = Assembly(self.positions(), self._feed, self.topic_ids)
        assembly.new_partitions, assembly.strange_topics = self.new_partitions, self.strange_topics
        for commit in self._known.values():
            assembly.manifest(commit.feed_partition, commit.feed_offset, commit.part)
        for left in self._left:
            assembly.manifest(*left)
        for where, lane in self._lanes.items():
            if lane.records:
                assembly.records(where, lane.records)
            assembly.position(where, lane.position)
        return assembly


def _hold(commit: Commit) -> None:
    """It is not released now, and what begins behind it on some partition is not, either."""
    for lane, _, after in commit.places:
        lane.limit = min(lane.limit, after - 1)
