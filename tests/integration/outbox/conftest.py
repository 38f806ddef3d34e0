"""What the outbox's tests share: a fresh database with an outbox, a topic of its own, relays in this process."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from pydantic import SecretStr

from oncebox.reader import read_transactions
from oncebox.settings import KafkaSection, PostgresSection
from relay.outbox import setup
from relay.outbox.config import OutboxSettings
from relay.outbox.relay import OutboxRelay
from tests.support.coordinator import Coordinators
from tests.support.kafka import create_topic

WAIT_S = 120.0
POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A committed Kafka transaction of a relay: the ids of the rows in it, in the order of offsets."""

    number: int
    ids: list[int]


@dataclass(kw_only=True)
class Outbox:
    dsn: str
    one: Coordinators
    suffix: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    @property
    def topic(self) -> str:
        return f"outbox.event.{self.suffix}"

    def settings(self, **given: Any) -> OutboxSettings:
        return OutboxSettings(
            **{
                "kafka": KafkaSection(bootstrap_servers=self.one.bootstrap_servers),
                "postgres": PostgresSection(dsn=SecretStr(self.dsn)),
                "coordinators": ",".join(self.one.addresses),
                "name": self.suffix,
                "slot": f"slot_{self.suffix}",
                "idle_ms": 200,
                **given,
            }
        )

    async def init(self, **given: Any) -> None:
        settings = self.settings(**given)
        async with await self.connect() as connection:
            await connection.execute(
                "CREATE TABLE IF NOT EXISTS public.outbox (id bigint PRIMARY KEY, aggregatetype text NOT NULL, "
                "aggregateid text NOT NULL, type text, payload jsonb, headers jsonb, "
                "created_at timestamptz NOT NULL DEFAULT now())"
            )
        await setup.run(settings, await setup.plan(settings))

    async def connect(self, *, autocommit: bool = True) -> psycopg.AsyncConnection[Any]:
        return await psycopg.AsyncConnection.connect(self.dsn, autocommit=autocommit)

    async def write(self, *ids: int, on: psycopg.AsyncConnection[Any] | None = None, key: str | None = None) -> None:
        """Rows in one transaction, or in the one that is open on the connection given."""
        connection = on or await self.connect(autocommit=False)
        for row_id in ids:
            await connection.execute(
                "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload) VALUES (%s, %s, %s, 'made', %s)",
                [row_id, self.suffix, key or f"key-{row_id}", f'{{"row": {row_id}}}'],
            )
        if on is None:
            await connection.commit()
            await connection.close()

    @asynccontextmanager
    async def running(self, **given: Any) -> AsyncIterator[OutboxRelay]:
        relay = OutboxRelay(self.settings(**given))
        task = asyncio.create_task(relay.run())
        active = asyncio.create_task(relay.is_active.wait())
        try:
            await asyncio.wait({task, active}, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
            yield relay
        finally:
            relay.stop()
            active.cancel()
            await task

    async def run_until_stopped(self, **given: Any) -> str:
        """What it says when it stops by itself."""
        from relay.outbox.token import StopError

        with pytest.raises(StopError) as stopped:
            await asyncio.wait_for(OutboxRelay(self.settings(**given)).run(), WAIT_S)
        return str(stopped.value)

    async def wait_published(self, count: int) -> list[Seen]:
        """Until as many rows of the topic can be read."""
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while True:
            seen = await self.seen()
            rows = sum(len(each.ids) for each in seen)
            if rows >= count:
                return seen
            assert asyncio.get_running_loop().time() < deadline, f"{rows} of {count} rows after {WAIT_S} s"
            await asyncio.sleep(0.1)

    async def wait_deleted(self) -> None:
        await self.wait_until("SELECT count(*) = 0 FROM outbox")

    async def wait_told(self, text: str) -> None:
        """Until the relay notes this as its state or message."""
        await self.wait_until(
            "SELECT state = %(text)s OR strpos(message, %(text)s) > 0 FROM oncebox.outbox_relay", text=text
        )

    async def wait_until(self, query: str, **values: str) -> None:
        async with await self.connect() as connection:
            for _ in range(int(WAIT_S / POLL_S)):
                row = await (await connection.execute(query.encode(), values)).fetchone()
                if row is not None and row[0]:
                    return
                await asyncio.sleep(POLL_S)
        raise AssertionError(f"{query} with {values} is not true after {WAIT_S} s")

    async def seen(self) -> list[Seen]:
        """All that is committed now, whole transactions."""
        found = []
        async with read_transactions(
            [self.topic], self.one.bootstrap_servers, feed_topic=self.one.feed_topic, until_end=True
        ) as reader:
            async for transaction in reader:
                ids = [
                    int(dict(record.headers)["id"] or b"")
                    for records in transaction.records.values()
                    for record in records
                ]
                found.append(Seen(number=transaction.number, ids=ids))
        return found

    async def fetch(self, query: str, *values: Any) -> Any:
        async with await self.connect() as connection:
            return await (await connection.execute(query.encode(), values)).fetchall()


@pytest.fixture
def outbox(request: pytest.FixtureRequest, database: str, shared_coordinator: Coordinators) -> Iterator[Outbox]:
    """Its topic has one partition, or as many as the test asks for."""
    made = Outbox(dsn=database, one=shared_coordinator)
    create_topic(shared_coordinator.bootstrap_servers, made.topic, partitions=getattr(request, "param", 1))
    yield made
    with psycopg.connect(database, autocommit=True) as connection:
        # A database with a slot cannot be dropped, nor a slot that the session of a killed relay holds or still takes.
        connection.execute(
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()"
        )
