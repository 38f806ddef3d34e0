"""The outbox relay from PostgreSQL to Kafka: rows per second against Debezium's PostgreSQL source, and latency."""

import asyncio
import json
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psycopg
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from psycopg import sql
from pydantic import SecretStr

from oncebox.settings import KafkaSection, PostgresSection
from proof.bench.connect import connect, connector_jars
from proof.bench.context import Context
from proof.bench.measure import Metric, Side, fixed, interleave
from proof.bench.result import Result
from proof.faults.process import ChildProcess
from relay.outbox import setup
from relay.outbox.config import OutboxSettings

DEBEZIUM_VERSION = "3.6.0.Final"
HASHES = Path(__file__).with_name("debezium_postgres_jars.sha256")
ROWS, ROWS_QUICK = 400_000, 200_000
ROWS_PER_TRANSACTION = 10
PAYLOAD_BYTES = 150
LATENCY_ROWS_PER_S = 1_000
LATENCY_MAX_MS = 50.0
WAIT_S = 120.0
FILL = sql.SQL(
    "DO $$ BEGIN FOR number IN 1..{transactions} LOOP "
    "INSERT INTO outbox (aggregatetype, aggregateid, type, payload) SELECT 'order', gen_random_uuid()::text, 'made', "
    "jsonb_build_object('note', repeat('x', {payload_bytes})) FROM generate_series(1, {rows}); "
    "COMMIT; END LOOP; END $$"
)


def bench(context: Context) -> Iterator[Result]:
    """Outbox rows with 150 bytes of payload, written in transactions of 10 before either side starts; rows per second
    as a stock read_committed consumer sees them, over the second half of each run (both are warm then). Ours: one
    Python process, exactly once. Peer: Debezium's PostgreSQL source with its outbox router on Kafka Connect standalone,
    pgoutput, at least once. Latency: from the commit of a row to the consumer, at 1,000 rows/s.
    """
    rows = ROWS_QUICK if context.quick else ROWS
    folder, servers = context.new_folder(), context.bootstrap_servers
    address = context.coordinator_address
    coordinates = [f"io.debezium:debezium-connector-postgres:{DEBEZIUM_VERSION}"]
    jars = connector_jars(f"debezium-postgres-{DEBEZIUM_VERSION}", coordinates, HASHES)
    dsn = context.new_database()
    asyncio.run(_init(servers, dsn))

    def ours() -> Mapping[str, float]:
        _fill(dsn, rows)
        topic = context.new_topic(partitions=2)
        with _relay(folder, servers, address, dsn, topic):
            return {"rows": _rate(servers, topic, rows)}

    def peer() -> Mapping[str, float]:
        topic, slot = context.new_topic(partitions=2), f"debezium_{uuid.uuid4().hex[:6]}"
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        _fill(dsn, rows)
        with connect(folder, jars, servers=servers, worker=WORKER, connector=_connector(dsn, topic, slot)):
            found = _rate(servers, topic, rows)
        with psycopg.connect(dsn, autocommit=True) as connection:
            _drop_slot(connection, slot)
        # The rows are ours to publish too: away with them, so that the next round begins alike.
        _skip(folder, servers, address, dsn, context)
        return {"rows": found}

    yield from interleave(
        [Metric(key="rows", name="reverse/vs-debezium", unit="rows/s", better="higher", target=2.0)],
        ours=Side(name="outbox relay", run=ours),
        peer=Side(name=f"Debezium {DEBEZIUM_VERSION}", run=peer),
        rounds=context.rounds,
        progress=context.progress,
        warm_up_turns=0,
    )

    def latency() -> Mapping[str, float]:
        topic = context.new_topic(partitions=1)
        with _relay(folder, servers, address, dsn, topic):
            waits = sorted(_latencies(servers, dsn, topic, context.duration_s + 2))
            return {"p99": waits[int(len(waits) * 0.99)] * 1000}

    yield from interleave(
        [Metric(key="p99", name="reverse/latency-p99", unit="ms", better="lower", target=1.0)],
        ours=Side(name="outbox relay", run=latency),
        peer=fixed({"p99": LATENCY_MAX_MS}),
        rounds=context.rounds,
        progress=context.progress,
        warm_up_turns=0,
    )


WORKER = {"producer.linger.ms": "5", "producer.batch.size": "262144", "offset.flush.interval.ms": "10000"}


def _connector(dsn: str, topic: str, slot: str) -> dict[str, str]:
    info = psycopg.conninfo.conninfo_to_dict(dsn)
    return {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "tasks.max": "1",
        "plugin.name": "pgoutput",
        "database.hostname": str(info["host"]),
        "database.port": str(info["port"]),
        "database.user": str(info["user"]),
        "database.password": str(info["password"]),
        "database.dbname": str(info["dbname"]),
        "topic.prefix": "debezium",
        "table.include.list": "public.outbox",
        "slot.name": slot,
        "publication.name": "oncebox_outbox",
        "publication.autocreate.mode": "disabled",
        "snapshot.mode": "no_data",
        "tombstones.on.delete": "false",
        "poll.interval.ms": "5",
        "max.batch.size": "8192",
        "max.queue.size": "32768",
        "transforms": "outbox",
        "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter",
        "transforms.outbox.route.topic.replacement": topic,
    }


