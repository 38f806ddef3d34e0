"""Database → Kafka → database: the second one is at every instant a state that the first one really had."""

import asyncio
import json
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import psycopg
import pytest
from psycopg import sql

from oncebox.local import LocalPostgres
from tests.integration.outbox.conftest import Outbox
from tests.integration.outbox.test_kill import process
from tests.support.postgres import run
from tests.support.relay import GUARD, Relays

ACCOUNTS = [f"account-{number}" for number in range(6)]
START = 100
VERSION = "version"
STATE = "SELECT jsonb_object_agg(id, amount) FROM copy"
TELL = "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload) VALUES (%s, %s, %s, 'changed', %s)"

State = dict[str, int]


@pytest.fixture
def copy(postgres: LocalPostgres, outbox: Outbox, tmp_path: Path) -> Iterator[Relays]:
    """The second database, and relays into it."""
    name = f"copy_{uuid.uuid4().hex[:12]}"
    run(postgres, sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    with Relays(outbox.one.bootstrap_servers, postgres.dsn_of(name), tmp_path) as relays:
        relays.run(f"CREATE TABLE copy (id text PRIMARY KEY, amount bigint NOT NULL, {GUARD})")
        table = {"topic": outbox.topic, "table": "copy", "key": ["id"]}
        relays.configure([table], mode="transaction", feed_topic=outbox.one.feed_topic)
        yield relays
    run(postgres, sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


class Bank:
    """Transfers in the first database; remembers the state after each commit, by its version."""

    def __init__(self, outbox: Outbox) -> None:
        self.states: dict[int, State] = {}
        self._outbox = outbox
        self._random = Random(3)
        self._now: State = {}
        self._row = 0

    async def open(self) -> None:
        await self._write({**dict.fromkeys(ACCOUNTS, START), VERSION: 1})

    async def transfer(self, count: int) -> None:
        for _ in range(count):
            source, target = self._random.sample(ACCOUNTS, 2)
            amount, now = self._random.randint(1, 9), self._now
            await self._write({source: now[source] - amount, target: now[target] + amount, VERSION: now[VERSION] + 1})

    async def _write(self, changes: State) -> None:
        async with await self._outbox.connect(autocommit=False) as connection:
            for account, amount in changes.items():
                self._row += 1
                payload = json.dumps({"id": account, "amount": amount})
                await connection.execute(TELL, [self._row, self._outbox.suffix, account, payload])
        self._now = self._now | changes
        self.states[self._now[VERSION]] = self._now


class Watcher(threading.Thread):
    """Reads the second database over and over."""

    def __init__(self, dsn: str) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.stopping = threading.Event()
        self._dsn = dsn

    def run(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while not self.stopping.is_set():
                (state,) = connection.execute(STATE).fetchone() or (None,)
                if state is not None and (not self.seen or self.seen[-1] != state):
                    self.seen.append(state)


async def test_the_second_database_only_has_states_that_the_first_one_had(outbox: Outbox, copy: Relays, tmp_path: Path):
    await outbox.init()
    bank, watcher = Bank(outbox), Watcher(copy.dsn)
    await bank.open()
    outward = process(outbox, tmp_path, "never", 1, group_rows_max=10, takeover_ms=800)
    await asyncio.to_thread(copy.start)
    outward.start()
    watcher.start()
    try:
        for _ in range(3):
            await bank.transfer(40)
            outward.kill()
            outward.start()
            await bank.transfer(40)
            copy.processes[-1].kill()
            await asyncio.to_thread(copy.start)
        last = max(bank.states)
        await asyncio.to_thread(
            copy.wait_for, f"SELECT amount FROM copy WHERE id = '{VERSION}'", [(last,)], timeout_s=90
        )
    finally:
        watcher.stopping.set()
        await asyncio.to_thread(watcher.join)
        outward.kill()
    (final,) = copy.rows(STATE)[0]
    assert final == bank.states[last]
    assert [state for state in watcher.seen if bank.states.get(state[VERSION]) != state] == []
    assert len(watcher.seen) > 5
