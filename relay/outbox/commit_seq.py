"""The fallback where wal_level=logical is not to be had: a deferred trigger numbers transactions in commit order.

The trigger's lock is held until its transaction has committed and is visible, so whoever sees a number sees all lower
ones; gaps are rolled back transactions. A transaction is published only once the log is flushed beyond the place where
it was when the rows had been read: one that a crash of the server can still undo (synchronous_commit=off) is not.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import psycopg
from psycopg import sql

from relay.outbox.config import OutboxSettings
from relay.outbox.database import SQL, Database, Identity, Noted, connect, table_of
from relay.outbox.plan import BYTEA_OID, Piece, Row
from relay.outbox.token import COMMIT_SEQ, RESYNC, Facts, StopError, Token

FLUSH_POLL_S = 0.005
FLUSH_S = 30.0


class CommitSeqSource:
    def __init__(self, settings: OutboxSettings, database: Database) -> None:
        self.pause_s = 0.0
        self.kept_bytes = 0
        self.age_transactions = 0
        # A look that is cut gives pieces: there is nothing else that could fill it.
        self.was_cut = False
        self._settings = settings
        self._database = database
        self._select: sql.Composed | None = None
        self._reader: psycopg.AsyncConnection[Any] | None = None

    async def facts(self, identity: Identity, noted: Noted, token: Token | None) -> Facts:
        del token  # there is no slot that could be elsewhere
        self._select = await self._statement()
        await self._check_trigger()
        (newest,) = await self._database.one("commit_seq_newest")
        return Facts(
            system_identifier=identity.system_identifier,
            timeline=identity.timeline,
            source=COMMIT_SEQ,
            fence=noted.fence,
            noted_source=noted.source,
            noted_system_identifier=noted.system_identifier,
            noted_timeline=noted.timeline,
            noted_published=noted.published,
            database=identity.database,
            idle=0,
            newest=newest,
            confirmed=None,
        )

    async def _statement(self) -> sql.Composed:
        settings, names = self._settings, self._settings.columns
        found = await self._database.connection.execute(
            sql.SQL("SELECT * FROM {table} LIMIT 0").format(table=table_of(settings))
        )
        present = {column.name: column.type_code for column in found.description or ()}
        required = [names.id, names.aggregatetype, names.aggregateid, names.payload, "oncebox_transaction"]
        missing = [name for name in required if name not in present]
        if missing:
            raise StopError(
                f"the table {settings.table_schema}.{settings.table} has no column {' and no '.join(missing)}: run "
                "oncebox outbox init, or name them under `columns`"
            )
        columns = row_columns(settings, present)
        return sql.SQL(
            "SELECT {columns}, place FROM unnest(%s::xid8[]) WITH ORDINALITY AS found (transaction_id, place) "
            "JOIN {table} ON oncebox_transaction = transaction_id ORDER BY place, oncebox_number"
        ).format(columns=sql.SQL(", ").join(columns), table=table_of(settings))

    async def _check_trigger(self) -> None:
        """What has no number is not found, and nobody would miss it."""
        table = self._table_name()
        numbers_all = await self._database.one("commit_seq_trigger", table=table)
        if numbers_all is None or not numbers_all[0]:
            raise StopError(
                f"the trigger oncebox_outbox_commit_seq on {table} is gone, or is or was switched off: rows written "
                f"meanwhile have no number, and are not found. Run oncebox outbox init, then {RESYNC}"
            )
        (parts,) = await self._database.one("commit_seq_parts", table=table)
        if parts:
            raise StopError(
                f"{table} has partitions, or tables that inherit from it, and their rows have no number here: use "
                "source: logical, or a table without"
            )

    async def mark(self) -> int:
        (lsn,) = await self._database.one("flush_lsn")
        return int(lsn)

    async def peek(self, position: int, unclean: int) -> AsyncGenerator[Piece]:
        del unclean  # what is published is hardly ever seen again, and then with its rows
        settings = self._settings
        # What is published already is found again where a crash came before it was forgotten.
        values = {"limit": settings.slice_rows, "table": self._table_name()}
        found = await (await self._database.connection.execute(SQL["commit_seq_next"], values)).fetchall()
        if not found or self._select is None:
            return
        pieces = [
            Piece(position=commit_seq, commit_time_us=time_us, rows=[], is_published=commit_seq <= position)
            for commit_seq, _, time_us in found
        ]
        if self._reader is None:
            self._reader = await connect(settings.postgres.dsn.get_secret_value())
        async with self._reader.transaction(), self._reader.cursor(name="outbox") as cursor:
            await cursor.execute(self._select, [[str(transaction) for _, transaction, _ in found]])
            # All that the cursor will ever show is in the log by now.
            await self._flushed()
            async with aclosing(fetched(cursor, settings.slice_rows)) as slices:
                async for piece in in_pieces(pieces, slices):
                    yield piece

    async def _flushed(self) -> None:
        (wanted,) = await self._database.one("insert_lsn")
        deadline = time.monotonic() + FLUSH_S
        while (await self._database.one("flush_lsn"))[0] < wanted:
            if time.monotonic() > deadline:
                raise TimeoutError("the database has not flushed its log for 30 s")
            await asyncio.sleep(FLUSH_POLL_S)

    async def done(self, end: int) -> None:
        await self._database.connection.execute(
            SQL["commit_seq_forget"], {"position": end, "table": self._table_name()}
        )

    async def idle(self, mark: int) -> None:
        """There is nothing to move along."""

    async def watch(self) -> None:
        """Keeps nothing of the log."""
        await self._check_trigger()

    async def close(self) -> None:
        if self._reader is not None:
            await self._reader.close()

    def _table_name(self) -> str:
        return table_of(self._settings).as_string(None)


async def in_pieces(wholes: list[Piece], slices: AsyncIterable[list[Any]]) -> AsyncGenerator[Piece]:
    """Each transaction with its rows, if it still has any. They come in order, each with the place of its transaction
    behind the rest; a transaction that goes on with the next slice comes in several pieces.
    """
    whole = iter(wholes)
    place, piece = 1, next(whole)
    async for rows in slices:
        for *fields, at in rows:
            while place < at:
                yield replace(piece, end=piece.position)
                place, piece = place + 1, next(whole)
            piece.rows.append(Row._make(fields))
        if piece.rows:
            yield piece
            piece = replace(piece, rows=[])
    for following in (piece, *whole):
        yield replace(following, end=following.position)


def row_columns(settings: OutboxSettings, present: dict[str, int]) -> list[sql.Composable]:
    """The table's columns, by those that are present, in the order of Row's fields."""
    names = settings.columns
    wanted = (names.id, names.aggregatetype, names.aggregateid, names.payload, names.type, names.headers)
    return [_as_bytes(name, present, is_payload=name == names.payload) for name in wanted]


def _as_bytes(name: str, present: dict[str, int], *, is_payload: bool) -> sql.Composable:
    if name not in present:
        return sql.SQL("NULL::bytea")
    column = sql.Identifier(name)
    if is_payload and present[name] == BYTEA_OID:
        return column
    # As decoding shows it: a cast makes another text of some types (char(n) loses its blanks).
    return sql.SQL("CASE WHEN {0} IS NOT NULL THEN convert_to(concat({0}), 'UTF8') END").format(column)


async def fetched(cursor: psycopg.AsyncServerCursor[Any], size: int) -> AsyncGenerator[list[Any]]:
    """Slice by slice; the next is on its way while the caller is busy with this one."""
    fetching: asyncio.Task[list[Any]] | None = asyncio.ensure_future(_fetch(cursor, size))
    try:
        while fetching is not None:
            rows = await fetching
            fetching = asyncio.ensure_future(_fetch(cursor, size)) if len(rows) == size else None
            await asyncio.sleep(0)  # lets the request go out
            if rows:
                yield rows
    finally:
        if fetching is not None:
            await asyncio.gather(fetching, return_exceptions=True)


async def _fetch(cursor: psycopg.AsyncServerCursor[Any], size: int) -> list[Any]:
    return await cursor.fetchmany(size)
