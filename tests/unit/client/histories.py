"""Histories of a small Kafka with transactions, told step by step, and what a reader of whole transactions must see.

The naive model of oncebox.reader: no positions, no waiting, all of it known at the end.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from random import Random

from oncebox.reader.types import CommittedTransaction, Record
from oncebox.v1 import manifest_pb2, transaction_pb2
from oncebox.wire import TopicPartition

TOPIC, OTHER = "read", "not-read"
IDS = {TOPIC: b"\1" * 16, OTHER: b"\2" * 16}


@dataclass
class Entry:
    """One offset of a log: a record, or a control marker (record None)."""

    record: Record | None
    writer: "Writer | None" = None
    compacted: bool = False


@dataclass(eq=False)
class Writer:
    """A transaction."""

    name: str
    number: int
    # The share of its records that compaction removes.
    compacted: float
    offsets: dict[TopicPartition, list[int]] = field(default_factory=dict)
    result: str = "open"

    def runs(self, where: TopicPartition) -> list[tuple[int, int]]:
        runs: list[tuple[int, int]] = []
        for offset in self.offsets[where]:
            if runs and runs[-1][1] == offset:
                runs[-1] = (runs[-1][0], offset + 1)
            else:
                runs.append((offset, offset + 1))
        return runs


class History:
    def __init__(
        self,
        random: Random,
        *,
        partitions: int,
        feeds: int,
        is_common: bool = False,
        compacted: Sequence[float] = (0.15,),
    ) -> None:
        """`is_common`: only what most histories have: no records without a transaction, no manifests in parts.
        `compacted`: which shares of their records transactions lose to compaction.
        """
        self.random = random
        self.is_common = is_common
        self.compacted = compacted
        self.partitions = [TopicPartition(TOPIC, index) for index in range(partitions)]
        self.logs: dict[TopicPartition, list[Entry]] = {
            where: [] for where in [*self.partitions, TopicPartition(OTHER, 0)]
        }
        self.feeds: list[list[manifest_pb2.Manifest]] = [[] for _ in range(feeds)]
        self.committed: list[Writer] = []
        self._open: list[Writer] = []
        self._numbers = {"a": 0, "b": 0, "c": 0}

    def step(self) -> None:
        move = self.random.random()
        idle = [name for name in self._numbers if all(writer.name != name for writer in self._open)]
        if idle and move < 0.2:
            name = self.random.choice(idle)
            self._numbers[name] += 1
            self._open.append(Writer(name, self._numbers[name], self.random.choice(self.compacted)))
        elif self._open and move < 0.65:
            self._write(self.random.choice(self._open))
        elif self._open and move < 0.85:
            self._end(self.random.choice(self._open), commit=self.random.random() < 0.8)
        elif not self.is_common:
            self._append(self.random.choice(list(self.logs)), None)

    def finish(self) -> None:
        for writer in list(self._open):
            self._end(writer, commit=self.random.random() < 0.8)

    def _write(self, writer: Writer) -> None:
        where = self.random.choice(list(self.logs))
        writer.offsets.setdefault(where, []).append(self._append(where, writer))

    def _append(self, where: TopicPartition, writer: Writer | None) -> int:
        log = self.logs[where]
        value = b"%s %d" % (writer.name.encode(), writer.number) if writer else b"plain"
        compacted = writer.compacted if writer else self.compacted[0]
        log.append(Entry(Record(*where, len(log), 0, None, value, ()), writer, self.random.random() < compacted))
        return len(log) - 1

    def _end(self, writer: Writer, *, commit: bool) -> None:
        self._open.remove(writer)
        writer.result = "committed" if commit else "aborted"
        if commit and writer.offsets:
            self.committed.append(writer)
            self.feeds["abc".index(writer.name) % len(self.feeds)] += self._manifests(writer)
        for where in writer.offsets:
            self.logs[where].append(Entry(None))

    def _manifests(self, writer: Writer) -> list[manifest_pb2.Manifest]:
        written = [
            transaction_pb2.Written(
                topic=where.topic,
                partition=where.partition,
                record_count=len(offsets),
                runs=[
                    transaction_pb2.Run(offset_first=first, offset_next=after) for first, after in writer.runs(where)
                ],
                topic_id=IDS[where.topic],
            )
            for where, offsets in writer.offsets.items()
        ]
        is_cut = self.random.random() < 0.3 and not self.is_common
        cut = self.random.randrange(len(written) + 1) if is_cut else len(written)
        pieces = [written[:cut], written[cut:]] if 0 < cut < len(written) else [written]
        parts = [
            manifest_pb2.Manifest(
                transactional_id=writer.name,
                number=writer.number,
                part=index,
                part_count=len(pieces),
                written=piece,
                metadata=b"m" if index == 0 else b"",
            )
            for index, piece in enumerate(pieces)
        ]
        if self.random.random() < 0.1:
            parts += parts  # a repeat
        return parts

    def stable(self, where: TopicPartition) -> int:
        """The last stable offset: what read_committed readers may see up to."""
        firsts = [writer.offsets[where][0] for writer in self._open if where in writer.offsets]
        return min(firsts, default=len(self.logs[where]))

    def visible(self, where: TopicPartition, first: int, after: int) -> list[Record]:
        """What a read_committed reader gets."""
        return [
            entry.record
            for entry in self.logs[where][first:after]
            if entry.record is not None
            and not entry.compacted
            and (entry.writer is None or entry.writer.result == "committed")
        ]

    # --- what must be read ------------------------------------------------------------------------------------------

    def expected(
        self, starts: dict[TopicPartition, int]
    ) -> dict[tuple[object, ...], dict[TopicPartition, list[Record]]]:
        """By name: the records that count, of what has any."""
        found: dict[tuple[object, ...], dict[TopicPartition, list[Record]]] = {}
        for where in self.partitions:
            for record in self.visible(where, starts[where], len(self.logs[where])):
                writer = self.logs[where][record.offset].writer
                name = (writer.name, writer.number) if writer else (*where, record.offset)
                found.setdefault(name, {}).setdefault(where, []).append(record)
        return found

    def spans(
        self, starts: dict[TopicPartition, int]
    ) -> dict[tuple[object, ...], dict[TopicPartition, tuple[int, int]]]:
        """By name: first and last offset on each partition, what compaction removed included."""
        found: dict[tuple[object, ...], dict[TopicPartition, tuple[int, int]]] = {}
        for writer in self.committed:
            for where, offsets in writer.offsets.items():
                if where.topic == TOPIC and offsets[-1] >= starts[where]:
                    found.setdefault((writer.name, writer.number), {})[where] = (offsets[0], offsets[-1])
        for where in self.partitions:
            for record in self.visible(where, starts[where], len(self.logs[where])):
                if self.logs[where][record.offset].writer is None:
                    found[*where, record.offset] = {where: (record.offset, record.offset)}
        return found


def name_of(transaction: CommittedTransaction) -> tuple[object, ...]:
    if transaction.transactional_id is not None:
        return transaction.transactional_id, transaction.number
    (records,) = transaction.records.values()
    (record,) = records
    return record.topic, record.partition, record.offset


Name = tuple[object, ...]
Spans = dict[Name, dict[TopicPartition, tuple[int, int]]]


# A partition, and the offsets up to which others come before it.
HeldBack = tuple[TopicPartition, dict[TopicPartition, int]]


def goes_before(
    spans: Spans, left: dict[Name, dict[TopicPartition, list[Record]]], held_back: HeldBack | None = None
) -> dict[Name, set[Name]]:
    """Who must be read before whom: what stands wholly before it on a partition where compaction has left some of both,
    or was committed before it under the same name, or what it is held back by; but for those that stand before each
    other in a circle.
    """
    before = {name: {other for other in spans if other != name and _is_before(spans, other, name)} for name in spans}
    held: dict[Name, set[Name]] = {name: set() for name in spans}
    if held_back is not None:
        late, ends = held_back
        early = {
            name
            for name in spans
            if any(where in spans[name] and spans[name][where][0] < ends[where] for where in ends)
        }
        held |= {name: early - {name} for name in spans if late in spans[name]}
        before = {name: before[name] | held[name] for name in spans}
        # What compaction has left nothing of there is not known to stand there before its manifest has come.
        seen = {name for name in left if any(r.offset < ends[w] for w in ends for r in left[name].get(w, ()))}
        held = {name: others & seen if late in left.get(name, ()) else set() for name, others in held.items()}
    reached = {name: set(others) for name, others in before.items()}
    for middle in spans:
        for name in spans:
            if middle in reached[name]:
                reached[name] |= reached[middle]
    return {
        name: {
            other
            for other in before[name] & left.keys()
            if name not in reached[other]
            and (other in held[name] or _is_same_id(name, other) or left[name].keys() & left[other].keys())
            if other in held[name]
            or _is_same_id(name, other)
            or _is_before(spans, other, name, left[name].keys() & left[other].keys())
        }
        for name in left
    }


def _is_same_id(name: Name, other: Name) -> bool:
    return len(name) == len(other) == 2 and name[0] == other[0]


def _is_before(spans: Spans, first: Name, second: Name, where: Collection[TopicPartition] | None = None) -> bool:
    if _is_same_id(first, second) and first[1] < second[1]:  # type: ignore[operator]
        return True
    both = spans[first].keys() & spans[second].keys()
    return any(spans[first][w][1] < spans[second][w][0] for w in both if where is None or w in where)
