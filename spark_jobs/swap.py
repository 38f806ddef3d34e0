"""The SQL with which a backfill makes a table equal to what is staged, inside a transaction of its caller, who has
locked the table. Rows that are right already are not written; columns that are not the relay's stay as they are.

Whatever would have to be guessed is refused: no row is deleted that nobody could make again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from spark_jobs.cut import waits
from spark_jobs.database import OFFSET, SOURCE, composed, in_cut
from spark_jobs.encoding import sql_row
from spark_jobs.errors import CannotCheckError, ReconcileError
from spark_jobs.followers import refuse_followers
from spark_jobs.values import text_sql

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from spark_jobs.columns import Column
    from spark_jobs.cut import SourceCut
    from spark_jobs.targets import Table

Connection = psycopg.Connection[Any]
# `newest`: as staged, the last record of each key in each source. `made`: the rows that there should be.
# `gone`: where the rows stand that are to be deleted.
NEWEST, MADE, GONE = (sql.Identifier("pg_temp", f"oncebox_backfill_{name}") for name in ("newest", "made", "gone"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    rows: int  # in the table afterwards
    deleted: int
    changed: int
    inserted: int


class Swap:
    def __init__(self, connection: Connection, table: Table, sources: Sequence[SourceCut]) -> None:
        self._connection = connection
        self._table = table
        self._target = table.first
        self._sources = sources
        columns = self._target.columns
        guard = [SOURCE, OFFSET] if self._target.guard else []
        self._written = [sql.Identifier(name) for name in (*(column.name for column in columns), *guard)]
        self._staged = [*(f"c{at}" for at in range(len(columns))), *(["s", "o"] if guard else [])]
        of_row = [sql.SQL("t.{}").format(name).as_string(None) for name in self._written]
        self._parts: dict[str, sql.Composable] = {
            "t": sql.Identifier(table.schema, table.table),
            "newest": NEWEST,
            "made": MADE,
            "gone": GONE,
            "key": _identity(table, [f"t.{_quoted(column)}" for column in self._target.key], "t."),
            "row": _whole(columns, of_row),
            "made_row": _whole(columns, [f"m.{name}" for name in self._staged]),
            "names": sql.SQL(", ").join(self._written),
            "values": composed(", ".join(f"m.{name}" for name in self._staged)),
        }

    def carry_out(self, staged: sql.Identifier, compacted: Collection[str], progress: Callable[[str], None]) -> Changes:
        try:
            self._make(staged)
            self._refuse_what_cannot_be_made(compacted)
            deleted, changed, inserted = self._delete(), self._update(), self._insert()
            self._remember_taken()
            progress(f"{self._table.name}: {deleted} rows deleted, {changed} changed, {inserted} inserted; verifying")
            return Changes(rows=self._verified(), deleted=deleted, changed=changed, inserted=inserted)
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            said = error.diag.message_primary or type(error).__name__
            raise ReconcileError(f"{self._table.name}: PostgreSQL refuses: {said}; nothing is changed") from error

    def _run(self, text: str, **more: sql.Composable) -> int:
        return self._connection.execute(composed(text).format(**self._parts, **more)).rowcount

    def _count(self, text: str, **more: sql.Composable) -> int:
        row = self._connection.execute(composed(text).format(**self._parts, **more)).fetchone()
        return int(row[0]) if row else 0

    # --- what there should be -----------------------------------------------------------------------------------------

    def _make(self, staged: sql.Identifier) -> None:
        self._run(
            "CREATE TEMPORARY TABLE {newest} ON COMMIT DROP AS SELECT DISTINCT ON (key_text, source) *, "
            "false AS is_past FROM {staged} "
            "ORDER BY key_text, source, record_offset DESC",
            staged=staged,
        )
        self._forget_what_was_waited_for()
        unknown = self._count(
            "SELECT count(*) FROM {newest} WHERE key_text IS NULL OR (texts IS NULL AND NOT is_delete)"
        )
        if unknown:
            raise ReconcileError(f"{self._table.name}: {unknown} records have keys or values that cannot be told here")
        tied = self._count(
            "SELECT count(*) FROM (SELECT FROM (SELECT key_text, rank() OVER (PARTITION BY key_text "
            "ORDER BY record_ms DESC) AS place FROM {newest} WHERE NOT is_past) AS r WHERE place = 1 GROUP BY key_text "
            "HAVING count(*) > 1) AS ties"
        )
        if tied:
            raise ReconcileError(
                f"{self._table.name}: {tied} keys have records of the same time in two partitions: nobody can tell "
                "which of them is newer"
            )
        texts = [text_sql(column, composed(f"texts[{at}]")) for at, column in enumerate(self._target.columns, start=1)]
        columns = [sql.SQL("{} AS {}").format(text, sql.Identifier(f"c{at}")) for at, text in enumerate(texts)]
        self._run(
            "CREATE TEMPORARY TABLE {made} ON COMMIT DROP AS "
            "SELECT key_text, source AS s, record_offset AS o, {columns} "
            "FROM (SELECT DISTINCT ON (key_text) * FROM {newest} WHERE NOT is_past ORDER BY key_text, record_ms DESC) "
            "AS n WHERE NOT is_delete",
            columns=sql.SQL(", ").join(columns),
        )
        for name in (NEWEST, MADE):
            self._connection.execute(sql.SQL("ANALYZE {}").format(name))
        places = {column.name: at for at, column in enumerate(self._target.columns)}
        of_made = _identity(self._table, [f"m.c{places[column.name]}" for column in self._target.key], "", "m.s", "m.o")
        differing = self._count("SELECT count(*) FROM {made} AS m WHERE {of_made} <> key_text", of_made=of_made)
        if differing:
            raise ReconcileError(
                f"{self._table.name}: Spark and PostgreSQL read the keys of {differing} records differently; "
                "let the relay rebuild it: oncebox relay rebuild"
            )

    def _forget_what_was_waited_for(self) -> None:
        """Of a key that has moved to a partition that was added: what the relay had applied before it began there."""
        ends = [(new, old, end) for new, each in waits(self._sources).items() for old, end in each.items()]
        if ends:
            self._run(
                "UPDATE {newest} AS n SET is_past = true FROM {newest} AS o, (VALUES {ends}) AS w (new, old, until) "
                "WHERE o.key_text = n.key_text AND o.source = w.new AND n.source = w.old AND n.record_offset < w.until",
                ends=sql.SQL(", ").join(sql.SQL("({}, {}, {}::bigint)").format(*each) for each in ends),
            )

    # --- what must not be lost ----------------------------------------------------------------------------------------

    def _refuse_what_cannot_be_made(self, compacted: Collection[str]) -> None:
        if not self._target.guard:
            return  # such a table is rebuilt only where all that was ever applied can be read
        started_late = any(source.position.start for source in self._sources)
        whens = sql.SQL(" ").join(
            sql.SQL("WHEN {} THEN {} >= {}").format(
                source.position.source, sql.SQL("t.{}").format(sql.Identifier(OFFSET)), source.position.start
            )
            for source in self._sources
        )
        older = self._count(
            "SELECT count(*) FROM {t} AS t WHERE (CASE t.{source} {whens} ELSE false END) IS NOT TRUE "
            "AND (t.{source} IS NOT NULL OR {started_late})",
            source=sql.Identifier(SOURCE),
            whens=whens,
            started_late=sql.Literal(started_late),
        )
        if older:
            raise ReconcileError(
                f"{self._table.name}: {older} rows come from before the relay's start or from elsewhere, and cannot be "
                "made again: delete them first if they are not wanted"
            )
        of_compacted = [source for source in self._sources if source.position.topic in compacted]
        gone = self._count(
            "SELECT count(*) FROM {t} AS t WHERE {in_cut} AND NOT EXISTS (SELECT FROM {newest} AS n "
            "WHERE n.key_text = {key} AND n.source = t.{source} AND n.record_offset >= t.{offset})",
            in_cut=in_cut(self._table, of_compacted),
            source=sql.Identifier(SOURCE),
            offset=sql.Identifier(OFFSET),
        )
        if gone:
            raise CannotCheckError(
                f"{self._table.name}: {gone} rows name records that their compacted topic does not have any more, and "
                "nobody can tell what they should be: let the relay catch up and try again; nothing is changed"
            )

    # --- the rows -----------------------------------------------------------------------------------------------------

    def _delete(self) -> int:
        """Rows that should not be there, and second copies, where somebody has dropped the constraint."""
        self._run(
            "CREATE TEMPORARY TABLE {gone} ON COMMIT DROP AS SELECT e.leaf, e.row_at FROM (SELECT t.tableoid AS leaf, "
            "t.ctid AS row_at, {key} AS key_text, row_number() OVER (PARTITION BY {key}) AS copy FROM {t} AS t) AS e "
            "LEFT JOIN {made} AS m ON m.key_text = e.key_text WHERE e.copy > 1 OR m.key_text IS NULL"
        )
        # The table's lock keeps nobody from referring to a row: that takes a lock of the row.
        place = composed("(tableoid, ctid) IN (SELECT leaf, row_at FROM {gone})").format(gone=GONE)
        self._run("SELECT FROM {t} WHERE {place} FOR UPDATE", place=place)
        refuse_followers(self._connection, self._table.schema, self._table.table, place)
        return self._run("DELETE FROM {t} WHERE {place}", place=place)

    def _update(self) -> int:
        pairs = zip(self._written, self._staged, strict=True)
        return self._run(
            "UPDATE {t} AS t SET {sets} FROM {made} AS m "
            "WHERE {key} = m.key_text AND {row} IS DISTINCT FROM {made_row}",
            sets=sql.SQL(", ").join(sql.SQL("{} = {}").format(name, composed(f"m.{made}")) for name, made in pairs),
        )

    def _insert(self) -> int:
        return self._run(
            "INSERT INTO {t} ({names}) SELECT {values} FROM {made} AS m "
            "WHERE NOT EXISTS (SELECT FROM {t} AS t WHERE {key} = m.key_text)"
        )

    def _remember_taken(self) -> None:
        """Of a key that has moved to another partition: what the former had last, as the version guard wants it."""
        if not (self._target.guard and self._target.is_keyed):
            return
        keys = sql.SQL(", ").join(sql.SQL("t.{}").format(sql.Identifier(column.name)) for column in self._target.key)
        self._run(
            "INSERT INTO oncebox.tombstone AS b (target_table, row_key, source, record_offset) "
            "SELECT {name}, jsonb_build_array({keys}), n.source, n.record_offset FROM {t} AS t "
            "JOIN {newest} AS n ON n.key_text = {key} WHERE n.source <> t.{source} "
            "ON CONFLICT (target_table, row_key, source) DO UPDATE SET record_offset = EXCLUDED.record_offset "
            "WHERE b.record_offset < EXCLUDED.record_offset",
            name=sql.Literal(f'"{self._table.schema}"."{self._table.table}"'),
            keys=keys,
            source=sql.Identifier(SOURCE),
        )

    def _verified(self) -> int:
        """A trigger or a rule may have made something else of it."""
        rows, wanted = self._count("SELECT count(*) FROM {t}"), self._count("SELECT count(*) FROM {made}")
        equal = self._count(
            "SELECT count(*) FROM {t} AS t JOIN {made} AS m ON {key} = m.key_text "
            "WHERE {row} IS NOT DISTINCT FROM {made_row}"
        )
        if not rows == wanted == equal:
            raise ReconcileError(
                f"{self._table.name}: {wanted} rows should be there, {rows} are, {equal} of them as they should; all "
                "is rolled back: does a trigger or a rule change what is written?"
            )
        return rows


def _quoted(column: Column) -> str:
    return sql.Identifier(column.name).as_string(None)


def _identity(table: Table, keys: Sequence[str], alias: str, source: str = SOURCE, offset: str = OFFSET) -> sql.SQL:
    """What a row is found by, as it is staged: its key; where each record is a row of its own, the record's place."""
    if table.first.is_keyed:
        return composed(f'({sql_row(table.first.key, keys)}) COLLATE "C"')
    return composed(f"(coalesce({alias}{source}::text, '~') || ';' || coalesce({alias}{offset}::text, '~') || ';')")


def _whole(columns: Sequence[Column], names: Sequence[str]) -> sql.SQL:
    """All of a row that is the relay's: the columns' canonical text (json has no equality), and the guard's. Compared
    byte by byte, whatever the columns' own collations call equal.
    """
    text = f'({sql_row(columns, names[: len(columns)])}) COLLATE "C"'
    return composed(f"ROW({', '.join([text, *names[len(columns) :]])})")
