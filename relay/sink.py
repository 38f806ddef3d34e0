"""Writes a batch to PostgreSQL in one transaction: rows, dead letters, positions, and the check of the fence.

Either all of it is committed or nothing is. Where the database refuses rows, the unit to blame is found inside of the
same transaction (see splitting.py); that one goes the way of the policy. Blocking; one thread at a time.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.errors import UniqueViolation
from psycopg.pq import TransactionStatus

from relay.config import GUARD_TYPES
from relay.database import RETRY_AT_ONCE, Connection, headers_json, is_data_error, is_gone, told
from relay.encoding import COPY_HEADER, COPY_TRAILER, storable, time_of
from relay.plan import Hold, Plan, Planner, Round, StopError, Unit, where_of
from relay.queries import query
from relay.splitting import Split
from relay.statements import Statements, statements
from relay.types import RelayError, TableChangedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from psycopg import sql

    from relay.plan import Letter, Stage
    from relay.types import Target

RETRIES_MAX = 20
RETRY_S = 0.02
# After a batch with rows that were there already, so many others at most are not guessed to be without.
GUESS_PAUSE_MAX = 256
# So many records are planned long before the database ends an open transaction in which nothing happens. Of more, so
# many in a millisecond, on a slow machine.
PLANNED_AT_ONCE = 10_000
PLANNED_PER_MS = 5


class RefusedError(RelayError):
    """Some of it cannot be written as it is. Nothing was written."""


class _Guess:
    """Whether all rows of the next batch are new to their table. A wrong guess costs as much as the batch: so after
    each it is not made for twice as many batches as before.
    """

    def __init__(self, *, is_possible: bool) -> None:
        self._is_possible = is_possible
        self._pause = self._wait = 0

    def is_new(self) -> bool:
        self._wait -= 1
        return self._is_possible and self._wait < 0

    def was(self, *, right: bool) -> None:
        self._pause = 0 if right else min(max(self._pause * 2, 1), GUESS_PAUSE_MAX)
        self._wait = self._pause


class Sink:
    def __init__(
        self, connection: Connection, relay: str, targets: Sequence[Target], order: Sequence[int], letters_max: int
    ) -> None:
        self._connection = connection
        self._relay = relay
        self._targets = targets
        self._order = order
        self._letters_max = letters_max
        self._statements = [statements(target, number) for number, target in enumerate(targets)]
        # Staging tables that hold rows of this transaction already.
        self._staged: set[int] = set()
        # From this unit on, a row whose foreign key refers to nothing may find it in what comes later.
        self.waits_from: int | None = None
        tables = [str(target.table) for target in targets]
        self._has_deferrable = connection.execute(query("has_deferrable"), {"tables": tables}).fetchone() == (True,)
        plain = {name for (name,) in connection.execute(query("plain_tables"), {"tables": tables})}
        # As PostgreSQL numbers them: COPY has to send what the columns are, not what they were.
        self._types = [
            self._known_types(target, each) if each.copy_new is not None and table in plain else None
            for table, target, each in zip(tables, targets, self._statements, strict=True)
        ]
        self._guesses = [_Guess(is_possible=types is not None) for types in self._types]
        for each in self._statements:
            connection.execute(each.create_up)
            if each.create_down is not None:
                connection.execute(each.create_down)

    def apply(
        self,
        planner: Planner,
        units: Sequence[Unit],
        plan: Plan,
        holds: frozenset[Hold],
        save: Callable[[Connection, Plan], None],
    ) -> Plan:
        """The plan that was carried out: the given one, or, where the database refused rows, another. `save` comes last
        in the transaction.
        """
        return self._commit(units, lambda: self._write(planner, units, plan, holds), save)

    def apply_pieces(
        self,
        units: Sequence[Unit],
        plans: Callable[[], Iterable[Plan]],
        holds: frozenset[Hold],
        save: Callable[[Connection, Plan], None],
    ) -> Plan:
        """Several plans one after the other, made as they are wanted; none of them changes the holds. Raises
        RefusedError where not all of it can be written as it is; nothing is then.
        """

        def write() -> Plan:
            row_count = 0
            for plan in plans():
                if plan.letters:
                    raise RefusedError(plan.letters[0].error)
                try:
                    self._write_rounds([plan])
                except psycopg.Error as error:
                    if is_data_error(error):
                        raise RefusedError(told(error)) from error
                    raise
                row_count += plan.row_count
            return Plan(rounds=(), letters=(), is_replay=False, row_count=row_count, holds=holds)

        return self._commit(units, write, save)

    def _commit(
        self, units: Sequence[Unit], write: Callable[[], Plan], save: Callable[[Connection, Plan], None]
    ) -> Plan:
        for attempt in range(RETRIES_MAX):
            if self._connection.info.transaction_status is TransactionStatus.IDLE:
                # Staging tables are emptied with each commit. (A dry run is one transaction around all.)
                self._staged.clear()
            try:
                with self._connection.transaction():
                    done = write()
                    save(self._connection, done)
                return done
            except RETRY_AT_ONCE:
                if attempt + 1 == RETRIES_MAX:
                    raise
                time.sleep(RETRY_S * (attempt + 1))
            except psycopg.Error as error:
                if is_gone(error) or isinstance(error, psycopg.DataError):
                    # (Rows that are refused do not come here: see _write. What stands beside them will never fit.)
                    tables = ", ".join(str(target.table) for target in self._targets)
                    raise RelayError(
                        f"{_begin_of(units) or self._relay}: {told(error)} "
                        f"(tables {tables}): mend it and start the relay again; nothing was passed over"
                    ) from error
                raise
        raise RelayError("unreachable")

    # --- rows -------------------------------------------------------------------------------------------------------

    def _write(self, planner: Planner, units: Sequence[Unit], plan: Plan, holds: frozenset[Hold]) -> Plan:
        """Tries the whole; where the database refuses it, it is found out what of it is to blame."""
        refused = self._try([plan])
        if refused is None:
            return plan
        count = sum(len(unit.records) for unit in units)
        if count > PLANNED_AT_ONCE:
            self._connection.execute(query("allow_planning"), {"more_ms": count // PLANNED_PER_MS})
        split = Split(planner, units, holds, self._try, waits_from=self.waits_from)
        return split.run(refused)

    def _try(self, plans: Iterable[Plan]) -> psycopg.Error | None:
        """Why the database refuses it: then nothing of it is written."""
        try:
            with self._connection.transaction():
                self._write_rounds(plans)
        except psycopg.Error as error:
            if not is_data_error(error):
                raise
            return error
        return None

    def _write_rounds(self, plans: Iterable[Plan]) -> None:
        if self._has_deferrable:
            self._connection.execute("SET CONSTRAINTS ALL DEFERRED")
        for plan in plans:
            for each in plan.rounds:
                self._write_round(each, is_replay=plan.is_replay)
        if self._has_deferrable:
            # Now, while it can still be told which unit is to blame.
            self._connection.execute("SET CONSTRAINTS ALL IMMEDIATE")

    def _write_round(self, written: Round, *, is_replay: bool) -> None:
        execute = self._connection.execute
        for at in self._order:
            stage, each = written.get(at), self._statements[at]
            if stage is None or not (stage.last or stage.rows):
                continue
            if each.lock is not None:
                execute(each.lock)
            if not is_replay and self._insert_new(at, stage):
                continue
            if at in self._staged:
                execute(each.truncate)
            self._staged.add(at)
            count = self._stage(stage, each)
            if each.forget_up is not None and (is_replay or each.lock is not None):
                execute(each.forget_up)
            if each.forget_down is not None and is_replay:
                execute(each.forget_down)
            if count:
                self._upsert(each, count)
        for at in reversed(self._order):
            stage, each = written.get(at), self._statements[at]
            if stage is not None and stage.has_down and each.delete is not None:
                if each.remember_deleted_taken is not None:
                    execute(each.remember_deleted_taken)
                execute(each.delete)
                if each.remember_down is not None:
                    execute(each.remember_down)

    def _insert_new(self, at: int, stage: Stage) -> bool:
        """Straight into the table, if none of its rows is there: that is less than half the work. False: nothing is
        done. Only where no earlier record can come again (a replay asks what was deleted since).
        """
        each, guess = self._statements[at], self._guesses[at]
        if stage.has_down or each.copy_new is None or not guess.is_new():
            return False
        try:
            with self._connection.transaction():
                if self._types_told(each.before_copy) != self._types[at]:
                    table = self._targets[at].table
                    raise TableChangedError(f"{table} was altered: begins anew with its columns as they are")
                self._copy(each.copy_new, stage.rows or [row for _, _, row, _ in stage.last.values()])
        except UniqueViolation:
            guess.was(right=False)
            return False
        guess.was(right=True)
        return True

    def _types_told(self, statement: sql.Composed) -> list[tuple[int, int]]:
        # (Prepared, it would fail where a type has changed.)
        cursor = self._connection.execute(statement, prepare=False)
        while cursor.nextset():
            pass
        told = cursor.pgresult
        return [] if told is None else [(told.ftype(at), told.fmod(at)) for at in range(told.nfields)]

    def _known_types(self, target: Target, each: Statements) -> list[tuple[int, int]] | None:
        """None: they are not what rows are made for."""
        found = self._types_told(each.types)
        values = {"ids": [number for number, _ in found], "modifiers": [modifier for _, modifier in found]}
        names = [name for (name,) in self._connection.execute(query("type_names"), values)]
        guard = GUARD_TYPES if target.guard else ()
        return found if names == [*(column.type for column in target.columns), *guard] else None

    def _stage(self, stage: Stage, each: Statements) -> int:
        """How many rows are to be upserted."""
        rows = stage.rows or [row for _, _, row, is_delete in stage.last.values() if not is_delete]
        if rows:
            self._copy(each.copy_up, rows)
        if each.copy_down is not None and stage.has_down:
            downs = [row for _, _, row, is_delete in stage.last.values() if is_delete]
            self._copy(each.copy_down, [*downs, *stage.superseded])
        return len(rows)

    def _copy(self, statement: Any, rows: Sequence[bytes]) -> None:
        with self._connection.cursor().copy(statement) as copy:
            copy.write(b"".join([COPY_HEADER, *rows, COPY_TRAILER]))

    def _upsert(self, each: Statements, count: int) -> None:
        done = self._connection.execute(each.upsert).rowcount
        if done < count and each.take_over is not None and each.remember_taken is not None:
            # Refused as older, or another source's: those are taken over, and what that wrote last is remembered.
            self._connection.execute(each.remember_taken)
            self._connection.execute(each.take_over)

    # --- dead letters -----------------------------------------------------------------------------------------------

    def write_letters(self, planner: Planner, letters: Sequence[Letter]) -> None:
        if not letters:
            return
        execute = self._connection.execute
        self._check_room(letters)
        units: dict[int, int] = {}
        for letter in letters:
            (new_id,) = execute(query("new_letter_unit")).fetchone() or (0,)
            record = letter.record
            execute(
                query("save_letter"),
                {
                    "id": new_id,
                    "relay": self._relay,
                    "source": planner.sources[record.topic, record.partition],
                    "record_offset": record.offset,
                    "record_at": time_of(max(record.timestamp_ms, 0)),
                    "key": record.key,
                    "value": record.value,
                    "headers": headers_json([(storable(name), raw) for name, raw in record.headers]),
                    "transactional_id": letter.transactional_id,
                    "number": letter.number,
                    "unit": units.setdefault(letter.unit, new_id),
                    "error": storable(letter.error),
                    "state": letter.state,
                    "holds": _json(letter.holds),
                },
            )

    def _check_room(self, letters: Sequence[Letter]) -> None:
        """Before any is written: a transaction may have more records than there is time and room for."""
        opened = [letter for letter in letters if letter.state != "skipped"]
        (count,) = self._connection.execute(query("count_open_letters"), {"relay": self._relay}).fetchone() or (0,)
        if opened and count + len(opened) > self._letters_max:
            raise StopError(
                f"{where_of(opened[0].record)}: {opened[0].error}; these would be {len(opened)} dead letters, and "
                f"{count} wait already (limits.dead_letters is {self._letters_max}): "
                "see `oncebox relay dead-letters list`"
            )


def _json(holds: Sequence[Hold]) -> Any:
    from psycopg.types.json import Jsonb

    return Jsonb([list(hold) for hold in holds])


def _begin_of(units: Sequence[Unit]) -> str:
    """Empty: there is nothing, or nothing of it is in memory."""
    first = next((record for unit in units for record in unit.records), None)
    return "" if first is None else where_of(first)
