"""Rewind and rebuild: what is read again keeps its order, its transactions whole, and doubles nothing."""

from __future__ import annotations

import asyncio
import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from confluent_kafka import Producer as StockProducer
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]

from oncebox import Producer
from oncebox.settings import load
from relay.config import RelaySettings
from relay.control import Control
from relay.kafka import EARLIEST
from relay.types import RelayError
from spark_jobs.queries import schema as reconciliation_schema
from tests.support.kafka import await_partitions
from tests.support.relay import GUARD, Relays

if TYPE_CHECKING:
    from oncebox.local import LocalKafka
    from tests.support.coordinator import Coordinators
    from tests.support.kafka import TopicFactory

ORDERS = f"CREATE TABLE orders (id bigint PRIMARY KEY, version integer, {GUARD})"


def control(relays: Relays) -> Control:
    return Control(load(RelaySettings, file=relays.config))


def send(
    kafka: LocalKafka, topic: str, rows: range, version: int, *, partition: int = 0, at_ms: int = 0, blanks: int = 0
) -> None:
    producer = StockProducer({"bootstrap.servers": kafka.bootstrap_servers, "linger.ms": 5})
    for row in rows:
        value = json.dumps({"id": row, "version": version}).encode() + b" " * blanks
        producer.produce(topic, value, key=str(row).encode(), partition=partition, timestamp=at_ms)
        producer.poll(0)
    producer.flush(30)


