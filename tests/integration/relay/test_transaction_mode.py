"""Transaction mode end to end: what a reader of PostgreSQL sees is at every instant a set of whole transactions."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import uuid
from typing import TYPE_CHECKING, Any, Self

import psycopg
import pytest
from confluent_kafka import Producer as StockProducer

from oncebox import Producer
from oncebox.settings import load
from relay.config import RelaySettings
from relay.control import Control
from tests.support.relay import GUARD, Relays, call, commit

if TYPE_CHECKING:
    from tests.support.coordinator import Coordinators
    from tests.support.kafka import TopicFactory

# What a session that its successor has ended hears, or that it hears nothing any more.
ENDED = "terminating connection|server closed the connection"
ACCOUNTS = 20
START_BALANCE = 100
TOTAL = "SELECT (SELECT sum(amount) FROM {0}), (SELECT count(*) FROM {0})".format(
    "(SELECT amount FROM debtors UNION ALL SELECT amount FROM creditors UNION ALL SELECT amount FROM fees) AS all_of_it"
)


def tables(one: list[str]) -> list[dict[str, Any]]:
    names = ("debtors", "creditors", "fees")
    return [{"topic": topic, "table": name, "key": ["id"]} for topic, name in zip(one, names, strict=True)]


def prepare(relays: Relays, one: Coordinators, names: list[str], **settings: Any) -> None:
    for name in ("debtors", "creditors", "fees"):
        relays.run(f"CREATE TABLE {name} (id text PRIMARY KEY, amount bigint NOT NULL, {GUARD})")
    relays.configure(tables(names), mode="transaction", feed_topic=one.feed_topic, **settings)


class Watcher:
    """Reads the total over and over; anything but the constant is kept."""

    def __init__(self, dsn: str, constant: int) -> None:
        self._dsn = dsn
        self._constant = constant
        self.wrong: list[Any] = []
        self.reads = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while not self._stop.is_set():
                total, count = connection.execute(TOTAL).fetchone() or (None, None)
                self.reads += 1
                # Before the first transaction (which fills all accounts) there is nothing.
                if count and total != self._constant:
                    self.wrong.append((total, count))


async def bank(one: Coordinators, names: list[str], teller: int, transfers: int, balances: dict[str, int]) -> None:
    """Each transfer writes one account in each of two topics and the fees in the third."""
    rng = random.Random(teller)
    debtors, creditors, fees = names

    async def send(transaction: Any, topic: str, account: str, amount: int) -> None:
        value = json.dumps({"id": account, "amount": amount}).encode()
        await transaction.send(topic, value, key=account.encode())

    async with Producer(
        one.bootstrap_servers, one.addresses[0], transactional_id=f"teller-{uuid.uuid4().hex[:6]}"
    ) as mine:
        for _ in range(transfers):
            debtor, creditor = f"d{teller}-{rng.randrange(ACCOUNTS)}", f"c{teller}-{rng.randrange(ACCOUNTS)}"
            amount = rng.randrange(1, 10)
            new = {debtor: -amount - 1, creditor: amount, f"f{teller}": 1}
            transaction = await mine.begin()
            for (account, change), topic in zip(new.items(), (debtors, creditors, fees), strict=True):
                await send(transaction, topic, account, balances[account] + change)
            if rng.random() < 0.15:
                await transaction.abort()
                continue
            await transaction.commit()
            for account, change in new.items():
                balances[account] += change


async def fill(one: Coordinators, names: list[str], tellers: int) -> dict[str, int]:
    balances: dict[str, int] = {}
    async with (
        Producer(one.bootstrap_servers, one.addresses[0], transactional_id=f"filler-{uuid.uuid4().hex[:6]}") as mine,
        mine.transaction() as transaction,
    ):
        for teller in range(tellers):
            accounts = [(names[0], f"d{teller}-{n}") for n in range(ACCOUNTS)]
            accounts += [(names[1], f"c{teller}-{n}") for n in range(ACCOUNTS)] + [(names[2], f"f{teller}")]
            for topic, account in accounts:
                balances[account] = START_BALANCE
                value = json.dumps({"id": account, "amount": START_BALANCE}).encode()
                await transaction.send(topic, value, key=account.encode())
    return balances


def copied(relays: Relays) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in ("debtors", "creditors", "fees"):
        found |= dict(relays.rows(f"SELECT id, amount FROM {name} WHERE id NOT LIKE 'plain%'"))
    return found


async def test_the_sum_is_constant_whatever_is_killed(
    shared_coordinator: Coordinators, new_topic: TopicFactory, relays: Relays
) -> None:
    one = shared_coordinator
    names = [new_topic(partitions=3), new_topic(partitions=2), new_topic()]
    tellers = 3
    await asyncio.to_thread(prepare, relays, one, names)
    balances = await fill(one, names, tellers)
    constant = sum(balances.values())
    active = await asyncio.to_thread(relays.start)
    standby = await asyncio.to_thread(relays.start)
    stock = StockProducer({"bootstrap.servers": one.bootstrap_servers})
    native = StockProducer(
        {"bootstrap.servers": one.bootstrap_servers, "transactional.id": f"n-{uuid.uuid4().hex[:6]}"}
    )
    native.init_transactions(30)
    with Watcher(relays.dsn, constant) as watcher:
        work = [asyncio.create_task(bank(one, names, teller, 120, balances)) for teller in range(tellers)]
        for kill in range(3):
            await asyncio.sleep(1)
            stock.produce(names[0], json.dumps({"id": f"plain-{kill}", "amount": 0}).encode(), key=b"plain")
            stock.flush(30)
            native.begin_transaction()
            native.produce(names[1], json.dumps({"id": f"plain-n{kill}", "amount": 0}).encode(), key=b"plain")
            native.produce(names[2], json.dumps({"id": f"plain-n{kill}", "amount": 0}).encode(), key=b"plain")
            await asyncio.to_thread(native.commit_transaction if kill != 1 else native.abort_transaction, 30)
            victim = (active, standby, active)[kill]
            await asyncio.to_thread(victim.restart)
        await asyncio.gather(*work)
        await asyncio.to_thread(
            relays.wait_until, lambda: copied(relays) == balances, lambda: f"{copied(relays)} instead of {balances}"
        )
        await asyncio.to_thread(
            relays.wait_for,
            "SELECT (SELECT count(*) FROM debtors WHERE id LIKE 'plain%') + "
            "(SELECT count(*) FROM creditors WHERE id LIKE 'plain%') + "
            "(SELECT count(*) FROM fees WHERE id LIKE 'plain%')",
            [(3 + 2 + 2,)],
        )
    assert not watcher.wrong
    assert watcher.reads > 50
    assert relays.rows("SELECT count(*) FROM oncebox.dead_letter") == [(0,)]


async def test_one_that_stood_still_is_refused(
    shared_coordinator: Coordinators, new_topic: TopicFactory, relays: Relays
) -> None:
    one = shared_coordinator
    names = [new_topic(), new_topic(), new_topic()]
    await asyncio.to_thread(prepare, relays, one, names, session_ms=6000)
    balances = await fill(one, names, 1)
    active = await asyncio.to_thread(relays.start)
    await asyncio.to_thread(relays.wait_until, lambda: copied(relays) == balances, lambda: "first copy")
    standby = await asyncio.to_thread(relays.start)
    # It stops with its rows written and its position not saved.
    with psycopg.connect(relays.dsn) as blocker:
        blocker.execute("LOCK TABLE oncebox.position IN EXCLUSIVE MODE")
        await bank(one, names, 0, 5, balances)
        waiting = (
            "SELECT count(*) > 0 FROM pg_stat_activity "
            "WHERE query LIKE 'INSERT INTO oncebox.position%' AND wait_event_type = 'Lock'"
        )
        await asyncio.to_thread(relays.wait_for, waiting, [(True,)])
        active.pause()
        blocker.rollback()
    await bank(one, names, 0, 20, balances)
    await asyncio.to_thread(relays.wait_until, lambda: copied(relays) == balances, lambda: "copy by the standby")
    assert standby.log_contains("active with fence")
    active.resume()
    # Its successor has ended its session. (What the fence refuses by itself: test_positions.py.)
    await asyncio.to_thread(relays.wait_until, lambda: active.log_contains(ENDED), active.log_tail)
    await bank(one, names, 0, 20, balances)
    await asyncio.to_thread(relays.wait_until, lambda: copied(relays) == balances, lambda: "copy afterwards")
    assert (await asyncio.to_thread(standby.stop), await asyncio.to_thread(active.stop)) == (0, 0)


async def test_who_stood_by_sees_tables_as_they_are_when_it_takes_over(
    shared_coordinator: Coordinators, new_topic: TopicFactory, relays: Relays
) -> None:
    one = shared_coordinator
    names = [new_topic(), new_topic(), new_topic()]
    await asyncio.to_thread(prepare, relays, one, names, on_error="park")
    active = await asyncio.to_thread(relays.start)
    await asyncio.to_thread(relays.wait_until, lambda: active.log_contains("active with fence"), active.log_tail)
    standby = await asyncio.to_thread(relays.start)
    await asyncio.to_thread(relays.wait_until, lambda: call(standby, "GetStatus") == "STANDBY", standby.log_tail)
    relays.run("ALTER TABLE debtors ADD COLUMN note text, ALTER COLUMN amount TYPE numeric")
    await asyncio.to_thread(active.kill)
    await commit(one, "later", names[0], {"id": "a", "amount": 1.5, "note": "new"})
    await asyncio.to_thread(relays.wait_for, "SELECT id, amount::text, note FROM debtors", [("a", "1.5", "new")])
    assert relays.rows("SELECT count(*) FROM oncebox.dead_letter") == [(0,)]


async def test_a_parked_transaction_is_replayed_whole(
    shared_coordinator: Coordinators, new_topic: TopicFactory, relays: Relays
) -> None:
    """Three letters, one of them bad, in two tables; and a transaction that was held behind it."""
    one = shared_coordinator
    names = [new_topic(), new_topic(), new_topic()]
    await asyncio.to_thread(prepare, relays, one, names, on_error="park")
    await asyncio.to_thread(relays.start)
    async with Producer(
        one.bootstrap_servers, one.addresses[0], transactional_id=f"parked-{uuid.uuid4().hex[:6]}"
    ) as mine:
        for amounts in ([1, "bad", 3], [4, 5]):
            async with mine.transaction() as transaction:
                for row, amount in enumerate(amounts):
                    value = json.dumps({"id": str(row), "amount": amount}).encode()
                    await transaction.send(names[row % 2], value, key=str(row).encode())

    def check() -> None:
        letters = "SELECT state, count(*), count(DISTINCT unit) FROM oncebox.dead_letter GROUP BY 1 ORDER BY 1"
        both = "SELECT id, amount FROM debtors UNION ALL SELECT id, amount FROM creditors ORDER BY id"
        relays.wait_for(letters, [("held", 2, 1), ("parked", 3, 1)])
        assert relays.rows(both) == []
        numbers = dict(
            relays.rows("SELECT convert_from(key, 'utf8'), id FROM oncebox.dead_letter WHERE state = 'parked'")
        )
        with Control(load(RelaySettings, file=relays.config)) as control:
            assert control.replay(numbers["2"]) == 3, "whichever is named"
            relays.wait_for(letters, [("held", 2, 1), ("parked", 3, 1)])
            assert relays.rows(both) == [], "it is bad still"
            control.fix(numbers["1"], b'{"id": "1", "amount": 2}')
            assert control.replay(numbers["0"]) == 3
        relays.wait_for(letters, [("replayed", 5, 2)])
        assert relays.rows(both) == [("0", 4), ("1", 5), ("2", 3)]

    await asyncio.to_thread(check)


async def test_partitions_that_are_added_wait_for_those_before(
    shared_coordinator: Coordinators, new_topic: TopicFactory, relays: Relays
) -> None:
    """Keys move to the new ones, in transactions of writers that nothing else orders."""
    from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]

    one = shared_coordinator
    topic = new_topic()
    rows = 1500
    relays.run(f"CREATE TABLE orders (id bigint PRIMARY KEY, version integer, {GUARD})")
    relays.configure(
        [{"topic": topic, "table": "orders", "key": ["id"]}],
        mode="transaction",
        feed_topic=one.feed_topic,
        limits={"batch_rows": 100},
    )
    admin = AdminClient({"bootstrap.servers": one.bootstrap_servers})
    versions = "SELECT min(version), max(version), count(*) FROM orders"

    async def write(version: int, partition: int) -> None:
        async with Producer(
            one.bootstrap_servers, one.addresses[0], transactional_id=f"writer-{version}-{uuid.uuid4().hex[:6]}"
        ) as mine:
            for first in range(0, rows, 100):
                async with mine.transaction() as transaction:
                    for row in range(first, first + 100):
                        value = json.dumps({"id": row, "version": version}).encode()
                        await transaction.send(topic, value, key=b"%d" % row, partition=partition)

    async def add(partitions: int) -> None:
        await asyncio.to_thread(admin.create_partitions([NewPartitions(topic, partitions)])[topic].result, 30)
        await asyncio.to_thread(
            relays.wait_until,
            lambda: len(admin.list_topics(topic, timeout=10).topics[topic].partitions) == partitions,
            lambda: "partitions",
        )

    await commit(one, "first", topic, {"id": 0, "version": 1})
    relay = await asyncio.to_thread(relays.start)
    await asyncio.to_thread(relays.wait_for, versions, [(1, 1, 1)])
    await asyncio.to_thread(relay.stop)
    await write(2, 0)
    await add(2)
    await write(3, 1)
    relay = await asyncio.to_thread(relays.start)
    await asyncio.to_thread(relays.wait_for, versions, [(3, 3, rows)])
    # And while it runs: a commit names the new partition.
    await asyncio.gather(write(4, 0), add(3))
    await write(5, 2)
    await asyncio.to_thread(relays.wait_for, versions, [(5, 5, rows)])
    assert relay.log_contains(f"{topic} has a new partition 2")
    assert relays.rows("SELECT count(*) FROM oncebox.position WHERE waits_for IS NOT NULL") == [(2,)], "kept"


async def test_a_table_that_is_dropped_stops_it_with_the_place(
    shared_coordinator: Coordinators, new_topic: TopicFactory, relays: Relays
) -> None:
    one = shared_coordinator
    topic = new_topic()
    # By its full name: the user's own schema, which comes first, is the relay's once that has started.
    orders = f"CREATE TABLE public.orders (id bigint PRIMARY KEY, version integer, {GUARD})"
    relays.run(orders)
    relays.configure(
        [{"topic": topic, "table": "orders", "key": ["id"]}], mode="transaction", feed_topic=one.feed_topic
    )
    relay = await asyncio.to_thread(relays.start)
    await commit(one, "first", topic, {"id": 1, "version": 1})
    await asyncio.to_thread(relays.wait_for, "SELECT id FROM public.orders", [(1,)])
    relays.run("DROP TABLE public.orders")
    await commit(one, "second", topic, {"id": 2, "version": 2})
    assert await asyncio.to_thread(relay.wait) == 1
    assert f"{topic} partition 0 offset" in relay.log_tail()
    assert "does not exist" in relay.log_tail()
    relays.run(orders)
    await asyncio.to_thread(relays.start)
    await asyncio.to_thread(relays.wait_for, "SELECT id FROM public.orders", [(2,)])
    assert relays.rows("SELECT count(*) FROM oncebox.dead_letter") == [(0,)]


@pytest.mark.parametrize("written", ["by Oncebox", "plainly", "in vain"])
async def test_a_topic_that_is_made_again_while_it_runs_is_not_taken_for_the_former_one(
    shared_coordinator: Coordinators, new_topic: TopicFactory, relays: Relays, written: str
) -> None:
    """Neither are its records applied, torn from their transactions, nor does the former one's position move."""
    from confluent_kafka.admin import AdminClient

    one = shared_coordinator
    topic = new_topic()
    relays.run(f"CREATE TABLE orders (id bigint PRIMARY KEY, version integer, {GUARD})")
    relays.configure(
        [{"topic": topic, "table": "orders", "key": ["id"]}], mode="transaction", feed_topic=one.feed_topic
    )
    relay = await asyncio.to_thread(relays.start)
    # At the begin: there the new one always has what is to be read next.
    await asyncio.to_thread(relays.wait_until, lambda: call(relay, "GetStatus") == "RUNNING", relay.log_tail)
    admin = AdminClient({"bootstrap.servers": one.bootstrap_servers})
    await asyncio.to_thread(admin.delete_topics([topic])[topic].result, 30)
    await asyncio.to_thread(
        relays.wait_until, lambda: topic not in admin.list_topics(timeout=10).topics, lambda: "deleted"
    )
    await asyncio.to_thread(new_topic, topic)
    if written == "by Oncebox":
        await commit(one, "new", topic, *({"id": row, "version": 1} for row in range(5)))
    elif written == "plainly":
        stock = StockProducer({"bootstrap.servers": one.bootstrap_servers})
        stock.produce(topic, b'{"id": 1, "version": 1}', key=b"1")
        await asyncio.to_thread(stock.flush, 30)
    else:
        native = StockProducer({"bootstrap.servers": one.bootstrap_servers, "transactional.id": f"native-{topic}"})
        native.init_transactions(30)
        native.begin_transaction()
        native.produce(topic, b"{}")
        await asyncio.to_thread(native.flush, 30)
        await asyncio.to_thread(native.abort_transaction, 30)
    assert await asyncio.to_thread(relay.wait) == 1
    assert f"the topic '{topic}' was deleted and made again" in relay.log_tail()
    assert relays.rows("SELECT count(*) FROM orders") == [(0,)]
    assert relays.rows("SELECT next_offset FROM oncebox.position") == [(0,)]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["transaction", "partition"])
