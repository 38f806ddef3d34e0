"""The bank: each transfer is one transaction over three topics; one in ten is aborted half-way, on purpose.

debits, credits    one record each, keyed by account
journal            one record that names both

`python -m proof.demo.bank SERVERS COORDINATORS NAME` makes transfers without end, to be killed in the middle of one.
"""

import asyncio
import itertools
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from oncebox.errors import FatalError, OnceboxError
from oncebox.producer import Producer, Transaction
from oncebox.v1 import transaction_pb2

ACCOUNTS = 20
TOPICS = ("debits", "credits", "journal")


class ChangedItsMindError(Exception):
    """The bank's customer, in the middle of a transfer."""


@dataclass(slots=True)
class Tally:
    """What the clients believe has happened."""

    committed: set[str] = field(default_factory=set)
    aborted: set[str] = field(default_factory=set)
    asked_again: int = 0

    @property
    def done(self) -> int:
        return len(self.committed) + len(self.aborted)


async def work(producer: Producer, name: str, numbers: Iterable[int], random: Random, tally: Tally) -> None:
    """One client's transfers, each to its definite end."""
    for number in numbers:
        await _transfer(producer, f"{name}-{number}", random, tally)


async def _transfer(producer: Producer, transfer_id: str, random: Random, tally: Tally) -> None:
    source, target = random.sample(range(ACCOUNTS), 2)
    amount = random.randint(1, 100)
    leaves_halfway = random.random() < 0.1
    while True:
        transaction = None
        try:
            transaction = await producer.begin()
            body = {"transfer": transfer_id, "amount": amount}
            await transaction.send("debits", _json(body | {"account": source}), key=str(source).encode())
            if leaves_halfway:
                raise ChangedItsMindError
            await transaction.send("credits", _json(body | {"account": target}), key=str(target).encode())
            await transaction.send("journal", _json(body | {"from": source, "to": target}))
            await transaction.commit()
        except ChangedItsMindError:
            if transaction is not None:
                await _abort(transaction)
            tally.aborted.add(transfer_id)
            return
        except FatalError:
            raise
        except OnceboxError:
            # "Unknown" lasts only until the coordinator is asked.
            tally.asked_again += 1
            if transaction is not None and await _is_committed(transaction):
                tally.committed.add(transfer_id)
                return
            continue
        tally.committed.add(transfer_id)
        return


async def _abort(transaction: Transaction) -> None:
    while transaction.is_open:
        try:
            await transaction.abort()
        except OnceboxError:
            await asyncio.sleep(0.1)


async def _is_committed(transaction: Transaction) -> bool:
    if transaction.is_open:
        await _abort(transaction)
    while True:
        try:
            outcome = await transaction.outcome()
        except FatalError:
            raise
        except OnceboxError:
            await asyncio.sleep(0.1)
            continue
        if outcome.result != transaction_pb2.UNDECIDED:
            return bool(outcome.result == transaction_pb2.COMMITTED)
        await asyncio.sleep(0.05)


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


async def _work_for_ever(bootstrap_servers: str, coordinators: str, name: str) -> None:
    async with Producer(bootstrap_servers, coordinators, transactional_id=name) as producer:
        print("begins", flush=True)
        await work(producer, name, itertools.count(), Random(name), Tally())


if __name__ == "__main__":
    asyncio.run(_work_for_ever(*sys.argv[1:]))
