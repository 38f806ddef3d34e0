"""A batch of records into what is to be written, table by table. Pure.

A unit (a transaction, or a record that belongs to none) is planned whole or not at all. Of several records of one row
only the last is written: the one with the higher offset where they come from one partition, else the later one.
"""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, overload

from relay.ordering import version
from relay.types import BadRecordError, RelayError, SchemaChangeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from oncebox.reader import Record
    from oncebox.wire import TopicPartition
    from relay.compiled import Quick
    from relay.config import RelaySettings
    from relay.mapping import RowMapper
    from relay.ordering import Version
    from relay.types import Change, Key

_GUARD = struct.Struct("!iiiq")
_GUARD_DELETE = struct.Struct("!iiiqi?")

NOTHING: Mapping[TopicPartition, int] = MappingProxyType({})

# What later records are held behind a parked one: ("record", topic, key) or (table, column, …), as JSON texts.
Hold = tuple[str, ...]


class StopError(RelayError):
    """A bad record, and the policy is to stop."""


class Unit(NamedTuple):
    """What is applied whole."""

    records: Sequence[Record]
    transactional_id: str | None = None
    number: int | None = None
    # Where `records` lacks some that are kept elsewhere (see large.py): by partition, the last one's offset.
    unloaded: Mapping[TopicPartition, int] = NOTHING


class Piece(NamedTuple):
    """What a reader gives at once: a transaction, or many of them."""

    records: Mapping[TopicPartition, Sequence[Record]]
    unloaded: Mapping[TopicPartition, int] = NOTHING
    # Of many: what makes them one by one, in order.
    transactions: Callable[[], Iterable[Unit]] | None = None
    transactional_id: str | None = None
    number: int | None = None

    def units(self) -> Iterable[Unit]:
        if self.transactions is not None:
            return self.transactions()
        records = [*chain.from_iterable(self.records.values())]
        return (Unit(records, self.transactional_id, self.number, self.unloaded),)


class Letter(NamedTuple):
    """A record for oncebox.dead_letter."""

    unit: int
    record: Record
    transactional_id: str | None
    number: int | None
    error: str
    state: str
    # Of all of its unit, on the unit's first letter.
    holds: tuple[Hold, ...]


# Source, offset, the row for COPY, whether it is a delete. (A bare tuple: one is made for each record.)
Written = tuple[int, int, bytes, bool]


class Singles(Sequence[Unit]):
    """Records that are units by themselves; the units are made when somebody looks at them."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, at: int) -> Unit: ...

    @overload
    def __getitem__(self, at: slice) -> Singles: ...

    def __getitem__(self, at: int | slice) -> Unit | Singles:
        return Singles(self.records[at]) if isinstance(at, slice) else Unit((self.records[at],))


class Pieces(Sequence[Unit]):
    """The units of pieces, which are made when somebody looks at them."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        # Whether `records` has them in the order of the units.
        self.is_ordered = all(piece.transactions is None for piece in pieces)
        self._units: list[Unit] | None = None

    @property
    def records(self) -> Iterable[Record]:
        return chain.from_iterable(chain.from_iterable([piece.records.values() for piece in self._pieces]))

    def _made(self) -> list[Unit]:
        if self._units is None:
            self._units = [unit for piece in self._pieces for unit in piece.units()]
        return self._units

    def __len__(self) -> int:
        return len(self._made())

    @overload
    def __getitem__(self, at: int) -> Unit: ...

    @overload
    def __getitem__(self, at: slice) -> list[Unit]: ...

    def __getitem__(self, at: int | slice) -> Unit | list[Unit]:
        return self._made()[at]


@dataclass(slots=True)
class Stage:
    """What one round writes to one table."""

    last: dict[Key, Written] = field(default_factory=dict)
    # Insert mode: every row.
    rows: list[bytes] = field(default_factory=list)
    # Rows that another source has taken over inside of the batch.
    superseded: list[bytes] = field(default_factory=list)
    # Whether there are deletes, or rows that were taken over.
    has_down: bool = False
    # Tables with an ordering column: the version of each in `last`.
    versions: dict[Key, Version] = field(default_factory=dict)


