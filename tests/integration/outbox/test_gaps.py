"""Rows that the source would not show: the relay stops and says so, and a resync finds them."""

import asyncio

import pytest

from relay.outbox.resync import resync
from tests.integration.outbox.conftest import Outbox
from tests.integration.outbox.test_trouble import run_sql

LOADED = "INSERT INTO outbox (id, aggregatetype, aggregateid, payload) VALUES (2, %s, 'key-2', '{}')"


async def test_a_publication_that_loses_the_table_is_noticed(outbox: Outbox):
    await outbox.init()
    stopped = asyncio.create_task(outbox.run_until_stopped())
    await outbox.write(1)
    await outbox.wait_published(1)
    await run_sql(outbox, "ALTER PUBLICATION oncebox_outbox DROP TABLE outbox")
    await outbox.write(2)
    assert "does not have the inserts of public.outbox" in await stopped
    assert "does not have the inserts of public.outbox" in await outbox.run_until_stopped()
    await run_sql(outbox, "ALTER PUBLICATION oncebox_outbox ADD TABLE outbox")
    await run_sql(outbox, "ALTER PUBLICATION oncebox_outbox SET (publish = 'update')")
    assert "does not have the inserts of public.outbox" in await outbox.run_until_stopped()
    await run_sql(outbox, "ALTER PUBLICATION oncebox_outbox SET (publish = 'insert')")
    await run_sql(outbox, "ALTER PUBLICATION oncebox_outbox SET TABLE outbox WHERE (id > 1000)")
    assert "has only rows of public.outbox with (id > 1000)" in await outbox.run_until_stopped()
    await run_sql(outbox, "DROP PUBLICATION oncebox_outbox")
    assert "does not exist" in await outbox.run_until_stopped()
    await run_sql(outbox, "CREATE PUBLICATION oncebox_outbox FOR TABLE outbox")
    assert (await resync(outbox.settings(), apply=True)).missing == ["2"]


SWITCHED_OFF = {
    "dropped": ["DROP TRIGGER oncebox_outbox_commit_seq ON outbox"],
    "disabled": ["ALTER TABLE outbox DISABLE TRIGGER oncebox_outbox_commit_seq"],
    "for a bulk load": ["ALTER TABLE outbox DISABLE TRIGGER ALL", LOADED, "ALTER TABLE outbox ENABLE TRIGGER ALL"],
}


@pytest.mark.parametrize("how", SWITCHED_OFF)
async def test_rows_that_get_no_number_are_noticed(outbox: Outbox, how: str):
    await outbox.init(source="commit_seq")
    stopped = asyncio.create_task(outbox.run_until_stopped(source="commit_seq"))
    await outbox.write(1)
    await outbox.wait_published(1)
    async with await outbox.connect() as connection, connection.transaction():
        for statement in SWITCHED_OFF[how]:
            await connection.execute(statement.encode(), [outbox.suffix] if statement == LOADED else None)
    if how != "for a bulk load":
        await outbox.write(2)
    assert "have no number" in await stopped
    assert "oncebox outbox resync" in await outbox.run_until_stopped(source="commit_seq")
    await outbox.init(source="commit_seq")
    assert (await resync(outbox.settings(source="commit_seq"), apply=True)).missing == ["2"]
    await outbox.write(3)
    async with outbox.running(source="commit_seq"):
        seen = await outbox.wait_published(3)
    assert [row for each in seen for row in each.ids] == [1, 2, 3]


async def test_a_row_of_a_replica_has_its_number_too(outbox: Outbox):
    await outbox.init(source="commit_seq")
    async with await outbox.connect(autocommit=False) as connection:
        await connection.execute("SET session_replication_role = replica")
        await outbox.write(1, on=connection)
    async with outbox.running(source="commit_seq"):
        assert [each.ids for each in await outbox.wait_published(1)] == [[1]]


async def test_partitions_are_refused_where_their_rows_would_have_no_number(outbox: Outbox):
    columns = "id bigint, aggregatetype text, aggregateid text, payload jsonb, created_at timestamptz DEFAULT now()"
    await run_sql(outbox, f"CREATE TABLE outbox ({columns}) PARTITION BY RANGE (id)")
    await run_sql(outbox, "CREATE TABLE outbox_rest PARTITION OF outbox DEFAULT")
    await outbox.init(source="commit_seq")
    assert "has partitions" in await outbox.run_until_stopped(source="commit_seq")
