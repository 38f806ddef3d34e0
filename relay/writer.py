"""The writing end of a session: one connection, its staging tables, the mappings and what is held. Blocking.

prepare() may run in another thread than the rest, one batch ahead; write() plans anew where holds have changed since.
"""

from __future__ import annotations

import logging
from base64 import b64decode
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from oncebox.reader import Record
from relay.database import Connection, connect, migrate, register, resolve, table_order
from relay.encoding import storable
from relay.large import LargeTransactions
from relay.mapping import RowMapper
from relay.plan import Hold, Plan, Unit, make_plan, planner
from relay.queries import query
from relay.schema_changes import create_missing
from relay.sink import RefusedError, Sink

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from relay.config import RelaySettings
    from relay.kafka import Place
    from relay.status import Status


OFFSET_MAX = (1 << 63) - 1

log = logging.getLogger(__name__)


class Prepared(NamedTuple):
    units: Sequence[Unit]
    # None: it is not all in memory, and planned piece by piece as it is written.
    plan: Plan | None
    holds: frozenset[Hold]


class Writer:
    def __init__(self, settings: RelaySettings, instance: str, status: Status) -> None:
        self._settings = settings
        self._status = status
        self._relay = {"relay": settings.name}
        self.connection: Connection = connect(settings, instance)
        try:
            migrate(self.connection)
            self.look_at_tables()
        except BaseException:
            self.connection.close()
            raise
        self.holds: frozenset[Hold] = frozenset()
        # Records that have letters and come again, by source and offset: whether they are judged anew.
        self._again: dict[tuple[int, int], bool] = {}
        # What the letters and partitions were like when nothing was left to settle.
        self._settled: tuple[object, frozenset[int]] | None = None

    def look_at_tables(self) -> None:
        """As they are now: who has stood by for long calls it again before it begins."""
        settings = self._settings
        self.connection.execute("DISCARD TEMP")
        create_missing(self.connection, settings)
        self._targets = [resolve(self.connection, section) for section in settings.tables]
        register(self.connection, settings, self._targets)
        order = table_order(self.connection, self._targets)
        tables = {"tables": [str(target.table) for target in self._targets]}
        # Whether rows of one table may have to wait for rows of another.
        self.has_references = bool(self.connection.execute(query("foreign_keys"), tables).fetchall())
        self.sink = Sink(self.connection, settings.name, self._targets, order, letters_max=settings.limits.dead_letters)
        ranks = {self._targets[at].topic: rank for rank, at in reversed(list(enumerate(order)))}
        self.large = LargeTransactions(self.connection, settings.limits, ranks)

    def begin(self, sources: Mapping[Place, int], high_offsets: Mapping[int, int]) -> None:
        """Both may change later, by whoever owns them."""
        size = self._settings.limits.record_bytes
        mappers = [RowMapper(target, record_bytes_max=size) for target in self._targets]
        self.planner = planner(self._settings, mappers, sources, high_offsets)
        self.load_holds()

    def close(self) -> None:
        self.connection.close()

    @property
    def takes_pieces(self) -> bool:
        """Whether a transaction may be written in pieces: of two records of one row, the guard knows the newer one."""
        return all(target.guard or target.insert_mode == "insert" for target in self._targets)

    def prepare(
        self, units: Sequence[Unit], lowest: Mapping[Place, int] | None = None, *, has_large: bool = False
    ) -> Prepared:
        """`lowest`: of each partition the lowest offset, where it is known."""
        holds = self.holds
        if self._again and not has_large:
            units = self._without_decided(units)
        return Prepared(units, None if has_large else make_plan(self.planner, units, holds, lowest=lowest), holds)

    def write(self, prepared: Prepared, save: Callable[[Connection], None]) -> None:
        units, plan, holds = prepared

        def save_all(connection: Connection, done: Plan) -> None:
            if self._again and plan is not None:
                self._forget_letters(units)
            self.sink.write_letters(self.planner, done.letters)
            save(connection)

        if plan is None:
            holds = self.holds
            done = self._write_large(units, save_all)
        else:
            if holds is not self.holds:
                plan, holds = make_plan(self.planner, units, self.holds), self.holds
            done = self.sink.apply(self.planner, units, plan, holds, save_all)
        self.holds = holds if done.holds == holds else done.holds
        if done.letters:
            self._status.set_aside(done.letters)
        self._status.applied(done.row_count)

    def _write_large(self, units: Sequence[Unit], save: Callable[[Connection, Plan], None]) -> Plan:
        """In pieces, which no reader sees before the commit."""
        kept, units = units, self._without_decided(units) if self._again else units
        alone = len(units) == 1
        # Among others it may stand anywhere: the guard has to be asked as in a replay.
        ends = self.planner.high_offsets if alone else dict.fromkeys(self.planner.sources.values(), OFFSET_MAX)
        by_pieces = replace(self.planner, high_offsets=ends)

        def plans() -> Iterator[Plan]:
            for large, group in groupby(units, key=lambda unit: bool(unit.unloaded)):
                if not large:
                    yield make_plan(by_pieces, list(group), self.holds)
                    continue
                for unit in group:
                    for records in self.large.pieces(unit):
                        yield make_plan(by_pieces, [unit._replace(records=records)], self.holds)

        def save_and_drop(connection: Connection, done: Plan) -> None:
            if self._again:
                self._forget_letters(units)
            self.large.drop(kept)
            save(connection, done)

        try:
            done = self.sink.apply_pieces(units, plans, self.holds, save_and_drop)
        except RefusedError as error:
            # Which record is to blame, and what goes with it, is found out with all of them in memory.
            log.warning("a large transaction cannot be written in pieces, and is read into memory: %s", error)
            whole = [self.large.whole(unit) if unit.unloaded else unit for unit in units]
            plan = make_plan(self.planner, whole, self.holds)
            done = self.sink.apply(self.planner, whole, plan, self.holds, save_and_drop)
        self.large.forget(kept)
        return done

    # --- dead letters -----------------------------------------------------------------------------------------------

    def load_holds(self) -> None:
        letters = self.connection.execute(query("open_letters"), self._relay).fetchall()
        self._status.letters = len(letters)
        self.holds = frozenset(tuple(hold) for _, _, holds, _ in letters for hold in holds)

    def load_letters_read_again(self) -> None:
        """Of a transaction that was parked or passed over, and of which only some is read again, nothing is applied."""
        rows = self.connection.execute(query("letters_read_again"), self._relay).fetchall()
        self._again = {(source, offset): is_anew for source, offset, is_anew in rows}

    def _places(self, unit: Unit) -> Iterator[tuple[int, int]]:
        """Of its records that have letters and come again."""
        sources = self.planner.sources
        for records in self.large.pieces(unit) if unit.unloaded else [unit.records]:
            for record in records:
                place = (sources[record.topic, record.partition], record.offset)
                if place in self._again:
                    yield place

    def _without_decided(self, units: Sequence[Unit]) -> list[Unit]:
        return [unit for unit in units if all(self._again[place] for place in self._places(unit))]

    def _forget_letters(self, units: Sequence[Unit]) -> None:
        """Of those that are judged anew."""
        places = [place for unit in units for place in self._places(unit)]
        if places:
            values = {"sources": [source for source, _ in places], "offsets": [offset for _, offset in places]}
            self.connection.execute(query("forget_letters"), self._relay | values)

    def settle(self, owned: Collection[int], check: Callable[[Connection], None]) -> None:
        """Applies what was queued for it, and what was only held behind letters that are settled now, in order.
        `check` raises, as the last statement before each commit, where the sources are no longer ours.
        """
        seen = (self.connection.execute(query("sum_of_letters"), self._relay).fetchone(), frozenset(owned))
        if seen == self._settled:
            return
        rows = self.connection.execute(query("open_letters"), self._relay).fetchall()
        blocked: set[Hold] = set()
        replayed = False
        for unit, group in groupby(rows, key=itemgetter(0)):
            letters = list(group)
            holds = {tuple(hold) for _, _, each, _ in letters for hold in each}
            is_ours = all(source in owned for *_, source in letters)
            if any(state == "parked" for _, state, *_ in letters) or holds & blocked or not is_ours:
                blocked |= holds
                continue
            replayed = True
            if not self._replay(unit, check):
                blocked |= holds
        self.load_holds()
        # What was replayed has changed the sum itself: the next look sees whether somebody else has, too.
        self._settled = None if replayed else seen

    def _replay(self, unit: int, check: Callable[[Connection], None]) -> bool:
        """False: it is parked, again or by somebody meanwhile."""
        asked = self._relay | {"unit": unit}
        with self.connection.transaction():
            letters = self.connection.execute(query("take_letters"), asked).fetchall()
            if not letters or any(letter[0] == "parked" for letter in letters):
                return not letters
            again = Unit([_record(letter) for letter in letters], letters[0][8], letters[0][9])
            # They come long after what stood behind them: the guard has to be asked.
            high_offsets = {letter[10]: letter[3] + 1 for letter in letters}
            strict = replace(self.planner, on_error="park", high_offsets=high_offsets)
            refused: list[str] = []

            def save(connection: Connection, done: Plan) -> None:
                refused[:] = [letter.error for letter in done.letters]
                state, error = ("parked", storable(refused[0])) if refused else ("replayed", None)
                connection.execute(query("settle_letters"), asked | {"state": state, "error": error})
                check(connection)

            none: frozenset[Hold] = frozenset()
            self.sink.apply(strict, [again], make_plan(strict, [again], none), none, save)
        return not refused


def _record(letter: tuple[Any, ...]) -> Record:
    _, topic, partition, offset, record_at, key, value, headers, *_ = letter
    named = [(name, None if raw is None else b64decode(raw)) for name, raw in headers]
    return Record(topic, partition, offset, round(record_at.timestamp() * 1000), key, value, named)
