"""What one commit over Kafka and PostgreSQL costs, against a commit of each."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping

import psycopg

import oncebox
from oncebox.atomic_schema import ATOMIC_SCHEMA
from proof.bench.context import Context
from proof.bench.measure import Metric, Side, interleave
from proof.bench.result import Result

WARM_UP = 20
INSERT = "INSERT INTO paid (what) VALUES (%s)"


def bench(context: Context) -> Iterator[Result]:
    """One record and one inserted row, one after another from one connection: oncebox.atomic() against a plain commit
    of the database and a plain commit of Oncebox, which together promise nothing. PostgreSQL flushes to disk.
    """
    servers, address = context.bootstrap_servers, context.coordinator_address
    topic = context.new_topic(partitions=1)
    # One event loop for all rounds: gRPC does not take well to a second one in a process.
    with context.postgres("PostgreSQL, atomic") as server, asyncio.Runner() as runner:
        with psycopg.connect(server.dsn) as connection:
            connection.execute(ATOMIC_SCHEMA)
            connection.execute("CREATE TABLE paid (what text)")

        def run(*, is_atomic: bool) -> Mapping[str, float]:
            return {"ms": runner.run(_measure(servers, address, server.dsn, topic, context.duration_s, is_atomic))}

        yield from interleave(
            [Metric(key="ms", name="atomic/cost", unit="ms", better="lower", target=0.5)],
            ours=Side(name="one commit over both", run=lambda: run(is_atomic=True)),
            peer=Side(name="a commit of each", run=lambda: run(is_atomic=False)),
            rounds=context.rounds,
            progress=context.progress,
            warm_up_turns=2,
        )


async def _measure(servers: str, address: str, dsn: str, topic: str, duration_s: float, is_atomic: bool) -> float:
    """Milliseconds for one, on average."""
    name = f"bench-atomic-{uuid.uuid4().hex[:8]}"
    async with (
        oncebox.Producer(servers, address, transactional_id=name) as producer,
        await psycopg.AsyncConnection.connect(dsn) as connection,
    ):

        async def both() -> None:
            async with oncebox.atomic(producer, connection) as (transaction, database):
                await transaction.send(topic, b"paid")
                await database.execute(INSERT, ["paid"])

        async def each() -> None:
            async with producer.transaction() as transaction:
                await transaction.send(topic, b"paid")
            await connection.execute(INSERT, ["paid"])
            await connection.commit()

        unit: Callable[[], Awaitable[None]] = both if is_atomic else each
        for _ in range(WARM_UP):
            await unit()
        count, start_s = 0, time.perf_counter()
        while time.perf_counter() - start_s < duration_s:
            await unit()
            count += 1
        return (time.perf_counter() - start_s) / count * 1000
