"""Finds the units to blame where the database refuses a batch: in halves, inside of the batch's own transaction.

What all units together have may be lacking while only some are written: so one whose foreign key refers to nothing is
set aside, with all that stand behind it on its rows, and tried again after the others. It is judged only when nothing
of what is left can be written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from psycopg.errors import ExclusionViolation, ForeignKeyViolation, RestrictViolation, UniqueViolation

from relay.database import told
from relay.plan import Plan, Unit, make_plan, rows_of, where_of
from relay.types import RelayError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import psycopg

    from relay.plan import Hold, Letter, Planner

# One by one, so many records are planned at a time.
CHUNK_RECORDS = 1_000
# Where many are to be skipped, and others stand behind them: so many are judged each with a pass of its own.
JUDGED_ALONE_MAX = 10
# Each time that some are judged, all that is left is planned anew: after so many times the rest is judged as it comes.
JUDGEMENTS_MAX = 20
# A row refers to nothing, or is referred to. (The latter under RESTRICT has an error of its own since PostgreSQL 18.)
REFERENCES = (ForeignKeyViolation, RestrictViolation)


class MissingReferenceError(RelayError):
    """A row refers to one that is not there, and may yet come. Nothing was written."""

    def __init__(self, message: str, unit_count: int) -> None:
        """`unit_count`: of all that were tried."""
        super().__init__(message)
        self.unit_count = unit_count


class Split:
    def __init__(
        self,
        planner: Planner,
        units: Sequence[Unit],
        holds: frozenset[Hold],
        write: Callable[[Iterable[Plan]], psycopg.Error | None],
        *,
        waits_from: int | None,
    ) -> None:
        """`write`: all of it, or why the database refuses it. `waits_from`: from this unit on, none is judged for lack
        of a row that it refers to.
        """
        self._planner = planner
        self._units = units
        self._write = write
        self._waits_from = waits_from
        # After what is written and judged so far.
        self._holds = holds
        self._letters: list[Letter] = []
        self._row_count = 0
        self._settled_count = 0
        self._judgement_count = 0
        # By number, those that are set aside: why, or None if only because they stand behind another one.
        self._aside: dict[int, psycopg.Error | None] = {}
        self._aside_rows: set[Hold] = set()
        self._rows: dict[int, set[Hold]] = {}

    def run(self, refused: psycopg.Error) -> Plan:
        """What was carried out. `refused`: why the database does not take all of it at once."""
        self._divide(range(len(self._units)), refused)
        # Ends, for each turn writes or judges one at least.
        while self._aside:
            numbers = sorted(self._aside)
            self._aside, self._aside_rows = {}, set()
            before = self._settled_count
            self._take(numbers)
            if self._settled_count == before:
                self._judge()
        # In the order of the units: it is the order in which they are replayed.
        letters = sorted(self._letters, key=lambda letter: letter.unit)
        return Plan(rounds=(), letters=letters, is_replay=False, row_count=self._row_count, holds=self._holds)

    # --- written, or set aside --------------------------------------------------------------------------------------

    def _take(self, numbers: Sequence[int]) -> None:
        if self._aside:
            numbers = [number for number in numbers if not self._stands_behind(number)]
        if not numbers:
            return
        plan = make_plan(self._planner, [self._units[number] for number in numbers], self._holds)
        refused = self._write([plan])
        if refused is None:
            self._settle(numbers, plan)
        else:
            self._divide(numbers, refused)

    def _divide(self, numbers: Sequence[int], refused: psycopg.Error) -> None:
        if len(numbers) == 1:
            self._take_alone(numbers[0], refused)
            return
        middle = len(numbers) // 2
        self._take(numbers[:middle])
        self._take(numbers[middle:])

    def _take_alone(self, number: int, refused: psycopg.Error) -> None:
        """Once more record by record: an order in which, say, a unique value moves from one row to another."""
        unit = self._units[number]
        if len(unit.records) > 1:
            row_counts: list[int] = []
            again = self._write(self._one_by_one(unit, row_counts))
            if again is None:
                self._settled_count += 1
                self._row_count += sum(row_counts)
                return
            if isinstance(again, REFERENCES):
                refused = again
        may_yet_go = isinstance(refused, REFERENCES) or (
            # It may be what another one gives up that is set aside.
            self._aside and isinstance(refused, UniqueViolation | ExclusionViolation)
        )
        if may_yet_go and self._judgement_count < JUDGEMENTS_MAX:
            self._set_aside(number, refused)
        else:
            self._check_waiting({number: refused})
            self._refuse({number: refused})

    def _one_by_one(self, unit: Unit, row_counts: list[int]) -> Iterator[Plan]:
        """Planned as it is written: the database ends a transaction in which nothing happens for long. (Nothing of the
        unit is bad or held, or there would have been nothing to refuse.)
        """
        for first in range(0, len(unit.records), CHUNK_RECORDS):
            some = unit._replace(records=unit.records[first : first + CHUNK_RECORDS])
            plan = make_plan(self._planner, [some], self._holds, one_by_one=True)
            row_counts.append(plan.row_count)
            yield plan

    def _stands_behind(self, number: int) -> bool:
        """Whether it shares a row with one that is set aside: then it is, too."""
        if self._aside_rows.isdisjoint(self._rows_of(number)):
            return False
        self._set_aside(number, None)
        return True

    def _set_aside(self, number: int, refused: psycopg.Error | None) -> None:
        self._aside[number] = refused
        self._aside_rows |= self._rows_of(number)

    def _rows_of(self, number: int) -> set[Hold]:
        rows = self._rows.get(number)
        if rows is None:
            records = self._units[number].records
            rows = self._rows[number] = {row for record in records for row in rows_of(self._planner, record)}
        return rows

    # --- judged -----------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        """Nothing of what is set aside can be written."""
        failed = {number: refused for number, refused in sorted(self._aside.items()) if refused is not None}
        self._check_waiting(failed)
        first = self._first_in_the_way(failed)
        if first is not None and self._judgement_count < JUDGED_ALONE_MAX:
            failed = {first: failed[first]}
        self._judgement_count += 1
        for number in failed:
            del self._aside[number]
        self._refuse(failed)

    def _check_waiting(self, failed: Mapping[int, psycopg.Error]) -> None:
        for number, refused in failed.items():
            if self._waits_from is not None and number >= self._waits_from and isinstance(refused, REFERENCES):
                where = where_of(self._units[number].records[0])
                raise MissingReferenceError(f"{where}: {told(refused)}", len(self._units)) from refused

    def _first_in_the_way(self, failed: Iterable[int]) -> int | None:
        """Without it others may be written, which may be what the rest lacks. (Not behind one that is parked.)"""
        if self._planner.on_error == "park":
            return None
        behind = {row for number, refused in self._aside.items() if refused is None for row in self._rows_of(number)}
        return next((number for number in failed if not behind.isdisjoint(self._rows_of(number))), None)

    def _refuse(self, refused: Mapping[int, psycopg.Error]) -> None:
        """All of them with one plan: they may be many, and the database hears nothing meanwhile."""
        units, errors = [self._units[number] for number in refused], [told(error) for error in refused.values()]
        self._settle([*refused], make_plan(self._planner, units, self._holds, refused=errors))

    def _settle(self, numbers: Sequence[int], plan: Plan) -> None:
        self._letters += [letter._replace(unit=numbers[letter.unit]) for letter in plan.letters]
        self._row_count += plan.row_count
        self._holds = plan.holds
        self._settled_count += len(numbers)
