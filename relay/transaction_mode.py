"""Transaction mode: whole transactions of all topics, by one active process; others stand by.

The reader tells whole transactions in order; many of them share a database transaction. Who is active is decided by the
relay's fence: the statement that raises it raises that of all its positions, and every commit is checked against it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from oncebox.reader import PartitionPosition, Position, TransactionReader, read_transactions
from oncebox.settings import kafka_settings
from oncebox.wire import TopicPartition
from relay.batch import Batch
from relay.database import check_same, connect
from relay.encoding import time_of
from relay.kafka import EARLIEST, KafkaAdmin, Place
from relay.order import is_done, overtaken
from relay.plan import rows_of
from relay.positions import PRUNE_S, begin, freed, overtaken_by_retention, prune
from relay.queries import query
from relay.references import Coming
from relay.splitting import MissingReferenceError
from relay.types import FencedError
from relay.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from relay.config import RelaySettings
    from relay.database import Connection
    from relay.kafka import Topics
    from relay.status import Status
    from relay.writer import Prepared

STANDBY_LOOK_S = 0.5
LOOK_S = 1.0
REFERENCE_WAIT_S = 0.2
# Where references are missing all the time, others are met with each wait: after so many, all there is is judged.
WAITS_MAX = 5

log = logging.getLogger(__name__)


class TransactionSession:
    """From one connection to its end. Whatever happens, the next session goes on from what the database says."""

    def __init__(self, settings: RelaySettings, instance: str, status: Status, stop: asyncio.Event) -> None:
        self._settings = settings
        self._instance = instance
        self._status = status
        self._stop = stop
        self._relay = {"relay": settings.name}
        self._kafka = kafka_settings(settings.kafka, client_id=f"oncebox-relay-{settings.name}")
        self._writing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="relay-writer")
        # Signs of life go over a connection of their own: a long batch is no reason to be taken for dead.
        self._beating = ThreadPoolExecutor(max_workers=1, thread_name_prefix="relay-beat")
        self._signs: Connection | None = None
        self._planning = ThreadPoolExecutor(max_workers=1, thread_name_prefix="relay-planner")
        self._writer: Writer
        self._admin: KafkaAdmin
        self._pruned_at = 0.0
        self._fence = 0
        self._topic_ids: dict[str, str] = {}
        self._sources: dict[Place, int] = {}
        self._high_offsets: dict[int, int] = {}
        # As the database has them.
        self._saved: Position
        self._starts: dict[int, int] = {}
        # By source: what it has to wait for.
        self._waits: dict[int, dict[int, int]] = {}

    async def run(self) -> None:
        self._writer = await self._in_writer(Writer, self._settings, self._instance, self._status)
        try:
            if not await self._become_active():
                return
            if self._status.state == "STANDBY":
                # That may have been long: others have changed tables since.
                await self._in_writer(self._writer.look_at_tables)
            start = await self._in_writer(self._begin)
            reader = read_transactions(
                self._settings.topics,
                self._kafka,
                start=start,
                feed_topic=self._settings.feed_topic,
                buffer_bytes=self._settings.limits.buffer_bytes,
                held_back=self._held_back(),
            )
            # Where rows may have to wait for others, each transaction is looked at by itself.
            reader.in_bulk = not self._writer.has_references
            beating = asyncio.create_task(self._beat())
            try:
                async with reader:
                    self._saved = start
                    self._status.turn("RUNNING")
                    await self._work(reader)
            finally:
                beating.cancel()
                await asyncio.wait([beating])
            await self._in_writer(self._release)
        finally:
            await self._in_writer(self._writer.close)
            self._writing.shutdown(wait=False)
            self._planning.shutdown(wait=False)
            self._beating.shutdown(wait=False)

    async def _in_writer(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._writing, function, *arguments)

    # --- who is active ----------------------------------------------------------------------------------------------

    async def _become_active(self) -> bool:
        """False: told to stop while standing by."""
        while not self._stop.is_set():
            if await self._in_writer(self._try_take):
                return True
            await _either(self._stop, STANDBY_LOOK_S)
        return False

    def _try_take(self) -> bool:
        connection = self._writer.connection
        row = connection.execute(
            query("look_at_owner"), self._relay | {"session_ms": self._settings.session_ms}
        ).fetchone()
        if row is None:
            raise FencedError("the relay's row is gone")
        fence, owner, since, _, is_free = row
        if not is_free:
            self._status.turn("STANDBY", f"{owner} is active since {since}")
            return False
        # It may stand still in the middle of a transaction, with locks that we would wait for.
        connection.execute(query("end_session_of_owner"), self._relay | {"seen": fence})
        with connection.transaction():
            taken = connection.execute(
                query("take_relay"), self._relay | {"owner": self._instance, "seen": fence}
            ).fetchone()
            if taken is None:
                return False
            self._fence = taken[0]
            mine = self._relay | {"fence": self._fence, "owner": self._instance}
            connection.execute(query("fence_positions"), mine)
            connection.execute(query("fence_feed"), mine)
        self._status.fence = self._fence
        log.info("active with fence %s%s", self._fence, f", after {owner}" if owner else "")
        return True

    async def _beat(self) -> None:
        """Until cancelled. What fails here is found out by the writer."""
        try:
            while True:
                await asyncio.get_running_loop().run_in_executor(self._beating, self._give_sign)
                await asyncio.sleep(self._settings.session_ms / 4000)
        finally:
            # In that thread, after whatever it is at: also after a connection that is only being made.
            self._beating.submit(self._stop_signs)

    def _give_sign(self) -> None:
        if self._signs is None:
            self._signs = connect(self._settings, f"{self._instance} beat")
        self._signs.execute(query("beat"), self._relay | {"fence": self._fence})

    def _stop_signs(self) -> None:
        if self._signs is not None:
            self._signs.close()

    def _release(self) -> None:
        self._writer.connection.execute(query("release_relay"), self._relay | {"fence": self._fence})

    def _begin(self) -> Position:
        connection = self._writer.connection
        admin = self._admin = KafkaAdmin(self._kafka)
        topics = admin.topics(self._settings.topics)
        self._topic_ids = dict(topics.ids)
        self._sources = begin(connection, self._settings, admin, topics)
        mine = self._relay | {"fence": self._fence, "owner": self._instance}
        connection.execute(query("fence_positions"), mine)
        partitions = {}
        firsts = admin.offsets(topics.partitions, EARLIEST)
        rows = connection.execute(query("positions"), self._relay | {"topic_ids": list(topics.ids.values())}).fetchall()
        for topic, partition, source, start, offset, high, beyond, _, _, waits_for in rows:
            if waits_for:
                self._waits[source] = {int(key): end for key, end in waits_for.items()}
            self._high_offsets[source] = high
            self._starts[source] = start
            done = tuple((first, after) for first, after in beyond)
            partitions[TopicPartition(topic, partition)] = PartitionPosition(next_offset=offset, done=done)
            if offset < firsts.get((topic, partition), 0):
                raise overtaken_by_retention((topic, partition), f"it begins at {firsts[topic, partition]}")
        self._free()
        self._writer.begin(self._sources, self._high_offsets)
        self._writer.load_letters_read_again()
        feed: dict[int, int] = dict(connection.execute(query("feed_positions"), self._relay).fetchall())
        ids = {topic: topic_id.replace("-", "") for topic, topic_id in topics.ids.items()}
        return Position(feed=feed, partitions=partitions, topic_ids=ids)

    def _free(self) -> None:
        for source in freed(self._writer.connection, self._settings.name, self._waits):
            del self._waits[source]

    def _held_back(self) -> dict[TopicPartition, dict[TopicPartition, int]]:
        at = {source: TopicPartition(*place) for place, source in self._sources.items()}
        return {at[new]: {at[old]: end for old, end in ends.items()} for new, ends in self._waits.items()}

    # --- the work ---------------------------------------------------------------------------------------------------

    async def _work(self, reader: TransactionReader) -> None:
        loop = asyncio.get_running_loop()
        writing: asyncio.Future[None] | None = None
        looked_at = 0.0
        try:
            while not self._stop.is_set():
                now = loop.time()
                if now > looked_at + LOOK_S:
                    looked_at = now
                    await _settled(writing)
                    writing = None
                    if await self._in_writer(self._look):
                        await self._unload(reader)
                        await _either(self._stop, LOOK_S)
                        continue
                    # Past markers and what was aborted; nothing is taken and not written at this point.
                    position = reader.position()
                    if self._has_new(position):
                        break
                    await self._in_writer(self._write_position, position)
                await self._unload(reader)
                if not await reader.wait(0.1 if writing is None else 0.005):
                    if writing is not None and writing.done():
                        await _settled(writing)
                        writing = None
                    continue
                batch = Batch(reader, self._settings.limits)
                await self._take_those_before(batch)
                if self._stop.is_set() or self._has_new(batch.position):
                    break
                prepared, asked = await loop.run_in_executor(self._planning, self._prepare, batch)
                await _settled(writing)
                writing = None
                if self._writer.has_references:
                    if not await self._write_with_references(batch, prepared, asked):
                        break
                else:
                    writing = asyncio.ensure_future(self._in_writer(self._write, batch, prepared, asked))
        finally:
            if writing is not None:
                await asyncio.wait([writing])
                if not self._stop.is_set():
                    writing.exception()
        await _settled(writing)

    def _has_new(self, position: Position) -> bool:
        """Partitions were added: the next session gives them a position, and knows what they have to wait for."""
        new = [where for where in position.partitions if (where.topic, where.partition) not in self._sources]
        for where in new:
            log.info("%s has a new partition %s: begins anew with it", where.topic, where.partition)
        return bool(new)

    async def _unload(self, reader: TransactionReader) -> None:
        """What is too large for memory waits for its rest in the database."""
        while self._writer.takes_pieces and (part := reader.unload()) is not None:
            await self._in_writer(self._writer.large.keep, part)

    async def _take_those_before(self, batch: Batch) -> None:
        """Takes more, as long as rows of the batch have earlier records in transactions that are not whole yet."""
        reader, rows = batch.reader, partial(rows_of, self._writer.planner)
        while True:
            found = overtaken(batch.pieces, batch.position.partitions, reader.waiting, reader.first_unloaded, rows)
            if found is None:
                return
            where, offset = found
            while not is_done(batch.position.partitions[where], offset):
                if self._stop.is_set():
                    return
                await self._unload(reader)
                # With no room for more: first it has to be certain that this is the way to it.
                if batch.is_full and not await reader.wait_until_whole(where, offset, REFERENCE_WAIT_S):
                    continue
                if await reader.wait(REFERENCE_WAIT_S):
                    batch.take()

    async def _write_with_references(self, batch: Batch, prepared: Prepared, asked: Callable[[], Topics]) -> bool:
        """A row whose foreign key refers to nothing waits for the commits that there are when it is met, as far as they
        have room; then all is written together. False: nothing was written, and the session is over.
        """
        reader, sink = batch.reader, self._writer.sink
        coming: Coming | None = None
        # So many units had been met when what is coming was asked for; and so many have waited for all there was.
        met = waited = waits = 0
        try:
            while not self._stop.is_set():
                if coming is not None and not await coming.is_open():
                    waited, coming, waits = met, None, waits + 1
                sink.waits_from = None if batch.is_full or waits == WAITS_MAX else waited
                try:
                    await self._in_writer(self._write, batch, prepared, asked)
                    return True
                except MissingReferenceError as error:
                    self._status.turn("RUNNING", f"waits for a reference: {error}")
                    if coming is None:
                        coming, met = Coming(reader), error.unit_count
                tried = len(batch.pieces)
                # Each attempt costs as much as the batch is long: so not one for each that has come.
                while len(batch.pieces) < 2 * tried and not batch.is_full and await coming.is_open():
                    if self._stop.is_set():
                        return False
                    await self._unload(reader)
                    if await reader.wait(REFERENCE_WAIT_S):
                        batch.take()
                await self._take_those_before(batch)
                if self._has_new(batch.position):
                    return False
                prepared, asked = await asyncio.get_running_loop().run_in_executor(self._planning, self._prepare, batch)
            return False
        finally:
            sink.waits_from = None

    def _prepare(self, batch: Batch) -> tuple[Prepared, Callable[[], Topics]]:
        # All of it has been read; the answer comes while it is prepared.
        asked = self._admin.ask_topics(self._settings.topics)
        prepared = self._writer.prepare(batch.units, batch.lowest, has_large=batch.has_large)
        for where, at in batch.position.partitions.items():
            # What comes below it from now on is applied out of order: the guard is asked as in a replay.
            source = self._sources[where.topic, where.partition]
            end = at.done[-1][1] if at.done else at.next_offset
            self._high_offsets[source] = max(self._high_offsets.get(source, 0), end)
        return prepared, asked

    def _write(self, batch: Batch, prepared: Prepared, asked: Callable[[], Topics]) -> None:
        position, newest = batch.position, batch.newest
        check_same(self._topic_ids, asked().ids)
        self._writer.write(prepared, lambda connection: self._save(connection, position, newest))
        self._saved = position

    def _write_position(self, position: Position) -> None:
        if position != self._saved:
            check_same(self._topic_ids, self._admin.topics(self._settings.topics).ids)
            with self._writer.connection.transaction():
                self._save(self._writer.connection, position, {})
            self._saved = position

    def _save(self, connection: Connection, position: Position, newest: dict[Place, int]) -> None:
        """The last statements before the commit: under another's fence they change nothing, and that undoes all."""
        self._check_fence(connection)
        mine = self._relay | {"fence": self._fence, "owner": self._instance}
        changed = {where: at for where, at in position.partitions.items() if self._saved.partitions.get(where) != at}
        sources = [self._sources[where.topic, where.partition] for where in changed]
        values = mine | {
            "sources": sources,
            "starts": [self._starts.get(source, 0) for source in sources],
            "nexts": [at.next_offset for at in changed.values()],
            "beyonds": [_multirange(at.done) for at in changed.values()],
            "highs": [max([at.next_offset, *(after for _, after in at.done)]) for at in changed.values()],
            "record_ats": [time_of(newest.get((where.topic, where.partition))) for where in changed],
        }
        feed = {index: at for index, at in position.feed.items() if self._saved.feed.get(index) != at}
        saved = connection.execute(query("save_positions"), values).rowcount if changed else 0
        fed = {"partitions": list(feed), "nexts": list(feed.values()), "topics": self._settings.topics}
        saved += connection.execute(query("save_feed"), mine | fed).rowcount if feed else 0
        if saved != len(changed) + len(feed):
            self._raise_fenced(connection)

    def _check_fence(self, connection: Connection) -> None:
        """Binds the commit: who takes over waits for it, or has raised the fence before."""
        if connection.execute(query("commit_relay"), self._relay | {"fence": self._fence}).rowcount != 1:
            self._raise_fenced(connection)

    def _raise_fenced(self, connection: Connection) -> None:
        row = connection.execute(query("owner_of"), self._relay).fetchone()
        owner, since, fence = row or (None, None, None)
        if fence == self._fence:
            raise FencedError("a position is not where this process left it: nothing of the batch was written")
        raise FencedError(f"fenced by {owner or 'an administrator'} at {since}: nothing of the batch was written")

    def _look(self) -> bool:
        """A sign of life, and whether somebody has paused the relay. Settles letters. The writer is idle."""
        row = self._writer.connection.execute(query("beat"), self._relay | {"fence": self._fence}).fetchone()
        if row is None:
            self._raise_fenced(self._writer.connection)
        is_paused = row is not None and bool(row[0])
        self._status.turn("PAUSED" if is_paused else "RUNNING")
        if not is_paused:
            self._writer.settle(set(self._sources.values()), self._check_fence)
        self._free()
        if time.monotonic() > self._pruned_at + PRUNE_S:
            self._pruned_at = time.monotonic()
            prune(self._writer.connection, self._admin, self._sources)
        return is_paused


async def _either(stop: asyncio.Event, timeout_s: float) -> None:
    """Until told to stop, but no longer than this."""
    try:
        async with asyncio.timeout(timeout_s):
            await stop.wait()
    except TimeoutError:
        return


async def _settled(writing: asyncio.Future[None] | None) -> None:
    if writing is not None:
        await writing


def _multirange(done: Sequence[tuple[int, int]]) -> str:
    return "{" + ",".join(f"[{first},{after})" for first, after in done) + "}"
