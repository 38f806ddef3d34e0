"""SQL of the database's side: row digests, checksums by bucket, what lies outside of the cut, rows looked up again.

Identifiers and values only through psycopg.sql. Rows stay in the database; what comes out are sums per bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from spark_jobs.columns import Kind
from spark_jobs.encoding import NULL, sql_digest, sql_row
from spark_jobs.queries import query
from spark_jobs.records import row_values
from spark_jobs.snapshot import ranges_text
from spark_jobs.values import value_sql

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from spark_jobs.columns import Column
    from spark_jobs.cut import Range, SourceCut
    from spark_jobs.findings import Suspect
    from spark_jobs.records import Record
    from spark_jobs.snapshot import Snapshot
    from spark_jobs.targets import Table, Target

Bucket = tuple[int, int]  # source, offset // width
RowPlace = tuple[int | None, int | None]  # source and offset that a row names
Identity = str | RowPlace  # a key's encoding where there are keys
Ask = Callable[[sql.Composed], list[tuple[Any, ...]]]
DIGESTS_AT_ONCE = 200
SOURCE, OFFSET = "oncebox_source", "oncebox_offset"
EACH_ROW, NO_ROW = sql.SQL("true"), sql.SQL("false")
OUTSIDE, TOUCHED, EXPIRED = -1, -2, -3  # in place of a bucket


@dataclass(slots=True, kw_only=True)
class Checksum:
    """Count, sum and exclusive or: no pair of changes cancels out in all three."""

    count: int = 0
    sum: int = 0
    xor: int = 0

    def add(self, count: int, total: int, xor: int) -> None:
        self.count += count
        self.sum += total
        self.xor ^= xor


def composed(text: str) -> sql.SQL:
    """An expression made by spark_jobs.encoding from quoted names."""
    return sql.SQL(text)


def quoted(columns: Sequence[Column]) -> list[str]:
    return [sql.Identifier(column.name).as_string(None) for column in columns]


def digest_sql(target: Target) -> sql.SQL:
    text = sql_row(target.columns, quoted(target.columns))
    if target.guard:
        text += f" || coalesce({SOURCE}::text, '~') || ';' || coalesce({OFFSET}::text, '~') || ';'"
    return composed(sql_digest(text))


def key_sql(target: Target) -> sql.SQL:
    return composed(sql_row(target.key, quoted(target.key)))


def in_cut(table: Table, sources: Sequence[SourceCut]) -> sql.Composable:
    if not table.first.guard:
        return EACH_ROW
    whens = [
        sql.SQL("WHEN {} THEN {}").format(source.position.source, _within(source.ranges))
        for source in sources
        if source.ranges
    ]
    if not whens:
        return NO_ROW
    return sql.SQL("CASE {} {} ELSE false END").format(sql.Identifier(SOURCE), sql.SQL(" ").join(whens))


def _within(ranges: Sequence[Range]) -> sql.Composable:
    offset = sql.Identifier(OFFSET)
    if len(ranges) == 1:  # nearly always, and asked of each row: plain numbers are quicker
        ((first, last),) = ranges
        return sql.SQL("{} >= {} AND {} < {}").format(offset, first, offset, last)
    return sql.SQL("{} <@ {}::int8multirange").format(offset, ranges_text(ranges))


def written_since(table: Table, before: Sequence[SourceCut], xmin: int) -> sql.Composable:
    """Rows of `before` that this transaction or a later one has written. A row's xmin has 32 bits; put before the
    snapshot's end it has all 64.
    """
    return sql.SQL("{now} - (({now} - xmin::text::bigint) & 4294967295) >= {since} AND {before}").format(
        now=sql.SQL("(SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint)"),
        since=xmin,
        before=in_cut(table, before),
    )


def keeps_apart(snapshot: Snapshot, table: Table) -> bool:
    """Whether an index keeps a second row of one key out (where each record is a row of its own, of one record)."""
    first = table.first
    identity = {column.name for column in first.key} if first.is_keyed else {SOURCE, OFFSET}
    name = sql.Identifier(table.schema, table.table).as_string(None)
    return any(set(unique) <= identity for (unique,) in snapshot.rows("unique_keys", table=name))


def at_places(places: Collection[tuple[int, int]]) -> sql.Composable:
    """Rows that name one of these records."""
    if not places:
        return NO_ROW
    pairs = sql.SQL(", ").join(sql.SQL("({}, {}::bigint)").format(*place) for place in sorted(places))
    return sql.SQL("({}, {}) IN (VALUES {})").format(sql.Identifier(SOURCE), sql.Identifier(OFFSET), pairs)


def guard_columns(table: Table) -> sql.Composable:
    if table.first.guard:
        return sql.SQL('{} AS source, {} AS "offset"').format(sql.Identifier(SOURCE), sql.Identifier(OFFSET))
    return sql.SQL('NULL::integer AS source, NULL::bigint AS "offset"')


def row_select(table: Table, relation: sql.Composable, condition: sql.Composable, canary: str) -> sql.Composable:
    """One row per row, with its place and the canary (evaluated once per query)."""
    return sql.SQL(
        "SELECT {key} AS key_text, {guard}, {digest} AS digest, ctid AS row_at, "
        "(SELECT pg_current_snapshot()::text = {canary}) AS is_cut FROM {relation} WHERE {condition}"
    ).format(
        key=key_sql(table.first),
        guard=guard_columns(table),
        digest=digest_sql(table.first),
        canary=canary,
        relation=relation,
        condition=condition,
    )


@dataclass(slots=True, kw_only=True)
class Scan:
    """What one pass over a table tells."""

    by_bucket: dict[Bucket, Checksum] = field(default_factory=dict)  # of the rows inside the cut
    outside: int = 0  # rows whose record the relay has not applied, or that name none
    touched: dict[int, tuple[int, int]] = field(default_factory=dict)  # source → how many, and the lowest offset
    expired: int = 0  # rows that were written since the last run, of records that nobody can read any more

    @property
    def rows(self) -> int:
        return sum(each.count for each in self.by_bucket.values())

    def add(self, source: int, bucket: int, count: int, total: Any, xor: int, first: int) -> None:
        if bucket == OUTSIDE:
            self.outside += count
        elif bucket == EXPIRED:
            self.expired += count
        elif bucket == TOUCHED:
            so_far, lowest = self.touched.get(source, (0, first))
            self.touched[source] = (so_far + count, min(lowest, first))
        else:
            self.by_bucket.setdefault((source, bucket), Checksum()).add(count, int(total), xor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """Which rows are summed, which are only counted, and which are left out."""

    cut: sql.Composable
    outside: sql.Composable
    touched: sql.Composable
    expired: sql.Composable
    older: sql.Composable


def scan(
    snapshot: Snapshot,
    table: Table,
    classes: Classes,
    width: int,
    *,
    connections: int,
    progress: Callable[[str], None],
) -> Scan:
    """Every row once, by several connections that share the snapshot."""
    from spark_jobs.sources import page_ranges

    name = sql.Identifier(table.schema, table.table).as_string(None)
    jobs = [
        (leaf, first, last)
        for leaf, pages in snapshot.execute(query("leaves"), {"table": name})
        for first, last in page_ranges(pages, connections * 4)
    ]
    source, offset = _guard_names(table) if table.first.guard else (sql.SQL("0"), sql.SQL("0::bigint"))
    # OFFSET 0 keeps the digest from being computed once for each aggregate.
    statement = sql.SQL(
        "SELECT s, b, count(*), sum(d), bit_xor(d), min(o) FROM (SELECT {source}, {offset}, "
        "CASE WHEN {cut} THEN {offset} / {width} WHEN {outside} THEN {o} WHEN {touched} THEN {t} "
        "WHEN {expired} THEN {e} END, "
        "CASE WHEN {cut} THEN {digest} END FROM {leaf} WHERE ctid >= {first}::tid AND ctid < {last}::tid OFFSET 0"
        ") AS t (s, o, b, d) WHERE b IS NOT NULL GROUP BY s, b"
    )
    parts = {
        "source": source,
        "offset": offset,
        "cut": classes.cut,
        "outside": classes.outside,
        "touched": classes.touched,
        "expired": classes.expired,
        "digest": digest_sql(table.first),
        "width": sql.Literal(width),
        "o": sql.Literal(OUTSIDE),
        "t": sql.Literal(TOUCHED),
        "e": sql.Literal(EXPIRED),
    }

    def run(job: tuple[str, int, int]) -> list[tuple[Any, ...]]:
        leaf, first, last = job
        pages = {"leaf": composed(leaf), "first": f"({first},0)", "last": f"({last},0)"}
        with snapshot.joined() as connection:
            return list(connection.execute(statement.format(**parts, **pages)).fetchall())

    found = Scan()
    with ThreadPoolExecutor(connections) as pool:
        for done, rows in enumerate(pool.map(run, jobs), start=1):
            for row in rows:
                found.add(*row)
            progress(f"{table.name}: {done} of {len(jobs)} parts of the table are summed")
    return found


def outside(snapshot: Snapshot, table: Table, condition: sql.Composable, limit: int) -> list[Any]:
    """Some rows whose record is not inside the cut, as (key_text, source, offset, copies, digest)."""
    rows = snapshot.execute(
        sql.SQL("SELECT {}, {}, {}, count(*), sum({})::text FROM {} WHERE {} GROUP BY 1, 2, 3 LIMIT {}").format(
            key_sql(table.first),
            sql.Identifier(SOURCE),
            sql.Identifier(OFFSET),
            digest_sql(table.first),
            sql.Identifier(table.schema, table.table),
            condition,
            limit,
        )
    )
    return [(*row[:4], int(row[4])) for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """What stands at a row's place now."""

    copies: int = 0
    digest: int | None = None  # of several copies their sum
    place: RowPlace = (None, None)