# By the index of the target.
Round = dict[int, Stage]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    rounds: Sequence[Round]
    letters: Sequence[Letter]
    # Records before the offset that their partition had reached once: the guard must be asked for each.
    is_replay: bool
    row_count: int
    # The holds after it.
    holds: frozenset[Hold]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """What planning depends on besides the records."""

    # By topic: the index of each target, and its mapper.
    mappers: Mapping[str, Sequence[tuple[int, RowMapper]]]
    sources: Mapping[tuple[str, int], int]
    # By source: below this, records may have been applied already. (Partition mode: only after a rewind.)
    high_offsets: Mapping[int, int]
    on_error: str


def planner(
    settings: RelaySettings,
    mappers: Sequence[RowMapper],
    sources: Mapping[tuple[str, int], int],
    high_offsets: Mapping[int, int],
) -> Planner:
    by_topic: dict[str, list[tuple[int, RowMapper]]] = {}
    for index, mapper in enumerate(mappers):
        by_topic.setdefault(mapper.target.topic, []).append((index, mapper))
    return Planner(mappers=by_topic, sources=sources, high_offsets=high_offsets, on_error=settings.on_error)


class _OrderMattersError(Exception):
    """A row has records of several sources, which do not come in the order of their transactions."""


class _Rounds:
    """Stages are filled in order; in a replay a row's records of different sources go to rounds of their own, because
    only the database can tell which of them it has already.
    """

    def __init__(self, *, is_replay: bool, is_ordered: bool = True) -> None:
        self.rounds: list[Round] = [{}]
        self._is_replay = is_replay
        self._is_ordered = is_ordered

    def stage(self, index: int) -> Stage:
        stage = self.rounds[-1].get(index)
        if stage is None:
            stage = self.rounds[-1][index] = Stage()
        return stage

    def add(self, index: int, mapper: RowMapper, source: int, offset: int, change: Change) -> None:
        stage = self.stage(index)
        key, row, is_delete = change
        if mapper.is_ordered:
            # The newest of all its sources counts, and nothing has to be remembered of the others.
            found = version(row, source, offset)
            if stage.versions.get(key, found) > found:
                return
            stage.versions[key] = found
        if is_delete:
            row += _GUARD_DELETE.pack(4, source, 8, offset, 1, True)
            stage.has_down = True
        elif mapper.has_guard:
            row += _GUARD.pack(4, source, 8, offset)
        if mapper.is_insert:
            stage.rows.append(row)
            return
        before = None if mapper.is_ordered else stage.last.get(key)
        if before is not None:
            if before[0] == source and before[1] > offset:
                return
            if before[0] != source:
                if not self._is_ordered:
                    raise _OrderMattersError
                if self._is_replay:
                    self.rounds.append({})
                    self.add(index, mapper, source, offset, change)
                    return
                if mapper.has_guard:
                    stage.superseded.append(superseded(mapper, key, before))
                    stage.has_down = True
        stage.last[key] = (source, offset, row, is_delete)


def superseded(mapper: RowMapper, key: Key, before: Written) -> bytes:
    return mapper.key_row(key) + _GUARD_DELETE.pack(4, before[0], 8, before[1], 1, False)


def where_of(record: Record) -> str:
    return f"{record.topic} partition {record.partition} offset {record.offset}"


def make_plan(
    planner: Planner,
    units: Sequence[Unit],
    holds: frozenset[Hold],
    *,
    lowest: Mapping[tuple[str, int], int] | None = None,
    refused: Sequence[str] | None = None,
    one_by_one: bool = False,
) -> Plan:
    """`lowest`: of each partition the lowest offset, if somebody knows it already. `refused`: of each unit, why the
    database did not take it. `one_by_one`: a round for each record.
    """
    sources = planner.sources
    is_replay = _is_replay(planner, units, lowest)
    if not holds and refused is None and not one_by_one:
        is_ordered = not isinstance(units, Pieces) or units.is_ordered
        with suppress(BadRecordError, _OrderMattersError):
            return _plan_good(planner, _records(units), is_replay=is_replay, is_ordered=is_ordered)
    rounds = _Rounds(is_replay=is_replay)
    row_count = 0
    letters: list[Letter] = []
    held = set(holds)
    for number, unit in enumerate(units):
        error, state, bad = refused[number] if refused else None, "parked", unit.records[0]
        changes: list[tuple[int, RowMapper, int, int, Change]] = []
        for record in unit.records:
            try:
                for index, mapper in planner.mappers[record.topic]:
                    change = mapper(record)
                    if change is not None:
                        source = sources[record.topic, record.partition]
                        changes.append((index, mapper, source, record.offset, change))
            except BadRecordError as wrong:
                if error is None:
                    error, bad = str(wrong), record
        unit_holds: set[Hold] = set()
        if error is not None or held:
            unit_holds = set(holds_of(unit, changes))
            if held & unit_holds:
                # Before it can be judged, what stands before it must be settled.
                error, state = "stands behind a record that is parked", "held"
        if error is None:
            for index, mapper, source, offset, change in changes:
                rounds.add(index, mapper, source, offset, change)
                row_count += 1
                if one_by_one:
                    rounds.rounds.append({})
            continue
        if state != "held" and planner.on_error == "stop":
            raise StopError(f"{where_of(bad)}: {error}")
        if state != "held" and planner.on_error == "skip":
            letters += _letters(number, unit, error, "skipped", ())
        else:
            held |= unit_holds
            letters += _letters(number, unit, error, state, tuple(sorted(unit_holds)))
    return Plan(
        rounds=rounds.rounds,
        letters=letters,
        is_replay=is_replay,
        row_count=row_count,
        holds=frozenset(held),
    )


