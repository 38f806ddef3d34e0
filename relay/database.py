"""The relay's sessions with PostgreSQL, its own tables, and what the target tables look like."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
from psycopg import errors, sql
from psycopg.types.json import Jsonb

from relay.config import GUARD_COLUMNS, ORDERING_COLUMN, RelaySettings, TableSection, config_hash
from relay.encoding import UnfitError, canonical
from relay.mapping import RowMapper, parse_path
from relay.ordering import check_agreement
from relay.queries import SCHEMA_VERSION, query, schema
from relay.types import BadRecordError, Column, RelayError, TableName, Target

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# PostgreSQL's own in every table.
SYSTEM_COLUMNS = ("tableoid", "xmin", "cmin", "xmax", "cmax", "ctid")
MIGRATION_LOCK = 0x6F6E6365_626F78
CONNECT_TIMEOUT_S = 10
# As long as PostgreSQL's names are.
NAME_BYTES = 63
# A server that is gone without a word is noticed within 20 s. Keepalives are for who only listens: while something that
# was sent is not acknowledged Linux sends none, but that again, and gives up after a quarter of an hour.
KEEPALIVE: dict[str, Any] = {
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
# How values are read and printed: rows, and keys in the memory of deletes, are the same whatever server, database, role
# and environment say. (spark_jobs writes that memory, too, under the same: AS_THE_RELAY in spark_jobs/values.py.)
VALUES: LiteralString = (
    "SET TimeZone = 'UTC'; SET DateStyle = 'ISO'; SET IntervalStyle = 'postgres'; SET bytea_output = 'hex'; "
    "SET extra_float_digits = 1"
)

Connection = psycopg.Connection[tuple[Any, ...]]


def application_name(instance: str) -> str:
    """By it others can end a session whose process stands still. PostgreSQL would cut off the end of a long one, by
    which processes of one host differ.
    """
    prefix = "oncebox relay "
    return prefix + instance[-(NAME_BYTES - len(prefix)) :]


def connect(settings: RelaySettings, instance: str) -> Connection:
    connection = psycopg.connect(
        settings.postgres.dsn.get_secret_value(),
        autocommit=True,
        connect_timeout=CONNECT_TIMEOUT_S,
        application_name=application_name(instance),
        # Rows are made as UTF-8, whatever environment or DSN make of that.
        client_encoding="UTF8",
        **KEEPALIVE,
    )
    if any(section.ordering is not None for section in settings.tables):
        # Who has waited for the table must see what was committed meanwhile.
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    connection.execute(VALUES)
    # A process that stands still inside a transaction must not keep its locks: the next owner waits for them.
    connection.execute(
        sql.SQL(
            "SET idle_in_transaction_session_timeout = {}; SET statement_timeout = {}; SET client_min_messages = error"
        ).format(sql.Literal(settings.session_ms), sql.Literal(settings.statement_timeout_ms))
    )
    return connection


def migrate(connection: Connection) -> None:
    """Brings the relay's own tables to this program's version; refuses newer ones."""
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [MIGRATION_LOCK])
        row = connection.execute(query("has_schema")).fetchone()
        found = connection.execute(query("version")).fetchone() if row and row[0] else None
        version = 0 if found is None else found[0]
        if version > SCHEMA_VERSION:
            raise RelayError(
                f"the tables of schema oncebox have version {version}, this program knows {SCHEMA_VERSION}"
            )
        if version == 0:
            connection.execute(schema())
        for step in range(version + 1, SCHEMA_VERSION + 1) if version else ():
            connection.execute(query(f"upgrade_to_{step}"))
        if version < SCHEMA_VERSION:
            connection.execute(query("set_version"), {"version": SCHEMA_VERSION})


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumn:
    name: str
    type: str
    is_required: bool
    is_generated: bool
    # Of a domain: the type that it is at last.
    base: str | None = None


def describe(connection: Connection, table: TableName) -> list[TableColumn]:
    """Empty: there is no such table."""
    rows = connection.execute(query("describe_table"), {"table": str(table)}).fetchall()
    return [TableColumn(name=row[0], type=row[1], is_required=row[2], is_generated=row[3], base=row[4]) for row in rows]


def resolve(connection: Connection, section: TableSection) -> Target:
    """The mapping against the table as it is. What does not fit is told with what to do."""
    table = section.target()
    present = {column.name: column for column in describe(connection, table)}
    if not present:
        raise RelayError(f"the table {table} does not exist: create it, or set auto_create for it")
    if not present.keys() >= section.own_columns.keys():
        raise RelayError(
            f"{table} lacks the version guard's columns: ALTER TABLE {table} {added_columns(section)}; or set "
            f"auto_evolve{'' if section.ordering else ', or guard: false'} for it"
        )
    columns = _written_down(section, present) if section.columns else _of_table(section, present)
    for name in (*section.key, *([section.ordering] if section.ordering else [])):
        if name not in {column.name for column in columns}:
            raise RelayError(
                f"{table} has no column {name!r}, which is in its {'key' if name in section.key else 'ordering'}"
            )
    if section.insert_mode == "upsert":
        _check_unique(connection, section)
    target = Target(
        topic=section.topic,
        table=table,
        format=section.format,
        insert_mode=section.insert_mode,
        columns=tuple(columns),
        key=section.key,
        guard=section.guard,
        ordering=section.ordering,
        delete_on_tombstone=section.delete_on_tombstone,
        strict_fields=not section.columns and not section.include,
        evolves=section.auto_evolve and not section.columns,
        exclude=section.exclude,
        include=section.include,
        reserved=frozenset(
            {
                *GUARD_COLUMNS,
                ORDERING_COLUMN,
                *SYSTEM_COLUMNS,
                *(each.name for each in present.values() if each.is_generated),
            }
        ),
    )
    try:
        RowMapper(target)
    except BadRecordError as error:
        raise RelayError(f"{table}: {error}") from None
    return target


def added_columns(section: TableSection) -> LiteralString:
    """What an ALTER TABLE has to say about the relay's own columns."""
    return ", ".join(f"ADD COLUMN IF NOT EXISTS {name} {of_type}" for name, of_type in section.own_columns.items())


