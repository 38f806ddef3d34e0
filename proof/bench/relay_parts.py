"""What the relay is measured with: a topic full of rows, a relay process, Debezium's JDBC sink, bare COPY."""

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import yaml
from confluent_kafka import Producer

from oncebox.local.postgres import find_binaries
from proof.bench.connect import connect, connector_jars
from proof.faults.process import ChildProcess

DEBEZIUM_VERSION = "3.5.0.Final"
COORDINATES = (f"io.debezium:debezium-connector-jdbc:{DEBEZIUM_VERSION}", "org.postgresql:postgresql:42.7.14")
HASHES = Path(__file__).with_name("connect_jars.sha256")
WAIT_S = 300.0
POLL_S = 0.02
# A table that has not grown for so long may be complete.
QUIET_S = 1.0
# Rows until a side is warm; they are not counted.
WARM_ROWS = 100_000
COLUMNS = "id bigint, name text, amount double precision, quantity integer, note text"
TABLE = f"CREATE TABLE public.rows ({COLUMNS}, oncebox_source integer, oncebox_offset bigint, PRIMARY KEY (id))"
# What Debezium's sink needs beside each row; both sides read the same topic.
SCHEMA = {
    "type": "struct",
    "optional": False,
    "fields": [
        {"field": "id", "type": "int64", "optional": False},
        {"field": "name", "type": "string", "optional": True},
        {"field": "amount", "type": "double", "optional": True},
        {"field": "quantity", "type": "int32", "optional": True},
        {"field": "note", "type": "string", "optional": True},
    ],
}


def row(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "name": f"customer {number % 9973}",
        "amount": number / 7,
        "quantity": number % 100,
        "note": "left at the door, ring twice",
    }


def fill(servers: str, topic: str, count: int, *, with_schema: bool = True) -> None:
    head = '{"schema":' + json.dumps(SCHEMA, separators=(",", ":")) + ',"payload":' if with_schema else ""
    tail = "}" if with_schema else ""
    producer = Producer(
        {
            "bootstrap.servers": servers,
            "linger.ms": 50,
            "compression.type": "lz4",
            "queue.buffering.max.messages": 200_000,
        }
    )
    for number in range(count):
        value = head + json.dumps(row(number), separators=(",", ":")) + tail
        while True:
            try:
                producer.produce(topic, value, key=str(number))
                break
            except BufferError:
                producer.poll(0.1)
    producer.flush(120)


