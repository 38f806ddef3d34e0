"""The database at one instant: a holder connection exports its snapshot and stays open until the run ends.

Everything else joins that snapshot. The canary (`pg_current_snapshot()` as text) goes with every query that returns
rows, so that a session that did not really join fails the run instead of comparing two different instants.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import quote

import psycopg
from psycopg import sql

from spark_jobs.cut import SETTLED_AFTER_MS, Cut, DeadLetter, Position, Range, SourceCut, cut_source, feed_ranges
from spark_jobs.errors import CannotCheckError, ReconcileError
from spark_jobs.facts import Facts, read_compacted, read_facts, read_offsets_at
from spark_jobs.queries import query
from spark_jobs.records import Record
from spark_jobs.targets import GUARD_COLUMNS, Table, by_table, config_hash, read_target

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from oncebox.wire import KafkaSettings
    from spark_jobs.cut import PartitionFacts

DEAD_LETTERS_MAX = 100_000
REPLAYED_MAX = 10_000  # with their values
APPLICATION = "oncebox reconcile"
# Where a policy would hide rows from us, PostgreSQL refuses the query: rows that are hidden are not missing.
SEE_ALL = "SET row_security = off"


class Snapshot:
    """Use as a context manager. Reads only."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._holder: psycopg.Connection[Any] | None = None
        self._calculator: psycopg.Connection[Any] | None = None
        self.name = ""
        self.text = ""
        self.xmin = 0
        self.lsn = ""
        self.system = 0

    def __enter__(self) -> Self:
        try:
            self._holder = psycopg.connect(self._dsn, autocommit=True, application_name=APPLICATION)
        except psycopg.OperationalError as error:
            raise CannotCheckError(f"the database does not answer: {_first_line(error)}") from error
        holder = self._holder
        holder.execute("SET idle_in_transaction_session_timeout = 0")
        holder.execute("SET TIME ZONE 'UTC'")
        holder.execute(SEE_ALL)
        holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        row = holder.execute(
            "SELECT pg_export_snapshot(), pg_current_snapshot()::text, "
            "pg_snapshot_xmin(pg_current_snapshot())::text::bigint, "
            "CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END::text, "
            "current_setting('server_encoding'), current_setting('server_version_num')::int, "
            "(SELECT system_identifier FROM pg_control_system())"
        ).fetchone()
        if row is None:
            raise CannotCheckError("the database gave no snapshot")
        self.name, self.text, self.xmin, self.lsn, encoding, version, self.system = row
        if encoding != "UTF8" or version < 140_000:
            raise ReconcileError(f"needs PostgreSQL 14 or newer with encoding UTF8; this is {version}, {encoding}")
        return self

    def __exit__(self, *_: object) -> None:
        for connection in (self._holder, self._calculator):
            if connection is not None:
                connection.close()

    def has_storage_of(self, schema: str, table: str) -> bool:
        """Whether the table's rows are where they were. To an old snapshot a table that was emptied or rewritten since
        (TRUNCATE, some ALTER TABLE) is empty, and one that VACUUM FULL has moved is read in two places.
        """
        statement, names = query("storage"), {"schema": schema, "table": table}
        return set(self.execute(statement, names)) <= set(self.calculated(statement, names))

    def calculated(self, statement: Any, parameters: Any = None) -> list[tuple[Any, ...]]:
        """Outside of the snapshot, in a session of its own: what PostgreSQL refuses would end the snapshot."""
        if self._calculator is None:
            self._calculator = psycopg.connect(self._dsn, autocommit=True, application_name=APPLICATION)
            self._calculator.execute("SET TIME ZONE 'UTC'")
        return list(self._calculator.execute(statement, parameters).fetchall())

    def rows(self, name: str, **parameters: object) -> list[tuple[Any, ...]]:
        return self.execute(query(name), parameters)

    def execute(self, statement: Any, parameters: Any = None) -> list[tuple[Any, ...]]:
        if self._holder is None:
            raise ReconcileError("the snapshot is not open")
        try:
            return list(self._holder.execute(statement, parameters).fetchall())
        except psycopg.OperationalError as error:
            raise CannotCheckError(
                f"the connection that holds the snapshot is gone ({_first_line(error)}): run again"
            ) from error
        except psycopg.Error as error:
            raise CannotCheckError(f"the database refused a query: {_first_line(error)}") from error

    def check_alive(self) -> None:
        self.execute("SELECT 1")

    @contextmanager
    def joined(self) -> Iterator[psycopg.Connection[Any]]:
        """Another connection that sees the same instant; proved by the canary."""
        with psycopg.connect(self._dsn, autocommit=True, application_name=APPLICATION) as connection:
            connection.execute(SEE_ALL)
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(self.name)))
            seen = connection.execute("SELECT pg_current_snapshot()::text").fetchone()
            if seen != (self.text,):
                raise CannotCheckError("a database session did not join the snapshot: run again")
            yield connection

    def jdbc_options(self) -> dict[str, str]:
        """For Spark's JDBC source. `fetchsize` must be lowercase and above 0: without it the driver would run the
        session's first statement in a transaction of its own, and the snapshot would silently not be used.
        """
        if self._holder is None:
            raise ReconcileError("the snapshot is not open")
        return jdbc_place(self._holder) | {
            "fetchsize": "10000",
            "sessionInitStatement": "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY; "
            f"SET TRANSACTION SNAPSHOT '{self.name}'; {SEE_ALL}",
        }


