"""Where a relay begins, what added partitions wait for, and that nobody commits under another's fence."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka import TopicPartition as NativeTopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]
from psycopg.types.json import Jsonb

import relay.partition_mode
import relay.transaction_mode
from oncebox.reader import PartitionPosition, Position
from oncebox.settings import kafka_settings
from oncebox.wire import TopicPartition
from relay.config import RelaySettings
from relay.database import connect, ensure_sources, migrate, register
from relay.kafka import KafkaAdmin
from relay.partition_mode import PartitionSession
from relay.plan import Unit
from relay.positions import OwnPartitions, begin, freed, prune
from relay.queries import query
from relay.status import Status
from relay.transaction_mode import TransactionSession
from relay.types import FencedError, RelayError
from relay.writer import Writer
from tests.integration.relay.conftest import TOPIC_IDS, record
from tests.support.relay import GUARD

if TYPE_CHECKING:
    from oncebox.local import LocalKafka
    from tests.support.kafka import TopicFactory

ORDERS = f"CREATE TABLE public.orders (id bigint PRIMARY KEY, state text, {GUARD})"


def settings_of(dsn: str, servers: str = "localhost:9092", topic: str = "orders", **given: Any) -> RelaySettings:
    table = {"topic": topic, "table": "orders", "key": ["id"]}
    known = {"name": "test", "kafka": {"bootstrap_servers": servers}, "postgres": {"dsn": dsn}, "tables": [table]}
    return RelaySettings.model_validate(known | given)


def begun(settings: RelaySettings) -> dict[int, tuple[Any, ...]]:
    """By partition: where it begins, and what it waits for."""
    admin = KafkaAdmin(kafka_settings(settings.kafka, client_id="test"))
    with connect(settings, "test") as connection:
        migrate(connection)
        register(connection, settings, [])
        topics = admin.topics(settings.topics)
        sources = begin(connection, settings, admin, topics)
        at = {source: partition for (_, partition), source in sources.items()}
        rows = connection.execute(
            "SELECT source, next_offset, waits_for FROM oncebox.position WHERE relay = %s", [settings.name]
        ).fetchall()
    return {
        at[source]: (offset, waits_for and {at[int(key)]: end for key, end in waits_for.items()})
        for source, offset, waits_for in rows
    }


def test_where_a_relay_begins(kafka: LocalKafka, new_topic: TopicFactory, database: str) -> None:
    topic = new_topic(partitions=2)
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    now_ms = int(time.time() * 1000)
    for number in range(10):
        producer.produce(topic, b"{}", partition=0, timestamp=now_ms - 100_000 + 10_000 * number)
    producer.flush(30)
    later = datetime.fromtimestamp((now_ms - 45_000) / 1000, UTC)

    def start(name: str, start: Any) -> dict[int, tuple[Any, ...]]:
        return begun(settings_of(database, kafka.bootstrap_servers, topic, name=name, start=start))

    assert start("a", "earliest") == {0: (0, None), 1: (0, None)}
    assert start("b", "latest") == {0: (10, None), 1: (0, None)}
    assert start("c", later) == {0: (6, None), 1: (0, None)}
    assert start("d", {topic: {0: 7, 1: 0}}) == {0: (7, None), 1: (0, None)}
    assert start("d", "earliest") == {0: (7, None), 1: (0, None)}, "only where there is no position yet"
    with pytest.raises(RelayError, match=f"start says 11 of {topic} partition 0, which has offsets 0 to 10"):
        start("e", {topic: {0: 11, 1: 0}})
    with pytest.raises(RelayError, match=f"start says nothing of {topic} partition 1"):
        start("f", {topic: {0: 7}})


def test_the_feed_is_read_again_where_it_was_read_without_a_topic(
    kafka: LocalKafka, new_topic: TopicFactory, database: str
) -> None:
    topic = new_topic()
    settings = settings_of(database, kafka.bootstrap_servers, topic)

    def left(*topics: list[str] | None) -> int:
        with connect(settings, "test") as connection:
            for partition, each in enumerate(topics):
                connection.execute("INSERT INTO oncebox.feed_position VALUES ('test', %s, 5, 0, %s)", [partition, each])
            begun(settings)
            return connection.execute("DELETE FROM oncebox.feed_position").rowcount

    begun(settings)
    assert left([topic], [topic, "another"]) == 2
    assert left([topic], ["another"]) == 0, "all of it"
    assert left(None, None) == 2, "of before version 3"
    assert left(None, ["another"]) == 0


@pytest.mark.parametrize("mode", ["partition", "transaction"])
def test_what_an_added_partition_waits_for(
    kafka: LocalKafka, new_topic: TopicFactory, database: str, mode: str
) -> None:
    topic = new_topic(partitions=1)
    settings = settings_of(database, kafka.bootstrap_servers, topic, mode=mode)
    assert begun(settings) == {0: (0, None)}
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    producer.produce(topic, b"{}", partition=0)
    producer.flush(30)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_partitions([NewPartitions(topic, 2)])[topic].result(30)
    while len(KafkaAdmin(kafka_settings(settings.kafka, client_id="test")).topics([topic]).partitions) < 2:
        time.sleep(0.1)
    for _ in range(2):
        assert begun(settings) == {0: (0, None), 1: (0, {0: 1})}
    with connect(settings, "test") as connection:
        rows = connection.execute("SELECT source, waits_for FROM oncebox.position").fetchall()
        waits = {source: {int(key): end for key, end in ends.items()} for source, ends in rows if ends}
        assert freed(connection, settings.name, waits) == []
        connection.execute("UPDATE oncebox.position SET next_offset = 1, high_offset = 1 WHERE waits_for IS NULL")
        assert freed(connection, settings.name, waits) == list(waits)
    assert begun(settings) == {0: (1, None), 1: (0, {0: 1})}, "not forgotten: a rebuild reads it all again"


def test_what_others_have_parked_is_known_when_an_added_partition_waits_no_longer(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(database, mode="partition")
    with psycopg.connect(database, autocommit=True) as other:
        other.execute(ORDERS)
        session = PartitionSession(settings, "mine", Status(name="test", instance="mine"), threading.Event())
        connection = session._writer.connection
        places = [("orders", 0), ("orders", 1)]
        sources = ensure_sources(connection, TOPIC_IDS, places)
        old, new = (sources[place] for place in places)
        for source, waits_for in ((old, None), (new, Jsonb({str(old): 5}))):
            given = {"relay": "test", "source": source, "offset": 0, "waits_for": waits_for}
            connection.execute(query("ensure_position"), given)
        session._own.take(connection, sources, places[1:])
        session._writer.begin(sources, {})
        monkeypatch.setattr(session, "_consumer", SimpleNamespace(pause=list, resume=list), raising=False)
        session._pruned_at = time.monotonic()

        def freed_late(*asked: Any) -> list[int]:
            other.execute("UPDATE oncebox.position SET next_offset = 5, high_offset = 5 WHERE source = %s", [old])
            other.execute(
                "INSERT INTO oncebox.dead_letter (relay, source, record_offset, record_at, unit, error, state, holds) "
                "VALUES ('test', %s, 4, now(), 1, '', 'parked', '[[\"orders\", \"7\"]]')",
                [old],
            )
            return freed(*asked)

        monkeypatch.setattr(relay.partition_mode, "freed", freed_late)
        session._look()
        assert not session._own.held["orders", 1].waits_for
        assert session._writer.holds == {("orders", "7")}
        session._writer.close()
        session._executor.shutdown()


# --- fences ---------------------------------------------------------------------------------------------------------


def test_nobody_commits_for_a_partition_that_another_has_taken(database: str) -> None:
    settings = settings_of(database, mode="partition")
    # (Not as its successor would know it: the session is not ended, only its fence is too low.)
    with psycopg.connect(database, autocommit=True) as mine, connect(settings, "second") as others:
        mine.execute(ORDERS)
        migrate(others)
        register(others, settings, [])
        sources = ensure_sources(others, TOPIC_IDS, [("orders", 0)])
        (source,) = [source for (topic, _), source in sources.items() if topic == "orders"]
        position = {"relay": "test", "source": source, "offset": 0, "waits_for": None}
        others.execute(query("ensure_position"), position)
        first, second = OwnPartitions("test", "first"), OwnPartitions("test", "second")
        first.take(mine, sources, [("orders", 0)])
        with mine.transaction():
            first.save(mine, {("orders", 0): (1, None)})
        first.saved({("orders", 0): (1, None)})
        second.take(others, sources, [("orders", 0)])
        for moves in (True, False):
            with pytest.raises(FencedError), mine.transaction():  # noqa: PT012 - the transaction is what is refused
                mine.execute("INSERT INTO public.orders VALUES (1, 'late')")
                if moves:
                    first.save(mine, {("orders", 0): (2, None)})
                else:
                    first.bind(mine)
        with pytest.raises(FencedError, match="fenced by second at"):
            first.check(mine)
        with others.transaction():
            second.save(others, {("orders", 0): (3, None)})
        assert mine.execute(
            "SELECT next_offset, (SELECT count(*) FROM public.orders) FROM oncebox.position"
        ).fetchall() == [(3, 0)]


def test_the_session_of_a_former_owner_is_found_however_long_its_host_is_called(database: str) -> None:
    settings = settings_of(database, mode="partition")
    host = ".".join(["a-name-as-clouds-give-it"] * 5)
    with connect(settings, f"{host}-17-aaaaaa") as former, connect(settings, f"{host}-18-bbbbbb") as other:
        migrate(other)
        register(other, settings, [])
        sources = ensure_sources(other, TOPIC_IDS, [("orders", 0)])
        given = {"relay": "test", "source": sources["orders", 0], "offset": 0, "waits_for": None}
        other.execute(query("ensure_position"), given)
        OwnPartitions("test", f"{host}-17-aaaaaa").take(former, sources, [("orders", 0)])
        with connect(settings, f"{host}-19-cccccc") as later:
            OwnPartitions("test", f"{host}-19-cccccc").take(later, sources, [("orders", 0)])
        with pytest.raises(psycopg.OperationalError):
            former.execute("SELECT 1")
        assert other.execute("SELECT 1").fetchone() == (1,), "another process of that host"


def test_tombstones_are_forgotten_once_nothing_older_is_left(
    kafka: LocalKafka, new_topic: TopicFactory, database: str
) -> None:
    topic = new_topic()
    settings = settings_of(database, kafka.bootstrap_servers, topic)
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for _ in range(10):
        producer.produce(topic, b"{}", partition=0)
    producer.flush(30)
    begun(settings)
    admin = KafkaAdmin(kafka_settings(settings.kafka, client_id="test"))
    left = "SELECT record_offset, ordering FROM oncebox.tombstone ORDER BY 1, 2"
    with connect(settings, "test") as connection:
        sources = {(topic, 0): connection.execute("SELECT source FROM oncebox.position").fetchall()[0][0]}
        for offset in range(10):
            connection.execute(
                "INSERT INTO oncebox.tombstone VALUES ('t', to_jsonb(ARRAY[%(at)s]), %(source)s, %(at)s, NULL), "
                "('ordered', to_jsonb(ARRAY[%(at)s]), %(source)s, %(at)s, 1)",
                {"at": offset, "source": sources[topic, 0]},
            )
        prune(connection, admin, sources)
        assert len(connection.execute(left).fetchall()) == 20
        asked = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        at = NativeTopicPartition(topic, 0, 7)
        asked.delete_records([at])[at].result(30)
        prune(connection, admin, sources)
        assert connection.execute(left).fetchall() == [
            *((offset, 1) for offset in range(7)),
            *((offset, ordering) for offset in range(7, 10) for ordering in (1, None)),
        ]


def test_of_two_that_see_a_silent_owner_one_takes_over_and_is_left_alone(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(database)
    with psycopg.connect(database, autocommit=True) as watching:
        watching.execute(ORDERS)
        quick, slow = (
            TransactionSession(settings, name, Status(name="test", instance=name), asyncio.Event())
            for name in ("quick", "slow")
        )
        for session in (quick, slow):
            session._writer = Writer(settings, session._instance, session._status)
        watching.execute("UPDATE oncebox.relay SET owner = 'gone', beat_at = now() - interval '1 hour'")

        def overtaken(name: str) -> str:
            if name == "end_session_of_owner":
                monkeypatch.undo()
                assert quick._try_take()
            return query(name)

        monkeypatch.setattr(relay.transaction_mode, "query", overtaken)
        assert not slow._try_take()
        quick._check_fence(quick._writer.connection)
        for session in (quick, slow):
            session._writer.close()


def test_nobody_commits_for_a_relay_that_another_has_taken(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that its successor could not end: all that stops it is the fence."""
    kept = {"end_session_of_owner": "SELECT 1"}
    monkeypatch.setattr(relay.transaction_mode, "query", lambda name: kept.get(name) or query(name))
    settings = settings_of(database)
    with psycopg.connect(database, autocommit=True) as watching:
        watching.execute(ORDERS)
        sessions = {}
        for name in ("first", "second"):
            status = Status(name="test", instance=name)
            session = sessions[name] = TransactionSession(settings, name, status, asyncio.Event())
            session._writer = Writer(settings, name, status)
            session._sources = ensure_sources(session._writer.connection, TOPIC_IDS, [("orders", 0)])
            session._writer.begin(session._sources, {})
            session._saved = Position(feed={}, partitions={})
            if name == "second":
                assert not session._try_take(), "the first gives signs of life"
                watching.execute("UPDATE oncebox.relay SET beat_at = now() - interval '1 hour'")
            assert session._try_take()

        def write(name: str, offset: int) -> None:
            session = sessions[name]
            position = Position(
                feed={0: offset}, partitions={TopicPartition("orders", 0): PartitionPosition(next_offset=offset + 1)}
            )
            prepared = session._writer.prepare([Unit([record(offset, b'{"id": %d}' % offset)])])
            session._writer.write(prepared, lambda connection: session._save(connection, position, {}))

        write("second", 0)
        with pytest.raises(FencedError, match="fenced by second at"):
            write("first", 1)
        with pytest.raises(FencedError, match="fenced by second at"):
            sessions["first"]._look()
        write("second", 2)
        assert watching.execute("SELECT id FROM public.orders ORDER BY id").fetchall() == [(0,), (2,)]
        for session in sessions.values():
            session._writer.close()
