"""`oncebox outbox init`: what a database needs, as statements that are shown before they are run.

Running it again is safe: what exists is left as it is.
"""

from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from oncebox.atomic_schema import ATOMIC_SCHEMA
from oncebox.queries import queries
from relay.outbox.config import OutboxSettings
from relay.outbox.database import SQL as ASKED
from relay.outbox.database import connect, table_of
from relay.outbox.token import COMMIT_SEQ

SQL = queries("relay.outbox", "schema.sql")


class SetupError(Exception):
    """The database cannot be set up as asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    what: str
    text: str


async def missing(settings: OutboxSettings, connection: psycopg.AsyncConnection[Any]) -> list[Statement]:
    """What there is to be done, in order."""
    if settings.source == "logical":
        level = await _one(connection, "SELECT current_setting('wal_level')")
        if level != "logical":
            raise SetupError(
                f"wal_level is {level}: set wal_level=logical in postgresql.conf and restart the server, or use "
                "source: commit_seq"
            )
    found = [_statement("the relay's own tables", "own_tables", settings)]
    found.append(Statement(what="for commits over Kafka and this database", text=ATOMIC_SCHEMA))
    table_name = table_of(settings).as_string(connection)
    if await _one(connection, "SELECT to_regclass(%s)", table_name) is None:
        found.append(_statement("the outbox table", "outbox_table", settings))
    if settings.source == "logical":
        if not await _one(
            connection, "SELECT FROM pg_publication WHERE pubname = %s", settings.publication, there=True
        ):
            found.append(_statement("the publication", "publication", settings))
        in_slots = "SELECT FROM pg_replication_slots WHERE slot_name = %s"
        if not await _one(connection, in_slots, settings.slot, there=True):
            found.append(_statement("the slot (waits for transactions that are open now)", "slot", settings))
    else:
        numbers_all = await (await connection.execute(ASKED["commit_seq_trigger"], {"table": table_name})).fetchone()
        if numbers_all is None or not numbers_all[0]:
            found.append(_statement("the numbering of commits", "commit_seq", settings))
    found.append(_statement("the relay's entry", "register", settings))
    return found


async def run(settings: OutboxSettings, statements: list[Statement]) -> None:
    async with await connect(settings.postgres.dsn.get_secret_value()) as connection:
        for statement in statements:
            # Each by itself: a slot cannot be made in a transaction that has written.
            await connection.execute(sql.SQL(_trusted(statement.text)))


async def plan(settings: OutboxSettings) -> list[Statement]:
    async with await connect(settings.postgres.dsn.get_secret_value()) as connection:
        return await missing(settings, connection)


def _statement(what: str, name: str, settings: OutboxSettings) -> Statement:
    columns = settings.columns
    composed = sql.SQL(SQL[name]).format(
        table=table_of(settings),
        id=sql.Identifier(columns.id),
        aggregatetype=sql.Identifier(columns.aggregatetype),
        aggregateid=sql.Identifier(columns.aggregateid),
        type=sql.Identifier(columns.type),
        payload=sql.Identifier(columns.payload),
        headers=sql.Identifier(columns.headers),
        publication=sql.Identifier(settings.publication),
        slot=sql.Literal(settings.slot),
        name=sql.Literal(settings.name),
        source=sql.Literal(settings.slot if settings.source == "logical" else COMMIT_SEQ),
        index=sql.Identifier(f"{settings.table[:40]}_oncebox_transaction"),
    )
    return Statement(what=what, text=composed.as_string(None))


def _trusted(text: str) -> LiteralString:
    """Made by _statement of our own blocks, with identifiers and literals put in by psycopg."""
    return text


async def _one(
    connection: psycopg.AsyncConnection[Any], query: LiteralString, *values: Any, there: bool = False
) -> Any:
    row = await (await connection.execute(query, values)).fetchone()
    return row is not None if there else row[0] if row else None
