"""The real relay: clean while it and the producers run, and a repair behind the back of a running relay."""

from __future__ import annotations

import json
import threading
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from oncebox import blocking
from oncebox.settings import KafkaSection, PostgresSection
from spark_jobs.config import ReconcileSettings
from spark_jobs.findings import Kind
from spark_jobs.jobs.repair import make_plan
from spark_jobs.reconcile import reconcile
from spark_jobs.repair import apply_plan
from tests.support.relay import GUARD, Relays

if TYPE_CHECKING:
    from tests.support.coordinator import Coordinators
    from tests.support.kafka import TopicFactory

KINDS = (
    "id text PRIMARY KEY, whole bigint, part numeric(20,4), text text, is_it boolean, at timestamptz, day date, "
    "mark uuid, document jsonb, raw bytea, ratio double precision, list integer[], words text[], free numeric, "
    "fine timestamptz, coarse timestamp(3)"
)

# Columns that come from elsewhere than the value.
ORIGINS = "id bigint PRIMARY KEY, topic text, part integer, off bigint, at timestamptz, at_ms bigint, name text"


def document(number: int, version: int) -> dict[str, Any]:
    return {
        "id": f"n-{number}",
        "whole": number * 10**15 + version,
        "part": f"{number}.{version % 10000:04d}",
        "text": f"né;~ {number}" if number % 3 else None,
        "is_it": number % 2 == 0,
        "at": f"2026-01-02T03:04:{number % 60:02d}.{version % 1000:03d}Z",
        "day": "2026-02-03",
        "mark": str(uuid.UUID(int=number)) if number % 2 else uuid.UUID(int=number).hex,
        "document": {"b": [1, None, version], "aa": {"x": 1.5}, "a": "é\n"},
        "raw": "AP+A",
        "ratio": number / 7,
        "list": [number, None, version],
        "words": ["a,b", "{}", ""],
        "free": 12345678901234567890,
        # Finer than a column can hold: one digit that halves, and nine.
        "fine": f"2026-01-02T03:04:59.{version % 1000:03d}{'0005' if number % 2 else '999999'}Z",
        "coarse": f"1999-12-31T23:59:{number % 60:02d}.{version % 1000:03d}5Z",
    }


def send_event(transaction: Any, topic: str, number: int, *, is_delete: bool = False) -> None:
    row = {"name": f"né {number}"}
    event = {"op": "d", "before": row, "after": None} if is_delete else {"op": "u", "before": None, "after": row}
    transaction.send(topic, json.dumps(event).encode(), key=str(number).encode())


def all_rows(relays: Relays) -> list[Any]:
    tables = ("things", "bare", "events")
    return [relays.rows(f"SELECT * FROM public.{table} ORDER BY id") for table in tables]


def damage(relays: Relays) -> None:
    relays.run("UPDATE public.things SET ratio = 1, text = 'by hand' WHERE id = 'n-7'")
    relays.run("DELETE FROM public.things WHERE id = 'n-8'")
    relays.run("UPDATE public.events SET topic = 'x', at = now(), off = 0, part = NULL WHERE id = 101")
    relays.run("DELETE FROM public.events WHERE id = 102")
    relays.run(
        "INSERT INTO public.events (id, name, oncebox_source, oncebox_offset) "
        "SELECT 104, 'back', source, record_offset - 1 FROM oncebox.tombstone WHERE row_key = '[104]'"
    )
    relays.run("UPDATE public.bare SET version = -1 WHERE id = 'n-9'")
    relays.run("INSERT INTO public.bare VALUES ('by hand', 1)")


