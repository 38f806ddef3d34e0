"""What a reader has gathered: of one transaction, and of one partition. Pure."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush
from types import MappingProxyType
from typing import TYPE_CHECKING

from oncebox.batch_token import metadata_of
from oncebox.reader.order import Item, Line
from oncebox.reader.ranges import Ranges
from oncebox.reader.types import CommittedTransaction

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from oncebox.reader.types import PartitionPosition, Record
    from oncebox.v1 import manifest_pb2
    from oncebox.wire import TopicPartition

RECORD_OVERHEAD_BYTES = 200
NOTHING: Mapping[TopicPartition, int] = MappingProxyType({})


def size_of(records: Sequence[Record]) -> int:
    # (By its place: named access takes twice as long, and this is done for each record.)
    return RECORD_OVERHEAD_BYTES * len(records) + sum([len(record[5] or b"") for record in records])


class Gathering(Item):
    """A transaction, or a single record, on its way to being whole."""

    __slots__ = (
        "is_done",
        "missing",
        "number",
        "parts",
        "records",
        "runs",
        "sizes",
        "transactional_id",
        "unloaded",
    )

    def __init__(self, rank: int, transactional_id: str | None = None, number: int | None = None) -> None:
        """A single record has no id and no number."""
        super().__init__(rank)
        self.transactional_id = transactional_id
        self.number = number
        self.parts: list[manifest_pb2.Manifest] = []
        self.records: dict[TopicPartition, list[Record]] = {}
        self.runs: dict[TopicPartition, list[tuple[int, int]]] = {}
        # Partitions whose last range has not been read to its end.
        self.missing = 0
        self.is_done = False
        # Bytes of its records.
        self.sizes: dict[TopicPartition, int] = {}
        # Where records of it have been taken away: the last one's offset.
        self.unloaded: Mapping[TopicPartition, int] = NOTHING

    def add(self, where: TopicPartition, records: Sequence[Record]) -> int:
        """How many bytes they have."""
        size = size_of(records)
        before = self.records.get(where)
        if before is None:
            self.records[where], self.sizes[where] = [*records], size
        else:
            before += records
            self.sizes[where] += size
        return size

    def size(self) -> int:
        return sum(self.sizes.values())

    def forget(self) -> None:
        """Its records are somebody else's: it may itself be kept for a while, among those that were released."""
        self.records = {}

    def transaction(self) -> CommittedTransaction:
        if self.transactional_id is None or self.number is None:
            return CommittedTransaction(records=self.records)
        manifest = self.parts[0]
        return CommittedTransaction(
            records=self.records,
            transactional_id=self.transactional_id,
            number=self.number,
            producer_id=manifest.producer_id,
            epoch=manifest.epoch,
            started_at_ms=manifest.started_at_ms,
            decided_at_ms=manifest.decided_at_ms,
            metadata=metadata_of(manifest.metadata),
            group_offsets=tuple(manifest.group_offsets),
            unloaded=self.unloaded,
        )


class Undone:
    """Items that have begun and are not done, by where they begin: the lowest tells up to where all is done."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[int, Gathering]] = []

    def add(self, first: int, item: Gathering) -> None:
        heappush(self._heap, (first, item))

    def items(self, below: int) -> Iterator[Gathering]:
        return (item for first, item in self._heap if first < below and not item.is_done)

    def first(self, otherwise: int) -> int:
        while self._heap and self._heap[0][1].is_done:
            heappop(self._heap)
        return min(otherwise, self._heap[0][0]) if self._heap else otherwise


class Partition:
    __slots__ = (
        "buffered",
        "done",
        "exact_from",
        "line",
        "position",
        "runs",
        "skip",
        "undetermined",
        "undone",
        "where",
    )

    def __init__(self, where: TopicPartition, start: PartitionPosition) -> None:
        self.where = where
        self.position = start.next_offset
        # Read before this reader began.
        self.skip = Ranges(start.done)
        self.done = Ranges(start.done)
        self.line: Line[Gathering] = Line()
        # A heap of the known ranges that have not been read to their end (they are disjoint), and whether their item
        # has its place in the line already.
        self.runs: list[tuple[int, int, Gathering, bool]] = []
        self.undetermined: OrderedDict[int, Record] = OrderedDict()
        self.undone = Undone()
        self.buffered = 0
        # From here on every commit is known to the feed, however much of it is forgotten.
        self.exact_from: int | None = None

    def frontier(self) -> int:
        """Everything below is done."""
        at = min(self.position, next(iter(self.undetermined))) if self.undetermined else self.position
        return self.undone.first(at)
