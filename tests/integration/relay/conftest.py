"""A database with the relay's tables, and a sink without Kafka: records are made up, everything else is real."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from oncebox.reader import Record
from oncebox.reader.source import ConsumerThread
from relay.config import RelaySettings
from relay.database import connect, ensure_sources, migrate, register, resolve, table_order
from relay.mapping import RowMapper
from relay.partition_mode import PartitionSession
from relay.plan import Plan, Unit, make_plan, planner
from relay.sink import Sink

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

TOPIC_IDS = {"orders": "00000000-0000-0000-0000-000000000001", "items": "00000000-0000-0000-0000-000000000002"}


class Bench:
    """Applies records to the tables of `sections` and remembers what the relay would have in memory."""

    def __init__(self, dsn: str, sections: list[dict[str, Any]], *, on_error: str = "stop") -> None:
        self.settings = RelaySettings.model_validate(
            {
                "name": "test",
                "kafka": {"bootstrap_servers": "localhost:9092"},
                "postgres": {"dsn": dsn},
                "tables": sections,
                "on_error": on_error,
            }
        )
        self.connection = connect(self.settings, "test-1")
        migrate(self.connection)
        targets = [resolve(self.connection, section) for section in self.settings.tables]
        register(self.connection, self.settings, targets)
        places = [(topic, partition) for topic in TOPIC_IDS for partition in range(3)]
        self.sources = ensure_sources(self.connection, TOPIC_IDS, places)
        mappers = [RowMapper(target) for target in targets]
        self.high: dict[int, int] = {}
        self.planner = planner(self.settings, mappers, self.sources, self.high)
        self.holds: frozenset[Any] = frozenset()
        self.sink = Sink(self.connection, "test", targets, table_order(self.connection, targets), letters_max=1000)

    def apply(self, *units: Unit | Record) -> Plan:
        whole = [unit if isinstance(unit, Unit) else Unit([unit]) for unit in units]
        plan = make_plan(self.planner, whole, self.holds)
        done = self.sink.apply(self.planner, whole, plan, self.holds, self._save)
        self.holds = done.holds
        for unit in whole:
            for record in unit.records:
                source = self.sources[record.topic, record.partition]
                self.high[source] = max(self.high.get(source, 0), record.offset + 1)
        return done

    def _save(self, _connection: Any, done: Plan) -> None:
        self.sink.write_letters(self.planner, done.letters)

    def rows(self, text: str) -> list[tuple[Any, ...]]:
        return self.connection.execute(text).fetchall()


def record(
    offset: int, value: bytes | None, *, key: bytes | None = None, topic: str = "orders", partition: int = 0
) -> Record:
    return Record(topic, partition, offset, 1_700_000_000_000, key, value, [])


@pytest.fixture
def bench(database: str) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(ddl: str, sections: list[dict[str, Any]], **settings: Any) -> Bench:
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute(ddl)
        made.append(Bench(database, sections, **settings))
        return made[-1]

    yield make
    for each in made:
        each.connection.close()


class CutOffError(BaseException):
    """Nothing of the product may catch it."""


class Cutter:
    """Counts exchanges of the sessions under test, and cuts after the one that is asked for."""

    def __init__(self) -> None:
        self.left = -1
        self.has_cut = False

    def passed(self, connection: psycopg.Connection[Any] | None) -> None:
        self.left -= 1
        if self.left == 0:
            self.has_cut = True
            if connection is not None:
                connection.pgconn.finish()
            raise CutOffError

    async def run(self, session: Coroutine[Any, Any, None], *, limit_s: float) -> bool:
        """Until it is cut off; or so long, for one that comes to its end before. Whether it was."""
        self.has_cut = False
        task = asyncio.ensure_future(session)
        ends_at_s = time.monotonic() + limit_s
        while not task.done() and not self.has_cut and time.monotonic() < ends_at_s:
            await asyncio.wait({task}, timeout=0.02)
        if self.has_cut:
            # Where that met its reader alone, it waits for ever.
            await asyncio.wait({task}, timeout=2)
        task.cancel()
        try:
            await task
        except (CutOffError, psycopg.OperationalError):
            # The library may find its connection closed while it cleans up.
            assert self.has_cut
        except asyncio.CancelledError:
            pass
        self.left = -1
        return self.has_cut


@pytest.fixture
def cutter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cutter]:
    made = Cutter()
    wait, poll, read = psycopg.Connection.wait, ConsumerThread._poll, PartitionSession._read

    def waiting(self: psycopg.Connection[Any], *arguments: Any, **options: Any) -> Any:
        result = wait(self, *arguments, **options)
        if self.info.parameter_status("application_name") == "oncebox relay under-test":
            made.passed(self)
        return result

    def polling(self: ConsumerThread) -> Any:
        result = poll(self)
        if result:
            made.passed(None)
        return result

    def reading(self: PartitionSession) -> None:
        read(self)
        if self._records:
            made.passed(None)

    monkeypatch.setattr(psycopg.Connection, "wait", waiting)
    monkeypatch.setattr(ConsumerThread, "_poll", polling)
    monkeypatch.setattr(PartitionSession, "_read", reading)
    yield made
    made.left = -1
