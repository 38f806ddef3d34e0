"""Puts manifests, records and positions together into whole transactions. Pure: no I/O, no clock.

A transaction is whole when its manifest is known and the reader's position is past the end of every range of it that
counts: records may be missing, for compaction removes some. A record that no manifest covers, once the feed has been
read past an end that was taken after the record came, was not written through Oncebox and stands for itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from heapq import heappop, heappush
from itertools import islice
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING

from oncebox.reader.gathering import Gathering, Partition, size_of
from oncebox.reader.order import Line, Order
from oncebox.reader.ranges import lower_ends
from oncebox.reader.types import FeedTooShortError, PartitionPosition, Record
from oncebox.wire import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from oncebox.reader.types import CommittedTransaction
    from oncebox.v1 import manifest_pb2

# What is done is noted with its partitions when somebody asks, or after so many.
NOTED_LATER_MAX = 10_000

_offset = attrgetter("offset")


class Assembly:
    def __init__(
        self,
        partitions: Mapping[TopicPartition, PartitionPosition],
        feed: Mapping[int, int],
        topic_ids: Mapping[str, str],
    ) -> None:
        """Where to begin, and the topics that are read. A topic's partitions that are not named begin at 0."""
        self.topic_ids = dict(topic_ids)
        # Partitions of our topics that a manifest named first, and topics named with an id that is not theirs.
        self.new_partitions: set[TopicPartition] = set()
        self.strange_topics: set[str] = set()
        # Set where the feed's begin has been deleted: the time from which on it is complete.
        self.horizon_ms: int | None = None
        self._partitions: dict[TopicPartition, Partition] = {}
        # The same by topic and number: each commit names some.
        self._of_topic: dict[str, dict[int, Partition]] = {topic: {} for topic in topic_ids}
        self._lines: dict[TopicPartition, Line[Gathering]] = {}
        self._order: Order[Gathering] = Order(self._lines)
        self._feed = dict(feed)
        # By feed partition: commits that are not done, in the order in which they stand there.
        self._feed_undone: dict[int, deque[tuple[int, Gathering]]] = {partition: deque() for partition in feed}
        self._pending: dict[tuple[str, int], Gathering] = {}
        # Ranges of what is done that are not noted with their partitions yet.
        self._noted_later: list[Mapping[TopicPartition, Sequence[tuple[int, int]]]] = []
        self._last_of_id: dict[str | None, Gathering] = {}
        self._rank = 0
        self._marks: dict[TopicPartition, int] | None = None
        self._ends: Mapping[int, int] | None = None
        for where, start in partitions.items():
            self.add_partition(where, start)

    def add_partition(self, where: TopicPartition, start: PartitionPosition) -> None:
        partition = self._partitions[where] = Partition(where, start)
        partition.line.read_to = partition.position
        self._lines[where] = partition.line
        self._of_topic[where.topic][where.partition] = partition

    def hold_back(self, where: TopicPartition, ends: Mapping[TopicPartition, int]) -> None:
        """Nothing of this partition is released before all that these have below these offsets."""
        self._order.hold_back(where, ends)

    # --- from the feed ----------------------------------------------------------------------------------------------

    def manifest(self, feed_partition: int, feed_offset: int, part: manifest_pb2.Manifest) -> None:
        key = (part.transactional_id, part.number)
        item = self._pending.get(key)
        if item is None:
            item = self._pending[key] = Gathering(self._next_rank(), *key)
            self._feed_undone[feed_partition].append((feed_offset, item))
        if part.part < len(item.parts):
            return  # a repeat
        if part.part > len(item.parts):
            # Those before it have been deleted, or it is a repeat of what was done before this reader began.
            if any(self._counting(partition, runs) for partition, runs in self._ranges(part)):
                raise FeedTooShortError(f"the feed lacks the first parts of the commit {part.number} of {key[0]!r}")
            del self._pending[key]
            item.is_done = True
            return
        item.parts.append(part)
        if len(item.parts) == part.part_count:
            self._claim(item)
            if not item.runs:
                self.done(item)

    def feed_position(self, feed_partition: int, position: int) -> None:
        self._feed[feed_partition] = max(self._feed[feed_partition], position)
        self._resolve()

    def has_read_feed(self, ends: Mapping[int, int]) -> bool:
        return all(self._feed.get(partition, 0) >= end for partition, end in ends.items())

    def _ranges(self, part: manifest_pb2.Manifest) -> Iterator[tuple[Partition, list[tuple[int, int]]]]:
        """Of the topics that are read."""
        for entry in part.written:
            topic = entry.topic
            partitions = self._of_topic.get(topic)
            if partitions is None:
                continue
            if entry.topic_id.hex() != self.topic_ids[topic]:
                self.strange_topics.add(topic)
                continue
            index = entry.partition
            if index not in partitions:
                where = TopicPartition(topic, index)
                self.new_partitions.add(where)
                self.add_partition(where, PartitionPosition(next_offset=0))
            yield partitions[index], [(run.offset_first, run.offset_next) for run in entry.runs]

    def _counting(self, partition: Partition, runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """What of these ranges is not done."""
        if runs and runs[0][0] >= partition.position and not partition.skip:
            return runs  # nothing there has been read, now or before
        self._note_done()
        frontier = partition.frontier()
        above = [(max(first, frontier), after) for first, after in runs if after > frontier]
        return [(first, after) for first, after in above if first not in partition.done]

    def _claim(self, item: Gathering) -> None:
        """All its ranges are known: takes its records that have come, and waits for the others."""
        spans: dict[TopicPartition, tuple[int, int]] = {}
        for part in item.parts:
            for partition, runs in self._ranges(part):
                counting = self._counting(partition, runs)
                if counting:
                    spans[partition.where] = (runs[0][0], runs[-1][1] - 1)
                    item.runs[partition.where] = counting
        if not item.runs:
            return
        self._order.add(item, spans, self._last_of_id.get(item.transactional_id))
        self._last_of_id[item.transactional_id] = item
        for where, counting in item.runs.items():
            self._claim_on(item, self._partitions[where], counting)
        if not item.missing:
            self._order.complete(item)

    def _claim_on(self, item: Gathering, partition: Partition, counting: list[tuple[int, int]]) -> None:
        where, position, undetermined = partition.where, partition.position, partition.undetermined
        if self.horizon_ms is not None and item.parts[0].started_at_ms >= self.horizon_ms:
            exact_from = partition.exact_from
            partition.exact_from = counting[0][0] if exact_from is None else min(exact_from, counting[0][0])
        has_begun = item.spans[where][0] < position
        if has_begun:
            self._begin(item, partition)
        for first, after in counting:
            if undetermined and first < position:
                come = [undetermined.pop(offset, None) for offset in range(first, min(after, position))]
                if found := [record for record in come if record is not None]:
                    item.add(where, found)
            if after > position:
                heappush(partition.runs, (max(first, position), after, item, has_begun))
                has_begun = True
        if counting[-1][1] > position:
            item.missing += 1
        if partition.line.undetermined_first != inf:
            self._order.determined(where, next(iter(undetermined), None))

    # --- from the topics --------------------------------------------------------------------------------------------

    def records(self, where: TopicPartition, records: Sequence[Record]) -> None:
        """In the order of their offsets."""
        partition = self._partitions[where]
        runs, skip, undetermined = partition.runs, partition.skip, partition.undetermined
        end = records[-1].offset + 1 if records else partition.position
        if skip or (records and records[0].offset < partition.position):
            records = [each for each in records if each.offset >= partition.position and each.offset not in skip]
        at = 0
        while at < len(records):
            offset = records[at].offset
            self._reach(partition, offset)
            first, after, item, _ = runs[0] if runs else (end, end, None, False)
            # All that belongs to one run, or to none.
            bound = after if first <= offset else first
            behind = min(at + bound - offset, len(records))
            if records[behind - 1].offset >= bound:
                # Some offsets below have no record.
                behind = bisect_left(records, bound, lo=at, hi=behind, key=_offset)
            some = records[at:behind]
            at = behind
            if first <= offset and item is not None:
                partition.buffered += item.add(where, some)
            else:
                undetermined.update((each.offset, each) for each in some)
                partition.buffered += size_of(some)
        if undetermined:
            self._order.determined(where, next(iter(undetermined)))
        self.position(where, end)

    def position(self, where: TopicPartition, position: int) -> None:
        """Everything below has been read: also where nothing stands, or nothing that is for readers."""
        partition = self._partitions[where]
        partition.position = partition.line.read_to = max(partition.position, position)
        if partition.skip:
            partition.skip.drop_below(partition.position)
        self._reach(partition, partition.position)

    def _begin(self, item: Gathering, partition: Partition) -> None:
        partition.undone.add(item.runs[partition.where][0][0], item)
        self._order.begin(item, partition.where)

    def _reach(self, partition: Partition, position: int) -> None:
        """Ranges that begin below take their place in the order; those that end there have been read."""
        runs, where = partition.runs, partition.where
        while runs and runs[0][0] < position:
            first, after, item, has_begun = runs[0]
            if not has_begun:
                self._begin(item, partition)
            if after > position:
                runs[0] = (first, after, item, True)
                return
            heappop(runs)
            if item.runs[where][-1][1] == after:
                item.missing -= 1
                if not item.missing:
                    self._order.complete(item)

    # --- records that no manifest covers ----------------------------------------------------------------------------

    @property
    def has_undetermined(self) -> bool:
        """Records have come that no known commit covers."""
        return any(partition.undetermined for partition in self._partitions.values())

    @property
    def wants_check(self) -> bool:
        """And no check of the feed's ends is under way."""
        return self._marks is None and self.has_undetermined

    @property
    def is_checking(self) -> bool:
        return self._marks is not None

    def begin_check(self) -> None:
        """The feed's ends are to be asked for, from here on."""
        self._marks = {where: p.position for where, p in self._partitions.items() if p.undetermined}

    def ends_known(self, ends: Mapping[int, int]) -> None:
        """The feed's ends, taken after begin_check(); again if they are not reached for long."""
        self._ends = lower_ends(self._ends, ends)
        self._resolve()

    def drop_check(self) -> None:
        """The ends could not be had."""
        self._marks = self._ends = None

    def _resolve(self) -> None:
        if self._marks is None or self._ends is None:
            return
        if not self.has_read_feed(self._ends):
            return
        for where, mark in self._marks.items():
            undetermined = self._partitions[where].undetermined
            while undetermined and next(iter(undetermined)) < mark:
                self._single(where, undetermined.popitem(last=False)[1])
            self._order.determined(where, next(iter(undetermined), None))
        self._marks = self._ends = None

    def _single(self, where: TopicPartition, record: Record) -> None:
        partition = self._partitions[where]
        offset = record.offset
        forgotten = self.horizon_ms is not None and record.timestamp_ms < self.horizon_ms
        if forgotten and (partition.exact_from is None or offset < partition.exact_from):
            raise FeedTooShortError(
                f"{where.topic}:{where.partition} offset {offset} may belong to a transaction that the feed has "
                "forgotten: begin later, or keep the feed at least as long as the topics it tells of"
            )
        item = Gathering(self._next_rank())
        item.add(where, [record])
        item.runs[where] = [(offset, offset + 1)]
        self._order.add(item, {where: (offset, offset)})
        self._begin(item, partition)
        self._order.complete(item)

    # --- what is whole ----------------------------------------------------------------------------------------------

    def _next_rank(self) -> int:
        self._rank += 1
        return self._rank

    def release(self) -> Iterator[Gathering]:
        """What has become whole, in order. To be told done() as each is handed on."""
        for item in self._order.release():
            for where, size in item.sizes.items():
                self._partitions[where].buffered -= size
            if item.records or item.unloaded:
                yield item
            else:
                self.done(item)  # compaction has left nothing of it

    def done(self, item: Gathering) -> None:
        """Its reader has it: a position taken from now on is behind it."""
        item.is_done = True
        self._noted_later.append(item.runs)
        if len(self._noted_later) > NOTED_LATER_MAX:
            self._note_done()
        transactional_id, number = item.transactional_id, item.number
        if transactional_id is not None and number is not None:
            self._pending.pop((transactional_id, number), None)
            if self._last_of_id.get(transactional_id) is item:
                del self._last_of_id[transactional_id]

    def _note_done(self) -> None:
        """Most of what is done lies below the frontier by the time somebody asks, and need not be noted at all."""
        if not self._noted_later:
            return
        frontiers = {where: partition.frontier() for where, partition in self._partitions.items()}
        for each in self._noted_later:
            for where, runs in each.items():
                if runs[-1][1] > frontiers[where]:
                    for first, after in runs:
                        self._partitions[where].done.add(first, after)
        for where, frontier in frontiers.items():
            self._partitions[where].done.drop_below(frontier)
        self._noted_later = []

    # --- where it stands --------------------------------------------------------------------------------------------

    def feed_positions(self) -> dict[int, int]:
        """Never past a commit that is not done."""
        found = {}
        for partition, at in self._feed.items():
            undone = self._feed_undone[partition]
            while undone and undone[0][1].is_done:
                undone.popleft()
            found[partition] = min(at, undone[0][0]) if undone else at
        return found

    def positions(self) -> dict[TopicPartition, PartitionPosition]:
        self._note_done()
        found = {}
        for where, partition in self._partitions.items():
            frontier = partition.frontier()
            found[where] = PartitionPosition(next_offset=frontier, done=partition.done.above(frontier))
        return found

    def waiting(self, where: TopicPartition, below: int) -> Iterator[Record]:
        """What has been read of this partition and is not done: all below this offset, and some above."""
        partition = self._partitions[where]
        for offset, record in partition.undetermined.items():
            if offset >= below:
                break
            yield record
        for item in partition.undone.items(below):
            yield from item.records.get(where, ())

    def unload(self, bytes_min: int) -> CommittedTransaction | None:
        """What has come of the largest transaction that is on its way, if it is at least so large. Here it is
        forgotten; the transaction itself will tell that it lacks it.
        """
        waiting = [item for item in self._pending.values() if item.runs and not item.is_released]
        item = max(waiting, key=Gathering.size, default=None)
        if item is None or item.size() < bytes_min:
            return None
        part = item.transaction()
        for where, size in item.sizes.items():
            self._partitions[where].buffered -= size
        item.unloaded = {**item.unloaded, **{where: records[-1].offset for where, records in item.records.items()}}
        item.records, item.sizes = {}, {}
        return part

    def first_unloaded(self, where: TopicPartition, below: int) -> int | None:
        """Where in this partition the first transaction begins that is not done and has been unloaded."""
        items = [item for item in self._partitions[where].undone.items(below) if where in item.unloaded]
        return min((item.runs[where][0][0] for item in items), default=None)

    def is_whole(self, where: TopicPartition, offset: int) -> bool:
        """Whether what this record belongs to is released, or was before."""
        return offset not in self._partitions[where].undetermined and not list(self._gathered(where, offset))

    def _gathered(self, where: TopicPartition, offset: int) -> Iterator[Gathering]:
        """What this record belongs to, while it is not released."""
        for item in self._partitions[where].undone.items(offset + 1):
            if not item.is_released and any(first <= offset < after for first, after in item.runs.get(where, ())):
                yield item

    def needed_for(self, where: TopicPartition, offset: int) -> set[TopicPartition]:
        """The partitions that have to be read on before what this record belongs to is released."""
        found: set[TopicPartition] = set()
        items = list(self._gathered(where, offset))
        seen = set(items)
        while items:
            item = items.pop()
            found |= {each for each, runs in item.runs.items() if runs[-1][1] > self._partitions[each].position}
            blockers = {other for other in self._order.blockers(item) if other is not None} - seen
            seen |= blockers
            items += blockers
        return found

    def knows(self, where: TopicPartition) -> bool:
        return where in self._partitions

    def partitions(self) -> Iterable[TopicPartition]:
        return self._partitions.keys()

    def buffered_by_partition(self) -> dict[TopicPartition, int]:
        """Bytes of records that have come and are not released."""
        return {where: partition.buffered for where, partition in self._partitions.items()}

    @property
    def pending_count(self) -> int:
        """Commits that are known and not done."""
        return len(self._pending)

    @property
    def is_settled(self) -> bool:
        """All that has come is done, and nothing has to be remembered of it but the position."""
        is_waiting = self._pending or self._order.has_gates or self.has_undetermined
        is_learning = self._marks is not None or self.new_partitions or self.strange_topics
        return not is_waiting and not is_learning and self.horizon_ms is None

    @property
    def newest_rank(self) -> int:
        return self._rank

    def is_pending(self, rank: int) -> bool:
        """Whether a commit that was known at this rank is not done."""
        # (They stand in the order in which they came.)
        return any(item.rank <= rank for item in islice(self._pending.values(), 1))

    def needed(self) -> set[TopicPartition]:
        """The partitions that what stands first anywhere still waits for: reading must go on there."""
        found = set(self._order.held_back_by())
        for partition in self._partitions.values():
            head = partition.line.head()
            if head is None and partition.runs:
                head = partition.runs[0][2]  # nothing has begun: this will be the first
            if head is not None and not head.is_complete:
                found |= {where for where, runs in head.runs.items() if runs[-1][1] > self._partitions[where].position}
        return found
