"""The relay from Kafka to PostgreSQL: rows per second, memory and lag, against Debezium's JDBC sink and bare COPY."""

import asyncio
import json
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

import psycopg
from confluent_kafka import Producer as StockProducer

from proof.bench import relay_parts as parts
from proof.bench.context import Context
from proof.bench.measure import Metric, Side, fixed, interleave
from proof.bench.result import Result

ROWS, ROWS_QUICK = 1_000_000, 400_000
TRANSACTIONS, TRANSACTIONS_QUICK = 30_000, 10_000
ROWS_PER_TRANSACTION = 10
WRITERS = 8
MEMORY_MAX_MB = 300.0
LAG_MAX_MS = 200.0
# Of the top rate that was measured before.
LAG_RATE = 0.1
# After the last row was sent.
SETTLE_S = 2.0
STOPPED_S, STOPPED_QUICK_S = 60.0, 10.0


def bench(context: Context) -> Iterator[Result]:
    """Rows of 5 columns as JSON (with the schema beside them that Debezium's sink asks for), upserted into a table with
    a primary key and the version guard's columns. Partition mode against Debezium's JDBC sink on Kafka Connect (two
    tasks, batches of 5,000), each from its 100,000th row on; against COPY and one upsert by psql; transaction mode
    against partition mode on the same topic, written in transactions of 10 rows. Lag: from the send to the first read
    that sees the row, at a tenth of the rate measured before; a row that is not seen 2 s after the last was sent counts
    with all the time until then. Memory: the most that the process had in use with the backlog before it; and the same
    with a database that stands still for a minute (10 s if quick) on the way. Lag and memory are measured once,
    whatever number of rounds is asked for.
    """
    rows = ROWS_QUICK if context.quick else ROWS
    servers, dsn, folder = context.bootstrap_servers, context.new_database(), context.new_folder()
    topic = context.new_topic(partitions=2)
    context.progress(f"writing {rows:,} rows")
    parts.fill(servers, topic, rows)
    rates: list[float] = []

    def ours() -> Mapping[str, float]:
        parts.new_table(dsn)
        with parts.relay(folder, servers, dsn, topic) as process:
            found = parts.rate(process, dsn, rows, parts.WARM_ROWS)
            rates.append(found)
            return {"rows": found, "memory": parts.peak_bytes(process) / 1e6}

    def peer() -> Mapping[str, float]:
        parts.new_table(dsn)
        with parts.debezium(folder, servers, dsn, topic) as process:
            return {"rows": parts.rate(process, dsn, rows, parts.WARM_ROWS)}

    def bare() -> Mapping[str, float]:
        parts.new_table(dsn)
        return {"rows": parts.copy_rate(folder, dsn, rows)}

    once = {"rounds": context.rounds, "progress": context.progress, "warm_up_turns": 0}
    ours_side = Side(name="relay, partition mode", run=ours)
    for name, target, side in (
        ("relay/vs-debezium", 2.0, Side(name=f"Debezium JDBC {parts.DEBEZIUM_VERSION}", run=peer)),
        ("relay/vs-copy", 0.6, Side(name="psql COPY + upsert", run=bare)),
    ):
        metric = Metric(key="rows", name=name, unit="rows/s", better="higher", target=target)
        yield from interleave([metric], ours=ours_side, peer=side, **once)  # type: ignore[arg-type]
    memory = Metric(key="memory", name="relay/memory", unit="MB", better="lower", target=1.0)
    limit = fixed({"memory": MEMORY_MAX_MB})
    yield from interleave([memory], ours=ours_side, peer=limit, rounds=1, progress=context.progress, warm_up_turns=0)
    yield from _stopped(context, topic, rows, folder)
    yield from _transactions(context, dsn, folder)
    yield from _lag(context, dsn, folder, median(rates) * LAG_RATE)


def _stopped(context: Context, topic: str, rows: int, folder: Path) -> Iterator[Result]:
    stopped_s = STOPPED_QUICK_S if context.quick else STOPPED_S

    def run() -> Mapping[str, float]:
        with context.postgres("PostgreSQL", {"fsync": "off"}) as server:
            parts.new_table(server.dsn)
            with parts.relay(folder, context.bootstrap_servers, server.dsn, topic) as process:
                parts.wait_for_rows(process, server.dsn, 1)
                server.pause()
                time.sleep(stopped_s)
                server.resume()
                parts.wait_for_rows(process, server.dsn, rows)
                return {"memory": parts.peak_bytes(process) / 1e6}

    yield from interleave(
        [Metric(key="memory", name="relay/memory-stopped", unit="MB", better="lower", target=1.0)],
        ours=Side(name=f"relay, the database stands still for {stopped_s:.0f} s", run=run),
        peer=fixed({"memory": MEMORY_MAX_MB}),
        rounds=1,
        progress=context.progress,
        warm_up_turns=0,
    )


