"""What connections are set to, and what an application does on them within a block."""

import psycopg
import pytest
from psycopg import rows

import oncebox
from oncebox.atomic_commit import drive_blocking, identify, wrap_metadata
from oncebox.databases import database_of
from tests.integration.atomic.conftest import INSERT, Bank, agree, connect, transfer
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
