"""Transfers between accounts in PostgreSQL, each with its entry in a Kafka journal: both, or neither.

    python examples/atomic_transfer.py --kafka localhost:9092 --coordinators localhost:7171 --dsn postgresql://…

Some transfers fail on the way, because an account may not be overdrawn. At the end the journal is added up: it gives
the balances that the database has, to the last cent.
"""

# ruff: noqa: T201 - an example prints what it found

import asyncio
import json
import os
from collections import Counter
from random import Random

import psycopg
from common import create_topics, parser

import oncebox
from oncebox.atomic_schema import ATOMIC_SCHEMA
from oncebox.producer import ProducerSettings

ACCOUNTS = ["ann", "bob", "cid", "dot"]
START = 100
TABLE = "CREATE TABLE IF NOT EXISTS example_account (name text PRIMARY KEY, balance bigint CHECK (balance >= 0))"
ADD = "UPDATE example_account SET balance = balance + %s WHERE name = %s"


async def pay(
    producer: oncebox.Producer, connection: psycopg.AsyncConnection[tuple[object, ...]], topic: str, random: Random
) -> None:
    source, target = random.sample(ACCOUNTS, 2)
    amount = random.randint(1, 60)
    async with oncebox.atomic(producer, connection) as (transaction, database):
        await transaction.send(topic, json.dumps({"from": source, "to": target, "amount": amount}).encode())
        await database.execute(ADD, [amount, target])
        await database.execute(ADD, [-amount, source])


async def main() -> None:
    arguments = parser("transfers in a database, with a journal in Kafka")
    arguments.add_argument("--dsn", default=os.environ.get("ONCEBOX_DSN", ""), help="of the database (or ONCEBOX_DSN)")
    given = arguments.parse_args()
    topic = f"{given.prefix}-journal"
    create_topics(given.kafka, topic)

    def teller() -> oncebox.Producer:
        return oncebox.Producer(
            given.kafka,
            given.coordinators,
            transactional_id=f"{given.prefix}-teller",
            settings=ProducerSettings(keep_prepared=True),
        )

    refused = 0
    async with teller() as producer, await psycopg.AsyncConnection.connect(given.dsn) as connection:
        await connection.execute(ATOMIC_SCHEMA)
        await connection.execute(TABLE)
        for account in ACCOUNTS:
            await connection.execute("INSERT INTO example_account VALUES (%s, %s)", [account, START])
        await connection.commit()
        await oncebox.recover(producer, connection)
        random = Random(7)  # noqa: S311 - which accounts is no secret
        for _ in range(given.count):
            try:
                await pay(producer, connection, topic, random)
            except psycopg.errors.CheckViolation:
                refused += 1
        found = await (await connection.execute("SELECT name, balance FROM example_account")).fetchall()
    async with teller():
        pass  # a start waits until all that was committed can be read, which a commit does only for a moment
    balances = Counter(dict.fromkeys(ACCOUNTS, START))
    async with oncebox.read_transactions([topic], given.kafka, feed_topic=given.feed, until_end=True) as reader:
        async for transaction in reader:
            for records in transaction.records.values():
                for record in records:
                    entry = json.loads(record.value or b"{}")
                    balances[entry["from"]] -= entry["amount"]
                    balances[entry["to"]] += entry["amount"]
    if balances != Counter({str(name): int(str(balance)) for name, balance in found}):
        raise SystemExit("the journal and the database do not agree")
    print(f"{given.count - refused} transfers made, {refused} refused: the journal gives the database's balances")


asyncio.run(main())