async def test_a_compacted_topic(
    shared_coordinator: Coordinators, new_topic: TopicFactory, relays: Relays, mode: str
) -> None:
    """Of most transactions some records are gone when the relay comes to read them."""
    from tests.support.coordinator import read_committed

    one = shared_coordinator
    compact = {"cleanup.policy": "compact", "segment.ms": "200", "min.cleanable.dirty.ratio": "0.001"}
    topic = new_topic(config=compact | {"max.compaction.lag.ms": "200"})
    relays.run(f"CREATE TABLE orders (id bigint PRIMARY KEY, version integer, {GUARD})")
    relays.configure([{"topic": topic, "table": "orders", "key": ["id"]}], mode=mode, feed_topic=one.feed_topic)
    for version in range(10):
        await commit(one, "writer", topic, *({"id": row, "version": version} for row in (0, 1, 10 + version)))
    rolls = 0
    async with asyncio.timeout(120):
        while len(await asyncio.to_thread(read_committed, one.bootstrap_servers, topic)) - rolls > 20:
            await asyncio.sleep(1)
            await commit(one, "roll", topic, {"id": -1, "version": rolls})  # rolls the segment
            rolls += 1
    await asyncio.to_thread(relays.start)
    expected = [(0, 9), (1, 9), *((10 + version, version) for version in range(10))]
    await asyncio.to_thread(relays.wait_for, "SELECT id, version FROM orders WHERE id >= 0 ORDER BY id", expected)


