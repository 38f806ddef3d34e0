"""The outbox read by logical decoding, with plain SQL: peek at the slot, and advance it once all is published.

A peek changes nothing, so a crash at any moment only means that the same is read again. It begins where the oldest
transaction that is still open began; a snapshot record in the log (PostgreSQL 16) keeps that way short.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol, cast

import psycopg

from relay.outbox.config import OutboxSettings
from relay.outbox.database import SQL, Database, Identity, Noted, connect, first_line
from relay.outbox.mapping import row_of_message
from relay.outbox.plan import Assembler, Piece
from relay.outbox.token import RESYNC, SLOT_TAKEN, Facts, StopError, Token, slot_beyond

logger = logging.getLogger(__name__)

BUSY_PAUSE_S = 0.05
BUSY_S = 30.0
# A peek reads this much again at most, while nobody keeps a transaction open.
DISTANCE_BYTES = 256 * 1024
# With more than this to read again, looks are taken less often, and under a backlog they are longer.
FAR_BYTES = 16 * 1024 * 1024
# A longer look is no more than so many times changes_max, and its messages no more than so many bytes: the server
# keeps them, in files if they are many, until they are read.
LONGER_MAX = 8
LOOK_BYTES_MAX = 256 * 1024 * 1024
SNAPSHOT_PAUSE_S = 1.0
# PostgreSQL counts them in an integer.
CHANGES_MAX = 2**31 - 1
SNAPSHOT_VERSION = 160_000


class Source(Protocol):
    """Where whole database transactions come from, in commit order."""

    # How long to wait at least before the next look, by what the last one cost.
    pause_s: float
    # Bytes of the log that are kept for us.
    kept_bytes: int
    # For how many transactions old rows of the catalogue are kept for us.
    age_transactions: int
    # The last look came to its limit, or was not carried to its end: there may be more behind it.
    was_cut: bool

    async def facts(self, identity: Identity, noted: Noted, token: Token | None) -> Facts: ...

    def peek(self, position: int, unclean: int) -> AsyncGenerator[Piece]:
        """All that is there, beginning at or before `position`; a piece says whether it is at or below it, and then may
        come without its rows, if it is beyond `unclean`.
        """
        ...

    async def mark(self) -> int:
        """A place in the log, taken before a peek: if the peek finds nothing and was not cut, nothing is before it."""
        ...

    async def done(self, end: int) -> None:
        """All up to here is published: it is not wanted again."""
        ...

    async def idle(self, mark: int) -> None:
        """There is nothing to publish up to this mark."""
        ...

    async def watch(self) -> None:
        """Every second, also while paused: how much is kept, and whether it can go on at all (StopError)."""
        ...

    async def close(self) -> None: ...


class LogicalSource:
    def __init__(self, settings: OutboxSettings, database: Database) -> None:
        self.pause_s = 0.0
        self.kept_bytes = 0
        self.age_transactions = 0
        self.was_cut = False
        self._settings = settings
        self._database = database
        self._changes_max = settings.changes_max
        # How far before its place in the log each look begins.
        self._distance_bytes = 0
        # Up to here all is published, or nothing was to be: the slot is never beyond it by our doing.
        self._furthest = 0
        # Whoever did not ask for facts only looks, as a resync does: it publishes nothing, and has no place.
        self._has_place = False
        self._reader: psycopg.AsyncConnection[Any] | None = None
        self._version = 0
        self._may_snapshot = True
        self._snapshot_at = 0.0

    async def facts(self, identity: Identity, noted: Noted, token: Token | None) -> Facts:
        settings = self._settings
        self._version = identity.version
        self._furthest = max(noted.idle_lsn, token.end if token else 0)
        self._has_place = True
        confirmed = await self._slot()
        await self._check_publication()
        return Facts(
            system_identifier=identity.system_identifier,
            timeline=identity.timeline,
            source=settings.slot,
            fence=noted.fence,
            noted_source=noted.source,
            noted_system_identifier=noted.system_identifier,
            noted_timeline=noted.timeline,
            noted_published=noted.published,
            database=identity.database,
            idle=noted.idle_lsn,
            newest=identity.flush_lsn,
            confirmed=confirmed,
        )

    async def _slot(self) -> int:
        """Where it stands."""
        name = self._settings.slot
        slot = await self._database.one("slot", slot=name)
        if slot is None:
            raise StopError(f"the slot {name} does not exist (dropped, or the database was restored); {RESYNC}")
        plugin, is_here, _pid, confirmed, wal_status, kept_bytes, distance, age_transactions = slot
        if plugin != "pgoutput" or not is_here:
            raise StopError(f"the slot {name} is not a pgoutput slot of this database: name another")
        if wal_status == "lost":
            raise StopError(
                f"the slot {name} was invalidated: the log it needs is gone (max_slot_wal_keep_size); {RESYNC}"
            )
        self.kept_bytes, self.age_transactions = int(kept_bytes), int(age_transactions or 0)
        self._distance_bytes = int(distance)
        return int(confirmed)

    async def _check_place(self) -> None:
        """Before all that raises `_furthest`, too: what was taken from a look must not count as looked at."""
        confirmed = await self._slot()
        if confirmed > self._furthest:
            # Refused to one that is no longer the owner: its successor has moved the slot, as it should.
            await self._database.keep_from_starting(SLOT_TAKEN)
            raise StopError(slot_beyond(self._settings.slot, confirmed, self._furthest))

    async def _check_publication(self) -> None:
        """What the publication does not have is not decoded, and nobody would miss it."""
        settings = self._settings
        found = await self._database.one(
            "is_published", publication=settings.publication, schema=settings.table_schema, table=settings.table
        )
        if found is None:
            raise StopError(
                f"the publication {settings.publication} does not exist: run oncebox outbox init; if it was there "
                f"before, {RESYNC}"
            )
        has_inserts, row_filter = found
        if not has_inserts:
            raise StopError(
                f"the publication {settings.publication} does not have the inserts of {settings.table_schema}."
                f"{settings.table}: rows written meanwhile are not decoded. ALTER PUBLICATION … ADD TABLE … (or SET "
                f"(publish = 'insert')), then {RESYNC}"
            )
        if row_filter is not None:
            raise StopError(
                f"the publication {settings.publication} has only rows of {settings.table_schema}.{settings.table} "
                f"with {row_filter}: others are not decoded. ALTER PUBLICATION … SET TABLE … without WHERE, then "
                f"{RESYNC}"
            )

    async def mark(self) -> int:
        lsn, confirmed = await self._database.one("place", slot=self._settings.slot)
        if confirmed is None or confirmed > self._furthest:
            await self._check_place()
        return int(lsn)

    async def peek(self, position: int, unclean: int) -> AsyncGenerator[Piece]:
        settings = self._settings
        assembler = Assembler(
            token=position,
            unclean=unclean,
            table=(settings.table_schema, settings.table),
            columns=settings.columns.names(),
            message=row_of_message if settings.message_prefix else None,
            message_prefix=settings.message_prefix,
        )
        started, decoded_s = time.monotonic(), 0.0
        self.was_cut, changes, size_bytes, is_empty = True, 0, 0, True
        async with aclosing(self._slices()) as slices:
            async for messages in slices:
                # The server has done its part before the first of them comes.
                decoded_s = decoded_s or time.monotonic() - started
                if not changes and self._has_place:
                    # What somebody else took before this look is not in it. Published is what it shows from here on,
                    # and then the token, with which the next start compares the slot, might stand behind that.
                    await self._check_place()
                changes += len(messages)
                size_bytes += sum(map(len, messages))
                for piece in assembler.feed(messages):
                    is_empty = False
                    yield piece
        assembler.check_whole()
        self.was_cut = changes >= self._changes_max
        self._changes_max = self._next_look(size_bytes // max(changes, 1), is_empty=is_empty)
        # With a backlog, what is read again pays: the next look brings as much as it can hold.
        is_slow = self._distance_bytes > FAR_BYTES and not self.was_cut
        self.pause_s = (decoded_s or time.monotonic() - started) if is_slow else 0.0

    def _next_look(self, change_bytes: int, *, is_empty: bool) -> int:
        """How many changes the next look shows, by what this one was."""
        longer = self._changes_max * 2
        if self.was_cut and is_empty:
            # Full of messages outside of any transaction, which are nobody's: what is behind them takes a longer look.
            return min(longer, CHANGES_MAX)
        usual = self._settings.changes_max
        if not self.was_cut or self._distance_bytes <= FAR_BYTES:
            return usual
        # Each look reads all of that again, so there should be fewer of them.
        return max(usual, min(longer, usual * LONGER_MAX, LOOK_BYTES_MAX // max(change_bytes, 1)))

    async def _slices(self) -> AsyncGenerator[list[bytes]]:
        settings = self._settings
        if self._reader is None:
            self._reader = await connect(settings.postgres.dsn.get_secret_value())
        values = {
            "slot": settings.slot,
            "changes_max": self._changes_max,
            "publication": '"' + settings.publication.replace('"', '""') + '"',
            "messages": "true" if settings.message_prefix else "false",
        }
        deadline = time.monotonic() + BUSY_S
        while True:
            try:
                async with (
                    self._reader.cursor() as cursor,
                    aclosing(streamed(cursor, values, settings.slice_rows)) as slices,
                ):
                    async for messages in slices:
                        yield messages
                return
            except psycopg.errors.ObjectInUse:
                # Before the first message: a former owner is still reading, or the slot is being advanced.
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(BUSY_PAUSE_S)
            except (psycopg.errors.UndefinedObject, psycopg.errors.ObjectNotInPrerequisiteState) as error:
                raise StopError(f"the slot {settings.slot} cannot be read: {first_line(error)}; {RESYNC}") from error

    async def done(self, end: int) -> None:
        await self._check_place()
        await self._advance(end)

    async def _advance(self, end: int) -> None:
        self._furthest = max(self._furthest, end)
        deadline = time.monotonic() + BUSY_S
        while True:
            try:
                await self._database.one("advance", slot=self._settings.slot, lsn=end)
                break
            except psycopg.errors.ObjectInUse:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(BUSY_PAUSE_S)
            except psycopg.errors.ObjectNotInPrerequisiteState as error:
                # 55000 also says "cannot advance replication slot to X, minimum is Y": it stands there already, by our
                # doing or, which is looked at below, somebody else's.
                if "minimum is" not in str(error):
                    raise
                break
        await self._keep_near()

    async def idle(self, mark: int) -> None:
        await self._check_publication()
        await self._check_place()
        await self._database.note_idle(mark)
        await self._advance(mark)

    async def watch(self) -> None:
        await self._check_publication()
        await self._check_place()

    async def _keep_near(self) -> None:
        await self._check_place()
        wanted = self._distance_bytes > DISTANCE_BYTES and self._may_snapshot and self._version >= SNAPSHOT_VERSION
        if wanted and time.monotonic() > self._snapshot_at + SNAPSHOT_PAUSE_S:
            self._snapshot_at = time.monotonic()
            try:
                await self._database.one("log_snapshot")
            except psycopg.errors.InsufficientPrivilege:
                self._may_snapshot = False
                logger.warning(
                    "without the right to pg_log_standby_snapshot() each look at the slot reads up to 15 s of the log "
                    "again: GRANT EXECUTE ON FUNCTION pg_log_standby_snapshot() to the relay's role"
                )

    async def close(self) -> None:
        if self._reader is not None:
            await self._reader.close()


async def streamed(
    cursor: psycopg.AsyncCursor[Any], values: dict[str, object], size: int
) -> AsyncGenerator[list[bytes]]:
    """Slice by slice, with one request: what is not taken yet waits in the server."""
    # It is a generator, whatever its type says, and has to be closed as one.
    rows = cast("AsyncGenerator[tuple[bytes]]", cursor.stream(SQL["peek"], values, binary=True, size=size))
    messages: list[bytes] = []
    async with aclosing(rows):
        async for (message,) in rows:
            messages.append(message)
            if len(messages) == size:
                yield messages
                messages = []
    if messages:
        yield messages
