"""What was published last was published from another database, or is told by nobody: met with a clear stop."""

import psycopg
import pytest

from oncebox.local import LocalPostgres
from relay.outbox import database
from relay.outbox.resync import resync
from relay.outbox.token import StopError
from tests.integration.outbox.conftest import Outbox
from tests.integration.outbox.test_trouble import run_sql


@pytest.mark.parametrize("source", ["logical", "commit_seq"])
async def test_coordinators_that_know_of_no_commit_are_noticed(outbox: Outbox, source: str):
    """Others than before, or with a new log: what is published would be published again."""
    await outbox.init(source=source)
    await run_sql(outbox, "UPDATE oncebox.outbox_relay SET published_position = 7")
    await outbox.write(1)
    assert "know of no commit of this relay" in await outbox.run_until_stopped(source=source)
    assert await outbox.seen() == []


async def test_another_database_of_the_server_is_noticed(outbox: Outbox, postgres: LocalPostgres):
    """With a relay of the same name, as far as this one, by numbers that count in each database anew."""
    given = {"source": "commit_seq"}
    await outbox.init(**given)
    await outbox.write(1)
    async with outbox.running(**given):
        await outbox.wait_published(1)
    other = f"other_{outbox.suffix}"
    async with await psycopg.AsyncConnection.connect(postgres.dsn, autocommit=True) as connection:
        await connection.execute(f"CREATE DATABASE {other}".encode())
        try:
            elsewhere = Outbox(dsn=f"{outbox.dsn.rpartition('/')[0]}/{other}", one=outbox.one, suffix=outbox.suffix)
            await elsewhere.init(**given)
            await elsewhere.write(2)
            await elsewhere.write(3)
            await run_sql(elsewhere, "UPDATE oncebox.outbox_relay SET fence = 5")
            assert "another database of the server" in await elsewhere.run_until_stopped(**given)
        finally:
            await connection.execute(f"DROP DATABASE {other} WITH (FORCE)".encode())


@pytest.mark.parametrize("source", ["logical", "commit_seq"])
async def test_two_relays_of_different_names_do_not_share_an_outbox(outbox: Outbox, monkeypatch, source: str):
    """Both would publish what both see, and each take away what the other has not seen yet."""
    monkeypatch.setattr(database, "SOURCE_S", 0.2)
    other = {"source": source, "name": f"{outbox.suffix}-other"}
    await outbox.init(source=source)
    await outbox.init(**other)
    async with outbox.running(source=source):
        await outbox.write(1)
        await outbox.wait_published(1)
        assert "another name reads the" in await outbox.run_until_stopped(**other)
        with pytest.raises(StopError, match="another name reads the"):
            await resync(outbox.settings(**other), apply=True)
        await outbox.write(2)
        seen = await outbox.wait_published(2)
    assert [row for each in seen for row in each.ids] == [1, 2]