def _check_unique(connection: Connection, section: TableSection) -> None:
    rows = connection.execute(query("unique_keys"), {"table": str(section.target())}).fetchall()
    fitting = [is_immediate for unique, is_immediate in rows if set(unique) == set(section.key)]
    key = ", ".join(section.key)
    if not fitting:
        raise RelayError(
            f"{section.target()} has no primary key or unique constraint on ({key}), which an upsert needs"
        )
    if not any(fitting):
        raise RelayError(
            f"the primary key or unique constraint of {section.target()} on ({key}) is DEFERRABLE, and PostgreSQL "
            "upserts by none that is: make it anew as NOT DEFERRABLE, or add a unique index"
        )


def _written_down(section: TableSection, present: dict[str, TableColumn]) -> list[Column]:
    columns = []
    for name, given in section.columns.items():
        if name not in present:
            raise RelayError(f"{section.target()} has no column {name!r}")
        found = column_of(name, present[name].type, given.path or name, given.unit)
        columns.append(replace(found, base=present[name].base))
    return columns


def column_of(name: str, type_name: str, path: str, unit: Any) -> Column:
    try:
        source, parts = parse_path(path)
    except BadRecordError as error:
        raise RelayError(f"column {name!r}: {error}") from None
    return Column(name=name, type=type_name, path=parts, source=source, unit=unit)


def _of_table(section: TableSection, present: dict[str, TableColumn]) -> list[Column]:
    left_out = {*GUARD_COLUMNS, ORDERING_COLUMN, *section.exclude}
    wanted = [
        column
        for column in present.values()
        if column.name not in left_out
        and not column.is_generated
        and (not section.include or column.name in section.include)
    ]
    return [Column(name=each.name, type=each.type, path=(each.name,), base=each.base) for each in wanted]


def given_type(name: str, type_name: str | None) -> str:
    if type_name is None:
        raise RelayError(f"column {name!r} needs a type, for its table is to be created")
    try:
        return canonical(type_name)
    except UnfitError as error:
        raise RelayError(f"column {name!r}: {error}") from None


def table_order(connection: Connection, targets: Sequence[Target]) -> list[int]:
    """The targets' indexes, so that what is referred to by a foreign key comes before what refers to it."""
    names = [str(target.table) for target in targets]
    ids = [row[0] for row in connection.execute(query("table_ids"), {"tables": names})]
    refers = connection.execute(query("foreign_keys"), {"tables": names}).fetchall()
    left, order = list(range(len(targets))), list[int]()
    while left:
        waiting = {ids[at] for at in left}
        free = [
            at for at in left if not any(child == ids[at] != parent and parent in waiting for child, parent in refers)
        ]
        order += free or left[:1]  # a circle of foreign keys: they must be deferrable
        left = [at for at in left if at not in order]
    return order


def register(connection: Connection, settings: RelaySettings, targets: Sequence[Target]) -> None:
    """The relay and its mappings, as others (reconciliation, status) read them."""
    with connection.transaction():
        connection.execute(query("ensure_relay"), {"relay": settings.name, "mode": settings.mode})
        row = connection.execute(query("relay_mode"), {"relay": settings.name}).fetchone()
        if row is None or row[0] != settings.mode:
            raise RelayError(
                f"the relay {settings.name!r} has run in {row and row[0]} mode, where positions mean something else: "
                "choose another name, or that mode"
            )
        check_ordering(connection, settings, targets)
        hashed = {"relay": settings.name, "config_hash": config_hash(settings)}
        connection.execute(query("save_config_hash"), hashed)
        connection.execute(query("forget_targets"), {"relay": settings.name})
        for target in targets:
            connection.execute(
                query("save_target"),
                {
                    "relay": settings.name,
                    "topic": target.topic,
                    "table_schema": target.table.schema,
                    "table_name": target.table.name,
                    "mapping": Jsonb(mapping_of(target)),
                },
            )


