"""Tables with an ordering column: what is in them depends on which records there are, and not on how they came."""

from __future__ import annotations

import json
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from confluent_kafka import Producer

from oncebox.reader import Record
from oncebox.settings import load
from relay.config import RelaySettings
from relay.control import Control
from relay.database import register, resolve
from relay.kafka import EARLIEST
from relay.plan import Unit, make_plan
from relay.types import RelayError
from tests.integration.relay.conftest import TOPIC_IDS, Bench
from tests.integration.relay.test_guard_model import interleaved, units_of
from tests.support.relay import GUARD

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncebox.local import LocalKafka
    from tests.support.coordinator import Coordinators
    from tests.support.kafka import TopicFactory
    from tests.support.relay import Relays

OWN = f"{GUARD}, oncebox_ordering bigint"
TABLE = f"CREATE TABLE stock (id bigint PRIMARY KEY, state text, version bigint, {OWN})"
COLUMNS: dict[str, Any] = {"id": {}, "state": {}, "version": {"path": "@header.version"}}
KEYS = 4


def sections(*topics: str, **settings: Any) -> list[dict[str, Any]]:
    common = {"table": "stock", "key": ["id"], "columns": COLUMNS, "ordering": "version"}
    return [{"topic": topic} | common | settings for topic in topics]


def record(topic: str, partition: int, offset: int, key: int, version: int, *, is_delete: bool) -> Record:
    value = None if is_delete else json.dumps({"id": key, "state": f"{topic}:{partition}:{offset}"}).encode()
    headers = [("version", str(version).encode())]
    return Record(topic, partition, offset, 1_700_000_000_000, str(key).encode(), value, headers)


def newest(made: Bench, records: list[Record]) -> dict[int, str]:
    """What the table has to hold of these records."""
    rows: dict[int, tuple[tuple[int, int, int], bytes | None]] = {}
    for each in records:
        version = (int(each.headers[0][1] or b""), made.sources[each.topic, each.partition], each.offset)
        key = int(each.key or b"")
        if key not in rows or rows[key][0] < version:
            rows[key] = (version, each.value)
    return {key: json.loads(value)["state"] for key, (_, value) in rows.items() if value is not None}


@pytest.mark.parametrize("seed", range(25))
def test_the_table_holds_the_newest_of_what_has_come(bench: Callable[..., Bench], seed: int) -> None:
    """Two topics with several partitions each, few versions (so that many are equal), deletes, and rewinds."""
    rng = random.Random(seed)
    made = bench(TABLE, sections(*TOPIC_IDS))
    logs = [
        [
            record(topic, partition, offset, rng.randrange(KEYS), rng.randrange(12), is_delete=rng.random() < 0.3)
            for offset in range(20)
        ]
        for topic in TOPIC_IDS
        for partition in range(2)
    ]
    positions, come = [0] * len(logs), list[Record]()
    for _ in range(16):
        if rng.random() < 0.3:
            positions[rng.randrange(len(logs))] = 0
        parts = []
        for at, log in enumerate(logs):
            count = rng.randrange(8)
            parts.append(log[positions[at] : positions[at] + count])
            positions[at] += len(parts[-1])
        batch = interleaved(rng, parts)
        units = units_of(rng, list(batch))
        if not batch:
            continue
        made.sink.apply(made.planner, units, make_plan(made.planner, units, frozenset()), frozenset(), made._save)
        for each in batch:
            source = made.sources[each.topic, each.partition]
            made.high[source] = max(made.high.get(source, 0), each.offset + 1)
        come += batch
        assert dict(made.rows("SELECT id, state FROM stock")) == newest(made, come)


