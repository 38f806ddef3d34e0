"""Transfers that die on the way: `python -m tests.integration.atomic.killed BANK NAME POINT`."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg

import oncebox
from oncebox.databases import _AsyncPsycopg
from oncebox.transaction import Transaction
from tests.integration.atomic.conftest import INSERT, Bank
from tests.support.coordinator import Coordinators

# method, whether before it or after it, and whether the transfer happens all the same
POINTS = {
    "before prepare": (Transaction, "prepare", True, False),
    "after prepare": (Transaction, "prepare", False, False),
    "after the token": (_AsyncPsycopg, "execute", False, False),
    "before the database's commit": (_AsyncPsycopg, "commit", True, False),
    "after the database's commit": (_AsyncPsycopg, "commit", False, True),
    "before Kafka's commit": (Transaction, "commit", True, True),
    "after Kafka's commit": (Transaction, "commit", False, True),
}


def at(point: str, action: Callable[[], Awaitable[None]]) -> tuple[Any, str, Any]:
    """A class, a method of it, and what to put in its place so that the action is taken at that point, once."""
    owner, name, is_before, _happens = POINTS[point]
    real = getattr(owner, name)
    is_taken = False

    async def interrupted(*args: Any, **named: Any) -> Any:
        nonlocal is_taken
        if is_taken or (name == "execute" and args[1] != "commit_token"):
            return await real(*args, **named)
        is_taken = True
        if is_before:
            await action()
        result = await real(*args, **named)
        if not is_before:
            await action()
        return result

    return owner, name, interrupted


async def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def transfer(bank: Bank, name: str, point: str) -> None:
    async with bank.producer() as producer, await psycopg.AsyncConnection.connect(bank.dsn) as connection:
        await oncebox.recover(producer, connection)
        setattr(*at(point, die))
        async with oncebox.atomic(producer, connection) as (transaction, database):
            await transaction.send(bank.topic, name.encode())
            await database.execute(INSERT, [name])


def main() -> None:
    given = json.loads(sys.argv[1])
    one = Coordinators(given["servers"], None)  # type: ignore[arg-type]
    one.addresses = given["addresses"]
    bank = Bank(dsn=given["dsn"], one=one, transactional_id=given["id"], topic=given["topic"])
    asyncio.run(transfer(bank, sys.argv[2], sys.argv[3]))


if __name__ == "__main__":
    main()