def add_partition(kafka: LocalKafka, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_partitions([NewPartitions(topic, 2)])[topic].result(30)
    await_partitions(kafka.bootstrap_servers, topic, 2)


def delete_records(kafka: LocalKafka, topic: str, before: int) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.delete_records([TopicPartition(topic, 0, before)])[TopicPartition(topic, 0)].result(30)


@pytest.mark.parametrize("mode", ["partition", "transaction"])
@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
def test_a_rebuild_keeps_the_order_of_keys_that_moved_to_an_added_partition(
    kafka: LocalKafka,
    shared_coordinator: Coordinators,
    new_topic: TopicFactory,
    relays: Relays,
    mode: str,
    *,
    is_known: bool,
) -> None:
    topic = new_topic(partitions=1)
    relays.run(ORDERS)
    feed = shared_coordinator.feed_topic
    table = {"topic": topic, "table": "orders", "key": ["id"]}
    relays.configure([table], mode=mode, feed_topic=feed, limits={"batch_rows": 100})
    # More than comes with the first of the second one.
    send(kafka, topic, range(5000), 1, blanks=1000)
    running = relays.start()
    newest = "SELECT count(*), sum(version) FROM orders"
    relays.wait_for(newest, [(5000, 5000)])
    running.stop()
    add_partition(kafka, topic)
    # The last of the first partition, and all there is in the second.
    send(kafka, topic, range(4990, 5000), 2, partition=1)
    if is_known:
        running = relays.start()
        relays.wait_for(newest, [(5000, 5010)])
        running.stop()
    with control(relays) as asked:
        asked.rebuild(topic)
    assert relays.rows("SELECT count(*) FROM orders") == [(0,)]
    relays.start()
    relays.wait_for("SELECT count(*), sum(next_offset) FROM oncebox.position", [(2, 5010)])
    assert relays.rows(newest) == [(5000, 5010)]


async def test_of_a_transaction_that_was_passed_over_no_half_is_applied(
    shared_coordinator: Coordinators, new_topic: TopicFactory, relays: Relays
) -> None:
    one = shared_coordinator
    names = [new_topic(), new_topic()]
    sections = []
    for topic, table in zip(names, ("debits", "credits"), strict=True):
        relays.run(f"CREATE TABLE {table} (id text PRIMARY KEY, amount smallint, {GUARD})")
        sections.append({"topic": topic, "table": table, "key": ["id"]})
    async with Producer(
        one.bootstrap_servers, one.addresses[0], transactional_id=f"half-{uuid.uuid4().hex[:6]}"
    ) as mine:
        for number, amount in enumerate([1, 100_000, 3]):
            async with mine.transaction() as transaction:
                for topic, given in zip(names, (1, amount), strict=True):
                    value = json.dumps({"id": str(number), "amount": given}).encode()
                    await transaction.send(topic, value, key=str(number).encode())

    def check() -> None:
        both = "SELECT (SELECT array_agg(id ORDER BY id) FROM debits), (SELECT array_agg(id ORDER BY id) FROM credits)"
        # Past the last of the three, with markers between them.
        done = "SELECT bool_and(next_offset >= 5) FROM oncebox.position"
        states = "SELECT state, count(*) FROM oncebox.dead_letter GROUP BY 1 ORDER BY 1"

        def go_back(*topics: str, how: str) -> None:
            with control(relays) as asked:
                if how == "rebuild":
                    asked.rebuild(*topics)
                else:
                    asked.rewind(*topics, to=EARLIEST)
            relays.wait_for(done, [(True,)])

        relays.configure(sections, mode="transaction", feed_topic=one.feed_topic, on_error="skip")
        running = relays.start()
        relays.wait_for(both, [(["0", "2"], ["0", "2"])])
        assert relays.rows(states) == [("skipped", 2)]
        for how in ("rewind", "rebuild"):
            for topic in names:
                go_back(topic, how=how)
                assert relays.rows(both) == [(["0", "2"], ["0", "2"])], (how, topic)
        running.stop()

        # Parked, it can still be mended while one of its topics is filled anew; discarded, it is gone whole.
        relays.configure(sections, on_error="park")
        running = relays.start()
        go_back(*names, how="rewind")
        assert relays.rows(states) == [("parked", 2)], "judged anew, for all of it was read"
        go_back(names[0], how="rebuild")
        assert relays.rows(states) == [("parked", 2)]
        assert relays.rows(both) == [(["0", "2"], ["0", "2"])]
        (letter,) = relays.rows("SELECT min(id) FROM oncebox.dead_letter")[0]
        with control(relays) as asked:
            asked.discard(letter)
        go_back(names[0], how="rewind")
        assert relays.rows(both) == [(["0", "2"], ["0", "2"])]
        assert relays.rows(states) == [("discarded", 2)]
        running.stop()

        # Once the table takes it and all of it is read again, it is applied.
        relays.run("ALTER TABLE credits ALTER COLUMN amount TYPE bigint")
        relays.start()
        go_back(*names, how="rewind")
        assert relays.rows(both) == [(["0", "1", "2"], ["0", "1", "2"])]
        assert relays.rows(states) == []
        go_back(names[0], how="rebuild")
        assert relays.rows(both) == [(["0", "1", "2"], ["0", "1", "2"])]

    await asyncio.to_thread(check)


@pytest.mark.parametrize(("on_error", "state"), [("park", "parked"), ("skip", "skipped")])
def test_in_partition_mode_what_is_read_again_has_no_second_letter(
    kafka: LocalKafka, new_topic: TopicFactory, relays: Relays, on_error: str, state: str
) -> None:
    topic = new_topic(partitions=1)
    relays.run(ORDERS)
    relays.configure([{"topic": topic, "table": "orders", "key": ["id"]}], mode="partition", on_error=on_error)
    send(kafka, topic, range(3), 1)
    bad = StockProducer({"bootstrap.servers": kafka.bootstrap_servers})
    bad.produce(topic, b"{", key=b"bad", partition=0)
    bad.flush(30)
    relays.start()
    for _ in range(2):
        relays.wait_for("SELECT next_offset FROM oncebox.position", [(4,)])
        assert relays.rows("SELECT record_offset, state FROM oncebox.dead_letter") == [(3, state)]
        with control(relays) as asked:
            asked.rewind(topic, to=0)
    relays.wait_for("SELECT next_offset FROM oncebox.position", [(4,)])
    assert relays.rows("SELECT record_offset, state FROM oncebox.dead_letter") == [(3, state)]
    assert relays.rows("SELECT count(*) FROM orders") == [(3,)]


async def test_a_topic_that_was_taken_out_for_a_while_keeps_its_transactions_whole(
    shared_coordinator: Coordinators, new_topic: TopicFactory, relays: Relays
) -> None:
    one = shared_coordinator
    names = [new_topic(), new_topic(partitions=2)]
    sections: list[dict[str, Any]] = []
    for topic, table in zip(names, ("kept", "taken"), strict=True):
        relays.run(f"CREATE TABLE {table} (id bigint PRIMARY KEY, {GUARD})")
        sections.append({"topic": topic, "table": table, "key": ["id"]})

    async def commit(first: int, after: int) -> None:
        async with Producer(
            one.bootstrap_servers, one.addresses[0], transactional_id=f"out-{uuid.uuid4().hex[:6]}"
        ) as mine:
            for number in range(first, after):
                async with mine.transaction() as transaction:
                    await transaction.send(names[0], b'{"id": %d}' % number, partition=0)
                    for partition in range(2):
                        value = b'{"id": %d}' % (2 * number + partition)
                        await transaction.send(names[1], value, partition=partition)

    async def run(tables: list[dict[str, Any]], kept: int, taken: int) -> None:
        # Each record by itself, unless it belongs to more.
        limits = {"batch_rows": 1}
        relays.configure(tables, mode="transaction", feed_topic=one.feed_topic, limits=limits)
        running = await asyncio.to_thread(relays.start)
        counts = "SELECT (SELECT count(*) FROM kept), (SELECT count(*) FROM taken)"
        await asyncio.to_thread(relays.wait_for, counts, [(kept, taken)])
        await asyncio.to_thread(running.stop)

    await commit(0, 1)
    await run(sections, 1, 2)
    await commit(1, 6)
    await run(sections[:1], 6, 2)
    await run(sections, 6, 12)
    halves = "SELECT id / 2 FROM taken GROUP BY 1 HAVING count(DISTINCT xmin::text) > 1"
    assert relays.rows(halves) == []


def test_tables_that_a_foreign_key_joins_are_rebuilt_together(
    shared_coordinator: Coordinators, kafka: LocalKafka, new_topic: TopicFactory, relays: Relays
) -> None:
    parents, children = new_topic(), new_topic()
    relays.run(f"CREATE TABLE parents (id bigint PRIMARY KEY, version integer, {GUARD})")
    relays.run(f"CREATE TABLE children (id bigint PRIMARY KEY REFERENCES parents, version integer, {GUARD})")
    sections = [
        {"topic": topic, "table": name, "key": ["id"]} for topic, name in ((parents, "parents"), (children, "children"))
    ]
    relays.configure(sections, mode="transaction", feed_topic=shared_coordinator.feed_topic)
    send(kafka, parents, range(10), 1)
    running = relays.start()
    relays.wait_for("SELECT count(*) FROM parents", [(10,)])
    send(kafka, children, range(10), 1)
    relays.wait_for("SELECT count(*) FROM children", [(10,)])
    running.stop()
    with control(relays) as asked:
        with pytest.raises(
            RelayError, match=r'Table "children" references "parents"\. .* rebuild its topic in the same'
        ):
            asked.rebuild(parents)
        assert relays.rows("SELECT count(*) FROM children") == [(10,)]
        asked.rebuild(parents, children)
    assert relays.rows("SELECT count(*) FROM parents") == [(0,)]
    relays.start()
    relays.wait_for("SELECT count(*) FROM children", [(10,)])


@pytest.mark.parametrize("mode", ["partition", "transaction"])
def test_where_retention_was_faster_it_says_how_to_go_on(
    shared_coordinator: Coordinators, kafka: LocalKafka, new_topic: TopicFactory, relays: Relays, mode: str
) -> None:
    topic = new_topic()
    relays.run("CREATE TABLE log (id bigint, version integer)")
    table = {"topic": topic, "table": "log", "insert_mode": "insert", "guard": False}
    relays.configure([table], mode=mode, feed_topic=shared_coordinator.feed_topic)
    send(kafka, topic, range(10), 1)
    running = relays.start()
    relays.wait_for("SELECT count(*) FROM log", [(10,)])
    running.stop()
    send(kafka, topic, range(10, 30), 1)
    delete_records(kafka, topic, 20)
    running = relays.start()
    assert running.wait() == 1
    advice = f"oncebox relay rewind --topic {topic} --partition 0 --to earliest"
    assert f"{topic} partition 0" in running.log_tail()
    assert advice in running.log_tail()
    with control(relays) as asked:
        assert asked.rewind(topic, to=EARLIEST, partition=0) == {(topic, 0): 20}
        relays.start()
        whole = [(20, 20, 29)]
        relays.wait_for("SELECT count(*), count(DISTINCT id), max(id) FROM log", whole)
        with pytest.raises(RelayError, match="would double rows"):
            asked.rewind(topic, to=EARLIEST, partition=0)
    assert relays.rows("SELECT count(*), count(DISTINCT id), max(id) FROM log") == whole


INSERT = "INSERT INTO orders (id) VALUES (99)"
SAVE = ("UPDATE oncebox.relay SET commits = commits + 1", "UPDATE oncebox.position SET updated_at = now()")


@pytest.mark.parametrize(
    ("how", "steps", "tries"),
    [
        ("rewind", SAVE, 1),
        ("rebuild", (INSERT, *SAVE), 1),
        ("rebuild", ("SELECT FROM oncebox.dead_letter FOR UPDATE", INSERT, *SAVE), 1),
        ("rebuild", (SAVE[0], INSERT), 2),
    ],
    ids=["rewind", "rebuild", "rebuild-while-letters-are-replayed", "rebuild-and-somebody-in-another-order"],
)
def test_going_back_while_others_commit_ends_well(
    kafka: LocalKafka,
    new_topic: TopicFactory,
    relays: Relays,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    steps: tuple[str, ...],
    tries: int,
) -> None:
    """`steps`: what the relay locks, in its order. It has come as far as the first one. Where somebody's order is
    another, the deadlock costs one try.
    """
    monkeypatch.setattr("relay.control.TRIES", tries)
    topic = new_topic()
    relays.run(ORDERS)
    relays.configure([{"topic": topic, "table": "orders", "key": ["id"]}], on_error="park")
    send(kafka, topic, range(10), 1)
    bad = StockProducer({"bootstrap.servers": kafka.bootstrap_servers})
    bad.produce(topic, b"{", partition=0)
    bad.flush(30)
    running = relays.start()
    position = "SELECT next_offset FROM oncebox.position"
    relays.wait_for(position, [(11,)])
    running.stop()
    waiting = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name LIKE '%control'"
    )
    with control(relays) as asked, psycopg.connect(relays.dsn) as writer, ThreadPoolExecutor() as pool:
        # A deadlock is found by the other.
        writer.execute("SET deadlock_timeout = '60s'")
        asked.connection.execute("SET deadlock_timeout = '5s'")  # it looks once, when all have come that far
        writer.execute(steps[0])
        back = pool.submit(asked.rebuild, topic) if how == "rebuild" else pool.submit(asked.rewind, topic, to=0)
        relays.wait_for(waiting, [(1,)])
        for step in steps[1:]:
            writer.execute(step)
        writer.commit()
        assert back.result(60) == {(topic, 0): 0}
    assert relays.rows(position) == [(0,)]
    assert relays.rows("SELECT count(*) FROM orders") == [(0 if how == "rebuild" else 10,)]


