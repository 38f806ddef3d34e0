"""Partition mode end to end: real Kafka, real PostgreSQL, real processes that are stopped, killed and paused."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

from oncebox.settings import load
from relay import partition_mode
from relay.config import RelaySettings
from relay.control import Control
from relay.partition_mode import PartitionSession
from relay.service import Relay
from relay.status import Status
from tests.support.relay import GUARD, Relays, call

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from oncebox.local import LocalKafka
    from tests.support.coordinator import Coordinators
    from tests.support.kafka import TopicFactory

ORDERS = f"CREATE TABLE orders (id bigint PRIMARY KEY, version integer, {GUARD})"
COUNT = "SELECT count(*), sum(version) FROM orders"


def produce(kafka: LocalKafka, topic: str, rows: range, version: int, *, transactional: bool = False) -> None:
    config: dict[str, str | int] = {"bootstrap.servers": kafka.bootstrap_servers, "linger.ms": 5}
    producer = Producer(config | ({"transactional.id": f"native-{topic}"} if transactional else {}))
    if transactional:
        producer.init_transactions(30)
        producer.begin_transaction()
    for row in rows:
        value = None if version < 0 else json.dumps({"id": row, "version": version}).encode()
        producer.produce(topic, value, key=str(row).encode())
        producer.poll(0)
    producer.flush(30)
    if transactional:
        producer.commit_transaction(30)


def test_two_processes_share_the_work_and_one_is_killed(
    kafka: LocalKafka, new_topic: TopicFactory, relays: Relays
) -> None:
    topic = new_topic(partitions=4)
    relays.run(ORDERS)
    relays.configure([{"topic": topic, "table": "orders", "key": ["id"]}])
    produce(kafka, topic, range(5000), 1)
    first = relays.start()
    relays.wait_for(COUNT, [(5000, 5000)])
    second = relays.start()
    owners = "SELECT count(DISTINCT owner), count(owner) FROM oncebox.position"
    relays.wait_for(owners, [(2, 4)])
    produce(kafka, topic, range(2000, 7000), 2)
    relays.wait_for(COUNT, [(7000, 2000 + 10000)])
    first.kill()
    produce(kafka, topic, range(1000), 3, transactional=True)
    produce(kafka, topic, range(6000, 7000), -1)
    relays.wait_for(COUNT, [(6000, 3000 + 1000 + 8000)])
    # Past the markers of Kafka's own transactions, too.
    ends = "SELECT sum(next_offset) FROM oncebox.position WHERE owner IS NOT NULL"
    relays.wait_for(ends, [(5000 + 5000 + 1000 + 1000 + 4,)])
    assert second.stop() == 0
    assert relays.rows("SELECT count(owner) FROM oncebox.position") == [(0,)], "it lets go when it is stopped"


def test_a_process_that_stood_still_is_refused(kafka: LocalKafka, new_topic: TopicFactory, relays: Relays) -> None:
    topic = new_topic(partitions=2)
    relays.run(ORDERS)
    relays.configure([{"topic": topic, "table": "orders", "key": ["id"]}])
    produce(kafka, topic, range(1000), 1)
    first = relays.start()
    relays.wait_for(COUNT, [(1000, 1000)])
    # It stands still in the middle of a batch: its rows are written, its position is not.
    with_lock = "BEGIN; LOCK TABLE oncebox.position IN EXCLUSIVE MODE"
    import psycopg

    with psycopg.connect(relays.dsn) as blocker:
        blocker.execute(with_lock)
        produce(kafka, topic, range(1000), 2)
        waiting = (
            "SELECT count(*) > 0 FROM pg_stat_activity "
            "WHERE query LIKE 'UPDATE oncebox.position p%' AND wait_event_type = 'Lock'"
        )
        relays.wait_for(waiting, [(True,)])
        first.pause()
        blocker.rollback()
    second = relays.start()
    produce(kafka, topic, range(500), 3)
    relays.wait_for(COUNT, [(1000, 500 * 2 + 500 * 3)], timeout_s=90)
    first.resume()
    # Its session was ended, or the group has told it. (What the fence refuses by itself: test_positions.py.)
    relays.wait_until(
        lambda: first.log_contains("terminating connection|server closed the connection|given this process"),
        first.log_tail,
    )
    produce(kafka, topic, range(100), 4)
    relays.wait_for(COUNT, [(1000, 500 * 2 + 400 * 3 + 100 * 4)])
    assert first.stop() == 0
    assert second.stop() == 0


def test_partitions_that_are_added_wait_for_those_before(
    kafka: LocalKafka, new_topic: TopicFactory, relays: Relays
) -> None:
    from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]

    topic = new_topic(partitions=1)
    relays.run(ORDERS)
    relays.configure([{"topic": topic, "table": "orders", "key": ["id"]}])
    produce(kafka, topic, range(100), 1)
    first = relays.start()
    relays.wait_for(COUNT, [(100, 100)])
    first.stop()
    produce(kafka, topic, range(5000), 2)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result(30)
    relays.wait_until(
        lambda: len(admin.list_topics(topic, timeout=10).topics[topic].partitions) == 3, lambda: "partitions"
    )
    produce(kafka, topic, range(5000), 3)
    relays.start()
    relays.wait_for(COUNT, [(5000, 15000)])
    assert relays.rows("SELECT count(DISTINCT oncebox_source) FROM orders") == [(3,)]
    assert relays.rows("SELECT count(*) FROM oncebox.position WHERE waits_for IS NOT NULL") == [(2,)], "kept"


def test_a_bad_record_stops_it_with_its_place(kafka: LocalKafka, new_topic: TopicFactory, relays: Relays) -> None:
    topic = new_topic(partitions=1)
    relays.run(ORDERS)
    relays.configure([{"topic": topic, "table": "orders", "key": ["id"]}])
    produce(kafka, topic, range(10), 1)
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    producer.produce(topic, b"{", key=b"1")
    producer.flush(30)
    relay = relays.start()
    assert relay.wait() == 1
    assert f"{topic} partition 0 offset 10: Input data was truncated" in relay.log_tail()
    assert "Traceback" not in relay.log.read_text()
    # Fixed by taking another policy; then the letter is mended, and replayed by the relay that runs.
    relays.configure([{"topic": topic, "table": "orders", "key": ["id"]}], on_error="park")
    relays.start()
    relays.wait_for("SELECT record_offset, state FROM oncebox.dead_letter", [(10, "parked")])
    produce(kafka, topic, range(1, 3), 2)
    relays.wait_for("SELECT record_offset, state FROM oncebox.dead_letter ORDER BY 1", [(10, "parked"), (11, "held")])
    relays.wait_for("SELECT version FROM orders WHERE id IN (1, 2) ORDER BY id", [(1,), (2,)])
    relays.run(
        "UPDATE oncebox.dead_letter SET value = '{\"id\": 1, \"version\": 7}', state = 'queued' WHERE state = 'parked'"
    )
    relays.wait_for("SELECT DISTINCT state FROM oncebox.dead_letter", [("replayed",)])
    assert relays.rows("SELECT version FROM orders WHERE id = 1") == [(2,)]
    produce(kafka, topic, range(1, 2), 9)
    relays.wait_for("SELECT version FROM orders WHERE id = 1", [(9,)])


def test_it_is_paused_though_the_database_is_slower_than_the_topic(
    kafka: LocalKafka, new_topic: TopicFactory, relays: Relays
) -> None:
    topic = new_topic()
    relays.run(ORDERS)
    relays.run(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.3); RETURN NULL; END';"
        "CREATE TRIGGER slow AFTER INSERT ON orders FOR EACH STATEMENT EXECUTE FUNCTION slow()"
    )
    relays.configure([{"topic": topic, "table": "orders", "key": ["id"]}], limits={"batch_rows": 5})
    relay = relays.start()
    is_over = threading.Event()

    def keep_producing() -> int:
        sent = 0
        while not is_over.wait(0.02):
            produce(kafka, topic, range(sent, sent + 5), 1)
            sent += 5
        return sent

    with ThreadPoolExecutor() as pool:
        sending = pool.submit(keep_producing)
        try:
            relays.wait_until(lambda: relays.rows("SELECT count(*) > 100 FROM orders") == [(True,)], relay.log_tail)
            assert call(relay, "Pause") in {"RUNNING", "PAUSED"}
            relays.wait_until(lambda: call(relay, "GetStatus") == "PAUSED", relay.log_tail)
        finally:
            is_over.set()
        sent = sending.result(60)
    produce(kafka, topic, range(sent, sent + 5), 1)
    sent += 5
    assert relays.rows("SELECT count(*) FROM orders")[0][0] < sent
    relays.run("DROP TRIGGER slow ON orders")
    call(relay, "Resume")
    relays.wait_for("SELECT count(*) FROM orders", [(sent,)])


async def test_who_is_paused_applies_nothing_however_often_it_begins_anew(
    kafka: LocalKafka, new_topic: TopicFactory, relays: Relays, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    look = PartitionSession._look

    def counted(self: PartitionSession) -> None:
        nonlocal looks
        look(self)
        looks += bool(self._own.held)

    monkeypatch.setattr(PartitionSession, "_look", counted)
    monkeypatch.setattr(partition_mode, "LOOK_S", 0.1)
    topic = new_topic()
    relays.run(ORDERS)
    relays.configure([{"topic": topic, "table": "orders", "key": ["id"]}], on_error="park")
    settings = load(RelaySettings, file=relays.config)
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    producer.produce(topic, b"{", key=b"1")
    producer.flush(30)
    position = "SELECT next_offset FROM oncebox.position"
    letters = "SELECT state FROM oncebox.dead_letter"
    unmoved: list[list[Any]] = [[(0, None)], [(1,)], [("queued",)]]

    async def wait_for(text: str, expected: list[tuple[Any, ...]]) -> None:
        await asyncio.to_thread(relays.wait_for, text, expected)

    async def some_looks() -> None:
        seen = looks
        await asyncio.to_thread(relays.wait_until, lambda: looks > seen + 5, lambda: f"{looks} looks")

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        relay = Relay(settings)
        task = asyncio.create_task(relay.run())
        try:
            yield
        finally:
            relay.stop()
            await task

    async with running():
        await wait_for(position, [(1,)])
    with Control(settings) as control:
        control.set_paused(paused=True)
        produce(kafka, topic, range(1000), 1)
        control.fix(1, b'{"id": 1, "version": 7}')
        control.replay(None)
        async with running():
            await some_looks()
            assert [relays.rows(each) for each in (COUNT, position, letters)] == unmoved
            await asyncio.to_thread(control.rewind, topic, to=1)
            await some_looks()
            assert [relays.rows(each) for each in (COUNT, position, letters)] == unmoved
            control.set_paused(paused=False)
            await wait_for(position, [(1001,)])
            await wait_for(letters, [("replayed",)])
            assert relays.rows("SELECT count(*) FROM orders") == [(1000,)]


def test_a_topic_that_is_made_again_while_it_runs_is_not_taken_for_the_former_one(
    kafka: LocalKafka, new_topic: TopicFactory, relays: Relays
) -> None:
    from confluent_kafka.admin import AdminClient

    topic = new_topic()
    relays.run(ORDERS)
    relays.configure([{"topic": topic, "table": "orders", "key": ["id"]}])
    produce(kafka, topic, range(10), 1)
    relay = relays.start()
    relays.wait_for("SELECT next_offset FROM oncebox.position", [(10,)])
    call(relay, "Pause")
    relays.wait_until(lambda: call(relay, "GetStatus") == "PAUSED", relay.log_tail)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.delete_topics([topic])[topic].result(30)
    relays.wait_until(lambda: topic not in admin.list_topics(timeout=10).topics, lambda: "deleted")
    new_topic(topic)
    # Longer than the former one.
    produce(kafka, topic, range(100, 130), 2)
    if relay.running:
        relays.run("UPDATE oncebox.relay SET paused = false")
    # (It may notice in between, when the topic is not there.)
    assert relay.wait() == 1
    assert relay.log_contains("was deleted and made again|does not exist"), relay.log_tail()
    assert relays.rows(COUNT) == [(10, 10)]
    relays.run("UPDATE oncebox.relay SET paused = false")
    relay = relays.start()
    assert relay.wait() == 1
    assert f"`oncebox relay rebuild --topic {topic}` begins anew" in relay.log_tail()


def test_partitions_that_are_added_while_it_runs(
    kafka: LocalKafka, new_topic: TopicFactory, relays: Relays, monkeypatch: pytest.MonkeyPatch
) -> None:
    from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]

    monkeypatch.setattr(partition_mode, "METADATA_REFRESH_MS", 500)
    topic = new_topic(partitions=1)
    relays.run(ORDERS)
    relays.configure([{"topic": topic, "table": "orders", "key": ["id"]}], limits={"batch_rows": 100})
    settings = load(RelaySettings, file=relays.config)
    stop = threading.Event()
    session = PartitionSession(settings, "under-test", Status(name=relays.name, instance="under-test"), stop)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(session.run)
        try:
            produce(kafka, topic, range(5000), 1)
            relays.wait_for(COUNT, [(5000, 5000)])
            produce(kafka, topic, range(5000), 2)
            admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
            admin.create_partitions([NewPartitions(topic, 3)])[topic].result(30)
            relays.wait_until(
                lambda: len(admin.list_topics(topic, timeout=10).topics[topic].partitions) == 3, lambda: "partitions"
            )
            produce(kafka, topic, range(5000), 3)
            relays.wait_for(COUNT, [(5000, 15000)])
        finally:
            stop.set()
        running.result(60)
    assert relays.rows("SELECT count(DISTINCT oncebox_source) FROM orders") == [(3,)]


@pytest.mark.parametrize("when", ["IMMEDIATE", "DEFERRED"])
@pytest.mark.parametrize("mode", ["partition", "transaction"])
def test_transactions_that_postgres_cannot_serialize_are_tried_again(
    kafka: LocalKafka, shared_coordinator: Coordinators, new_topic: TopicFactory, relays: Relays, mode: str, when: str
) -> None:
    topic = new_topic()
    relays.run("CREATE TABLE log (id bigint, version integer); CREATE SEQUENCE attempts")
    # (What a sequence has counted is not undone.)
    relays.run(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF nextval('attempts') <= 5 THEN RAISE "
        "EXCEPTION 'could not serialize access' USING ERRCODE = '40001'; END IF; RETURN NULL; END $$;"
        "CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON log DEFERRABLE "
        f"INITIALLY {when} FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    table = {"topic": topic, "table": "log", "insert_mode": "insert", "guard": False}
    relays.configure([table], mode=mode, feed_topic=shared_coordinator.feed_topic, on_error="park")
    produce(kafka, topic, range(100), 1)
    relay = relays.start()
    relays.wait_for("SELECT count(*), count(DISTINCT id) FROM log", [(100, 100)])
    assert relays.rows("SELECT last_value > 5 FROM attempts") == [(True,)]
    assert relays.rows("SELECT count(*) FROM oncebox.dead_letter") == [(0,)]
    assert not relay.log_contains("tries again"), "at once"


def test_sigint_ends_it_cleanly(kafka: LocalKafka, new_topic: TopicFactory, relays: Relays) -> None:
    import os

    relays.run(ORDERS)
    relays.configure([{"topic": new_topic(), "table": "orders", "key": ["id"]}])
    relay = relays.start()
    os.kill(relay.pid, signal.SIGINT)
    assert relay.wait() == 0
