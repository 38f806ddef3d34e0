"""What a relay notes in the source database and asks of it: who leads, its fence, parked rows, clean-up, long writers.

Whatever an owner writes here is bound to its fence: a former owner that wakes up changes nothing.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import psycopg
from psycopg import sql

from oncebox.queries import queries
from relay.outbox.config import OutboxSettings
from relay.outbox.mapping import BadRowError
from relay.outbox.plan import MessageRow, Row
from relay.outbox.token import StopError

# A peer that is gone must not hold the lead for hours.
CONNECTION = {
    "application_name": "oncebox-outbox",
    # Decoded rows come in the client's encoding too, whatever environment or DSN make of that.
    "client_encoding": "UTF8",
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
    "connect_timeout": 10,
    "options": "-c bytea_output=hex -c DateStyle=ISO -c lock_timeout=0 -c statement_timeout=0",
}
DELETE_ROWS_MAX = 10_000
BEAT_S = 1.0
SOURCE_S = 5.0  # a session that is just ending takes a moment
SOURCE_POLL_S = 0.05

SQL = queries("relay.outbox", "queries.sql")


class FencedError(Exception):
    """Another relay has taken over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """The relay's row in oncebox.outbox_relay, as its new owner finds it."""

    fence: int
    source: str
    system_identifier: str
    timeline: int
    idle_lsn: int
    is_paused: bool
    # 0: nothing was ever published from here.
    published: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    system_identifier: str
    timeline: int
    flush_lsn: int
    version: int
    # Of this database among those of the server: its oid.
    database: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Whoever has the oldest open transaction that has written."""

    what: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """What is parked: the transactions, and the keys that later ones wait behind."""

    positions: set[int]
    rows: int
    keys: set[tuple[bytes | None, bytes | None]]
    is_retry_asked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Parked rows that are to be published after all, in their order."""

    name: str
    # Of the last of them.
    position: int
    rows: list[Row]


async def connect(dsn: str) -> psycopg.AsyncConnection[Any]:
    connection = await psycopg.AsyncConnection.connect(dsn, autocommit=True, **CONNECTION)  # type: ignore[arg-type]
    try:
        await connection.execute(SQL["commit_durably"])
    except BaseException:
        await connection.close()
        raise
    return connection


