"""What was asked for at the router outlives the shards: pushes of fencing, watches and their limit."""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from coordinator import router as module
from coordinator.calls import Answer, WatchOverrunError
from tests.support.memory_instance import serving

if TYPE_CHECKING:
    from coordinator.core.commands import Refused


async def test_fencing_is_pushed_after_the_same_instance_leads_anew() -> None:
    async with serving() as instance:
        assert isinstance(await instance.init("a", "old"), Answer)
        told: list[tuple[str, Refused]] = []
        stop = instance.router.listen("a", lambda name, refused: told.append((name, refused)))
        await instance.leadership.revoke({0})
        await instance.lead()
        assert not told
        assert isinstance(await instance.init("a", "new"), Answer)
        assert [(name, refused.owner.instance) for name, refused in told if refused.owner] == [("a", "new")]
        stop()
        stop()
        assert isinstance(await instance.init("a", "newer"), Answer)
        assert len(told) == 1
        assert not instance.router.listeners


async def test_who_listens_before_anybody_leads_is_told_too() -> None:
    async with serving() as instance:
        assert isinstance(await instance.init("a", "old"), Answer)
        await instance.leadership.revoke({0})
        told: list[str] = []
        instance.router.listen("a", lambda name, _: told.append(name))
        await instance.lead()
        assert isinstance(await instance.init("a", "new"), Answer)
        assert told == ["a"]


async def test_a_watch_that_is_overrun_tells_what_it_has_and_then_that_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WATCH_BACKLOG_MAX", 2)
    async with serving() as instance:
        watch = instance.router.watch("")
        first = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        changes: list[Any] = [Named(f"id{number}") for number in range(5)]
        for change in changes:
            for watcher in tuple(instance.router.watchers):
                watcher(change)
        assert not instance.router.watchers
        assert await first is changes[0]
        assert await anext(watch) is changes[1]
        with pytest.raises(WatchOverrunError):
            await anext(watch)


@dataclass(frozen=True)
class Named:
    transactional_id: str
