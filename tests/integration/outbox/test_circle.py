"""Database → Kafka → database: the second one is at every instant a state that the first one really had."""

import asyncio
import itertools
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
from tests.support.coordinator import read_committed
from tests.support.postgres import run
from tests.support.relay import GUARD, Relays

ACCOUNTS = [f"account-{number}" for number in range(8)]
START = 100
WRITERS = 4
PARTITIONS = 4
VERSION = "version"
STATE = "SELECT jsonb_object_agg(id, amount) FROM copy"
CHANGE = "UPDATE account SET amount = amount + %s WHERE id = %s RETURNING amount"
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
    """Transfers in the first database, by writers that overlap; remembers what each commit changed, by its version.

    A transaction takes its version last, and holds that row until it has committed: so versions are in the order of
    commits, though not in that of beginnings, nor of the rows in the log.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._changes: dict[int, State] = {}
        self._outbox = outbox
        self._random = Random(3)
        self._rows = itertools.count()

    async def open(self) -> None:
        async with await self._outbox.connect(autocommit=False) as connection:
            await connection.execute("CREATE TABLE account (id text PRIMARY KEY, amount bigint NOT NULL)")
            for account in (*ACCOUNTS, VERSION):
                await connection.execute("INSERT INTO account VALUES (%s, 0)", [account])
            changes = {account: await self._add(connection, account, START) for account in ACCOUNTS}
            changes[VERSION] = await self._add(connection, VERSION, 1)
        self._changes[1] = changes

    async def transfer(self, count: int) -> None:
        """As many by each of some writers; and one that begins before all of them and commits after."""
        apart, *free = self._random.sample(ACCOUNTS, len(ACCOUNTS))
        async with await self._outbox.connect(autocommit=False) as early:
            changes = {apart: await self._add(early, apart, 0)}
            await asyncio.gather(*(self._transfer_often(count, free) for _ in range(WRITERS)))
            await self._commit(early, changes)

    async def _transfer_often(self, count: int, accounts: list[str]) -> None:
        async with await self._outbox.connect(autocommit=False) as connection:
            for _ in range(count):
                # In one order, so that no two wait for each other.
                source, target = sorted(self._random.sample(accounts, 2))
                amount = self._random.randint(-9, 9)
                changes = {source: await self._add(connection, source, -amount)}
                changes[target] = await self._add(connection, target, amount)
                await self._commit(connection, changes)

    async def _commit(self, connection: Any, changes: State) -> None:
        version = await self._add(connection, VERSION, 1)
        await connection.commit()
        self._changes[version] = changes | {VERSION: version}

    async def _add(self, connection: Any, account: str, amount: int) -> int:
        changed = await connection.execute(CHANGE, [amount, account])
        (now,) = await changed.fetchone()
        payload = json.dumps({"id": account, "amount": now})
        await connection.execute(TELL, [next(self._rows), self._outbox.suffix, account, payload])
        return int(now)

    def states(self) -> dict[int, State]:
        """After each commit."""
        found, now = {}, State()
        for version in sorted(self._changes):
            now = now | self._changes[version]
            found[version] = now
        return found


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

    async def sees_more_than(self, count: int) -> None:
        """What was committed before this is awaited comes to be seen, however slow the relays start again."""
        async with asyncio.timeout(90):
            while self.is_alive() and len(self.seen) <= count:  # noqa: ASYNC110 - another thread's list
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("outbox", [PARTITIONS], indirect=True)
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
            seen = len(watcher.seen)
            await bank.transfer(10)
            outward.kill()
            outward.start()
            await watcher.sees_more_than(seen)
            seen = len(watcher.seen)
            await bank.transfer(10)
            copy.processes[-1].kill()
            await asyncio.to_thread(copy.start)
            await watcher.sees_more_than(seen)
        states = bank.states()
        last = max(states)
        await asyncio.to_thread(
            copy.wait_for, f"SELECT amount FROM copy WHERE id = '{VERSION}'", [(last,)], timeout_s=90
        )
    finally:
        watcher.stopping.set()
        await asyncio.to_thread(watcher.join)
        outward.kill()
    (final,) = copy.rows(STATE)[0]
    assert final == states[last]
    assert [state for state in watcher.seen if states.get(state[VERSION]) != state] == []
    assert len(watcher.seen) > 5
    # No partition could have given this order by itself.
    records = read_committed(outbox.one.bootstrap_servers, outbox.topic)
    assert {record.partition() for record in records} == set(range(PARTITIONS))
