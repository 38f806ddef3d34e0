"""What connections are set to, and what an application does on them within a block."""

from contextlib import suppress
from typing import Any

import psycopg
import pytest
import sqlalchemy
from psycopg import rows
from sqlalchemy import orm

import oncebox
from oncebox.atomic_commit import drive_blocking, identify, wrap_metadata
from oncebox.databases import database_of
from oncebox.errors import UsageError
from oncebox.transaction import Transaction
from tests.integration.atomic.conftest import INSERT, Bank, agree, connect, transfer
from tests.integration.atomic.killed import INSERT_NAMED, url_of
from tests.integration.atomic.test_instances import leave_prepared

ROW_FACTORIES = {"dict_row": rows.dict_row, "scalar_row": rows.scalar_row}


@pytest.mark.parametrize("row_factory", ROW_FACTORIES)
async def test_rows_may_be_made_of_anything(bank: Bank, monkeypatch, row_factory: str):
    async with (
        bank.producer() as producer,
        await connect(bank, row_factory=ROW_FACTORIES[row_factory]) as connection,
    ):
        await transfer(bank, producer, connection, "a")
        await leave_prepared(bank, producer, connection, "b", monkeypatch)
        assert await oncebox.recover(producer, connection) == "committed"
    await agree(bank, "a", "b")


@pytest.mark.parametrize("row_factory", ROW_FACTORIES)
def test_rows_may_be_made_of_anything_blocking(bank: Bank, row_factory: str):
    with (
        bank.blocking_producer() as producer,
        psycopg.connect(bank.dsn, row_factory=ROW_FACTORIES[row_factory]) as connection,
    ):
        with oncebox.atomic(producer, connection) as (transaction, database):
            transaction.send(bank.topic, b"a")
            database.execute(INSERT, ["a"])
        transaction = producer.begin()
        transaction.send(bank.topic, b"b")
        transaction.flush()
        database_id = drive_blocking(identify(database_of(connection, is_async=False)))
        transaction.prepare(metadata=wrap_metadata(database_id, b""))
        assert oncebox.recover(producer, connection) == "aborted"
    bank.check_agree({"a"})


@pytest.mark.parametrize("kind", ["AsyncRawCursor", "AsyncClientCursor"])
async def test_parameters_may_be_bound_in_any_way(bank: Bank, kind: str):
    async with bank.producer() as producer, await connect(bank, cursor_factory=getattr(psycopg, kind)) as connection:
        for name in "abcdefg":
            async with oncebox.atomic(producer, connection) as (transaction, _):
                await transaction.send(bank.topic, name.encode())
                await psycopg.AsyncCursor(connection).execute(INSERT, [name])
        prepared = await (await connection.execute("SELECT statement FROM pg_prepared_statements")).fetchall()
        assert any("atomic_token" in statement for (statement,) in prepared) is (kind == "AsyncRawCursor")
    await agree(bank, *"abcdefg")


class ChangedHisMindError(Exception):
    pass


async def transfer_in_part(bank: Bank, producer: Any, connection: Any, part: Any, insert: Any) -> None:
    """A part of the block in a transaction of its own; then the whole is given up."""
    async with oncebox.atomic(producer, connection) as (transaction, _):
        await transaction.send(bank.topic, b"never")
        async with part():
            await insert()
        raise ChangedHisMindError


def transfer_in_part_blocking(bank: Bank, producer: Any, connection: Any, part: Any, insert: Any) -> None:
    with oncebox.atomic(producer, connection) as (transaction, _):
        transaction.send(bank.topic, b"never")
        with part():
            insert()
        raise ChangedHisMindError


@pytest.mark.parametrize("autocommit", [False, True])
async def test_psycopgs_transaction_in_a_block_is_a_part_of_it(bank: Bank, autocommit: bool):
    """Else it would be committed when it is left, whatever becomes of the block."""
    async with bank.producer() as producer, await connect(bank, autocommit=autocommit) as connection:
        part = connection.transaction
        with pytest.raises(ChangedHisMindError):
            await transfer_in_part(bank, producer, connection, part, lambda: connection.execute(INSERT, ["never"]))
        async with oncebox.atomic(producer, connection) as (transaction, _):
            async with part():
                await connection.execute(INSERT, ["a"])
            with suppress(ChangedHisMindError):
                async with part():
                    await connection.execute(INSERT, ["b"])
                    raise ChangedHisMindError
            await transaction.send(bank.topic, b"a")
    await agree(bank, "a")


@pytest.mark.parametrize("autocommit", [False, True])
def test_blocking_psycopgs_transaction_in_a_block_is_a_part_of_it(bank: Bank, autocommit: bool):
    with bank.blocking_producer() as producer, psycopg.connect(bank.dsn, autocommit=autocommit) as connection:
        part = connection.transaction
        with pytest.raises(ChangedHisMindError):
            transfer_in_part_blocking(bank, producer, connection, part, lambda: connection.execute(INSERT, ["never"]))
        with oncebox.atomic(producer, connection) as (transaction, _):
            with part():
                connection.execute(INSERT, ["a"])
            transaction.send(bank.topic, b"a")
    bank.check_agree({"a"})