class Database:
    def __init__(self, settings: OutboxSettings, connection: psycopg.AsyncConnection[Any]) -> None:
        self.connection = connection
        self._settings = settings
        self._fence = -1
        # Who led when we looked last, with the sign of life that there was; and since when we have seen that.
        self._leader: tuple[Any, ...] | None = None
        self._leader_seen_s = 0.0
        self._delete: sql.Composed | None = None

    @classmethod
    async def open(cls, settings: OutboxSettings) -> Self:
        return cls(settings, await connect(settings.postgres.dsn.get_secret_value()))

    async def close(self) -> None:
        await self.connection.close()

    async def one(self, name: str, **values: object) -> Any:
        cursor = await self.connection.execute(SQL[name], {"name": self._settings.name, **values})
        return await cursor.fetchone()

    async def lead(self) -> bool:
        """Whether this session is the one that leads; the lock ends with the session."""
        (leads,) = await self.one("try_lead")
        return bool(leads)

    async def take_source(self) -> None:
        """After the lead, and as long as that. Two relays of different names would each take what the other needs."""
        settings = self._settings
        what = f"the slot {settings.slot}"
        if settings.source == "commit_seq":
            what = f"the table {table_of(settings).as_string(None)}"
        deadline_s = time.monotonic() + SOURCE_S
        while not (await self.one("try_source", source=what))[0]:
            if time.monotonic() > deadline_s:
                raise StopError(
                    f"a relay of another name reads {what}: give this one the same name, then it stands by; to publish "
                    "by itself it needs an outbox of its own"
                )
            await asyncio.sleep(SOURCE_POLL_S)

    async def put_out_silent_leader(self) -> bool:
        """Ends the session of one that has led for too long without a new sign of life (stopped, or hanging), as far as
        we have seen: one that leads since a moment ago has given none yet. What it may still try later is refused by
        the fences. Whether there was one.
        """
        try:
            leader = await self.one("leader")
        except psycopg.errors.UndefinedTable:
            return False
        now_s = time.monotonic()
        if leader is None or leader != self._leader:
            self._leader, self._leader_seen_s = leader, now_s
            return False
        if now_s - self._leader_seen_s < self._settings.takeover_ms / 1000:
            return False
        (ended,) = await self.one("end_session", pid=leader[0])
        return bool(ended)

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Meanwhile says every second that we are alive, on a connection of its own, while the database is there."""
        self._fence = await self._noted_fence()
        # Connected before there is a task that can be cancelled: a connection half made would linger.
        async with await connect(self._settings.postgres.dsn.get_secret_value()) as connection:
            task = asyncio.create_task(self._beat(connection))
            try:
                yield
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _beat(self, connection: psycopg.AsyncConnection[Any]) -> None:
        while True:
            await connection.execute(SQL["beat"], {"name": self._settings.name, "fence": self._fence})
            await asyncio.sleep(min(BEAT_S, self._settings.takeover_ms / 4000))

    async def _noted_fence(self) -> int:
        try:
            row = await self.one("fence")
        except psycopg.errors.UndefinedTable:
            row = None
        if row is None:
            raise StopError(
                f"the database does not know an outbox relay {self._settings.name!r}: run oncebox outbox init first"
            )
        return int(row[0])

    async def raise_fence(self, owner: str) -> Noted:
        fence, source, system_identifier, timeline, idle_lsn, is_paused, published = await self.one(
            "raise_fence", owner=owner
        )
        self._fence = fence
        return Noted(
            fence=fence,
            source=source,
            system_identifier=system_identifier,
            timeline=timeline,
            idle_lsn=int(idle_lsn),
            is_paused=is_paused,
            published=int(published),
        )

    async def identity(self) -> Identity:
        system_identifier, in_recovery, version, timeline, flush_lsn, database = await self.one("identity")
        if in_recovery:
            raise StopError("this server is a standby: name the primary in the DSN (target_session_attrs=read-write)")
        return Identity(
            system_identifier=system_identifier,
            timeline=timeline,
            flush_lsn=int(flush_lsn),
            version=version,
            database=database,
        )

    async def note_idle(self, lsn: int) -> None:
        cursor = await self.connection.execute(
            SQL["note_idle"], {"name": self._settings.name, "fence": self._fence, "lsn": lsn}
        )
        if cursor.rowcount != 1:
            raise FencedError("another relay has raised the fence in the database")

    async def keep_from_starting(self, why: str) -> None:
        """Until a resync has come to its end."""
        if await self.one("keep_from_starting", fence=self._fence, why=why) is None:
            raise FencedError("another relay has raised the fence in the database")

    async def note_slot(self, identity: Identity, lsn: int) -> None:
        """Of a resync: where its new slot stands; 0: it has none."""
        noted = await self.one(
            "note_slot",
            fence=self._fence,
            lsn=lsn,
            system_identifier=identity.system_identifier,
            timeline=identity.timeline,
        )
        if noted is None:
            raise FencedError("another relay has raised the fence in the database")

    async def note_state(self, state: str, message: str, *, rows: int, position: int) -> bool:
        """Whether it should pause."""
        found = await self.one(
            "note_state", fence=self._fence, state=state, message=message, rows=rows, position=position
        )
        if found is None:
            raise FencedError("another relay has raised the fence in the database")
        return bool(found[0])

    async def parked(self) -> Parked:
        cursor = await self.connection.execute(SQL["parked"], {"name": self._settings.name})
        rows = await cursor.fetchall()
        return Parked(
            positions={int(position) for position, _, _, _ in rows},
            rows=len(rows),
            keys={(kind, key) for _, kind, key, _ in rows},
            is_retry_asked=any(is_asked for *_, is_asked in rows),
        )

    async def parked_rows(self) -> dict[int, list[Row]]:
        """By the position of their transaction, in their order."""
        cursor = await self.connection.execute(SQL["parked_rows"], {"name": self._settings.name})
        found: dict[int, list[Row]] = {}
        for position, *fields in await cursor.fetchall():
            found.setdefault(int(position), []).append(Row._make(fields))
        return found

    async def forget_settled(self, positions: Sequence[int]) -> None:
        """These transactions are published, whatever the database was told of it."""
        await self._execute("forget_settled", positions=list(positions))

    async def park(self, position: int, rows: Sequence[Row], reason: str) -> None:
        """One transaction, whole; again is the same as once."""
        async with self.connection.transaction():
            await self._check_fence()
            async with self.connection.cursor() as cursor:
                await cursor.executemany(
                    SQL["park"],
                    [
                        {
                            "name": self._settings.name,
                            "position": position,
                            "number": number,
                            "row_id": None if row.id is None else _as_text(row.id),
                            "aggregatetype": row.aggregatetype,
                            "aggregateid": row.aggregateid,
                            "type": row.type,
                            "payload": row.payload,
                            "headers": row.headers,
                            "reason": reason,
                        }
                        for number, row in enumerate(rows)
                    ],
                )

    async def retry_asked(self, done: str) -> Retry | None:
        """Also what was parked since it was asked for, unless it is the one that is `done`."""
        async with self.connection.transaction():
            await self._check_fence()
            await self._execute("join_retry", done=done)
            cursor = await self.connection.execute(SQL["retry_asked"], {"name": self._settings.name})
            found = await cursor.fetchall()
        if not found:
            return None
        name, last, *_ = found[-1]
        return Retry(name=name, position=int(last), rows=[Row._make(fields) for _, _, *fields in found])

    async def refuse_retry(self, retry: Retry, bad: BadRowError) -> None:
        """They stay parked."""
        row_id = bad.row.id.decode(errors="replace") if bad.row.id is not None else None
        await self._execute("refuse_retry", retry=retry.name, row_id=row_id, reason=bad.reason)

    async def forget_retried(self, retry: Retry) -> None:
        """They are published, whoever says so."""
        await self._execute("forget_retried", retry=retry.name)

    async def _check_fence(self) -> None:
        """Nobody raises it before this transaction has ended."""
        if await self.one("fence_for_parking", fence=self._fence) is None:
            raise FencedError("another relay has raised the fence in the database")

    async def _execute(self, name: str, **values: object) -> None:
        await self.connection.execute(SQL[name], {"name": self._settings.name, **values})

    async def delete(self, ids: Sequence[bytes]) -> None:
        """Removes published rows from the outbox; those that are gone already are none of our concern."""
        if not ids:
            return
        if self._delete is None:
            self._delete = await self._delete_statement()
        for first in range(0, len(ids), DELETE_ROWS_MAX):
            chosen = [row_id.decode() for row_id in ids[first : first + DELETE_ROWS_MAX]]
            await self.connection.execute(self._delete, [chosen])

    async def _delete_statement(self) -> sql.Composed:
        settings = self._settings
        cursor = await self.connection.execute(
            sql.SQL("SELECT {column} FROM {table} LIMIT 0").format(
                column=sql.Identifier(settings.columns.id), table=table_of(settings)
            )
        )
        oid = cursor.description[0].type_code if cursor.description else 0
        found = await (await self.connection.execute("SELECT format_type(%s, -1)", [oid])).fetchone()
        kind = found[0] if found else "text"
        # The type's name comes from PostgreSQL's own catalogue, quoted by it where it must be. By -1 a char(n) is one
        # of any length: `character` alone has one place, and would find other rows or none.
        return sql.SQL("DELETE FROM {table} WHERE {column} = ANY(%s::text[]::{kind}[])").format(
            table=table_of(settings), column=sql.Identifier(settings.columns.id), kind=sql.SQL(kind)
        )

    async def oldest_writer(self) -> Writer | None:
        row = await self.one("oldest_writer")
        if row is None:
            return None
        what, age_s = row
        return Writer(what=what, age_s=age_s or 0.0)


def _as_text(row_id: bytes) -> str:
    """A message may have an id that is no text of PostgreSQL's."""
    return row_id.decode(errors="replace").replace("\0", "\N{REPLACEMENT CHARACTER}")


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def ids_in_table(rows: Iterable[Row]) -> list[bytes]:
    return [row.id for row in rows if row.id is not None and not isinstance(row, MessageRow)]


def table_of(settings: OutboxSettings) -> sql.Identifier:
    return sql.Identifier(settings.table_schema, settings.table)
