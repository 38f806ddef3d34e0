"""The same rows in a topic and in a table, as a relay would have left them; made as fast as both can take them."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from oncebox.settings import KafkaSection, PostgresSection
from spark_jobs.config import ReconcileSettings

PARTITIONS = 4
BATCH = 20_000
RELAY = "bench"
COLUMNS = {
    "id": "bigint",
    "name": "text",
    "amount": "numeric(12,2)",
    "at": "timestamp with time zone",
    "is_open": "boolean",
}
# The row of number n, in SQL and below in JSON.
ROWS = (
    "SELECT n, 'customer number ' || n, (n %% 1000000)::numeric / 100, "
    "TIMESTAMPTZ '2026-01-01 00:00:00Z' + n * INTERVAL '1 second', n %% 3 = 0, {source}, "
    "(n - {partition}) / {partitions} "
    "FROM generate_series({first}::bigint, {last}::bigint, {partitions}) AS n"
)
EPOCH_S = 1_767_225_600  # 2026-01-01


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    servers: str
    dsn: str
    topic: str
    sources: tuple[int, ...]


def make_place(servers: str, dsn: str, topic: str) -> Place:
    """Empty: the relay's tables, the target and positions at 0."""
    from oncebox.wire import KafkaSettings
    from spark_jobs.facts import read_facts

    facts = read_facts(KafkaSettings(bootstrap_servers=servers), [topic])[topic]
    columns = [
        {"name": name, "type": kind, "path": [name], "from": "value", "unit": None} for name, kind in COLUMNS.items()
    ]
    mapping = {
        "format": "json",
        "insert_mode": "upsert",
        "guard": True,
        "delete_on_tombstone": True,
        "key": ["id"],
        "columns": columns,
    }
    sources = []
    with psycopg.connect(dsn) as connection:
        connection.execute((files("relay") / "sql" / "schema.sql").read_text())
        connection.execute("INSERT INTO oncebox.relay (relay, mode) VALUES (%s, 'partition')", [RELAY])
        defined = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
        connection.execute(f"CREATE TABLE public.rows ({defined}, oncebox_source integer, oncebox_offset bigint)")
        connection.execute(
            "INSERT INTO oncebox.target (relay, topic, table_schema, table_name, mapping) "
            "VALUES (%s, %s, 'public', 'rows', %s)",
            [RELAY, topic, Jsonb(mapping)],
        )
        for partition in range(PARTITIONS):
            row = connection.execute(
                "INSERT INTO oncebox.source (topic, topic_id, partition) VALUES (%s, %s, %s) RETURNING source",
                [topic, facts[partition].topic_id, partition],
            ).fetchone()
            sources.append(row[0] if row else 0)
            connection.execute(
                "INSERT INTO oncebox.position (relay, source, start_offset, next_offset, high_offset) "
                "VALUES (%s, %s, 0, 0, 0)",
                [RELAY, sources[-1]],
            )
    return Place(servers=servers, dsn=dsn, topic=topic, sources=tuple(sources))


def add_rows(place: Place, first: int, last: int, progress: Callable[[str], None]) -> None:
    """Numbers [first, last), both multiples of the partitions: number n is at offset n // 4 of partition n % 4."""
    begun_s = time.monotonic()
    _produce(place, first, last)
    produced_s = time.monotonic()
    with psycopg.connect(place.dsn) as connection:
        for partition, source in enumerate(place.sources):
            statement = ROWS.format(
                source=source, partition=partition, partitions=PARTITIONS, first=first + partition, last=last - 1
            )
            connection.execute("INSERT INTO public.rows " + statement.replace("%%", "%"))
            connection.execute(
                "UPDATE oncebox.position SET next_offset = %s, high_offset = %s WHERE source = %s",
                [last // PARTITIONS, last // PARTITIONS, source],
            )
    if first == 0:
        with psycopg.connect(place.dsn, autocommit=True) as connection:
            connection.execute("ALTER TABLE public.rows ADD PRIMARY KEY (id)")
            connection.execute("VACUUM ANALYZE public.rows")
    took_s = produced_s - begun_s, time.monotonic() - produced_s
    progress(f"{last - first:,} records written in {took_s[0]:.0f} s, rows in {took_s[1]:.0f} s")


def _produce(place: Place, first: int, last: int) -> None:
    from confluent_kafka import Producer

    producer: Any = Producer(
        {
            "bootstrap.servers": place.servers,
            "enable.idempotence": True,
            "linger.ms": 50,
            "batch.size": 1_000_000,
            "queue.buffering.max.messages": 2_000_000,
            "compression.type": "lz4",
        }
    )
    for start in range(first, last, BATCH * PARTITIONS):
        for partition in range(PARTITIONS):
            numbers = range(start + partition, min(start + BATCH * PARTITIONS, last), PARTITIONS)
            messages = [{"key": str(number).encode(), "value": document(number)} for number in numbers]
            producer.produce_batch(place.topic, messages, partition=partition)
            if failed := [each for each in messages if "_error" in each]:
                raise RuntimeError(f"{len(failed)} records were not taken: {failed[0]['_error']!r}")
        producer.poll(0)
        while len(producer) > 1_000_000:
            producer.poll(0.05)
    if producer.flush(120):
        raise TimeoutError("the broker did not take all records in time")


def document(number: int) -> bytes:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(EPOCH_S + number))
    return (
        f'{{"id":{number},"name":"customer number {number}","amount":{number % 1_000_000 / 100:.2f},'
        f'"at":"{at}","is_open":{json.dumps(number % 3 == 0)}}}'
    ).encode()


def spoil(place: Place, *, every: int) -> None:
    """One row in `every` gets another value, evenly over all partitions: each bucket of offsets differs."""
    with psycopg.connect(place.dsn, autocommit=True) as connection:
        connection.execute(
            "UPDATE public.rows SET amount = amount + 1 WHERE id %% %s = (id / %s) %% %s", [every, every, PARTITIONS]
        )
        connection.execute("VACUUM ANALYZE public.rows")


def settings_for(place: Place, **more: Any) -> ReconcileSettings:
    return ReconcileSettings(
        kafka=KafkaSection(bootstrap_servers=place.servers),
        postgres=PostgresSection(dsn=place.dsn),  # type: ignore[arg-type]
        **more,
    )