async def test_psycopgs_connection_is_not_committed_within_a_block(bank: Bank):
    async with bank.producer() as producer, await connect(bank) as connection:
        with pytest.raises(psycopg.ProgrammingError, match="commit"):  # noqa: PT012 - the block is what is tested
            async with oncebox.atomic(producer, connection) as (transaction, _):
                await transaction.send(bank.topic, b"never")
                await connection.execute(INSERT, ["never"])
                await connection.commit()
        await transfer(bank, producer, connection, "a")
        await connection.execute("SELECT 1")
        await connection.commit()
    await agree(bank, "a")


async def test_a_connection_that_is_lost_within_a_block_has_committed_nothing(bank: Bank, monkeypatch):
    """Also where psycopg knows it by then: it leaves its own blocks without a word."""
    real = Transaction.prepare

    async with bank.producer() as producer, await connect(bank) as connection:

        async def prepare(*given: Any, **named: Any) -> Any:
            name = await real(*given, **named)
            await connection.close()
            return name

        with monkeypatch.context() as patch:
            patch.setattr(Transaction, "prepare", prepare)
            with pytest.raises(psycopg.OperationalError, match="lost"):
                await transfer(bank, producer, connection, "never")
        async with await connect(bank) as another:
            await transfer(bank, producer, another, "a")
    await agree(bank, "a")


def test_a_blocking_connection_that_is_lost_within_a_block_has_committed_nothing(bank: Bank):
    with bank.blocking_producer() as producer:
        connection = psycopg.connect(bank.dsn)
        with pytest.raises(psycopg.OperationalError, match="lost"), oncebox.atomic(producer, connection):
            connection.close()
    bank.check_agree(set())


@pytest.mark.parametrize("isolation_level", [psycopg.IsolationLevel.SERIALIZABLE, None])
@pytest.mark.parametrize("autocommit", [False, True])
async def test_a_block_has_the_connections_isolation_level(bank: Bank, autocommit: bool, isolation_level: Any):
    async with bank.producer() as producer, await connect(bank, autocommit=autocommit) as connection:
        await connection.set_isolation_level(isolation_level)
        async with oncebox.atomic(producer, connection):
            [(found,)] = await (await connection.execute("SHOW transaction_isolation")).fetchall()
    assert found == ("read committed" if isolation_level is None else "serializable")


@pytest.mark.parametrize("kind", ["connection", "session"])
async def test_sqlalchemys_transaction_in_a_block_is_a_part_of_it(bank: Bank, kind: str):
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    engine = create_async_engine(url_of(bank))
    opened = engine.connect() if kind == "connection" else AsyncSession(engine)
    async with bank.producer() as producer, opened as connection:

        def insert() -> Any:
            return connection.execute(INSERT_NAMED, {"name": "never"})

        with pytest.raises(sqlalchemy.exc.InvalidRequestError, match="already"):
            await transfer_in_part(bank, producer, connection, connection.begin, insert)
        with pytest.raises(ChangedHisMindError):
            await transfer_in_part(bank, producer, connection, connection.begin_nested, insert)
    await engine.dispose()
    await agree(bank)


@pytest.mark.parametrize("kind", ["connection", "session"])
def test_blocking_sqlalchemys_transaction_in_a_block_is_a_part_of_it(bank: Bank, kind: str):
    engine = sqlalchemy.create_engine(url_of(bank))
    opened: Any = engine.connect() if kind == "connection" else orm.Session(engine)
    with bank.blocking_producer() as producer, opened as connection:

        def insert() -> Any:
            return connection.execute(INSERT_NAMED, {"name": "never"})

        with pytest.raises(sqlalchemy.exc.InvalidRequestError, match="already"):
            transfer_in_part_blocking(bank, producer, connection, connection.begin, insert)
        with pytest.raises(ChangedHisMindError):
            transfer_in_part_blocking(bank, producer, connection, connection.begin_nested, insert)
    engine.dispose()
    bank.check_agree(set())


async def test_a_session_on_a_connection_that_is_in_a_transaction_is_refused(bank: Bank):
    """Its commit would be left to whoever began that one, and Kafka's would not."""
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    engine = create_async_engine(url_of(bank))
    async with bank.producer() as producer, engine.connect() as connection:
        await connection.begin()
        async with AsyncSession(connection) as session:
            with pytest.raises(UsageError, match="in a transaction already"):
                async with oncebox.atomic(producer, session) as (transaction, _):
                    await transaction.send(bank.topic, b"never")
        await connection.rollback()
        async with AsyncSession(connection) as session, oncebox.atomic(producer, session) as (transaction, _):
            await transaction.send(bank.topic, b"a")
            await session.execute(INSERT_NAMED, {"name": "a"})
    await engine.dispose()
    await agree(bank, "a")