def identity(table: Table, suspect: Suspect) -> Identity:
    """What a row is found by: its key, or the record that it was made of."""
    if table.first.is_keyed:
        return suspect.key_text
    return suspect.found or suspect.expected or (None, None)


def row_states(snapshot: Snapshot, table: Table, wanted: Collection[Identity]) -> dict[Identity, RowState]:
    """Those that are there."""
    if not wanted:
        return {}
    keyed = table.first.is_keyed
    guard = _guard_names(table)
    statement = sql.SQL(
        "SELECT {what}, count(*), sum({digest})::text, min({s}), min({o}) FROM {t} WHERE {w} {g}"
    ).format(
        what=key_sql(table.first) if keyed else sql.SQL("0"),
        digest=digest_sql(table.first),
        s=guard[0],
        o=guard[1],
        t=sql.Identifier(table.schema, table.table),
        w=identities_condition(table, wanted),
        g=sql.SQL("GROUP BY 1") if keyed else sql.SQL("GROUP BY {}, {}").format(*guard),
    )
    states: dict[Identity, RowState] = {}
    for key_text, copies, digest, source, offset in snapshot.execute(statement):
        state = RowState(copies=copies, digest=int(digest), place=(source, offset))
        states[key_text if keyed else (source, offset)] = state
    return states