def test_a_delete_that_another_has_not_committed_yet_is_waited_for(bench: Callable[..., Bench]) -> None:
    made = bench(TABLE, sections(*TOPIC_IDS))
    other = Bench(made.settings.postgres.dsn.get_secret_value(), sections(*TOPIC_IDS))
    old = [Unit([record("items", 0, 0, 1, 5, is_delete=False)])]
    late = threading.Thread(
        target=lambda: other.sink.apply(
            other.planner, old, make_plan(other.planner, old, frozenset()), frozenset(), other._save
        )
    )
    pid = other.connection.info.backend_pid
    waiting = "SELECT count(*) FROM pg_locks WHERE pid = %s AND locktype = 'advisory' AND NOT granted"

    def save(*_: object) -> None:
        # The delete is written and not committed: the older upsert, which cannot see it, must not go by.
        late.start()
        with psycopg.connect(made.settings.postgres.dsn.get_secret_value(), autocommit=True) as looking:
            while looking.execute(waiting, [pid]).fetchone() != (1,):
                pass

    try:
        units = [Unit([record("orders", 0, 0, 1, 9, is_delete=True)])]
        made.sink.apply(made.planner, units, make_plan(made.planner, units, frozenset()), frozenset(), save)
        late.join(30)
        assert made.rows("SELECT id FROM stock") == []
    finally:
        other.connection.close()


def test_a_record_that_does_not_say_when_is_bad(bench: Callable[..., Bench]) -> None:
    columns: dict[str, Any] = {"id": {}, "state": {}, "version": {}}
    made = bench(TABLE, sections("orders", columns=columns), on_error="park")
    good = {"id": 1, "state": "a", "version": 3}
    lacking = {"id": 2, "state": "a"}
    values = [json.dumps(good).encode(), json.dumps(lacking).encode(), None]
    done = made.apply(
        *(Record("orders", 0, at, 0, str(at).encode(), value, []) for at, value in enumerate(values)),
    )
    assert [letter.error for letter in done.letters] == [
        "the ordering column 'version' has no value",
        (
            "the record deletes a row and does not say when: it lacks the ordering column 'version' "
            "(take that from @timestamp or a header)"
        ),
    ]
    assert made.rows("SELECT id, version, oncebox_ordering FROM stock") == [(1, 3, 3)]


def test_what_debezium_says_of_a_deleted_row_is_its_version(bench: Callable[..., Bench]) -> None:
    columns: dict[str, Any] = {"id": {}, "state": {}, "version": {}}
    made = bench(TABLE, sections("orders", "items", columns=columns, format="debezium"))
    row = {"id": 1, "state": "a", "version": 3}

    def envelope(op: str, **rows: Any) -> bytes:
        return json.dumps({"op": op} | rows).encode()

    made.apply(Record("orders", 0, 0, 0, b'{"id": 1}', envelope("d", before=row), []))
    made.apply(Record("items", 0, 0, 0, b'{"id": 1}', envelope("c", after=row | {"version": 2}), []))
    assert made.rows("SELECT id FROM stock") == []
    made.apply(Record("items", 0, 1, 0, b'{"id": 1}', envelope("u", after=row | {"version": 4}), []))
    assert made.rows("SELECT id, version FROM stock") == [(1, 4)]


def start(made: Bench, tables: list[dict[str, Any]]) -> None:
    """What a relay does with its tables before it reads anything."""
    settings = made.settings.model_validate(made.settings.model_dump() | {"tables": tables})
    register(made.connection, settings, [resolve(made.connection, section) for section in settings.tables])


def test_what_cannot_be_ordered_is_refused(bench: Callable[..., Bench]) -> None:
    made = bench(TABLE, sections("orders"))
    made.apply(record("orders", 0, 0, 1, 1, is_delete=False))
    with pytest.raises(RelayError, match=r"by version, not by their topic: `oncebox relay rebuild --topic orders`"):
        start(made, sections("orders", ordering=None))
    with pytest.raises(RelayError, match=r"fed by orders and items, which fill different columns"):
        start(made, [*sections("orders"), *sections("items", columns={"id": {}, "version": {}})])
    with pytest.raises(RelayError, match=r"the ordering column 'state' is text: take a whole number"):
        start(made, sections("orders", ordering="state"))
    made.connection.execute("TRUNCATE stock")
    start(made, sections("orders", ordering=None))
    made.connection.execute("ALTER TABLE stock DROP COLUMN oncebox_ordering")
    with pytest.raises(RelayError, match=r"lacks the version guard's columns: .* oncebox_ordering bigint"):
        start(made, sections("orders"))


