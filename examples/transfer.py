"""Transfers between accounts: each is a debit in one topic and a credit in another, and never only one of them.

    python examples/transfer.py --kafka localhost:9092 --coordinators localhost:7171

A customer who changes his mind in the middle leaves no trace. The reader adds up whole transactions, so that its books
balance after every single one of them.
"""

# ruff: noqa: T201 - an example prints what it found

import asyncio
import json
from collections import Counter
from random import Random

from common import arguments, create_topics

import oncebox

ACCOUNTS = ["ann", "bob", "cid", "dot"]


class ChangedHisMindError(Exception):
    pass


async def pay(producer: oncebox.Producer, debits: str, credits_: str, random: Random) -> None:
    source, target = random.sample(ACCOUNTS, 2)
    amount = random.randint(1, 100)
    async with producer.transaction() as transaction:
        await transaction.send(debits, json.dumps({"amount": amount}).encode(), key=source.encode())
        if random.random() < 0.2:
            raise ChangedHisMindError
        await transaction.send(credits_, json.dumps({"amount": amount}).encode(), key=target.encode())


async def main() -> None:
    given = arguments("transfers between accounts")
    debits, credits_ = f"{given.prefix}-debits", f"{given.prefix}-credits"
    create_topics(given.kafka, debits, credits_)
    changed = 0

    def teller() -> oncebox.Producer:
        return oncebox.Producer(given.kafka, given.coordinators, transactional_id=f"{given.prefix}-teller")

    async with teller() as producer:
        random = Random()  # noqa: S311 - which accounts is no secret
        for _ in range(given.count):
            try:
                await pay(producer, debits, credits_, random)
            except ChangedHisMindError:
                changed += 1
    async with teller():
        pass  # a start waits until all that was committed can be read, which a commit does only for a moment
    balances: Counter[str] = Counter()
    read = 0
    async with oncebox.read_transactions(
        [debits, credits_], given.kafka, feed_topic=given.feed, until_end=True
    ) as reader:
        async for transaction in reader:
            for where, records in transaction.records.items():
                sign = -1 if where.topic == debits else 1
                for record in records:
                    balances[(record.key or b"").decode()] += sign * json.loads(record.value or b"{}")["amount"]
            read += 1
            if sum(balances.values()):
                raise SystemExit(f"the books do not balance after {transaction.transactional_id} {transaction.number}")
    print(
        f"{given.count - changed} transfers committed, {changed} given up half-way; {read} read, in balance each time"
    )
    print(", ".join(f"{account} {balances[account]:+}" for account in ACCOUNTS))


asyncio.run(main())