def jdbc_place(connection: psycopg.Connection[Any]) -> dict[str, str]:
    """Where a connection leads and as whom, for Spark's JDBC."""
    # What libpq has made of the address, the environment and the password file.
    used = {each.keyword.decode(): each.val.decode() for each in connection.pgconn.info if each.val}
    info = connection.info
    host = "localhost" if info.host.startswith("/") else info.host  # Java knows no sockets in folders
    host = f"[{host}]" if ":" in host else host
    options = {
        "url": f"jdbc:postgresql://{host}:{info.port}/{quote(info.dbname, safe='')}",
        "driver": "org.postgresql.Driver",
        "user": info.user,
        "password": info.password,
        "ApplicationName": APPLICATION,
    }
    # (In `options` stands where names are looked for, or as whom: a table of the same name may be elsewhere.)
    for name in ("options", "sslmode", "sslrootcert", "sslcert", "sslkey"):
        if name in used:
            options[name] = used[name]
    return options


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def take_cut(snapshot: Snapshot, kafka: KafkaSettings, *, relay: str, feed_topic: str, is_full: bool) -> Cut:
    """The cut under the snapshot. Kafka is asked after it: so the feed's end covers all that the database shows. The
    feed is asked before the topics: so they have all that it tells of.
    """
    _need_tables(snapshot)
    name, mode, fence = _choose(snapshot, relay)
    positions = read_positions(snapshot, name)
    mappings = snapshot.rows("targets", relay=name)
    targets = [read_target(*row) for row in mappings]
    hashed = config_hash([(row[0], row[1], row[2], row[3]) for row in mappings])
    topics = sorted({position.topic for position in positions} | {target.topic for target in targets})
    at_ms = time.time_ns() // 1_000_000
    facts = read_facts(kafka, [feed_topic, *topics])
    compacted, silent = read_compacted(kafka, [topic for topic in topics if topic in facts])
    marks = [] if is_full else _verified(snapshot, name, hashed)
    verified = {row[0]: row[1] for row in marks}
    sources = tuple(
        cut_source(
            position,
            facts.get(position.topic, {}).get(position.partition),
            verified=verified.get(position.source, 0),
        )
        for position in positions
    )
    # A mark below which there is nothing is none: the run is a full one then, and so is its look at the feed.
    mark = marks[0] if any(verified.values()) else None
    feed_from = {int(partition): offset for partition, offset in mark[2].items()} if mark else {}
    feed, feed_whole_from_ms = _feed(kafka, feed_topic, facts.get(feed_topic, {}), feed_from, mark[5] if mark else None)
    letters, replayed, notes = _letters(snapshot, name)
    has_more_letters = bool(notes)
    ((_, letters_replayed),) = snapshot.rows("letters_counted", relay=name)
    tables, more = existing_tables(snapshot, by_table(targets))
    notes += more + _notes(topics, sources, facts, feed_topic, mode)
    mapped = frozenset(target.topic for target in targets)
    notes += [f"the topic {topic} is mapped to no table: not checked" for topic in topics if topic not in mapped]
    unread, told = feed_gaps(feed_from, facts.get(feed_topic, {}))
    told += [f"the topic {topic} does not tell its cleanup.policy: it is taken for compacted" for topic in silent]
    return Cut(
        relay=name,
        mode=mode,
        fence=fence,
        snapshot_text=snapshot.text,
        xmin=snapshot.xmin,
        system=snapshot.system,
        lsn=snapshot.lsn,
        config_hash=hashed,
        sources=sources,
        mapped=mapped,
        dead_letters=letters,
        replayed=replayed,
        letters_replayed=letters_replayed,
        has_more_letters=has_more_letters,
        tables=tuple(tables),
        at_ms=at_ms,
        feed=feed,
        feed_whole_from_ms=feed_whole_from_ms,
        feed_applied=dict(snapshot.rows("feed_positions", relay=name)),
        compacted=compacted | frozenset(silent),
        unpositioned=_unpositioned(sorted(mapped), sources, facts),
        notes=(*notes, *unread),
        told=tuple(told),
    )


