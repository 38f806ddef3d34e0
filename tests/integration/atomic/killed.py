"""Transfers that die on the way: `python -m tests.integration.atomic.killed BANK KIND NAME POINT`."""

import asyncio
import inspect
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psycopg
import sqlalchemy

import oncebox
from oncebox import blocking
from oncebox.databases import _AsyncAlchemy, _AsyncPsycopg, _BlockingAlchemy, _BlockingPsycopg
from oncebox.transaction import Transaction
from tests.integration.atomic.conftest import INSERT, Bank
from tests.support.coordinator import Coordinators

# what wraps the connection, and whose transactions go with it
KINDS: dict[str, tuple[type, type]] = {
    "psycopg": (_AsyncPsycopg, Transaction),
    "blocking psycopg": (_BlockingPsycopg, blocking.Transaction),
    "sqlalchemy": (_AsyncAlchemy, Transaction),
    "blocking sqlalchemy": (_BlockingAlchemy, blocking.Transaction),
}
DATABASE, TRANSACTION = 0, 1
# whose method, whether before it or after it, and whether the transfer happens all the same
POINTS = {
    "after the token": (DATABASE, "execute", False, False),
    "before prepare": (TRANSACTION, "prepare", True, False),
    "after prepare": (TRANSACTION, "prepare", False, False),
    "before the database's commit": (DATABASE, "commit", True, False),
    "after the database's commit": (DATABASE, "commit", False, True),
    "before Kafka's commit": (TRANSACTION, "commit", True, True),
    "after Kafka's commit": (TRANSACTION, "commit", False, True),
}


def at(point: str, action: Callable[[], Any], kind: str = "psycopg") -> tuple[Any, str, Any]:
    """A class, a method of it, and what to put in its place so that the action is taken at that point, once."""
    whose, name, is_before, _happens = POINTS[point]
    owner = KINDS[kind][whose]
    real = getattr(owner, name)
    is_taken = False

    def is_due(*args: Any) -> bool:
        nonlocal is_taken
        if is_taken or (name == "execute" and args[1] != "commit_token"):
            return False
        is_taken = True
        return True

    async def interrupted(*args: Any, **named: Any) -> Any:
        due = is_due(*args)
        if due and is_before:
            await action()
        result = await real(*args, **named)
        if due and not is_before:
            await action()
        return result

    def interrupted_blocking(*args: Any, **named: Any) -> Any:
        due = is_due(*args)
        if due and is_before:
            action()
        result = real(*args, **named)
        if due and not is_before:
            action()
        return result

    return owner, name, interrupted if inspect.iscoroutinefunction(real) else interrupted_blocking


def die() -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


@asynccontextmanager
async def opened(bank: Bank, kind: str) -> AsyncIterator[tuple[Any, Callable[[str], Any]]]:
    """A connection, and what writes a transfer on it."""
    if kind == "psycopg":
        async with await psycopg.AsyncConnection.connect(bank.dsn) as connection:
            yield connection, lambda name: connection.execute(INSERT, [name])
        return
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(url_of(bank))
    try:
        async with engine.connect() as plain:
            yield plain, lambda name: plain.execute(INSERT_NAMED, {"name": name})
    finally:
        await engine.dispose()


@contextmanager
def opened_blocking(bank: Bank, kind: str) -> Iterator[tuple[Any, Callable[[str], Any]]]:
    if kind == "blocking psycopg":
        with psycopg.connect(bank.dsn) as connection:
            yield connection, lambda name: connection.execute(INSERT, [name])
        return
    engine = sqlalchemy.create_engine(url_of(bank))
    try:
        with engine.connect() as plain:
            yield plain, lambda name: plain.execute(INSERT_NAMED, {"name": name})
    finally:
        engine.dispose()


INSERT_NAMED = sqlalchemy.text("INSERT INTO transfer (name) VALUES (:name)")


def url_of(bank: Bank) -> str:
    return bank.dsn.replace("postgresql://", "postgresql+psycopg://")


async def transfer(bank: Bank, kind: str, name: str, before: Callable[[], None]) -> None:
    async with bank.producer() as producer, opened(bank, kind) as (connection, insert):
        await oncebox.recover(producer, connection)
        before()
        async with oncebox.atomic(producer, connection) as (transaction, _):
            await transaction.send(bank.topic, name.encode())
            await insert(name)


def transfer_blocking(bank: Bank, kind: str, name: str, before: Callable[[], None]) -> None:
    with bank.blocking_producer() as producer, opened_blocking(bank, kind) as (connection, insert):
        oncebox.recover(producer, connection)
        before()
        with oncebox.atomic(producer, connection) as (transaction, _):
            transaction.send(bank.topic, name.encode())
            insert(name)


def main() -> None:
    given, (kind, name, point) = json.loads(sys.argv[1]), sys.argv[2:]
    one = Coordinators(given["servers"], None)  # type: ignore[arg-type]
    one.addresses = given["addresses"]
    bank = Bank(dsn=given["dsn"], one=one, transactional_id=given["id"], topic=given["topic"])

    def before() -> None:
        setattr(*at(point, die, kind))

    if kind.startswith("blocking"):
        transfer_blocking(bank, kind, name, before)
    else:
        asyncio.run(transfer(bank, kind, name, before))


if __name__ == "__main__":
    main()