async def _init(servers: str, dsn: str) -> None:
    settings = OutboxSettings(
        kafka=KafkaSection(bootstrap_servers=servers), postgres=PostgresSection(dsn=SecretStr(dsn))
    )
    await setup.run(settings, await setup.plan(settings))


@contextmanager
def _relay(folder: Path, servers: str, address: str, dsn: str, topic: str) -> Iterator[ChildProcess]:
    environment = {
        "ONCEBOX_BOOTSTRAP_SERVERS": servers,
        "ONCEBOX_DSN": dsn,
        "ONCEBOX_OUTBOX_COORDINATORS": address,
        "ONCEBOX_OUTBOX_TOPIC": topic,
    }
    command = [sys.executable, "-c", "from oncebox.cli import main; main()", "outbox", "run"]
    log = folder / f"relay-{uuid.uuid4().hex[:6]}.log"
    with ChildProcess(command, log=log, environment=environment) as process:
        process.wait_ready(lambda: process.log_contains("publishing from"))
        yield process
        process.stop()


def _fill(dsn: str, rows: int) -> None:
    """Committed one by one; away from the table again, for the log has them."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            FILL.format(
                transactions=rows // ROWS_PER_TRANSACTION, payload_bytes=PAYLOAD_BYTES - 12, rows=ROWS_PER_TRANSACTION
            )
        )
        connection.execute("TRUNCATE outbox")
        connection.execute("CHECKPOINT")


def _drop_slot(connection: psycopg.Connection[tuple[object, ...]], slot: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            connection.execute("SELECT pg_drop_replication_slot(%s)", [slot])
            return
        except psycopg.errors.ObjectInUse:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)


def _skip(folder: Path, servers: str, address: str, dsn: str, context: Context) -> None:
    """Lets the relay publish what it has not seen yet, elsewhere."""
    with _relay(folder, servers, address, dsn, context.new_topic(partitions=1)):
        deadline_s = time.monotonic() + WAIT_S
        with psycopg.connect(dsn, autocommit=True) as connection:
            (target,) = connection.execute("SELECT pg_current_wal_lsn()").fetchone() or ("",)
            query = "SELECT confirmed_flush_lsn >= %s FROM pg_replication_slots WHERE slot_name = 'oncebox_outbox'"
            while connection.execute(query, [target]).fetchone() != (True,):
                if time.monotonic() > deadline_s:
                    raise TimeoutError("the relay did not catch up")
                time.sleep(0.1)


def _consumer(servers: str, topic: str) -> Consumer:
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": f"bench-{uuid.uuid4().hex[:8]}",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 5,
        }
    )
    partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
    consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in partitions])
    return consumer


def _rate(servers: str, topic: str, rows: int) -> float:
    """Over the second half of the rows, as they become visible."""
    consumer = _consumer(servers, topic)
    count, half_s, half_at, deadline_s = 0, 0.0, 0, time.monotonic() + WAIT_S
    while count < rows:
        count += sum(message.error() is None for message in consumer.consume(10_000, timeout=0.02))
        now_s = time.monotonic()
        if not half_s and count >= rows // 2:
            half_s, half_at = now_s, count
        if now_s > deadline_s:
            raise TimeoutError(f"after {WAIT_S:g} s {count} of {rows} rows")
    consumer.close()
    return (count - half_at) / (now_s - half_s)


def _latencies(servers: str, dsn: str, topic: str, duration_s: float) -> list[float]:
    consumer = _consumer(servers, topic)
    count = int(duration_s * LATENCY_ROWS_PER_S)
    committed_s: dict[int, float] = {}

    def write() -> None:
        start_s = time.monotonic()
        with psycopg.connect(dsn, autocommit=True) as connection:
            for number in range(count):
                pause_s = start_s + number / LATENCY_ROWS_PER_S - time.monotonic()
                if pause_s > 0:
                    time.sleep(pause_s)
                connection.execute(
                    "INSERT INTO outbox (aggregatetype, aggregateid, type, payload) VALUES ('order', 'k', 't', %s)",
                    [json.dumps({"number": number})],
                )
                committed_s[number] = time.monotonic()

    writer = threading.Thread(target=write)
    writer.start()
    seen_s: dict[int, float] = {}
    deadline_s = time.monotonic() + duration_s + WAIT_S
    while len(seen_s) < count and time.monotonic() < deadline_s:
        for message in consumer.consume(100, timeout=0.002):
            if message.error() is None:
                seen_s[json.loads(message.value() or b"{}")["number"]] = time.monotonic()
    writer.join()
    consumer.close()
    # The first second warms up connections and caches.
    return [seen_s[number] - committed_s[number] for number in range(LATENCY_ROWS_PER_S, count)]
