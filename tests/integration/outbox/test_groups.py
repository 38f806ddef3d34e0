"""Several groups of one look: filled while the one before is committed, whatever becomes of that one."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from oncebox.claim import Claim
from oncebox.errors import RetriableError
from relay.outbox import logical, parked, publisher
from relay.outbox.logical import LogicalSource
from relay.outbox.plan import Piece
from relay.outbox.relay import OutboxRelay
from tests.integration.outbox.conftest import WAIT_S, Outbox, Seen
from tests.integration.outbox.test_kill import kill_at_each
from tests.integration.outbox.test_trouble import write_bad
from tests.support.kafka import create_topic

ROWS = 24


def ids_of(seen: list[Seen]) -> list[int]:
    return [row for each in seen for row in each.ids]


async def test_killed_while_a_group_is_filled_behind_another(outbox: Outbox, tmp_path: Path):
    """Each look shows all that waits, which is several groups."""
    points = [("begin", 2), ("sent", 4), ("before commit", 2), ("after commit", 2), ("after clean-up", 2), ("begin", 3)]
    await kill_at_each(outbox, tmp_path, points, changes_max=1_000, group_rows_max=4, cleanup="delete")


@pytest.mark.parametrize("is_decided", [True, False], ids=["its answer is lost", "it did not arrive"])
@pytest.mark.parametrize("cleanup", ["keep", "delete"])
async def test_a_commit_that_fails_takes_the_next_group_along(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, cleanup: str, *, is_decided: bool
):
    end, ends = Claim.end, 0

    async def failing(self: Claim, *values: Any, **given: Any) -> Any:
        nonlocal ends
        ends += 1
        if ends not in {2, 5}:
            return await end(self, *values, **given)
        if is_decided:
            await end(self, *values, **given)
        raise RetriableError("the line is dead")

    await outbox.init()
    for row_id in range(ROWS):
        await outbox.write(row_id)
    monkeypatch.setattr(Claim, "end", failing)
    async with outbox.running(group_rows_max=3, cleanup=cleanup):
        seen = await outbox.wait_published(ROWS)
        if cleanup == "delete":
            await outbox.wait_deleted()
    assert ids_of(seen) == list(range(ROWS))


@pytest.mark.parametrize("is_parked", [True, False], ids=["park", "stop"])
async def test_a_refused_row_is_found_although_the_next_group_is_on_its_way(outbox: Outbox, *, is_parked: bool):
    small = f"{outbox.suffix}-small"
    create_topic(outbox.one.bootstrap_servers, f"outbox.event.{small}", config={"max.message.bytes": "2000"})
    await outbox.init()
    for row_id in range(ROWS):
        await outbox.write(row_id)
        if row_id == ROWS // 2:
            await write_bad(outbox, 1_000, aggregatetype=small, payload=f'"{"x" * 5000}"')
    if is_parked:
        async with outbox.running(group_rows_max=2, bad_row="park"):
            seen = await outbox.wait_published(ROWS)
        assert ids_of(seen) == list(range(ROWS))
        assert [row.row_id for row in await parked.listed(outbox.settings(), 10)] == ["1000"]
    else:
        assert "the row with id 1000 cannot be published" in await outbox.run_until_stopped(group_rows_max=2)
        assert ids_of(await outbox.wait_published(ROWS // 2 + 1)) == list(range(ROWS // 2 + 1))


async def test_a_row_that_is_bad_by_itself_leaves_the_commit_before_it_alone(outbox: Outbox):
    await outbox.init()
    for row_id in range(ROWS):
        await outbox.write(row_id)
        if row_id % 5 == 0:
            await write_bad(outbox, 1_000 + row_id, key=f"bad-{row_id}", headers="[1]")
    async with outbox.running(group_rows_max=2, bad_row="park"):
        seen = await outbox.wait_published(ROWS)
    assert ids_of(seen) == list(range(ROWS))
    assert len(await parked.listed(outbox.settings(), 10)) == 5


@pytest.mark.parametrize("rows", [0, 10, 1_000_000], ids=["at once", "after some", "when idle"])
async def test_published_rows_are_shown_again_for_a_while(outbox: Outbox, monkeypatch: pytest.MonkeyPatch, rows: int):
    monkeypatch.setattr(publisher, "SHOWN_AGAIN_ROWS", rows)
    await outbox.init()
    async with outbox.running(group_rows_max=3, idle_ms=60_000, cleanup="delete"):
        for first in range(0, 20, 4):
            ((before,),) = await outbox.fetch("SELECT pg_current_wal_insert_lsn()::text")
            await outbox.write(*range(first, first + 4))
        seen = await outbox.wait_published(20)
        await outbox.wait_deleted()
        # Also behind the last, which nothing follows.
        await outbox.wait_until(
            "SELECT confirmed_flush_lsn > %(lsn)s::pg_lsn FROM pg_replication_slots WHERE slot_name = %(slot)s",
            lsn=before,
            slot=outbox.settings().slot,
        )
    assert ids_of(seen) == list(range(20))


@pytest.mark.parametrize("far_bytes", [-1, 2**40], ids=["far", "near"])
async def test_a_backlog_far_behind_is_read_with_longer_looks_and_without_a_pause(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, far_bytes: int
):
    """What lies before the slot's place is read again by each look."""
    looks: list[tuple[bool, float]] = []
    peek = LogicalSource.peek

    async def watched(self: LogicalSource, *positions: int) -> AsyncGenerator[Piece]:
        async for piece in peek(self, *positions):
            yield piece
        looks.append((self.was_cut, self.pause_s))

    monkeypatch.setattr(publisher, "SHOWN_AGAIN_ROWS", 0)
    monkeypatch.setattr(logical, "FAR_BYTES", far_bytes)
    monkeypatch.setattr(LogicalSource, "peek", watched)
    await outbox.init()
    for row_id in range(ROWS):
        await outbox.write(row_id)
    relay = OutboxRelay(outbox.settings(changes_max=6))
    running = asyncio.create_task(relay.run())
    seen = await outbox.wait_published(ROWS)
    relay.stop()
    await asyncio.wait_for(running, WAIT_S)
    assert ids_of(seen) == list(range(ROWS))
    pauses = [pause_s for was_cut, pause_s in looks if was_cut]
    # Of 72 changes: 6 at a time; or 6, 12, 24 and the rest.
    assert 3 <= len(pauses) <= 5 if far_bytes < 0 else len(pauses) >= 12
    assert not any(pauses)
    assert any(pause_s for was_cut, pause_s in looks if not was_cut) == (far_bytes < 0)