def _transactions(context: Context, dsn: str, folder: Path) -> Iterator[Result]:
    from proof.bench.instances import Coordinator

    count = TRANSACTIONS_QUICK if context.quick else TRANSACTIONS
    servers, topic = context.bootstrap_servers, context.new_topic(partitions=2)
    suffix = uuid.uuid4().hex[:8]
    feed = f"oncebox.commits.{suffix}"
    environment = {"ONCEBOX_COORDINATOR_FEED_TOPIC": feed, "ONCEBOX_COORDINATOR_LOG_TOPIC": f"oncebox.log.{suffix}"}
    context.progress(f"writing {count:,} transactions")
    with Coordinator(servers, context.new_folder(), environment) as coordinator:
        asyncio.run(_write(servers, coordinator.address, topic, count))
    rows = count * ROWS_PER_TRANSACTION

    def run(mode: str) -> Mapping[str, float]:
        parts.new_table(dsn)
        with parts.relay(folder, servers, dsn, topic, mode=mode, feed_topic=feed) as process:
            return {"rows": parts.rate(process, dsn, rows, rows // 5)}

    metric = Metric(key="rows", name="relay/transaction-vs-partition", unit="rows/s", better="higher", target=0.7)
    yield from interleave(
        [metric],
        ours=Side(name="relay, transaction mode", run=lambda: run("transaction")),
        peer=Side(name="relay, partition mode", run=lambda: run("partition")),
        rounds=context.rounds,
        progress=context.progress,
        warm_up_turns=0,
    )


async def _write(servers: str, address: str, topic: str, count: int) -> None:
    from oncebox import Producer

    async def write(writer: int) -> None:
        async with Producer(servers, address, transactional_id=f"bench-{writer}-{uuid.uuid4().hex[:6]}") as producer:
            for number in range(writer, count, WRITERS):
                async with producer.transaction() as transaction:
                    for place in range(ROWS_PER_TRANSACTION):
                        row = parts.row(number * ROWS_PER_TRANSACTION + place)
                        value = json.dumps({"payload": row}, separators=(",", ":")).encode()
                        await transaction.send(topic, value, key=str(row["id"]).encode())

    await asyncio.gather(*(write(writer) for writer in range(WRITERS)))


def _lag(context: Context, dsn: str, folder: Path, rows_per_s: float) -> Iterator[Result]:
    servers, topic = context.bootstrap_servers, context.new_topic(partitions=1)

    def run() -> Mapping[str, float]:
        parts.new_table(dsn)
        with parts.relay(folder, servers, dsn, topic) as process:
            process.wait_ready(lambda: process.log_contains("took over"))
            lags = sorted(_lags(servers, dsn, topic, context.duration_s, rows_per_s))
            return {"lag": lags[int(len(lags) * 0.99)]}

    metric = Metric(key="lag", name="relay/lag-p99", unit="ms", better="lower", target=1.0)
    yield from interleave(
        [metric],
        ours=Side(name=f"relay, partition mode, {rows_per_s:,.0f} rows/s", run=run),
        peer=fixed({"lag": LAG_MAX_MS}),
        rounds=1,
        progress=context.progress,
        warm_up_turns=0,
    )


def _lags(servers: str, dsn: str, topic: str, duration_s: float, rows_per_s: float) -> list[float]:
    """Sends at the given rate and looks how far the table is; the lag of every row that was sent. One that is not seen
    until SETTLE_S after the last was sent counts with the time until then: a relay that stands still is not fast.
    """
    producer = StockProducer({"bootstrap.servers": servers, "linger.ms": 2})
    wanted = max(1, int(duration_s * rows_per_s))
    sent: list[float] = []
    lags: list[float] = []
    start_s = time.monotonic()
    with psycopg.connect(dsn, autocommit=True) as connection:
        seen = -1
        while seen + 1 < wanted and (now_s := time.monotonic()) < start_s + duration_s + SETTLE_S:
            while len(sent) < min((now_s - start_s) * rows_per_s, wanted):
                value = json.dumps({"payload": parts.row(len(sent))}, separators=(",", ":"))
                producer.produce(topic, value, key=str(len(sent)))
                sent.append(time.monotonic())
            producer.poll(0)
            (highest,) = connection.execute("SELECT max(id) FROM public.rows").fetchone() or (None,)
            if highest is not None and highest > seen:
                seen_s = time.monotonic()
                lags += [(seen_s - at_s) * 1000 for at_s in sent[seen + 1 : highest + 1]]
                seen = highest
            time.sleep(0.002)
    end_s = time.monotonic()
    producer.flush(10)
    return lags + [(end_s - at_s) * 1000 for at_s in sent[seen + 1 :]]
