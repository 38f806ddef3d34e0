"""The SQL that brings staged rows into a target table, made once for each. Identifiers only through psycopg.sql.

A target has two staging tables in the session: `up` holds rows (c0, c1, … as in the mapping, s source, o offset),
`down` holds keys (k0, k1, …, s, o, d: it is a delete; else only to be remembered). With an ordering column both have
its value as v, and the newest (v, s, o) of a row wins; otherwise sources follow one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from psycopg import sql

from relay.config import GUARD_COLUMNS, ORDERING_COLUMN
from relay.encoding import codec

if TYPE_CHECKING:
    from relay.types import Target

ORDERING_LOCK = 0x6F72_6465
MARKS = ["s integer", "o bigint"]
OLD_VERSION = "(t.oncebox_ordering, t.oncebox_source, t.oncebox_offset)"
NEW_VERSION = "(EXCLUDED.oncebox_ordering, EXCLUDED.oncebox_source, EXCLUDED.oncebox_offset)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statements:
    create_up: sql.Composed
    create_down: sql.Composed | None
    copy_up: sql.Composed
    copy_down: sql.Composed | None
    # Straight into the target, where nothing has to be cast on the way.
    copy_new: sql.Composed | None
    # What it takes for granted: asked first, and kept as it is until the commit. Its last result has no rows, only
    # the columns that are filled, with their types; `types` tells those alone.
    before_copy: sql.Composed
    types: sql.Composed
    # Rows that are new, or newer than what the same source wrote.
    upsert: sql.Composed
    # With the guard: what of them belongs to other sources; then the rows are taken over.
    remember_taken: sql.Composed | None
    take_over: sql.Composed | None
    delete: sql.Composed | None
    remember_deleted_taken: sql.Composed | None
    remember_down: sql.Composed | None
    # With an ordering column, first of all: others who write the table wait. A delete that another has not committed
    # yet cannot be seen, and a row that is not there cannot be locked.
    lock: sql.Composed | None
    # In a replay (with an ordering column: always), before anything else: what was written or deleted since is not
    # written again.
    forget_up: sql.Composed | None
    forget_down: sql.Composed | None
    truncate: sql.Composed


def _raw(text: str) -> sql.SQL:
    """Of text that is ours or PostgreSQL's own name of a type."""
    return sql.SQL(text)


def _comma(parts: list[sql.Composable]) -> sql.Composed:
    return sql.SQL(", ").join(parts)