def _guard_names(table: Table) -> tuple[sql.Composable, sql.Composable]:
    if table.first.guard:
        return sql.Identifier(SOURCE), sql.Identifier(OFFSET)
    return sql.SQL("NULL::integer"), sql.SQL("NULL::bigint")


def identities_condition(table: Table, wanted: Collection[Identity]) -> sql.Composable:
    if table.first.is_keyed:
        return keys_condition(table, [each for each in wanted if isinstance(each, str)])
    # A row without a record has NULLs there, which equal nothing.
    pairs = sql.SQL(", ").join(
        sql.SQL("({}, {}::bigint)").format(*(-1 if part is None else part for part in each))
        for each in wanted
        if not isinstance(each, str)
    )
    return sql.SQL("(coalesce({}, -1), coalesce({}, -1)) IN (VALUES {})").format(*_guard_names(table), pairs)


def record_digests(ask: Ask, target: Target, records: Sequence[tuple[int, Record]]) -> list[int | None]:
    """The digests of the rows that PostgreSQL itself makes of records (with their source); None: of no row, or it
    refuses the record. Where it does not answer, nothing is said of any.
    """
    found: list[int | None] = []
    for first in range(0, len(records), DIGESTS_AT_ONCE):
        some = records[first : first + DIGESTS_AT_ONCE]
        try:
            found += _digests(ask, target, some)
        except psycopg.Error as error:
            if len(some) > 1:  # one of them is to blame, the others can be told
                found += [digest for each in some for digest in record_digests(ask, target, [each])]
            elif isinstance(error, psycopg.OperationalError):  # the connection, or the database itself
                raise
            else:
                found.append(None)
    return found