def _feed(
    kafka: KafkaSettings,
    topic: str,
    facts: Mapping[int, PartitionFacts],
    marked: Mapping[int, int],
    marked_at_ms: int | None,
) -> tuple[dict[int, Range], dict[int, int | None]]:
    """What is read of the feed, and since when all decisions are in it, by partition. The run that left the mark has
    compared with the log what was settled when it began; manifests of what was decided after that may stand before the
    mark.
    """
    if marked_at_ms is None or not facts:
        feed, whole = feed_ranges(facts, marked, {})
        return feed, {partition: 0 if partition in whole else None for partition in feed}
    settled_ms = marked_at_ms - SETTLED_AFTER_MS
    feed, whole = feed_ranges(facts, marked, read_offsets_at(kafka, topic, settled_ms - SETTLED_AFTER_MS))
    since_ms = {partition: settled_ms if partition in whole else None for partition in feed}
    return feed, since_ms | {partition: 0 for partition, (first, _) in feed.items() if first == 0}


def read_positions(snapshot: Snapshot, relay: str) -> list[Position]:
    return [
        Position(
            source=row[0],
            topic=row[1],
            topic_id=row[2],
            partition=row[3],
            start=row[4],
            next=row[5],
            beyond=tuple((first, last) for first, last in row[6]),
            high=row[7],
            waited_for=tuple((int(source), end) for source, end in (row[8] or {}).items()),
        )
        for row in snapshot.rows("positions", relay=relay)
    ]


def feed_gaps(feed_from: Mapping[int, int], facts: Mapping[int, PartitionFacts]) -> tuple[list[str], list[str]]:
    """What of the feed is past retention: what an earlier run has left to this one is not checked; what is older than
    any run's mark is worth a word (records that are applied whole need no manifest).
    """
    lost = sum(
        max(each.log_start - feed_from[partition], 0) for partition, each in facts.items() if partition in feed_from
    )
    if lost:
        return [f"{lost} records of the feed are past retention and were not read before"], []
    old = 0 if feed_from else sum(each.log_start for each in facts.values())
    return [], [f"{old} records of the feed are past retention; their transactions are not compared"] if old else []


def _letters(snapshot: Snapshot, relay: str) -> tuple[tuple[DeadLetter, ...], dict[tuple[int, int], Record], list[str]]:
    letters = snapshot.rows("dead_letters", relay=relay, limit=DEAD_LETTERS_MAX + 1)
    replayed = snapshot.rows("replayed_letters", relay=relay, limit=REPLAYED_MAX + 1)
    notes = []
    if len(letters) > DEAD_LETTERS_MAX:
        notes.append(f"there are more than {DEAD_LETTERS_MAX} dead letters: their records are not compared")
    if len(replayed) > REPLAYED_MAX:
        notes.append(f"more than {REPLAYED_MAX} dead letters were replayed: their rows are not compared as mended")
    parked = {(row[0], row[1]) for row in letters}
    return (
        tuple(
            DeadLetter(source=row[0], offset=row[1], state=row[2], error=row[3]) for row in letters[:DEAD_LETTERS_MAX]
        ),
        {
            (row[0], row[1]): Record(
                topic=row[2], partition=row[3], offset=row[1], timestamp_ms=row[4], key=row[5], value=row[6]
            )
            for row in replayed[:REPLAYED_MAX]
            if (row[0], row[1]) not in parked  # parked again, after a rewind
        },
        notes,
    )


class Mark(NamedTuple):
    """What an earlier run has found clean, and left to this one."""

    run: int
    xmin: int  # rows written by this transaction or a later one may be new
    started_at_ms: int
    replayed: frozenset[tuple[int, int]]  # dead letters below it that were replayed since: not compared by any run


def read_mark(snapshot: Snapshot, cut: Cut) -> Mark | None:
    """None: nothing was verified."""
    rows = _verified(snapshot, cut.relay, cut.config_hash)
    if not rows:
        return None
    run, xmin = rows[0][4], rows[0][3]
    replayed = frozenset(snapshot.rows("letters_replayed_since", relay=cut.relay, run=run))
    return Mark(run=run, xmin=xmin, started_at_ms=rows[0][5], replayed=replayed & cut.replayed.keys())


