"""A slot that somebody else moves while a relay runs: met with a stop that lasts until a resync, never a silent gap."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from relay.outbox import control
from relay.outbox.database import Database, FencedError
from relay.outbox.logical import LogicalSource
from relay.outbox.resync import resync
from relay.outbox.token import StopError
from tests.integration.outbox.conftest import Outbox
from tests.integration.outbox.test_trouble import READ_BY_SOMEBODY, run_sql

MADE_ANEW = (
    "SELECT pg_create_logical_replication_slot(slot, 'pgoutput') "
    "FROM (SELECT slot_name AS slot, pg_drop_replication_slot(slot_name) FROM pg_replication_slots "
    "WHERE slot_name = %s OFFSET 0) dropped"
)


@pytest.mark.parametrize("how", [READ_BY_SOMEBODY, MADE_ANEW], ids=["read", "made anew"])
async def test_a_slot_that_is_moved_by_somebody_else_under_a_relay_is_noticed(outbox: Outbox, how: str):
    await outbox.init()
    await outbox.write(1)
    stopped = asyncio.create_task(outbox.run_until_stopped())
    await outbox.wait_published(1)
    await control.set_paused(outbox.settings(), is_paused=True)
    await outbox.wait_told("PAUSED")
    await outbox.write(2, 3)
    await outbox.write(4)
    await run_sql(outbox, how, outbox.settings().slot)
    await control.set_paused(outbox.settings(), is_paused=False)
    assert "beyond all that this relay has published" in await stopped
    assert "somebody else has read from the slot" in await outbox.run_until_stopped()
    assert (await resync(outbox.settings(), apply=False)).missing == ["2", "3", "4"]
    assert (await resync(outbox.settings(), apply=True)).missing == ["2", "3", "4"]
    async with outbox.running():
        await outbox.write(5)
        seen = await outbox.wait_published(5)
    assert [row for each in seen for row in each.ids] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("step", ["mark", "watch", "idle", "done"])
async def test_what_is_taken_from_a_look_does_not_count_as_looked_at(outbox: Outbox, step: str):
    """Wherever between two questions somebody else reads: the place that is ours does not move, nor is it noted."""
    await outbox.init()
    async with owned_source(outbox) as source:
        await source.idle(await source.mark())
        noted = await outbox.fetch("SELECT idle_lsn FROM oncebox.outbox_relay")
        await outbox.write(1)
        mark = await source.mark()
        await run_sql(outbox, READ_BY_SOMEBODY, outbox.settings().slot)
        assert [piece async for piece in source.peek(0, 0)] == []
        with pytest.raises(StopError, match="beyond all"):
            await take(source, step, mark)
        assert await outbox.fetch("SELECT idle_lsn FROM oncebox.outbox_relay") == noted
    assert "somebody else has read from the slot" in await outbox.run_until_stopped()


async def test_what_stands_behind_a_place_that_somebody_has_taken_is_not_published(outbox: Outbox):
    """Else who dies right afterwards leaves a token that makes the slot look like its own, and a gap for ever."""
    await outbox.init()
    async with owned_source(outbox) as source:
        await source.idle(await source.mark())
        await outbox.write(1)
        await run_sql(outbox, READ_BY_SOMEBODY, outbox.settings().slot)
        await outbox.write(2)
        with pytest.raises(StopError, match="beyond all"):
            await anext(source.peek(0, 0))
    assert "somebody else has read from the slot" in await outbox.run_until_stopped()


async def take(source: LogicalSource, step: str, mark: int) -> None:
    match step:
        case "mark":
            await source.mark()
        case "watch":
            await source.watch()
        case "idle":
            await source.idle(mark)
        case _:
            await source.done(mark)


async def test_a_slot_that_its_next_owner_has_moved_is_not_somebody_elses(outbox: Outbox):
    await outbox.init()
    async with owned_source(outbox) as former, owned_source(outbox) as source:
        await run_sql(outbox, "SELECT pg_logical_emit_message(true, 'other', 'x')")
        await source.idle(await source.mark())
        with pytest.raises(FencedError):
            await former.watch()
    async with outbox.running():
        await outbox.wait_told("RUNNING")


@asynccontextmanager
async def owned_source(outbox: Outbox) -> AsyncIterator[LogicalSource]:
    """As a relay that has just started has it."""
    database = await Database.open(outbox.settings())
    source = LogicalSource(outbox.settings(), database)
    try:
        noted = await database.raise_fence("test")
        await source.facts(await database.identity(), noted, None)
        yield source
    finally:
        await source.close()
        await database.close()