async def test_rewind_and_rebuild(shared_coordinator: Coordinators, new_topic: TopicFactory, relays: Relays) -> None:
    one = shared_coordinator
    names = [new_topic(partitions=2), new_topic(), new_topic()]
    await asyncio.to_thread(prepare, relays, one, names)
    balances = await fill(one, names, 1)
    await bank(one, names, 0, 30, balances)
    relay = await asyncio.to_thread(relays.start)
    await asyncio.to_thread(relays.wait_until, lambda: copied(relays) == balances, lambda: "first copy")
    settings = load(RelaySettings, file=relays.config)

    def change() -> None:
        with Control(settings) as control:
            control.rewind(names[0], to=-2)
            control.rewind(names[1], to=0, partition=0)
            relays.run("UPDATE fees SET amount = 7")
            control.rebuild(names[2])
            control.set_paused(paused=True)

    await asyncio.to_thread(change)
    await bank(one, names, 0, 10, balances)
    await asyncio.to_thread(
        relays.wait_until,
        lambda: relay.log_contains("fenced by an administrator|stands behind|position is not"),
        relay.log_tail,
    )
    with Control(settings) as control:
        control.set_paused(paused=False)
    await asyncio.to_thread(relays.wait_until, lambda: copied(relays) == balances, lambda: str(copied(relays)))

    def caught_up() -> bool:
        with Control(settings) as control:
            return all(each.lag_records <= 1 for each in control.status().partitions)

    await asyncio.to_thread(relays.wait_until, caught_up, relay.log_tail)