def _digests(ask: Ask, target: Target, records: Sequence[tuple[int, Record]]) -> list[int | None]:
    rows = []
    for at, (source, record) in enumerate(records):
        try:
            values = row_values(target, record)
        except ValueError:
            values = None
        if values is not None:
            made = [value_sql(column, value) for column, value in zip(target.columns, values, strict=True)]
            rows.append(sql.SQL("({})").format(sql.SQL(", ").join([sql.Literal(at), *made, *_place(source, record)])))
    if not rows:
        return [None] * len(records)
    names = [sql.Identifier(name) for name in ("number of record", *target.columns_named, SOURCE, OFFSET)]
    statement = sql.SQL("SELECT {}, {} FROM (VALUES {}) AS t ({})").format(
        names[0], digest_sql(target), sql.SQL(", ").join(rows), sql.SQL(", ").join(names)
    )
    by_number = {row[0]: row[1] for row in ask(statement)}
    return [by_number.get(at) for at in range(len(records))]


def _place(source: int, record: Record) -> list[sql.Composable]:
    return [sql.Literal(source), sql.SQL("{}::bigint").format(record.offset)]


def keys_condition(table: Table, keys: Sequence[str]) -> sql.Composable:
    """Finds the rows of encoded keys; by the index where the keys' values can be told from the encoding."""
    decoded = [decode_key(table.first, key_text) for key_text in keys]
    if any(values is None for values in decoded):
        texts = sql.SQL(", ").join(sql.SQL("({})").format(key_text) for key_text in keys)
        return sql.SQL("({}) IN (VALUES {})").format(key_sql(table.first), texts)
    # One array per column: thousands of literals would take longer to write down than to look up.
    arrays = sql.SQL(", ").join(
        sql.SQL("{}::text[]::{}[]").format([values[at] for values in decoded if values], composed(column.type.name))
        for at, column in enumerate(table.first.key)
    )
    names = sql.SQL(", ").join(sql.Identifier(column.name) for column in table.first.key)
    return sql.SQL("({}) IN (SELECT * FROM unnest({}))").format(names, arrays)


PLAIN = {Kind.INTEGER, Kind.NUMERIC, Kind.UUID, Kind.BOOLEAN}


def decode_key(target: Target, key_text: str) -> list[str] | None:
    """The key's values as texts; None where a type's encoding is not its text, where one is NULL (which equals
    nothing), and where the text is no encoding of such a key.
    """
    rest, values = key_text.encode(), []
    for column in target.key:
        found = _decoded(column.type.kind, rest)
        if found is None or rest.startswith(NULL.encode()):
            return None
        value, rest = found
        values.append(value.decode())
    return None if rest else values


def _decoded(kind: Kind, text: bytes) -> tuple[bytes, bytes] | None:
    """The first value of an encoded key, and what comes after it."""
    if kind in PLAIN:
        value, end, rest = text.partition(b";")
        return (value, rest) if end else None
    if kind not in {Kind.TEXT, Kind.CHARACTER}:
        return None
    size, _, rest = text.partition(b":")
    if not size.isdigit() or len(rest) < int(size):
        return None
    return rest[: int(size)], rest[int(size) :]
