"""A long log is replayed by a process of its own: the same state, errors told, and no process left behind."""

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from subprocess import Popen
from typing import Any

import pytest

from coordinator.core.records import IdState
from coordinator.log import codec, packer
from coordinator.log import kafka as kafka_log
from coordinator.log.consumer import ReadError
from coordinator.log.kafka import KafkaStore
from coordinator.log.lead import Appender, take_over, writer_of
from coordinator.log.port import Kind
from coordinator.log.replay import Replay
from oncebox.wire import KafkaSettings, Wire
from proof.bench.idle_ids import idle_state
from tests.unit.core.states import NOW_MS, id_state, transaction

IDS = 2_000


@pytest.fixture
def topics(new_topic) -> dict[str, str]:
    return {"log_topic": new_topic(config={"cleanup.policy": "compact"}), "feed_topic": new_topic()}


@asynccontextmanager
async def opened(kafka, topics) -> AsyncIterator[KafkaStore]:
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    async with Wire(settings) as wire:
        store = KafkaStore(wire, settings, **topics)
        try:
            yield store
        finally:
            await store.close()


async def lead(store: KafkaStore, replay: Replay) -> Appender:
    won = await take_over(store, 0, instance="i", address="a", nonce=lambda: secrets.token_bytes(16), replay=replay)
    return Appender(store, Kind.LOG, 0, writer_of(0, won.leader.generation, won.leader.epoch), 1, won.log_offset_next)


async def fill(store: KafkaStore) -> Appender:
    """Ids that are idle, one that is not, and many records of it."""
    rng = Random(1)
    log = await lead(store, Replay())
    states = [codec.encode_id(idle_state(rng, NOW_MS)) for _ in range(50)]
    await log.append([(codec.id_key(f"id-{number}"), rng.choice(states)) for number in range(IDS)])
    await log.append([codec.encode(id_state(transaction(), number=number)) for number in range(1, 200)])
    return log


def children() -> set[int]:
    """Whichever thread started them."""
    found: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended meanwhile
            found.update(int(pid) for pid in file.read_text().split())
    return found


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - a process tells of itself by being there
            await asyncio.sleep(0.002)


def states_of(replay: Replay) -> dict[str, IdState]:
    return {state.transactional_id: state for state in replay.finish()}


async def test_it_is_the_same_state(kafka, topics, monkeypatch):
    before = children()
    async with opened(kafka, topics) as store:
        await fill(store)
        here, elsewhere = Replay(), Replay()
        await lead(store, here)
        monkeypatch.setattr(kafka_log, "LONG", 10)
        await lead(store, elsewhere)
        found = states_of(elsewhere)
        assert len(found) == IDS + 1
        assert found["a"].number == 199
        assert found == states_of(here)
        assert (here.leader, elsewhere.leader) == ((0, 1), (0, 2))
        await until(lambda: children() <= before)


async def test_what_cannot_be_read_is_told(kafka, topics, monkeypatch):
    async with opened(kafka, topics) as store:
        log = await fill(store)
        await log.append([(codec.id_key("newer"), b"\x08\x63")])
        monkeypatch.setattr(kafka_log, "LONG", 10)
        with pytest.raises(codec.CorruptLogError, match="version 99"):
            await lead(store, Replay())


class Standing(Popen[bytes]):
    """Begins, and does no more than that: else it could be done before anybody has looked."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.send_signal(signal.SIGSTOP)


async def test_a_process_that_is_killed_is_told_and_the_next_one_succeeds(kafka, topics, monkeypatch):
    before = children()
    monkeypatch.setattr(kafka_log, "LONG", 10)
    async with opened(kafka, topics) as store:
        await fill(store)
        with monkeypatch.context() as patched:
            patched.setattr(packer, "Popen", Standing)
            taking = asyncio.create_task(lead(store, Replay()))
            await until(lambda: children() - before)
            os.kill((children() - before).pop(), signal.SIGKILL)
            with pytest.raises(ReadError, match="ended with code -9"):
                await taking
        replay = Replay()
        await lead(store, replay)
        assert len(states_of(replay)) == IDS + 1
        await until(lambda: children() <= before)


async def test_one_that_nobody_waits_for_is_ended(kafka, topics, monkeypatch):
    before = children()
    started: list[Any] = []

    def start(*given: Any, **named: Any) -> Any:
        started.append(Popen(*given, **named))
        return started[-1]

    monkeypatch.setattr(kafka_log, "LONG", 10)
    monkeypatch.setattr(packer, "Popen", start)
    async with opened(kafka, topics) as store:
        await fill(store)
        taking = asyncio.create_task(lead(store, Replay()))
        await until(lambda: started)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await until(lambda: children() <= before)