async def test_interleaved_transactions_on_shared_rows(
    shared_coordinator: Coordinators, new_topic: TopicFactory, relays: Relays
) -> None:
    """What stands later in the partition wins, in whichever order the transactions are committed."""
    one = shared_coordinator
    names = [new_topic(), new_topic(), new_topic()]
    await asyncio.to_thread(prepare, relays, one, names)
    await asyncio.to_thread(relays.start)
    first, second = (
        Producer(one.bootstrap_servers, one.addresses[0], transactional_id=f"{name}-{uuid.uuid4().hex[:6]}")
        for name in ("first", "second")
    )
    async with first, second:
        for turn in range(4):
            early, late = await first.begin(), await second.begin()
            for transaction, amount in ((early, 1), (late, 2)):
                for row in ("kept", "deleted"):
                    gone = row == "deleted" and transaction is late
                    value = None if gone else json.dumps({"id": f"{row}{turn}", "amount": amount}).encode()
                    await transaction.send_and_wait(names[0], value, key=f"{row}{turn}".encode())
                value = json.dumps({"id": f"{turn}-{amount}", "amount": amount}).encode()
                await transaction.send_and_wait(names[1], value, key=b"x")
            # (While the earlier one is open, Kafka shows nothing of the later one to who reads committed data.)
            for transaction in (late, early) if turn % 2 else (early, late):
                await transaction.commit()
            if turn < 2:
                await asyncio.to_thread(relays.wait_for, "SELECT count(*) FROM creditors", [(2 * turn + 2,)])
    await asyncio.to_thread(relays.wait_for, "SELECT count(*) FROM creditors", [(8,)])
    rows = relays.rows("SELECT id, amount FROM debtors ORDER BY id")
    assert rows == [(f"kept{turn}", 2) for turn in range(4)]
