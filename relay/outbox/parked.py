"""What is to become of parked rows: listed, published after all, or dropped.

Publishing is the relay's: it alone knows when nothing that came later with a key of theirs is on its way. Here they are
only marked.
"""

import uuid
from dataclasses import dataclass
from typing import Any

import psycopg

from relay.outbox.config import OutboxSettings
from relay.outbox.database import SQL, connect
from relay.outbox.token import StopError


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedRow:
    position: int
    row_id: str | None
    reason: str


async def listed(settings: OutboxSettings, limit: int) -> list[ParkedRow]:
    async with await connect(settings.postgres.dsn.get_secret_value()) as connection:
        try:
            cursor = await connection.execute(SQL["parked_list"], {"name": settings.name, "limit": limit})
        except psycopg.errors.UndefinedTable:
            raise StopError("the database does not know this outbox relay: run oncebox outbox init first") from None
        return [
            ParkedRow(position=int(position), row_id=row_id, reason=reason)
            for position, row_id, reason in await cursor.fetchall()
        ]


async def retry(settings: OutboxSettings) -> int:
    """Hands all of them back to the relay, as one transaction; how many."""
    async with await connect(settings.postgres.dsn.get_secret_value()) as connection, connection.transaction():
        await _lock(settings, connection)
        return (await connection.execute(SQL["ask_retry"], {"name": settings.name, "retry": uuid.uuid4()})).rowcount


async def discard(settings: OutboxSettings) -> int:
    """They are never published; how many."""
    async with await connect(settings.postgres.dsn.get_secret_value()) as connection, connection.transaction():
        await _lock(settings, connection)
        found = await (await connection.execute(SQL["parked_is_settled"], {"name": settings.name})).fetchone()
        if found is not None and not found[0]:
            raise StopError("the relay is still at work on what it has just parked: let it run, try again in a second")
        return (await connection.execute(SQL["discard"], {"name": settings.name})).rowcount


async def _lock(settings: OutboxSettings, connection: psycopg.AsyncConnection[Any]) -> None:
    """No relay parks meanwhile: it locks its row for that."""
    await connection.execute(SQL["lock_relay"], {"name": settings.name})
    found = await (await connection.execute(SQL["is_retry_asked"], {"name": settings.name})).fetchone()
    if found is not None and found[0]:
        raise StopError("they are handed back to the relay already: let it run")