def _need_tables(snapshot: Snapshot) -> None:
    ((found,),) = snapshot.execute("SELECT to_regclass('oncebox.target') IS NOT NULL")
    if not found:
        raise ReconcileError("this database has no tables of a relay (schema oncebox): is it the relay's target?")


def _choose(snapshot: Snapshot, relay: str) -> tuple[str, str, int]:
    relays = snapshot.rows("relays")
    chosen = [row for row in relays if row[0] == relay or not relay]
    if len(chosen) != 1:
        names = ", ".join(row[0] for row in relays) or "none"
        raise ReconcileError(f"name one relay with --relay; this database knows: {names}")
    name, mode, fence = chosen[0]
    return name, mode, fence


def _verified(snapshot: Snapshot, relay: str, hashed: str) -> list[tuple[Any, ...]]:
    """Of this mapping, and of this database cluster: one restored into another has other transaction ids."""
    ((exists,),) = snapshot.execute("SELECT to_regclass('oncebox.reconciliation_verified') IS NOT NULL")
    if not exists:
        return []
    return snapshot.rows("verified", relay=relay, config_hash=hashed, system_identifier=snapshot.system)


def existing_tables(snapshot: Snapshot, tables: Sequence[Table]) -> tuple[list[Table], list[str]]:
    """Tables that are there with all their columns; the others are told, not guessed."""
    existing, notes = [], []
    for table in tables:
        quoted = sql.Identifier(table.schema, table.table).as_string(None)
        columns = {name: kind for name, kind, _ in snapshot.rows("columns", table=quoted)}
        wanted = {column.name: column.type.name for target in table.targets for column in target.columns}
        if table.first.guard:
            wanted |= dict(zip(GUARD_COLUMNS, ("integer", "bigint"), strict=True))
        missing = sorted(wanted.keys() - columns.keys())
        changed = sorted(name for name, kind in wanted.items() if columns.get(name, kind) != kind)
        if not columns:
            notes.append(f"the table {table.name} does not exist: none of its rows is checked")
        elif missing or changed:
            told = ", ".join(missing + changed)
            notes.append(f"{table.name}: missing or of another type than the relay knows: {told}; it is not checked")
        elif table.obstacle:
            notes.append(f"{table.name}: {table.obstacle}; it is not checked")
        elif snapshot.rows("is_hidden", table=quoted) == [(True,)]:
            notes.append(
                f"{table.name}: row-level security may hide rows from this role, which needs BYPASSRLS (or to be the "
                "table's owner); it is not checked"
            )
        else:
            existing.append(table)
    for table in existing:
        notes += [f"{table.name}: not compared: {each}" for target in table.targets for each in target.unchecked]
    return existing, notes


def _notes(topics: Sequence[str], sources: Sequence[SourceCut], facts: Facts, feed_topic: str, mode: str) -> list[str]:
    notes = [
        f"the topic {topic} does not exist: what came from it is not checked" for topic in topics if topic not in facts
    ]
    for source in sources:
        position = source.position
        where = f"{position.topic}:{position.partition}"
        if source.facts is None:
            if position.topic in facts:
                notes.append(f"{where}: the relay's incarnation of the topic was deleted; its rows are not checked")
        else:
            if source.expired:
                notes.append(f"{where}: {source.expired} offsets are past retention; they were not checked before")
            if position.next > source.facts.stable:
                notes.append(
                    f"{where}: the relay is at {position.next}, readers may read to {source.facts.stable} only"
                )
            if position.is_rewound:
                notes.append(f"{where}: the relay was rewound and is not back at {position.high} yet")
    if feed_topic not in facts and mode == "transaction":
        notes.append(f"the feed {feed_topic} does not exist: whole transactions are not checked")
    return notes


def _unpositioned(
    topics: Sequence[str], sources: Sequence[SourceCut], facts: Facts
) -> tuple[tuple[str, int, int], ...]:
    known = {(source.position.topic, source.position.partition) for source in sources if source.facts is not None}
    return tuple(
        (topic, partition, each.stable - each.log_start)
        for topic in topics
        for partition, each in facts.get(topic, {}).items()
        if (topic, partition) not in known and each.stable > each.log_start
    )


def ranges_text(ranges: Sequence[Range]) -> str:
    """As an int8multirange."""
    return "{" + ",".join(f"[{first},{last})" for first, last in ranges) + "}"


def as_mapping(sources: Sequence[SourceCut]) -> Mapping[int, SourceCut]:
    return {source.position.source: source for source in sources}
