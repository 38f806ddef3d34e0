"""Which database decides is asked of the one that commits: a name that leads elsewhere decides nothing for another."""

import asyncio
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy
from psycopg import sql

import oncebox
from oncebox import resolver
from oncebox.atomic_commit import InDoubtError, drive, identify, unwrap_metadata
from oncebox.databases import _AsyncPsycopg, database_of
from oncebox.local import LocalPostgres
from tests.integration.atomic.conftest import Bank, connect, make_bank, transfer
from tests.integration.atomic.killed import INSERT_NAMED


@pytest.fixture
def other(bank: Bank, postgres: LocalPostgres) -> Iterator[Bank]:
    """Another database, with tables of its own and none of the rows."""
    name = f"other_{bank.transactional_id[-8:]}"
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        yield make_bank(postgres.dsn_of(name), bank.one)
        connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


async def id_of(bank: Bank) -> str:
    async with await connect(bank) as connection:
        return await drive(identify(database_of(connection, is_async=True)))


def named(bank: Bank) -> str:
    name = psycopg.conninfo.conninfo_to_dict(bank.dsn)["dbname"]
    assert isinstance(name, str)
    return name


async def test_a_database_that_moves_while_the_service_lives(
    bank: Bank, other: Bank, postgres: LocalPostgres, monkeypatch
):
    """The same DSN leads to another one since, as after a restore elsewhere. What is left prepared is its own."""

    async def away(*_args: Any) -> None:
        raise psycopg.OperationalError("the network is gone")

    async with bank.producer() as producer:
        async with await connect(bank) as connection:
            await transfer(bank, producer, connection, "before")
            assert unwrap_metadata(producer.resume_token)[0] == await id_of(bank)
        moved = sql.SQL("ALTER DATABASE {} RENAME TO {}").format
        async with await psycopg.AsyncConnection.connect(postgres.dsn, autocommit=True) as renaming:
            # Sessions that were closed a moment ago may still be on their way out.
            for old, new in ((named(bank), f"{named(bank)}_old"), (named(other), named(bank))):
                await renaming.execute(
                    "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname = %s", [old]
                )
                await renaming.execute(moved(sql.Identifier(old), sql.Identifier(new)))
        async with await connect(bank) as connection:
            with monkeypatch.context() as patch:
                patch.setattr(_AsyncPsycopg, "commit", away)
                patch.setattr(_AsyncPsycopg, "another", away)
                with pytest.raises(InDoubtError):
                    await transfer(bank, producer, connection, "in doubt", settle_s=0)
        found = await resolver.resolve(bank.dsn, bank.one.addresses, prefix=bank.transactional_id, older_than_s=0)
        assert [each.result for each in found.resolved] == ["aborted"]
    with psycopg.connect(postgres.dsn, autocommit=True) as dropping:
        dropping.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(f"{named(bank)}_old")))


async def test_two_engines_with_one_url(bank: Bank, other: Bank):
    """Where they lead is in `creator`, or in connect_args."""

    def commit_with(producer: Any, name: str, **given: Any) -> str | None:
        engine = sqlalchemy.create_engine("postgresql+psycopg://", **given)
        with engine.connect() as connection, oncebox.atomic(producer, connection) as (transaction, same):
            transaction.send(bank.topic, name.encode())
            same.execute(INSERT_NAMED, {"name": name})
        engine.dispose()
        return unwrap_metadata(producer.resume_token)[0]

    def commit_with_each() -> list[str | None]:
        with bank.blocking_producer() as producer:
            return [
                commit_with(producer, "a", creator=lambda: psycopg.connect(bank.dsn)),
                commit_with(producer, "b", creator=lambda: psycopg.connect(other.dsn)),
                commit_with(producer, "c", connect_args=psycopg.conninfo.conninfo_to_dict(bank.dsn)),
            ]

    first, second = await id_of(bank), await id_of(other)
    assert await asyncio.to_thread(commit_with_each) == [first, second, first]
    assert (bank.in_database(), other.in_database()) == ({"a", "c"}, {"b"})


async def test_a_new_connection_that_leads_elsewhere_decides_nothing(bank: Bank, other: Bank, monkeypatch):
    """The answer to the commit is lost, and there is no row in the other database: that would mean "aborted"."""
    real = _AsyncPsycopg.commit

    async def lost(self: _AsyncPsycopg) -> None:
        await real(self)
        raise psycopg.OperationalError("the answer is lost")

    async def elsewhere(_self: _AsyncPsycopg) -> _AsyncPsycopg:
        return _AsyncPsycopg(await connect(other, autocommit=True))

    async with bank.producer() as producer, await connect(bank) as connection:
        with monkeypatch.context() as patch:
            patch.setattr(_AsyncPsycopg, "commit", lost)
            patch.setattr(_AsyncPsycopg, "another", elsewhere)
            with pytest.raises(InDoubtError, match="leads to another database"):
                await transfer(bank, producer, connection, "a", settle_s=0)
        assert await oncebox.recover(producer, connection) == "committed"
    await asyncio.to_thread(bank.check_agree, {"a"})