def test_tables_of_before_are_brought_up_to_date(bench: Callable[..., Bench]) -> None:
    made = bench(TABLE, sections("orders"))
    made.connection.execute("ALTER TABLE oncebox.tombstone DROP COLUMN ordering")
    made.connection.execute("ALTER TABLE oncebox.feed_position DROP COLUMN topics")
    made.connection.execute("INSERT INTO oncebox.feed_position VALUES ('test', 0, 5)")
    made.connection.execute("UPDATE oncebox.schema_version SET version = 1 WHERE component = 'relay'")
    again = bench("SELECT 1", sections("orders"))
    again.apply(record("orders", 0, 0, 1, 7, is_delete=True))
    remembered = [(made.sources["orders", 0], 0, 7)]
    assert made.rows("SELECT source, record_offset, ordering FROM oncebox.tombstone") == remembered
    assert made.rows("SELECT next_offset, topics FROM oncebox.feed_position") == [(5, None)]


# --- two topics, end to end -----------------------------------------------------------------------------------------

# By topic: row, version (a record's timestamp, from the begin of the test on), state (None: a tombstone).
STORY: tuple[list[tuple[int, int, str | None]], ...] = (
    [(1, 10, "a10"), (2, 10, "a10"), (3, 40, None), (1, 30, None), (4, 20, "a20"), (5, 50, "a50"), (5, 60, None)],
    [(1, 20, "b20"), (2, 30, "b30"), (3, 30, "b30"), (4, 10, None), (5, 55, "b55"), (2, 20, None), (6, 10, "b10")],
)
EXPECTED = [(2, "b30"), (4, "a20"), (6, "b10")]
ROWS = "SELECT id, state FROM stock ORDER BY id"
# How many of which topic come next.
ORDERS = {"one after the other": [(0, 7), (1, 7)], "the other first": [(1, 7), (0, 7)], "in turn": [(0, 4), (1, 4)] * 2}


@pytest.mark.parametrize("mode", ["partition", "transaction"])
@pytest.mark.parametrize("order", ORDERS)
def test_two_topics_give_the_same_rows_in_any_order(
    kafka: LocalKafka,
    shared_coordinator: Coordinators,
    new_topic: TopicFactory,
    relays: Relays,
    mode: str,
    order: str,
) -> None:
    topics = [new_topic(partitions=2), new_topic(partitions=2)]
    columns: dict[str, Any] = {"id": "bigint", "state": "text", "at": {"type": "timestamptz", "path": "@timestamp"}}
    relays.configure(
        sections(*topics, columns=columns, ordering="at", auto_create=True),
        mode=mode,
        feed_topic=shared_coordinator.feed_topic,
    )
    settings = load(RelaySettings, file=relays.config)
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    # (Of long ago, the broker would delete them.)
    begin_ms = int(time.time() * 1000)
    left = [list(each) for each in STORY]
    sent = 0
    running = relays.start()
    for step, (which, count) in enumerate(ORDERS[order]):
        for row, version, state in left[which][:count]:
            value = None if state is None else json.dumps({"id": row, "state": state}).encode()
            producer.produce(topics[which], value, key=str(row), timestamp=begin_ms + version)
        producer.flush(30)
        sent += len(left[which][:count])
        del left[which][:count]
        if step:
            # Killed anywhere in it, and gone on with by another, which reads one topic once more.
            running.kill()
            with Control(settings) as control:
                control.rewind(topics[step % 2], to=EARLIEST)
            running = relays.start()
        relays.wait_for("SELECT sum(next_offset) FROM oncebox.position", [(sent,)])
    assert not any(left)
    relays.wait_for(ROWS, EXPECTED)
    # From the begin, in whatever order the topics are read; and anew, with nothing remembered.
    with Control(settings) as control:
        for topic in topics:
            control.rewind(topic, to=EARLIEST)
    relays.wait_for("SELECT sum(next_offset) FROM oncebox.position", [(sent,)])
    assert relays.rows(ROWS) == EXPECTED
    with Control(settings) as control:
        assert {topic for topic, _ in control.rebuild(topics[1])} == set(topics)
    relays.wait_for("SELECT sum(next_offset) FROM oncebox.position", [(sent,)])
    assert relays.rows(ROWS) == EXPECTED
