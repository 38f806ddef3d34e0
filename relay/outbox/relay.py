"""One relay's life: stand by → lead → fence → check → publish, until told to stop; then over again after trouble.

What is outside of it (database or Kafka down) is waited for. What needs a person (StopError) ends it, with the reason
noted in the database. It never publishes before the coordinator has fenced the former owner and given its token.
"""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import psycopg

from oncebox.errors import OnceboxError, ProducerFencedError
from oncebox.producer import Producer, ProducerSettings
from oncebox.settings import kafka_settings
from relay.outbox.commit_seq import CommitSeqSource
from relay.outbox.config import OutboxSettings
from relay.outbox.database import Database, FencedError, connect, first_line
from relay.outbox.logical import LogicalSource, Source
from relay.outbox.metrics import Metrics
from relay.outbox.plan import TableError
from relay.outbox.publisher import Publisher, Step, no_step
from relay.outbox.token import Facts, StopError, Token, check, decode

logger = logging.getLogger(__name__)

STANDBY_POLL_S = 0.5
HOUSEKEEPING_S = 1.0
RETRY_FIRST_S = 0.2
RETRY_MAX_S = 10.0
# Of the database, that are the same however often it is tried: missing rights, tables, functions.
REFUSALS = (psycopg.ProgrammingError, psycopg.DataError, psycopg.IntegrityError, psycopg.NotSupportedError)