@pytest.mark.parametrize("mode", ["transaction", pytest.param("partition", marks=pytest.mark.long)])
def test_clean_while_all_run_and_mended_behind_its_back(
    mode: str,
    relays: Relays,
    shared_coordinator: Coordinators,
    new_topic: TopicFactory,
    spark: Any,
):
    topic, other, events = (new_topic(partitions=2) for _ in range(3))
    relays.run(f"CREATE TABLE public.things ({KINDS}, {GUARD})")
    relays.run("CREATE TABLE public.bare (id text PRIMARY KEY, version bigint)")
    relays.run(f"CREATE TABLE public.events ({ORIGINS}, {GUARD})")
    sections: list[dict[str, Any]] = [
        {"topic": topic, "table": "public.things", "key": ["id"]},
        {"topic": other, "table": "public.bare", "key": ["id"], "guard": False},
        {
            "topic": events,
            "table": "public.events",
            "key": ["id"],
            "format": "debezium",
            "columns": {
                "id": {"path": "@key"},
                "topic": {"path": "@topic"},
                "part": {"path": "@partition"},
                "off": {"path": "@offset"},
                "at": {"path": "@timestamp"},
                "at_ms": {"path": "@timestamp"},
                "name": {},
            },
        },
    ]
    relays.configure(sections, mode=mode, feed_topic=shared_coordinator.feed_topic)
    relays.start()
    settings = ReconcileSettings(
        kafka=KafkaSection(bootstrap_servers=shared_coordinator.bootstrap_servers),
        postgres=PostgresSection(dsn=relays.dsn),  # type: ignore[arg-type]
        log_topic=shared_coordinator.log_topic,
        feed_topic=shared_coordinator.feed_topic,
        full=True,
    )
    stop = threading.Event()
    versions = [0]

    def write() -> None:
        producer = blocking.Producer(
            shared_coordinator.bootstrap_servers, shared_coordinator.addresses, transactional_id=topic
        )
        with producer:
            while not stop.is_set():
                versions[0] += 1
                transaction = producer.begin()
                for number in range(versions[0] % 7, 40, 7):
                    value = json.dumps(document(number, versions[0])).encode()
                    transaction.send(topic, value, key=f"n-{number}".encode())
                    entry = {"id": f"n-{number}", "version": versions[0]}
                    transaction.send(other, json.dumps(entry).encode(), key=f"n-{number}".encode())
                send_event(transaction, events, versions[0] % 9, is_delete=versions[0] % 4 == 0)
                if versions[0] % 5:
                    transaction.commit()
                else:
                    transaction.abort()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        relays.wait_for("SELECT count(*) FROM public.things", [(40,)])
        result, _, tables = reconcile(spark, settings, lambda _: None)
    finally:
        stop.set()
        writer.join(60)
    assert (result.findings, result.unchecked) == ((), ())
    assert [table.rows_found for table in tables if table.table != "public.events"] == [40, 40]

    with blocking.Producer(
        shared_coordinator.bootstrap_servers, shared_coordinator.addresses, transactional_id=topic
    ) as producer:
        transaction = producer.begin()
        for number in (101, 102, 104):
            send_event(transaction, events, number)
        send_event(transaction, events, 104, is_delete=True)
        transaction.commit()
    relays.wait_for("SELECT count(*) FROM public.events WHERE id > 100", [(2,)])
    right = all_rows(relays)
    damage(relays)
    plan = make_plan(settings, limit=10, progress=lambda _: None, session=spark)
    assert sorted((action["table"], action["do"], action["why"].split(";")[0]) for action in plan["actions"]) == [
        ("public.bare", "delete", Kind.ROW_EXTRA),
        ("public.bare", "write", Kind.ROW_DIFFERS),
        ("public.events", "delete", Kind.ROW_OLDER),
        ("public.events", "write", Kind.ROW_DIFFERS),
        ("public.events", "write", Kind.ROW_MISSING),
        ("public.things", "write", Kind.ROW_DIFFERS),
        ("public.things", "write", Kind.ROW_MISSING),
    ]
    done = apply_plan(relays.dsn, json.loads(json.dumps(plan)), keep=lambda _: None)
    assert (done["done"], done["skipped"]) == (7, [])
    assert all_rows(relays) == right  # as the relay itself had written them
    # The relay was fenced by it, and goes on.
    with blocking.Producer(
        shared_coordinator.bootstrap_servers, shared_coordinator.addresses, transactional_id=topic
    ) as producer:
        transaction = producer.begin()
        transaction.send(other, b'{"id": "last", "version": 1}', key=b"last")
        transaction.commit()
    if not relays.processes[0].running:
        relays.start()
    relays.wait_for("SELECT version FROM public.bare WHERE id = 'last'", [(1,)])
    assert reconcile(spark, settings, lambda _: None)[0].findings == ()
