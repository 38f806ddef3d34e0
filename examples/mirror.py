"""Database → Kafka → database: accounts in one PostgreSQL, their copy in another, which is never half-way.

    python examples/mirror.py --kafka localhost:9092 --coordinators localhost:7171 --dsn postgresql://…/a --copy …/b

A transfer changes two accounts and writes an event for each into the outbox, in one transaction. The outbox relay
publishes it whole, the relay applies it whole: whoever adds up the copy, at any moment, finds all the money. Both run
in this process; elsewhere they are `oncebox outbox run` and `oncebox relay run`.
"""

# ruff: noqa: T201 - an example prints what it found

import asyncio
import os
from random import Random
from typing import Any

import psycopg
from common import create_topics, parser
from psycopg import sql
from pydantic import SecretStr

from oncebox.outbox import INSERT, event
from oncebox.settings import KafkaSection, PostgresSection
from relay.config import RelaySettings, TableSection
from relay.outbox import setup
from relay.outbox.config import OutboxSettings
from relay.outbox.relay import OutboxRelay
from relay.service import Relay

ACCOUNTS = ["ann", "bob", "cid", "dot"]
START = 100
SOURCE = "CREATE TABLE IF NOT EXISTS example_account (name text PRIMARY KEY, balance bigint NOT NULL)"
ADD = (
    "INSERT INTO example_account VALUES (%(name)s, %(amount)s) ON CONFLICT (name) "
    "DO UPDATE SET balance = example_account.balance + %(amount)s RETURNING balance"
)
COPY = (
    "CREATE TABLE IF NOT EXISTS example_copy (name text PRIMARY KEY, balance bigint NOT NULL, "
    "oncebox_source integer, oncebox_offset bigint)"
)

Connection = psycopg.AsyncConnection[Any]


async def change(connection: Connection, amounts: dict[str, int]) -> None:
    """One transaction: the accounts, and what is told of them."""
    async with connection.transaction():
        for name in sorted(amounts):
            found = await (await connection.execute(ADD, {"name": name, "amount": amounts[name]})).fetchone()
            told = {"name": name, "balance": found[0] if found else 0}
            await connection.execute(INSERT, event("account", name, "Changed", told))


async def transfers(connection: Connection, count: int) -> None:
    random = Random(7)  # noqa: S311 - which accounts is no secret
    for _ in range(count):
        source, target = random.sample(ACCOUNTS, 2)
        amount = random.randint(1, 9)
        await change(connection, {source: -amount, target: amount})


async def look(connection: Connection, table: str) -> dict[str, int]:
    query = sql.SQL("SELECT name, balance FROM {}").format(sql.Identifier(table))
    return dict(await (await connection.execute(query)).fetchall())


async def watch(connection: Connection, wanted: asyncio.Future[dict[str, int]]) -> int:
    """How many states the copy has had, until it has the last one."""
    states, last = 0, dict[str, int]()
    while not (wanted.done() and last == wanted.result()):
        found = await look(connection, "example_copy")
        if found and sum(found.values()) != START * len(ACCOUNTS):
            raise SystemExit(f"the copy was never to be seen like this: {found}")
        states, last = states + (found != last), found
        await asyncio.sleep(0.001)
    return states


async def main() -> None:
    arguments = parser("accounts in a database, and their copy in another")
    arguments.add_argument("--dsn", default=os.environ.get("ONCEBOX_DSN", ""), help="of the database (or ONCEBOX_DSN)")
    arguments.add_argument("--copy", required=True, help="postgresql://… of the copy's database")
    given = arguments.parse_args()
    topic = f"{given.prefix}-accounts"
    create_topics(given.kafka, topic)
    kafka, slot = KafkaSection(bootstrap_servers=given.kafka), given.prefix.lower().replace("-", "_")
    outward = OutboxSettings(
        kafka=kafka,
        postgres=PostgresSection(dsn=SecretStr(given.dsn)),
        coordinators=given.coordinators,
        name=given.prefix,
        slot=slot,
        topic=topic,
    )
    inward = RelaySettings(
        name=given.prefix,
        kafka=kafka,
        postgres=PostgresSection(dsn=SecretStr(given.copy)),
        tables=[TableSection(topic=topic, table="example_copy", key=("name",))],
        feed_topic=given.feed,
    )
    await setup.run(outward, await setup.plan(outward))
    connect = psycopg.AsyncConnection.connect
    async with await connect(given.dsn, autocommit=True) as first, await connect(given.copy, autocommit=True) as second:
        await first.execute(SOURCE)
        await second.execute(COPY)
        await change(first, dict.fromkeys(ACCOUNTS, START))
        publishing, applying = OutboxRelay(outward), Relay(inward)
        wanted: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(publishing.run())
            tasks.create_task(applying.run())
            watching = tasks.create_task(watch(second, wanted))
            await transfers(first, given.count)
            wanted.set_result(await look(first, "example_account"))
            states = await watching
            publishing.stop()
            applying.stop()
        # A slot that nobody reads any more would keep the log for ever.
        await first.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    print(f"{given.count} transfers; the copy was in balance in each of its states, and is the same at the end")
    print(f"{states} states were seen")


asyncio.run(main())
