"""Giving partitions up never waits for what cannot end: a log that is not read, one that takes no appends."""

import asyncio
from typing import Any

import pytest

from coordinator import leadership as module
from coordinator.leadership import Leadership, next_in_line
from coordinator.log.codec import CorruptLogError
from coordinator.shard import ShardState


class SlowShard:
    """Loads for as long as it is told to; resigns only if it may."""

    def __init__(self, partition: int, *, loads: bool = True, resigns: bool = True) -> None:
        self.partition = partition
        self.state = ShardState.LOADING
        self._loads = loads
        self._resigns = resigns
        self._resigned = asyncio.Event()

    async def lead(self) -> None:
        try:
            if not self._loads:
                await asyncio.Event().wait()
            self.state = ShardState.SERVING
            await self._resigned.wait()
        finally:
            self.state = ShardState.RESIGNED

    def resign(self) -> None:
        if self._resigns:
            self._resigned.set()


def leading(**options: bool) -> tuple[Leadership, list[SlowShard]]:
    made: list[SlowShard] = []

    def make(partition: int) -> Any:
        made.append(SlowShard(partition, **options))
        return made[-1]

    return Leadership("i", make_shard=make, changed=lambda: None), made


async def until_idle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_partition_that_is_being_loaded_is_given_up_at_once() -> None:
    leadership, made = leading(loads=False)
    leadership.assign({1, 2})
    await until_idle()
    async with asyncio.timeout(30):
        await leadership.revoke({1})
    assert [shard.state for shard in made] == [ShardState.RESIGNED, ShardState.LOADING]
    assert set(leadership.shards) == {2}
    async with asyncio.timeout(30):
        await leadership.close()
    assert not leadership.shards


async def test_one_that_serves_resigns_in_good_order() -> None:
    leadership, made = leading()
    leadership.assign({1})
    await until_idle()
    assert made[0].state is ShardState.SERVING
    await leadership.revoke({1})
    assert not leadership.shards
    leadership.assign({1})
    await until_idle()
    assert leadership.shards[1].state is ShardState.SERVING
    await leadership.close()


async def test_one_that_cannot_finish_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESIGN_TIMEOUT_S", 0.05)
    leadership, _ = leading(resigns=False)
    leadership.assign({1})
    await until_idle()
    async with asyncio.timeout(30):
        await leadership.revoke({1})
    assert not leadership.shards


async def test_an_end_waits_no_longer_for_it_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESIGN_TIMEOUT_S", 1_000)
    leadership, _ = leading(resigns=False)
    leadership.assign({1})
    await until_idle()
    async with asyncio.timeout(30):
        await leadership.close(within_s=0.05)
    assert not leadership.shards


async def test_one_that_comes_back_while_it_is_given_up_is_led_again() -> None:
    leadership, made = leading(loads=False)
    leadership.assign({1})
    await until_idle()
    revoking = asyncio.create_task(leadership.revoke({1}))
    await asyncio.sleep(0)
    leadership.assign({1})
    await revoking
    await until_idle()
    assert len(made) == 2
    assert id(leadership.shards[1]) == id(made[1])
    await leadership.close()
    assert not leadership.shards


class BrokenShard(SlowShard):
    """Cannot be served: its log is not as it must be."""

    async def lead(self) -> None:
        self.state = ShardState.FAILED
        raise CorruptLogError("unreadable")


async def test_one_that_cannot_be_served_is_tried_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    is_tried_again = asyncio.Event()

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 3:
            is_tried_again.set()
            await asyncio.Event().wait()

    made: list[BrokenShard] = []

    def make(partition: int) -> Any:
        if len(made) == 100:
            raise RuntimeError("tried without a pause")
        made.append(BrokenShard(partition))
        return made[-1]

    leadership = Leadership("i", make_shard=make, changed=lambda: None)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    leadership.adopt({1}, alive=set())
    async with asyncio.timeout(30):
        await is_tried_again.wait()
    assert pauses == [0.1, 0.2, 0.4]
    assert len(made) == 3
    assert leadership.shards[1].state is ShardState.FAILED
    await leadership.close()


def test_all_agree_on_who_is_next() -> None:
    alive = {"a", "b", "c"}
    heirs = {partition: next_in_line(partition, alive) for partition in range(32)}
    assert set(heirs.values()) == alive
    for partition, heir in heirs.items():
        assert next_in_line(partition, alive - (alive - {heir})) == heir


def serves_all(leadership: Leadership) -> bool:
    return leadership.serves_all


async def test_all_is_served_once_every_partition_is_and_also_where_there_is_none() -> None:
    leadership, _ = leading()
    assert serves_all(leadership)
    leadership.assign({1, 2})
    assert not serves_all(leadership), "assigned, and not begun"
    await until_idle()
    assert serves_all(leadership)
    await leadership.revoke({1, 2})
    assert serves_all(leadership)
    await leadership.close()
    assert not serves_all(leadership)
    slow, _ = leading(loads=False)
    slow.assign({1})
    await until_idle()
    assert not serves_all(slow)
    await slow.close()