class _Maker:
    def __init__(self, target: Target, number: int) -> None:
        self.target = target
        self.table = sql.Identifier(target.table.schema, target.table.name)
        self.up = sql.Identifier(f"oncebox_up_{number}")
        self.down = sql.Identifier(f"oncebox_down_{number}")
        self.codecs = [codec(column.type, column.unit, column.base) for column in target.columns]
        self.names = [sql.Identifier(column.name) for column in target.columns]
        names = [column.name for column in target.columns]
        self.key_at = [names.index(name) for name in target.key]
        self.keys = [sql.Identifier(name) for name in target.key]
        # A staged column's way into the target.
        self.rows = [self._cast(at, f"s.c{at}") for at in range(len(names))]
        self.up_keys = [self.rows[at] for at in self.key_at]
        self.down_keys = [self._cast(at, f"s.k{place}") for place, at in enumerate(self.key_at)]
        # What stands behind a staged row's columns, and is written with them in this order.
        self.marks = [*([] if target.ordering is None else ["v bigint"]), *(MARKS if target.guard else [])]

    def _cast(self, at: int, staged: str) -> sql.Composable:
        cast_as = self.codecs[at].cast
        return _raw(cast_as.format(staged) if cast_as else staged)

    def create(self, name: sql.Identifier, columns: list[str]) -> sql.Composed:
        return sql.SQL("CREATE TEMPORARY TABLE IF NOT EXISTS {} ({}) ON COMMIT DELETE ROWS").format(
            name, _comma([_raw(each) for each in columns])
        )

    def same_row(self, staged_keys: list[sql.Composable]) -> sql.Composed:
        pairs = [sql.SQL("t.{} = {}").format(key, staged) for key, staged in zip(self.keys, staged_keys, strict=True)]
        return sql.SQL(" AND ").join(pairs)

    def row_key(self, keys: list[sql.Composable]) -> sql.Composed:
        return sql.SQL("jsonb_build_array({})").format(_comma(keys))

    def remember(self, what: sql.Composed) -> sql.Composed:
        if self.target.ordering is not None:
            return sql.SQL(
                "INSERT INTO oncebox.tombstone AS b (target_table, row_key, source, record_offset, ordering) {} "
                "ON CONFLICT (target_table, row_key, source) DO UPDATE SET record_offset = EXCLUDED.record_offset, "
                "ordering = EXCLUDED.ordering WHERE b.ordering IS NULL "
                "OR (b.ordering, b.record_offset) < (EXCLUDED.ordering, EXCLUDED.record_offset)"
            ).format(what)
        return sql.SQL(
            "INSERT INTO oncebox.tombstone AS b (target_table, row_key, source, record_offset) {} "
            "ON CONFLICT (target_table, row_key, source) DO UPDATE SET record_offset = EXCLUDED.record_offset "
            "WHERE b.record_offset < EXCLUDED.record_offset"
        ).format(what)

    def remember_taken(self, staged: sql.Identifier, keys: list[sql.Composable], also: str = "") -> sql.Composed:
        chosen = sql.SQL(
            "SELECT {}, {}, t.oncebox_source, t.oncebox_offset FROM {} AS t JOIN {} AS s ON {} "
            "WHERE t.oncebox_source <> s.s {} ORDER BY 2"
        ).format(
            sql.Literal(str(self.target.table)),
            self.row_key([sql.SQL("t.{}").format(key) for key in self.keys]),
            self.table,
            staged,
            self.same_row(keys),
            _raw(also),
        )
        return self.remember(chosen)

    def written(self) -> list[sql.Identifier]:
        guard = GUARD_COLUMNS if self.target.guard else ()
        ordering = () if self.target.ordering is None else (ORDERING_COLUMN,)
        return [*self.names, *map(sql.Identifier, (*ordering, *guard))]

    def copy_new(self) -> sql.Composed | None:
        if any(each.cast for each in self.codecs) or self.target.ordering is not None:
            return None
        return sql.SQL("COPY {} ({}) FROM STDIN (FORMAT binary)").format(self.table, _comma(list(self.written())))

    def types(self) -> sql.Composed:
        """Of the table as it is now, whatever the transaction's snapshot is, and without the right to read it."""
        columns = [sql.SQL("(NULL::{}).{}").format(self.table, name) for name in self.written()]
        return sql.SQL("SELECT {} LIMIT 0").format(_comma(list(columns)))

    def before_copy(self) -> sql.Composed:
        """With a key it fails as the upsert would, were the constraint gone that keeps rows from coming twice. Both
        ways lock the table as COPY does: from then on nobody alters it.
        """
        lock = sql.SQL("LOCK TABLE ONLY {} IN ROW EXCLUSIVE MODE").format(self.table)
        if self.target.insert_mode == "upsert":
            lock = sql.SQL(
                "EXPLAIN INSERT INTO {0} ({1}) SELECT {1} FROM {0} WHERE false ON CONFLICT ({1}) DO NOTHING"
            ).format(self.table, _comma(list(self.keys)))
        return sql.SQL("{}; {}").format(lock, self.types())

    def upsert(self, where: str | None) -> sql.Composed:
        columns = self.written()
        head = sql.SQL("INSERT INTO {} AS t ({}) SELECT {} FROM {} AS s").format(
            self.table,
            _comma(list(columns)),
            _comma([*self.rows, *(_raw(f"s.{mark.split()[0]}") for mark in self.marks)]),
            self.up,
        )
        if self.target.insert_mode == "insert":
            return head
        changed = [each for each in columns if each not in self.keys]
        sets = _comma([sql.SQL("{0} = EXCLUDED.{0}").format(each) for each in changed])
        action = sql.SQL("DO UPDATE SET {}").format(sets) if changed else sql.SQL("DO NOTHING")
        # In the order of the keys: two writers then wait for each other, and never in a circle.
        return sql.SQL("{} ORDER BY {} ON CONFLICT ({}) {} {}").format(
            head, _comma(self.up_keys), _comma(list(self.keys)), action, _raw(f"WHERE {where}" if where else "")
        )

    def delete(self) -> sql.Composed:
        newer = "AND (t.oncebox_source IS DISTINCT FROM s.s OR t.oncebox_offset < s.o)" if self.target.guard else ""
        if self.target.ordering is not None:
            newer = f"AND (t.oncebox_ordering IS NULL OR {OLD_VERSION} < (s.v, s.s, s.o))"
        return sql.SQL("DELETE FROM {} AS t USING {} AS s WHERE {} AND s.d {}").format(
            self.table, self.down, self.same_row(self.down_keys), _raw(newer)
        )

    def remember_down(self) -> sql.Composed:
        text = "SELECT {}, {}, s.s, max(s.o) FROM {} AS s WHERE {} GROUP BY 2, 3 ORDER BY 2"
        if self.target.ordering is not None:
            text = (
                "SELECT DISTINCT ON (2, 3) {}, {}, s.s, s.o, s.v FROM {} AS s WHERE {} "
                "ORDER BY 2, 3, s.v DESC, s.o DESC"
            )
        typed = self._typed(self.down_keys)
        # What its type has to cut is no row's key.
        is_key = sql.SQL(" AND ").join(
            sql.SQL("{} = {}").format(key, staged) for key, staged in zip(typed, self.down_keys, strict=True)
        )
        chosen = _raw(text).format(sql.Literal(str(self.target.table)), self.row_key(typed), self.down, is_key)
        return self.remember(chosen)

    def forget(self, staged: sql.Identifier, keys: list[sql.Composable]) -> sql.Composed:
        newer = "b.source = s.s AND b.record_offset >= s.o"
        if self.target.ordering is not None:
            newer = "(b.ordering, b.source, b.record_offset) >= (s.v, s.s, s.o)"
        return sql.SQL(
            "DELETE FROM {} AS s USING oncebox.tombstone AS b WHERE b.target_table = {} AND b.row_key = {} AND {}"
        ).format(staged, sql.Literal(str(self.target.table)), self.row_key(self._typed(keys)), _raw(newer))

    def lock(self) -> sql.Composed:
        return sql.SQL("SELECT pg_advisory_xact_lock({}, hashtext({}))").format(
            sql.Literal(ORDERING_LOCK), sql.Literal(str(self.target.table))
        )

    def _typed(self, keys: list[sql.Composable]) -> list[sql.Composable]:
        """As the target's columns print: a shortened or padded type may differ from what is staged."""
        types = [_raw(self.target.columns[at].type) for at in self.key_at]
        return [sql.SQL("({})::{}").format(key, type_) for key, type_ in zip(keys, types, strict=True)]


