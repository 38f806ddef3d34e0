"""What the quick way to whole transactions is made of: a commit, a partition, and the bulk that leaves. Pure."""

from __future__ import annotations

from bisect import bisect_left
from math import inf
from operator import attrgetter, itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING

from oncebox.reader.assembly import Assembly
from oncebox.reader.ranges import Ranges
from oncebox.reader.types import PartitionPosition, Record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oncebox.reader.gathering import Gathering
    from oncebox.v1 import manifest_pb2
    from oncebox.wire import TopicPartition

NOTHING: Mapping[TopicPartition, int] = MappingProxyType({})

offset_of = itemgetter(2)
_first = itemgetter(0)
_place_in_feed = attrgetter("feed_partition", "feed_offset")


class Commit:
    __slots__ = ("feed_offset", "feed_partition", "is_done", "is_released", "key", "look", "part", "places", "previous")

    def __init__(
        self,
        key: tuple[str, int],
        feed_partition: int,
        feed_offset: int,
        part: manifest_pb2.Manifest,
        previous: Commit | None,
    ) -> None:
        # Its transactional id and number.
        self.key = key
        self.feed_partition = feed_partition
        self.feed_offset = feed_offset
        self.part = part
        # Where it wrote: its first offset there, and the one behind its last.
        self.places: list[tuple[Lane, int, int]] = []
        # The one before it of its id, which is released before it.
        self.previous = previous
        self.is_released = False
        self.is_done = False
        # The last one that has met it.
        self.look = 0


# First and next offset.
Run = tuple[int, int, Commit]


class Bulk:
    """Whole transactions that leave together."""

    __slots__ = ("commits", "is_done", "ranges", "records", "sizes", "topic_ids")
    is_joined = False
    unloaded = NOTHING

    def __init__(self, commits: list[Commit], topic_ids: Mapping[str, str]) -> None:
        self.commits = commits
        self.topic_ids = topic_ids
        # By partition, each in the order of its offsets.
        self.records: dict[TopicPartition, list[Record]] = {}
        self.ranges: dict[TopicPartition, list[tuple[int, int]]] = {}
        self.sizes: dict[TopicPartition, int] = {}
        self.is_done = False

    def size(self) -> int:
        return sum(self.sizes.values())

    def transactions(self) -> list[Gathering]:
        """One by one, in order."""
        starts = {where: PartitionPosition(next_offset=ranges[0][0]) for where, ranges in self.ranges.items()}
        assembly = Assembly(starts, {commit.feed_partition: 0 for commit in self.commits}, self.topic_ids)
        for commit in sorted(self.commits, key=_place_in_feed):
            assembly.manifest(commit.feed_partition, commit.feed_offset, commit.part)
        for where, ranges in self.ranges.items():
            if records := self.records.get(where):
                assembly.records(where, records)
            assembly.position(where, ranges[-1][1])
        return list(assembly.release())


class Lane:
    """One partition."""

    __slots__ = (
        "ahead",
        "begun",
        "buffered",
        "done",
        "is_sorted",
        "limit",
        "position",
        "records",
        "skip",
        "slices",
        "uncovered",
        "where",
    )

    def __init__(self, where: TopicPartition, start: PartitionPosition) -> None:
        self.where = where
        self.position = start.next_offset
        # Read before this one began.
        self.skip = Ranges(start.done)
        self.done = Ranges(start.done)
        # Have been read, and are not released.
        self.records: list[Record] = []
        self.buffered = 0
        # Runs of commits that are not released: those that begin behind the position, and the others in their order.
        self.ahead: list[Run] = []
        self.is_sorted = True
        self.begun: list[Run] = []
        # Of each that has begun: its part of the records.
        self.slices: list[tuple[int, int]] = []
        # The first record that no commit is known to cover.
        self.uncovered: float = inf
        # What begins behind it has to wait for something that is over there.
        self.limit: float = inf

    def look(self) -> None:
        """Where the runs that have begun have their records, and what has none."""
        if not self.is_sorted:
            self.ahead.sort(key=_first, reverse=True)
            self.is_sorted = True
        ahead, begun, position = self.ahead, self.begun, self.position
        if ahead and ahead[-1][0] < position:
            while ahead and ahead[-1][0] < position:
                begun.append(ahead.pop())
            begun.sort(key=_first)
        records, slices, uncovered = self.records, [], inf
        at, count = 0, len(records)
        for first, after, _ in begun:
            if at < count and records[at][2] < first:
                uncovered = min(uncovered, records[at][2])
                at = bisect_left(records, first, lo=at, key=offset_of)
            behind = at + after - first
            if behind > count or records[behind - 1][2] != after - 1:
                # Some have been compacted away, or are still to come.
                behind = bisect_left(records, after, lo=at, hi=min(behind, count), key=offset_of)
            slices.append((at, behind))
            at = behind
        if at < count:
            uncovered = min(uncovered, records[at][2])
        self.slices, self.uncovered, self.limit = slices, uncovered, uncovered

    def take(self) -> tuple[list[Record], list[tuple[int, int]]]:
        """The records of what is released, and the ranges that are done with it: what lies between two of them without
        a record is nobody's.
        """
        records, taken, left = self.records, list[Record](), list[Record]()
        ranges: list[tuple[int, int]] = []
        waiting: list[Run] = []
        at = since = 0  # up to where it is settled; from where on it is taken, or left
        is_taken = False
        for run, (begin, behind) in zip(self.begun, self.slices, strict=True):
            first, after, commit = run
            is_next = commit.is_released
            if is_next is not is_taken or (is_taken and begin > at):
                (taken if is_taken else left).extend(records[since:at])
                if is_next and begin > at:
                    left += records[at:begin]
                since = begin if is_next else at
                is_taken = is_next
                if is_next:
                    ranges.append((first, after))
            elif is_next:
                ranges[-1] = (ranges[-1][0], after)
            if not is_next:
                waiting.append(run)
            at = behind
        (taken if is_taken else left).extend(records[since:at])
        left += records[at:]
        self.records, self.begun = left, waiting
        return taken, ranges
