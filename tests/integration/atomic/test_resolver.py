"""What is left prepared is decided by whoever comes, as the database says, and only by the database it belongs to."""

import asyncio
from typing import Any

import psycopg
import pytest

import oncebox
from oncebox import atomic_commit, resolver
from oncebox.atomic_commit import drive, identify, wrap_metadata
from oncebox.databases import _AsyncPsycopg, database_of
from oncebox.errors import UsageError
from oncebox.local import LocalPostgres
from oncebox.transaction import TransactionName
from tests.integration.atomic.conftest import Bank, agree, connect, transfer


async def test_r17_a_resolver_and_a_late_database_commit_agree(bank: Bank, monkeypatch):
    """R17: the application's commit is on its way while a resolver decides. The row that is first decides for both."""
    real = _AsyncPsycopg.commit
    resolving: list[asyncio.Task[Any]] = []

    def resolve() -> asyncio.Task[Any]:
        work = resolver.resolve(bank.dsn, bank.one.addresses, prefix=bank.transactional_id, older_than_s=0)
        return asyncio.create_task(work)

    async with bank.producer() as producer, await connect(bank) as connection:

        async def late(self: _AsyncPsycopg) -> None:
            if self._connection is connection and not resolving:
                resolving.append(resolve())
                await wait_until_blocked(bank)
            await real(self)

        monkeypatch.setattr(_AsyncPsycopg, "commit", late)
        await transfer(bank, producer, connection, "the application first")
        monkeypatch.undo()
        assert [each.result for each in (await resolving[0]).resolved] == ["committed"]

    async with bank.producer() as producer:
        async with await connect(bank) as connection:

            async def too_late(self: _AsyncPsycopg) -> None:
                if self._connection is connection:
                    # The session is gone, and its row with it; the service does not know yet.
                    await end_session(bank, connection)
                    assert [each.result for each in (await resolve()).resolved] == ["aborted"]
                await real(self)

            monkeypatch.setattr(_AsyncPsycopg, "commit", too_late)
            with pytest.raises(psycopg.OperationalError):
                await transfer(bank, producer, connection, "the resolver first")
            monkeypatch.undo()
        async with await connect(bank) as connection:
            await transfer(bank, producer, connection, "and on")
    await agree(bank, "the application first", "and on")


async def end_session(bank: Bank, connection: psycopg.AsyncConnection[Any]) -> None:
    async with await connect(bank, autocommit=True) as other:
        await other.execute("SELECT pg_terminate_backend(%s, 60000)", [connection.info.backend_pid])


async def wait_until_blocked(bank: Bank) -> None:
    """Until the resolver waits for the application's row."""
    async with await connect(bank, autocommit=True) as looking:
        while True:
            found = await looking.execute(
                "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%atomic_token%%'"
            )
            if found.rowcount:
                return
            await asyncio.sleep(0.01)


async def leave_prepared(bank: Bank, name: str) -> TransactionName:
    """As a service does that ends after the prepare; the database knows nothing of it."""
    async with await connect(bank, autocommit=True) as connection:
        database_id = await drive(identify(database_of(connection, is_async=True)))
    async with bank.producer() as producer:
        transaction = await producer.begin()
        await transaction.send(bank.topic, name.encode())
        prepared: TransactionName = await transaction.prepare(metadata=wrap_metadata(database_id, b""))
        return prepared


async def test_one_that_cannot_be_decided_holds_up_no_other(bank: Bank, monkeypatch):
    prefix, left = bank.transactional_id, []
    for number in range(3):
        bank.transactional_id = f"{prefix}-{number}"
        left.append(await leave_prepared(bank, f"a-{number}"))
    stuck = left[1].transactional_id
    async with await connect(bank) as holding:
        # Its row is there, and not decided: as from a service that hangs in its commit.
        await holding.execute("INSERT INTO oncebox.atomic_token VALUES (%s, %s, 'committed')", [stuck, left[1].number])
        monkeypatch.setattr(atomic_commit, "LOCK_TIMEOUT_S", 0.2)
        found = await resolver.resolve(bank.dsn, bank.one.addresses, prefix=prefix, older_than_s=0, settle_s=0.1)
        assert {each.transactional_id: each.result for each in found.resolved} == {
            f"{prefix}-0": "aborted",
            stuck: None,
            f"{prefix}-2": "aborted",
        }
        (error,) = [each.error for each in found.resolved if each.error]
        assert "does not say whether it has committed" in error
        await holding.rollback()
    found = await resolver.resolve(bank.dsn, bank.one.addresses, prefix=prefix, older_than_s=0)
    assert [(each.transactional_id, each.result) for each in found.resolved] == [(stuck, "aborted")]
    await agree(bank)


async def test_a_copy_of_the_database_decides_nothing(bank: Bank, postgres: LocalPostgres):
    """It has the same id, and no row of what was committed since: it would abort what the first one has committed."""
    await leave_prepared(bank, "a")
    copy = f"copy_{bank.transactional_id[-8:]}"
    name = psycopg.conninfo.conninfo_to_dict(bank.dsn)["dbname"]
    async with await psycopg.AsyncConnection.connect(postgres.dsn, autocommit=True) as connection:
        await connection.execute(f'CREATE DATABASE "{copy}" TEMPLATE "{name}"'.encode())
        found = await resolver.resolve(
            postgres.dsn_of(copy), bank.one.addresses, prefix=bank.transactional_id, older_than_s=0
        )
        assert found == resolver.Resolution()
        await connection.execute(f'DROP DATABASE "{copy}"'.encode())
    found = await resolver.resolve(bank.dsn, bank.one.addresses, prefix=bank.transactional_id, older_than_s=0)
    assert [each.result for each in found.resolved] == ["aborted"]


async def test_a_resolver_leaves_other_databases_alone(bank: Bank):
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the block is what is tested
        async with bank.producer() as producer, producer.transaction() as transaction:
            await transaction.send(bank.topic, b"of somebody else")
            await transaction.prepare(metadata=b'{"oncebox.atomic": "another", "metadata": ""}')
            raise ZeroDivisionError
    assert (
        await resolver.resolve(bank.dsn, bank.one.addresses, prefix=bank.transactional_id, older_than_s=0)
        == resolver.Resolution()
    )
    async with bank.producer() as producer, await connect(bank) as connection:
        with pytest.raises(UsageError, match="not prepared together with this database"):
            await oncebox.recover(producer, connection)
        await producer.prepared.abort()
    assert await resolver.prune(bank.dsn, 1) == 0