def new_table(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS public.rows")
        connection.execute(TABLE)
        connection.execute("CHECKPOINT")


def rate(process: ChildProcess, dsn: str, count: int, warm: int) -> float:
    """Rows per second, from the first `warm` ones to the last. The table's size tells how far it is: rows are all about
    as long as each other, and counting them would cost more than writing them.
    """
    samples: list[tuple[float, int]] = [(time.monotonic(), 0)]
    counted_s = samples[0][0]
    deadline_s = counted_s + WAIT_S
    with psycopg.connect(dsn, autocommit=True) as connection:
        while True:
            (size,) = connection.execute("SELECT pg_relation_size('public.rows')").fetchone() or (0,)
            now_s = time.monotonic()
            if size > samples[-1][1]:
                samples.append((now_s, size))
            elif size and now_s > max(samples[-1][0], counted_s) + QUIET_S:
                counted_s = now_s
                if connection.execute("SELECT count(*) FROM public.rows").fetchone() == (count,):
                    break
            if now_s > deadline_s or not process.running:
                raise TimeoutError(f"stopped at {size} bytes: {process.log_tail()}")
            time.sleep(POLL_S)
    end_s, end_size = samples[-1]
    warm_s, warm_size = next(each for each in samples if each[1] >= end_size * warm / count)
    return (end_size - warm_size) / end_size * count / (end_s - warm_s)


def wait_for_rows(process: ChildProcess, dsn: str, count: int) -> None:
    """Until the table has at least so many."""
    deadline_s = time.monotonic() + WAIT_S
    with psycopg.connect(dsn, autocommit=True) as connection:
        while (connection.execute("SELECT count(*) FROM public.rows").fetchone() or (0,))[0] < count:
            if time.monotonic() > deadline_s or not process.running:
                raise TimeoutError(process.log_tail())
            time.sleep(0.2)


@contextmanager
def relay(folder: Path, servers: str, dsn: str, topic: str, **settings: Any) -> Iterator[ChildProcess]:
    columns = {name: {"path": f"payload.{name}"} for name in row(0)}
    section = {"topic": topic, "table": "public.rows", "key": ["id"], "columns": columns}
    name = f"bench-{uuid.uuid4().hex[:6]}"
    file = folder / f"{name}.yaml"
    given = {
        "name": name,
        "mode": "partition",
        "kafka": {"bootstrap_servers": servers},
        "postgres": {"dsn": dsn},
        "listen_port": 0,
        "http_port": 0,
        "tables": [section],
    }
    file.write_text(yaml.safe_dump(given | settings))
    with ChildProcess([sys.executable, "-m", "relay", str(file)], log=folder / f"{name}.log") as process:
        yield process


def peak_bytes(process: ChildProcess) -> int:
    """The most memory that it had in use."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM")


@contextmanager
def debezium(folder: Path, servers: str, dsn: str, topic: str) -> Iterator[ChildProcess]:
    """Kafka Connect standalone with two tasks of Debezium's JDBC sink, set up as its documentation says for speed."""
    info = psycopg.conninfo.conninfo_to_dict(dsn)
    worker = {
        "value.converter": "org.apache.kafka.connect.json.JsonConverter",
        "value.converter.schemas.enable": "true",
        "consumer.max.poll.records": "5000",
        "consumer.auto.offset.reset": "earliest",
    }
    connector = {
        "connector.class": "io.debezium.connector.jdbc.JdbcSinkConnector",
        "tasks.max": "2",
        "topics": topic,
        "connection.url": f"jdbc:postgresql://{info['host']}:{info['port']}/{info['dbname']}?reWriteBatchedInserts=true",
        "connection.username": str(info["user"]),
        "connection.password": str(info["password"]),
        "insert.mode": "upsert",
        "primary.key.mode": "record_value",
        "primary.key.fields": "id",
        "schema.evolution": "none",
        "collection.name.format": "public.rows",
        "batch.size": "5000",
    }
    jars = connector_jars(DEBEZIUM_VERSION, COORDINATES, HASHES)
    with connect(folder, jars, servers=servers, worker=worker, connector=connector) as process:
        yield process


def copy_rate(folder: Path, dsn: str, count: int) -> float:
    """psql: COPY of all rows into a temporary table, then one upsert into the table."""
    file = folder / "rows.csv"
    if not file.exists():
        with file.open("w") as out:
            for number in range(count):
                out.write("\t".join(map(str, row(number).values())) + f"\t1\t{number}\n")
    script = folder / "copy.sql"
    names = "id, name, amount, quantity, note, oncebox_source, oncebox_offset"
    sets = ", ".join(f"{name} = EXCLUDED.{name}" for name in names.split(", ")[1:])
    script.write_text(
        f"BEGIN;\nCREATE TEMPORARY TABLE staged ({COLUMNS}, oncebox_source integer, "  # noqa: S608 - our own names
        "oncebox_offset bigint) "
        f"ON COMMIT DROP;\n\\copy staged FROM '{file}'\n"
        f"INSERT INTO public.rows ({names}) SELECT {names} FROM staged ORDER BY id "
        f"ON CONFLICT (id) DO UPDATE SET {sets};\nCOMMIT;\n"
    )
    start_s = time.monotonic()
    subprocess.run([find_binaries() / "psql", dsn, "-q", "-v", "ON_ERROR_STOP=1", "-f", str(script)], check=True)
    return count / (time.monotonic() - start_s)