def statements(target: Target, number: int) -> Statements:
    make = _Maker(target, number)
    with_keys = target.insert_mode == "upsert"
    is_ordered = target.ordering is not None
    remembers = target.guard and with_keys
    # Rows of other sources are taken over, unless the ordering column says who is newer.
    takes_over = remembers and not is_ordered
    same_source = "t.oncebox_source = EXCLUDED.oncebox_source"
    newer = f"t.oncebox_source IS NULL OR ({same_source} AND t.oncebox_offset < EXCLUDED.oncebox_offset)"
    if is_ordered:
        newer = f"t.oncebox_ordering IS NULL OR {OLD_VERSION} < {NEW_VERSION}"
    tables = [make.up, *([make.down] if with_keys else [])]
    keys = [f"k{place} {make.codecs[at].staged}" for place, at in enumerate(make.key_at)]
    # (A delete is told by source and offset even where rows do not remember them.)
    down_marks = make.marks or MARKS
    return Statements(
        create_up=make.create(make.up, [*(f"c{at} {each.staged}" for at, each in enumerate(make.codecs)), *make.marks]),
        create_down=make.create(make.down, [*keys, *down_marks, "d boolean"]) if with_keys else None,
        copy_up=sql.SQL("COPY {} FROM STDIN (FORMAT binary)").format(make.up),
        copy_down=sql.SQL("COPY {} FROM STDIN (FORMAT binary)").format(make.down) if with_keys else None,
        copy_new=make.copy_new(),
        before_copy=make.before_copy(),
        types=make.types(),
        upsert=make.upsert(newer if target.guard else None),
        remember_taken=make.remember_taken(make.up, make.up_keys) if takes_over else None,
        take_over=make.upsert("t.oncebox_source <> EXCLUDED.oncebox_source") if takes_over else None,
        delete=make.delete() if with_keys else None,
        remember_deleted_taken=make.remember_taken(make.down, make.down_keys, "AND s.d") if takes_over else None,
        remember_down=make.remember_down() if remembers else None,
        lock=make.lock() if is_ordered else None,
        forget_up=make.forget(make.up, make.up_keys) if remembers else None,
        forget_down=make.forget(make.down, make.down_keys) if takes_over else None,
        truncate=sql.SQL("TRUNCATE {}").format(_comma(list(tables))),
    )