def _records(units: Sequence[Unit]) -> Iterable[Record]:
    return (
        units.records if isinstance(units, Singles | Pieces) else chain.from_iterable([unit.records for unit in units])
    )


def _is_replay(planner: Planner, units: Sequence[Unit], lowest: Mapping[tuple[str, int], int] | None) -> bool:
    """Whether some of it may have been applied already, or comes out of order."""
    sources, high_offsets = planner.sources, planner.high_offsets
    if not high_offsets:
        return False
    if lowest is not None:
        return any(offset < high_offsets.get(sources[place], 0) for place, offset in lowest.items())
    topic, partition, high = "", -1, 0
    for record in _records(units):
        if record.partition != partition or record.topic != topic:
            topic, partition = record.topic, record.partition
            high = high_offsets.get(sources[topic, partition], 0)
        if record.offset < high:
            return True
    return False


def _plan_good(planner: Planner, records: Iterable[Record], *, is_replay: bool, is_ordered: bool) -> Plan:
    """The quick way, as long as no record is bad and none is held."""
    rounds = _Rounds(is_replay=is_replay, is_ordered=is_ordered)
    row_count = 0
    topic, partition = "", -1
    source, mappers = 0, planner.mappers.get("", ())
    # Where a topic has one table and nothing is replayed: what its rows are made by, and those that are there.
    quick: Quick | None = None
    last: dict[Key, Written] = {}
    for record in records:
        _, _, offset, _, _, value, _ = record
        # Neighbours mostly come from one partition.
        if record.partition != partition or record.topic != topic:
            topic, partition = record.topic, record.partition
            source, mappers = planner.sources[topic, partition], planner.mappers[topic]
            index, mapper = mappers[0]
            quick = None if is_replay or len(mappers) > 1 or mapper.is_insert else mapper.quick
            last = rounds.stage(index).last
        if quick is not None and value is not None:
            made = quick(value, source, offset)
            if made is not None:
                before = last.get(made[0])
                if before is None or (before[0] == source and before[1] < offset):
                    last[made[0]] = (source, offset, made[1], False)
                    row_count += 1
                    continue
        for index, mapper in mappers:
            change = mapper(record)
            if change is not None:
                rounds.add(index, mapper, source, offset, change)
                row_count += 1
    return Plan(rounds=rounds.rounds, letters=(), is_replay=is_replay, row_count=row_count, holds=frozenset())


def holds_of(unit: Unit, changes: Iterable[tuple[int, RowMapper, int, int, Change]]) -> Iterator[Hold]:
    for record in unit.records:
        if record.key is not None:
            yield "record", record.topic, b64encode(record.key).decode()
    for _, mapper, _, _, (key, _, _) in changes:
        if key:
            yield str(mapper.target.table), *mapper.key_name(key)


def rows_of(planner: Planner, record: Record) -> set[Hold]:
    """What two records have in common that are about one row, as far as it can become rows."""
    changes: list[tuple[int, RowMapper, int, int, Change]] = []
    with suppress(BadRecordError, SchemaChangeError):
        for index, mapper in planner.mappers[record.topic]:
            change = mapper(record)
            if change is not None:
                changes.append((index, mapper, 0, record.offset, change))
    return set(holds_of(Unit((record,)), changes))


def _letters(number: int, unit: Unit, error: str, state: str, holds: tuple[Hold, ...]) -> Iterator[Letter]:
    for record in unit.records:
        yield Letter(number, record, unit.transactional_id, unit.number, error, state, holds)
        holds = ()