def test_a_rewind_to_a_time(kafka: LocalKafka, new_topic: TopicFactory, relays: Relays) -> None:
    topic = new_topic()
    relays.run(ORDERS)
    relays.configure([{"topic": topic, "table": "orders", "key": ["id"]}])
    # Lately: what is a week old is deleted at any moment.
    noon = (datetime.now(UTC) - timedelta(days=2)).replace(hour=12, minute=0, second=0, microsecond=0)
    for hour in range(3):
        send(kafka, topic, range(10 * hour, 10 * hour + 10), 1, at_ms=int(noon.timestamp() * 1000) + 3_600_000 * hour)
    running = relays.start()
    relays.wait_for("SELECT count(*) FROM orders", [(30,)])
    running.stop()
    relays.run("DELETE FROM orders")
    with control(relays) as asked:
        assert asked.rewind(topic, to=noon.replace(hour=13)) == {(topic, 0): 10}
    relays.start()
    relays.wait_for("SELECT count(*), min(id) FROM orders", [(20, 10)])


@pytest.mark.parametrize("how", ["rewind", "rebuild"])
def test_what_was_found_clean_before_is_compared_again(
    kafka: LocalKafka, new_topic: TopicFactory, relays: Relays, how: str
) -> None:
    """A mark of the reconciliation says that no row below it is missing."""
    topic = new_topic()
    relays.run(ORDERS)
    relays.configure([{"topic": topic, "table": "orders", "key": ["id"]}])
    send(kafka, topic, range(10), 1)
    running = relays.start()
    relays.wait_for("SELECT count(*) FROM orders", [(10,)])
    running.stop()

    def go_back() -> None:
        with control(relays) as asked:
            if how == "rebuild":
                asked.rebuild(topic)
            else:
                asked.rewind(topic, to=EARLIEST)

    go_back()  # no reconciliation has ever run
    relays.run(reconciliation_schema())
    for name in ("other", relays.rows("SELECT relay FROM oncebox.relay")[0][0]):
        relays.rows(
            "INSERT INTO oncebox.reconciliation_runs (relay, kind, verdict, started_at, rows_checked, findings, lag, "
            "snapshot_xmin, lsn, config_hash, result) "
            "VALUES (%s, 'full', 'clean', now(), 10, 0, 0, 1, '0/0', '', '{}') "
            "RETURNING run",
            name,
        )
        relays.rows(
            "INSERT INTO oncebox.reconciliation_verified (relay, source, next_offset, snapshot_xmin, "
            "system_identifier, config_hash, run) "
            "SELECT %s, 1, 10, 1, 1, '', max(run) FROM oncebox.reconciliation_runs RETURNING run",
            name,
        )
    go_back()
    assert relays.rows("SELECT relay FROM oncebox.reconciliation_verified") == [("other",)]
