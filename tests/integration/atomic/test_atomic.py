"""Kafka and PostgreSQL agree, on every kind of connection."""

import asyncio
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import orm

import oncebox
from oncebox.atomic_commit import unwrap_metadata
from oncebox.errors import UsageError
from tests.integration.atomic.conftest import INSERT, Bank, agree, connect, transfer


class ChangedHisMindError(Exception):
    pass


@pytest.mark.parametrize("autocommit", [False, True])
async def test_psycopg(bank: Bank, autocommit: bool):
    async with bank.producer() as producer, await connect(bank, autocommit=autocommit) as connection:
        await transfer(bank, producer, connection, "a")
        with pytest.raises(ChangedHisMindError):  # noqa: PT012 - the block is what is tested
            async with oncebox.atomic(producer, connection) as (transaction, database):
                await transaction.send(bank.topic, b"b")
                await database.execute(INSERT, ["b"])
                raise ChangedHisMindError
        with pytest.raises(psycopg.errors.UniqueViolation):
            await transfer(bank, producer, connection, "a")
        async with oncebox.atomic(producer, connection) as (transaction, database):
            await database.execute(INSERT, ["only here"])
            transaction.metadata = b"mine"
        async with oncebox.atomic(producer, connection) as (transaction, _):
            transaction.metadata = b"mine"
            await transaction.send(bank.topic, b"only there")
        assert unwrap_metadata(producer.resume_token)[1] == b"mine"
        await transfer(bank, producer, connection, "c")
        assert await oncebox.recover(producer, connection) is None
    assert await asyncio.to_thread(bank.in_kafka) == ["a", "c", "only there"]
    assert bank.in_database() == {"a", "c", "only here"}


def test_blocking_psycopg_and_sqlalchemy(bank: Bank):
    engine = sqlalchemy.create_engine(bank.dsn.replace("postgresql://", "postgresql+psycopg://"))
    insert = sqlalchemy.text("INSERT INTO transfer (name) VALUES (:name)")
    with bank.blocking_producer() as producer:
        with psycopg.connect(bank.dsn) as connection:
            with oncebox.atomic(producer, connection) as (transaction, database):
                transaction.send(bank.topic, b"a")
                database.execute(INSERT, ["a"])
            assert oncebox.recover(producer, connection) is None
        with engine.connect() as plain, oncebox.atomic(producer, plain) as (transaction, same):
            transaction.send(bank.topic, b"b")
            same.execute(insert, {"name": "b"})
        with orm.Session(engine) as session:
            with oncebox.atomic(producer, session) as (transaction, same_session):
                transaction.send(bank.topic, b"c")
                same_session.execute(insert, {"name": "c"})
            with pytest.raises(ChangedHisMindError):
                _give_up_half_way(bank, producer, session)
            with pytest.raises(sqlalchemy.exc.IntegrityError), oncebox.atomic(producer, session) as (_, same_session):
                same_session.execute(insert, {"name": "c"})
    engine.dispose()
    bank.check_agree({"a", "b", "c"})


def _give_up_half_way(bank: Bank, producer: Any, session: Any) -> None:
    with oncebox.atomic(producer, session) as (transaction, same):
        transaction.send(bank.topic, b"d")
        same.execute(sqlalchemy.text("INSERT INTO transfer (name) VALUES ('d')"))
        raise ChangedHisMindError


async def test_async_sqlalchemy(bank: Bank):
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    engine = create_async_engine(bank.dsn.replace("postgresql://", "postgresql+psycopg://"))
    insert = sqlalchemy.text("INSERT INTO transfer (name) VALUES (:name)")
    async with bank.producer() as producer:
        async with engine.connect() as plain, oncebox.atomic(producer, plain) as (transaction, same):
            await transaction.send(bank.topic, b"a")
            await same.execute(insert, {"name": "a"})
        async with AsyncSession(engine) as session:
            async with oncebox.atomic(producer, session) as (transaction, same_session):
                await transaction.send(bank.topic, b"b")
                await same_session.execute(insert, {"name": "b"})
            assert await oncebox.recover(producer, session) is None
    await engine.dispose()
    await agree(bank, "a", "b")


@pytest.mark.parametrize("where", ["engine", "connection"])
async def test_autocommit_of_sqlalchemy_is_refused(bank: Bank, where: str):
    """Each statement would be committed by itself, and stay when the rest is given up."""
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    dsn, autocommit = bank.dsn.replace("postgresql://", "postgresql+psycopg://"), {"isolation_level": "AUTOCOMMIT"}
    options = autocommit if where == "engine" else {}
    insert = sqlalchemy.text("INSERT INTO transfer (name) VALUES ('a')")
    engine = create_async_engine(dsn, **options)
    async with bank.producer() as producer, engine.connect() as connection:
        with pytest.raises(UsageError, match="AUTOCOMMIT"):
            async with oncebox.atomic(producer, await connection.execution_options(**autocommit)) as (_, same):
                await same.execute(insert)
        async with AsyncSession(engine if where == "engine" else connection) as session:
            with pytest.raises(UsageError, match="AUTOCOMMIT"):
                async with oncebox.atomic(producer, session) as (_, same_session):
                    await same_session.execute(insert)
    await engine.dispose()
    blocking_engine = sqlalchemy.create_engine(dsn, **options)
    with bank.blocking_producer() as blocking_producer, blocking_engine.connect() as plain:
        plain.execution_options(**autocommit)
        with orm.Session(plain) as orm_session, pytest.raises(UsageError, match="AUTOCOMMIT"):
            _give_up_half_way(bank, blocking_producer, orm_session)
        plain.rollback()
        with pytest.raises(UsageError, match="AUTOCOMMIT"):
            _give_up_half_way(bank, blocking_producer, plain)
    blocking_engine.dispose()
    await agree(bank)


async def test_wrong_use_is_told(bank: Bank):
    async with bank.producer() as producer, await connect(bank) as connection:
        with pytest.raises(UsageError, match="not known here"):
            oncebox.atomic(producer, object())
        with psycopg.connect(bank.dsn) as blocking, pytest.raises(UsageError, match="async connection"):
            oncebox.atomic(producer, blocking)
        await connection.execute("SELECT 1")
        with pytest.raises(UsageError, match="in a transaction already"):
            await transfer(bank, producer, connection, "a")
        await connection.rollback()
        await connection.execute("DROP TABLE oncebox.atomic_database")
        await connection.commit()
        with pytest.raises(UsageError, match="oncebox outbox init"):
            await transfer(bank, producer, connection, "a")
    await agree(bank)
