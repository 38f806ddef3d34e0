"""Killed everywhere: each outbox row is in exactly one committed Kafka transaction, whole, in commit order."""

import asyncio
import json
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from proof.faults.process import ChildProcess
from relay.outbox import parked
from tests.integration.outbox.conftest import Outbox
from tests.integration.outbox.killed import STEPS
from tests.integration.outbox.test_trouble import write_bad

# Ids of rows that are parked at first.
BAD_FIRST = 1_000_000


class Writers:
    """Transactions that overlap and commit in another order than they began; knows the order of their commits."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.committed: list[list[int]] = []
        self._random = Random(7)
        self._next = 0
        self._open: list[tuple[Any, list[int]]] = []

    async def write(self, count: int) -> None:
        """As many commits; some transactions stay open for a later call, some are rolled back."""
        for _ in range(count):
            while len(self._open) < 3:
                connection = await self.outbox.connect(autocommit=False)
                ids = [self._next + index for index in range(self._random.randint(1, 4))]
                self._next = ids[-1] + 1
                await self.outbox.write(*ids, on=connection)
                self._open.append((connection, ids))
            connection, ids = self._open.pop(self._random.randrange(len(self._open)))
            if self._random.random() < 0.15:
                await connection.rollback()
            else:
                await connection.commit()
                self.committed.append(ids)
            await connection.close()

    async def finish(self) -> None:
        for connection, ids in self._open:
            await connection.commit()
            self.committed.append(ids)
            await connection.close()

    def check(self, seen: list[Any]) -> None:
        """Each row once, whole, in the order of commits."""
        published = [row for each in seen for row in each.ids if row < BAD_FIRST]
        assert published == [row for ids in self.committed for row in ids]
        home = {row: each.number for each in seen for row in each.ids}
        assert all(len({home[row] for row in ids}) == 1 for ids in self.committed)


def process(outbox: Outbox, folder: Path, step: str, count: int, **given: Any) -> ChildProcess:
    settings = outbox.settings(**given)
    plain = settings.model_dump(mode="json", exclude_none=True)
    plain["postgres"]["dsn"] = outbox.dsn
    return ChildProcess(
        [sys.executable, "-m", "tests.integration.outbox.killed", json.dumps(plain), step, str(count)],
        log=folder / f"{step.replace(' ', '-')}-{count}.log",
        directory=Path(__file__).parents[3],
    )


async def kill_at_each(outbox: Outbox, folder: Path, points: list[tuple[str, int]], **given: Any) -> None:
    """Each look shows only part of what waits; some rows are bad, and published after all."""
    given = {"group_rows_max": 5, "changes_max": 12, "bad_row": "park", **given}
    settings, bad = outbox.settings(**given), list[int]()
    await outbox.init(**given)
    writers = Writers(outbox)
    for step, count in points:
        await writers.write(8)
        if step in {"before park", "after park"}:
            for _ in range(count):
                bad.append(BAD_FIRST + len(bad))
                await write_bad(outbox, bad[-1], headers="[1]")
        if step == "before retry":
            async with outbox.running(**given):
                await outbox.wait_until(
                    "SELECT count(*) = %(count)s::integer FROM oncebox.outbox_parked", count=str(len(bad))
                )
            await outbox.fetch("UPDATE oncebox.outbox_parked SET headers = NULL RETURNING 1")
            assert await parked.retry(settings) == len(bad)
        with process(outbox, folder, step, count, **given) as relay:
            assert await asyncio.to_thread(relay.wait) == -9, f"it did not come to {step}: {relay.log_tail()}"
    await writers.write(4)
    await writers.finish()
    async with outbox.running(**given):
        seen = await outbox.wait_published(sum(map(len, writers.committed)) + len(bad))
        if given.get("cleanup") == "delete":
            await outbox.wait_deleted()
    writers.check(seen)
    assert [row for each in seen for row in each.ids if row >= BAD_FIRST] == bad
    assert await parked.listed(settings, 1) == []
    assert len(seen) > len(points)


@pytest.mark.timeout(900)
async def test_killed_at_every_step(outbox: Outbox, tmp_path: Path):
    await kill_at_each(outbox, tmp_path, [(step, 1) for step in STEPS], cleanup="delete")


@pytest.mark.long
@pytest.mark.parametrize("source", ["logical", "commit_seq"])
@pytest.mark.parametrize("cleanup", ["keep", "delete"])
async def test_killed_at_every_step_again_and_again(outbox: Outbox, tmp_path: Path, source: str, cleanup: str):
    # What is there at the start is published in one look, so that these come only once.
    once = {"before init", "after init", "before retry", "after retry", "before advance", "after advance"}
    points = [(step, count) for step in STEPS for count in (1, 2) if step not in once or count == 1]
    await kill_at_each(outbox, tmp_path, points, source=source, cleanup=cleanup)


async def test_killed_at_any_moment_with_a_standby(outbox: Outbox, tmp_path: Path):
    """Two relays at once under a steady load; the active one is killed, or stopped and woken up as a zombie."""
    await outbox.init()
    writers, random = Writers(outbox), Random(11)
    # Longer than a busy machine keeps one that lives from giving a sign of it.
    given: dict[str, Any] = {"group_rows_max": 5, "takeover_ms": 2_500}
    relays = [process(outbox, tmp_path, "never", number, **given) for number in (1, 2)]
    try:
        for relay in relays:
            relay.start()
        for turn in range(4):
            until = time.monotonic() + 1.0 + random.random()
            while time.monotonic() < until:
                await writers.write(2)
            for victim in relays if turn % 2 else reversed(relays):
                if turn < 2:
                    victim.kill()
                    victim.start()
                else:
                    # Whichever leads: the other one puts it out, and then it wakes up as a zombie.
                    victim.pause()
                    await writers.write(10)
                    await outbox.wait_published(sum(map(len, writers.committed)))
                    victim.resume()
        await writers.finish()
        seen = await outbox.wait_published(sum(map(len, writers.committed)))
    finally:
        for relay in relays:
            relay.kill()
    writers.check(seen)