def check_ordering(connection: Connection, settings: RelaySettings, targets: Sequence[Target]) -> None:
    """Rows that were written under another order cannot be compared with those to come."""
    check_agreement(targets)
    rows = connection.execute(query("orderings"), {"relay": settings.name}).fetchall()
    before = {(schema, name): ordering for schema, name, ordering in rows}
    for target in targets:
        place = (target.table.schema, target.table.name)
        if before.get(place, target.ordering) == target.ordering:
            continue
        any_row = sql.SQL("SELECT EXISTS (SELECT FROM {})").format(sql.Identifier(*place))
        if connection.execute(any_row).fetchone() == (True,):
            raise RelayError(
                f"{target.table} has rows that were ordered by {before[place] or 'their topic'}, not by "
                f"{target.ordering or 'their topic'}: `oncebox relay rebuild --topic {target.topic}` first"
            )


def mapping_of(target: Target) -> dict[str, Any]:
    """As documented in sql/schema.sql."""
    return {
        "format": target.format,
        "insert_mode": target.insert_mode,
        "guard": target.guard,
        "ordering": target.ordering,
        "delete_on_tombstone": target.delete_on_tombstone,
        "key": list(target.key),
        "columns": [
            {
                "name": column.name,
                "type": column.type,
                "path": list(column.path),
                "from": column.source,
                "unit": column.unit,
            }
            for column in target.columns
        ],
    }


def ensure_sources(
    connection: Connection, topic_ids: dict[str, str], partitions: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], int]:
    connection.execute(
        query("ensure_sources"),
        {
            "topics": [topic for topic, _ in partitions],
            "topic_ids": [topic_ids[topic] for topic, _ in partitions],
            "partitions": [partition for _, partition in partitions],
        },
    )
    rows = connection.execute(query("sources"), {"topic_ids": list(topic_ids.values())}).fetchall()
    return {(topic, partition): source for topic, partition, source in rows}


def check_incarnations(connection: Connection, relay: str, topic_ids: dict[str, str]) -> None:
    """A topic that was deleted and made again is another one: its offsets mean something else."""
    found = connection.execute(
        query("foreign_incarnations"),
        {"relay": relay, "topics": list(topic_ids), "topic_ids": list(topic_ids.values())},
    ).fetchall()
    for topic, _ in found:
        raise made_again(topic)


def check_same(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """A topic that was made again may have grown past where we were: nothing but its id tells it from the former one.
    Asked after records were read: the same topics still, then all of them are of these.
    """
    for topic, topic_id in now.items():
        if topic_id != before[topic]:
            raise made_again(topic)


def made_again(topic: str) -> RelayError:
    return RelayError(
        f"the topic {topic!r} was deleted and made again since it was relayed: "
        f"`oncebox relay rebuild --topic {topic}` begins anew with the topic as it is"
    )


def headers_json(headers: Sequence[tuple[str, bytes | None]]) -> str:
    from base64 import b64encode

    return json.dumps([[name, None if raw is None else b64encode(raw).decode()] for name, raw in headers])


# What a failure of the database means for the batch at hand.
RETRY_AT_ONCE = (errors.SerializationFailure, errors.DeadlockDetected, errors.LockNotAvailable)
PASSING_CLASSES = ("08", "25", "40", "53", "55", "57", "58", "XX")
DATA_CLASSES = ("09", "20", "21", "22", "23", "27", "38", "44", "54", "P0")
# What PostgreSQL's own function for RAISE is called: with it a trigger may give any code.
RAISED = "exec_stmt_raise"


def is_data_error(error: psycopg.Error) -> bool:
    """The rows are to blame, not the surroundings."""
    if error.sqlstate is None:
        return False
    is_raised = error.diag.source_function == RAISED and not is_passing(error) and not is_gone(error)
    return error.sqlstate[:2] in DATA_CLASSES or is_raised


def is_passing(error: psycopg.Error) -> bool:
    """The surroundings are to blame, and waiting may help: the connection, locks, disk, memory, somebody's shutdown."""
    return error.sqlstate[:2] in PASSING_CLASSES if error.sqlstate else isinstance(error, psycopg.OperationalError)


def is_gone(error: psycopg.Error) -> bool:
    """A table, column or privilege that was there at the start is not any more."""
    return error.sqlstate is not None and error.sqlstate[:2] == "42"


def told(error: psycopg.Error) -> str:
    """What the database says, without the rows around it."""
    said = error.diag.message_primary or str(error).partition("\n")[0]
    return f"{said} ({error.diag.constraint_name})" if error.diag.constraint_name else said