class OutboxRelay:
    def __init__(
        self, settings: OutboxSettings, *, metrics: Metrics | None = None, on_step: Step = no_step, instance: str = ""
    ) -> None:
        self.settings = settings
        self.metrics = metrics or Metrics()
        # Set while it leads and publishes.
        self.is_active = asyncio.Event()
        self._on_step = on_step
        self._stop = asyncio.Event()
        self._instance = instance or f"{socket.gethostname()}"
        self._housekept_at = 0.0
        self._idled_at = 0.0
        self._noted_rows = 0

    def stop(self) -> None:
        """After the group in hand."""
        self._stop.set()

    async def run(self) -> None:
        """Until stop(), or StopError."""
        pause_s = RETRY_FIRST_S
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                await self._lead()
            except StopError as error:
                await self._tell_stopped(error)
                raise
            except (FencedError, ProducerFencedError) as error:
                logger.warning("another relay has taken over, standing by: %s", error)
            except REFUSALS as error:
                refusal = StopError(f"the database refuses: {first_line(error)}")
                await self._tell_stopped(refusal)
                raise refusal from error
            except (OnceboxError, psycopg.Error, OSError) as error:
                self.metrics.state("WAITING")
                logger.warning("waiting %.1f s, then starting anew: %s", pause_s, first_line(error))
            finally:
                self.is_active.clear()
            if time.monotonic() - began > RETRY_MAX_S:
                pause_s = RETRY_FIRST_S
            await self._pause(pause_s)
            pause_s = min(pause_s * 2, RETRY_MAX_S)

    async def _lead(self) -> None:
        async with AsyncExitStack() as leaving:
            database = await Database.open(self.settings)
            leaving.push_async_callback(database.close)
            self.metrics.state("STANDBY")
            while not await database.lead():
                if await database.put_out_silent_leader():
                    logger.warning("the relay that led has shown no sign of life: taking over")
                    continue
                if await self._pause(STANDBY_POLL_S):
                    return
            self.metrics.state("STARTING")
            await database.take_source()
            publisher, source = await leaving.enter_async_context(self._started(database))
            self.is_active.set()
            logger.info("publishing from %s", publisher.token.source)
            await self._publish(publisher, source, database)

    @asynccontextmanager
    async def _started(self, database: Database) -> AsyncIterator[tuple[Publisher, Source]]:
        settings = self.settings
        producer = Producer(
            kafka_settings(settings.kafka, client_id=settings.transactional_id),
            settings.coordinators,
            transactional_id=settings.transactional_id,
            settings=ProducerSettings(transaction_timeout_ms=settings.transaction_timeout_ms),
            open_channel=settings.opens_channels(),
        )
        source: Source
        if settings.source == "logical":
            source = LogicalSource(settings, database)
        else:
            source = CommitSeqSource(settings, database)
        async with AsyncExitStack() as leaving:
            await leaving.enter_async_context(database.beating())
            self._on_step("before init")
            # First the fence in Kafka: from here on no former owner commits, and its token is final.
            await producer.start()
            leaving.push_async_callback(producer.stop)
            self._on_step("after init")
            leaving.push_async_callback(source.close)
            token = decode(producer.resume_token)
            # A fence that was raised by somebody who then stopped would make an older copy look newer.
            async with database.connection.transaction():
                noted = await database.raise_fence(f"{self._instance} {producer.instance}")
                facts = await source.facts(await database.identity(), noted, token)
                check(token, facts)
            publisher = Publisher(
                settings=settings,
                producer=producer,
                source=source,
                database=database,
                token=_going_on(token, facts),
                on_step=self._on_step,
            )
            await publisher.reload_parked()
            self._noted_rows = 0
            self._housekept_at = 0.0
            self._idled_at = 0.0
            yield publisher, source
            await self._note(publisher, database, "STOPPED", "told to stop")

    async def _publish(self, publisher: Publisher, source: Source, database: Database) -> None:
        settings = self.settings
        is_paused = await self._housekeep(publisher, source, database, is_paused=False)
        try:
            while not self._stop.is_set():
                if time.monotonic() > self._housekept_at + HOUSEKEEPING_S:
                    is_paused = await self._housekeep(publisher, source, database, is_paused=is_paused)
                if is_paused:
                    await self._pause(STANDBY_POLL_S)
                    continue
                await publisher.retry_parked()
                is_due = time.monotonic() > self._idled_at + settings.idle_ms / 1000
                found = await publisher.cycle(self._stop.is_set, may_idle=is_due)
                self.metrics.published(publisher.counters)
                if is_due and not found:
                    self._idled_at = time.monotonic()
                    await publisher.idle()
                # Also after rows: those that are committed meanwhile come together, for half of the work.
                if not source.was_cut:
                    await self._pause(max(settings.poll_ms / 1000, source.pause_s))
        except TableError as error:
            raise StopError(str(error)) from error

    async def _housekeep(self, publisher: Publisher, source: Source, database: Database, *, is_paused: bool) -> bool:
        """Notes how far it is, looks for trouble to come; whether it should pause."""
        self._housekept_at = time.monotonic()
        if publisher.has_parked:
            await publisher.reload_parked()
        warnings = []
        await source.watch()
        writer = await database.oldest_writer()
        self.metrics.source(
            kept_bytes=source.kept_bytes,
            age_transactions=source.age_transactions,
            writer_age_s=writer.age_s if writer else 0.0,
        )
        if writer is not None and writer.age_s > self.settings.writer_warn_s:
            warnings.append(f"{writer.what}: open for {writer.age_s:.0f} s, and the log since then is kept")
        if source.kept_bytes > self.settings.slot_warn_bytes:
            warnings.append(f"the slot keeps {source.kept_bytes // 1_048_576} MiB of the log")
        told = "; ".join(warnings)
        if told:
            logger.warning("%s", told)
        state = "PAUSED" if is_paused else "RUNNING"
        self.metrics.state(state)
        return await self._note(publisher, database, state, told)

    async def _note(self, publisher: Publisher, database: Database, state: str, message: str) -> bool:
        rows = publisher.counters.rows - self._noted_rows
        self._noted_rows = publisher.counters.rows
        return await database.note_state(state, message, rows=rows, position=publisher.token.position)

    async def _pause(self, seconds: float) -> bool:
        """Whether it was told to stop meanwhile."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        return self._stop.is_set()

    async def _tell_stopped(self, error: StopError) -> None:
        """In the database too, where it can be done: whoever looks there sees why."""
        self.metrics.state("STOPPED")
        with suppress(psycopg.Error, OSError):
            connection = await connect(self.settings.postgres.dsn.get_secret_value())
            async with connection:
                await connection.execute(
                    "UPDATE oncebox.outbox_relay SET state = 'STOPPED', message = %s, updated_at = now() "
                    "WHERE name = %s",
                    [str(error), self.settings.name],
                )


def _going_on(token: Token | None, facts: Facts) -> Token:
    return Token(
        system_identifier=facts.system_identifier,
        timeline=facts.timeline,
        source=facts.source,
        position=token.position if token else 0,
        end=token.end if token else 0,
        fence=facts.fence,
        retried=token.retried if token else "",
        database=facts.database,
    )
