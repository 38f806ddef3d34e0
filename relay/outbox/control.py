"""What an operator asks and tells, through the source database: status, pause, resume."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg

from relay.outbox.config import OutboxSettings
from relay.outbox.database import SQL, connect
from relay.outbox.token import StopError


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    name: str
    state: str
    message: str
    owner: str
    owner_since: datetime
    is_paused: bool
    rows_published: int
    updated_at: datetime
    source: str
    active_pid: int | None
    wal_status: str | None
    # What the slot keeps: bytes of the write-ahead log, and old catalogue rows, for so many transactions.
    kept_bytes: int | None
    age_transactions: int | None
    parked_rows: int


async def status(dsn: str) -> list[Status]:
    async with await connect(dsn) as connection:
        rows = await _fetch(connection, "status", {})
    return [
        Status(
            name=row[0],
            state=row[1],
            message=row[2],
            owner=row[3],
            owner_since=row[4],
            is_paused=row[5],
            rows_published=row[6],
            updated_at=row[7],
            source=row[8],
            active_pid=row[9],
            wal_status=row[10],
            kept_bytes=None if row[11] is None else int(row[11]),
            age_transactions=row[12],
            parked_rows=row[13],
        )
        for row in rows
    ]


async def set_paused(settings: OutboxSettings, *, is_paused: bool) -> None:
    """Takes effect within a second, after the group in hand; also on whoever takes over."""
    async with await connect(settings.postgres.dsn.get_secret_value()) as connection:
        values = {"name": settings.name, "is_paused": is_paused}
        try:
            cursor = await connection.execute(SQL["set_paused"], values)
        except psycopg.errors.UndefinedTable:
            raise _unknown() from None
        if cursor.rowcount != 1:
            raise _unknown()


async def _fetch(connection: psycopg.AsyncConnection[Any], name: str, values: dict[str, object]) -> list[Any]:
    try:
        return await (await connection.execute(SQL[name], values)).fetchall()
    except psycopg.errors.UndefinedTable:
        raise _unknown() from None


def _unknown() -> StopError:
    return StopError("the database does not know this outbox relay: run oncebox outbox init first")
