"""The files of a server put back to where they were before the last commits: met with a clear stop, never a gap."""

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest

from oncebox.local import LocalPostgres
from relay.outbox import parked
from relay.outbox.resync import resync
from tests.integration.outbox.conftest import Outbox
from tests.integration.outbox.test_trouble import run_sql, write_bad
from tests.support.coordinator import Coordinators
from tests.support.kafka import create_topic


def back_up(server: LocalPostgres, copy: Path) -> None:
    server.stop()
    # As it is, owners included.
    subprocess.run(["cp", "-a", server.folder / "data", copy], check=True)
    server.restart()


def restore(server: LocalPostgres, copy: Path) -> None:
    server.stop()
    shutil.rmtree(server.folder / "data")
    subprocess.run(["cp", "-a", copy, server.folder / "data"], check=True)
    server.restart()


@pytest.mark.parametrize("written", ["at once", "far beyond"])
@pytest.mark.parametrize("source", ["logical", "commit_seq"])
async def test_a_server_that_is_restored(tmp_path: Path, shared_coordinator: Coordinators, source: str, written: str):
    """It has the slot, the fence and the sequence of the copy. Rows may have gone in since, also so many that its log
    is longer again than all that was published.
    """
    with LocalPostgres(tmp_path / "postgres") as server:
        outbox = Outbox(dsn=server.dsn, one=shared_coordinator)
        create_topic(shared_coordinator.bootstrap_servers, outbox.topic)
        await outbox.init(source=source)
        await outbox.write(1)
        async with outbox.running(source=source):
            await outbox.wait_published(1)
        await asyncio.to_thread(back_up, server, tmp_path / "copy")
        await outbox.write(2)
        async with outbox.running(source=source):
            await outbox.wait_published(2)
        await asyncio.to_thread(restore, server, tmp_path / "copy")
        await outbox.write(3)
        if written == "far beyond":
            await outbox.fetch("SELECT pg_logical_emit_message(true, 'other', repeat('x', 8000000))")
            for row_id in range(4, 8):
                await outbox.write(row_id)
        for _ in range(2):
            message = await outbox.run_until_stopped(source=source)
            assert "the database is an older copy of itself" in message
            assert "oncebox outbox resync" in message
        await outbox.wait_told("older copy")
        assert [each.ids for each in await outbox.seen()] == [[1], [2]]
        later = ["3", "4", "5", "6", "7"] if written == "far beyond" else ["3"]
        assert (await resync(outbox.settings(source=source), apply=True)).missing == later
        await outbox.write(8)
        async with outbox.running(source=source):
            seen = await outbox.wait_published(3 + len(later))
        assert [row for each in seen for row in each.ids] == [1, 2, *map(int, later), 8]


@pytest.mark.parametrize("source", ["logical", "commit_seq"])
async def test_what_was_parked_in_the_copy_and_published_since(
    tmp_path: Path, shared_coordinator: Coordinators, source: str
):
    """It is parked again, and as bad as it was: a retry would publish it a second time."""
    given = {"source": source, "bad_row": "park"}
    with LocalPostgres(tmp_path / "postgres") as server:
        outbox = Outbox(dsn=server.dsn, one=shared_coordinator)
        create_topic(shared_coordinator.bootstrap_servers, outbox.topic)
        await outbox.init(**given)
        await write_bad(outbox, 1, key="k", headers="[1]")
        await outbox.write(2, key="k")
        async with outbox.running(**given):
            await outbox.wait_until("SELECT count(*) = 2 FROM oncebox.outbox_parked")
        await asyncio.to_thread(back_up, server, tmp_path / "copy")
        await run_sql(outbox, "UPDATE oncebox.outbox_parked SET headers = NULL")
        assert await parked.retry(outbox.settings(**given)) == 2
        async with outbox.running(**given):
            await outbox.wait_until("SELECT count(*) = 0 FROM oncebox.outbox_parked")
        await asyncio.to_thread(restore, server, tmp_path / "copy")
        assert await outbox.fetch("SELECT count(*) FROM oncebox.outbox_parked") == [(2,)]
        assert "older copy" in await outbox.run_until_stopped(**given)
        done = await resync(outbox.settings(**given), apply=True)
        assert (done.rows, done.published, done.parked, done.missing) == (2, 2, 0, [])
        assert done.settled == ["1", "2"]
        assert await parked.retry(outbox.settings(**given)) == 0
        await outbox.write(3, key="k")
        async with outbox.running(**given):
            seen = await outbox.wait_published(3)
        assert [row for each in seen for row in each.ids] == [1, 2, 3]
