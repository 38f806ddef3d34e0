"""Old and new releases side by side on one log: instances are replaced one by one without an error, and one that meets
records of a later version than it knows says so and serves nothing of them.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING

import pytest

from oncebox.errors import CoordinatorNotAvailableError
from oncebox.producer import Producer, ProducerSettings
from tests.support.coordinator import Coordinators, manifests, values

if TYPE_CHECKING:
    from proof.faults.process import ChildProcess
    from tests.support.kafka import TopicFactory

NEWER = "tests.support.newer"
PARTITIONS = 4


def name_in(partition: int) -> str:
    return next(
        name for name in (f"id-{n}" for n in range(1_000)) if zlib.crc32(name.encode()) % PARTITIONS == partition
    )


async def commit(coordinators: Coordinators, name: str, topic: str, value: bytes, timeout_ms: int = 30_000) -> None:
    settings = ProducerSettings(call_timeout_ms=timeout_ms)
    living = [a for a, p in zip(coordinators.addresses, coordinators.processes, strict=True) if p.running]
    producer = Producer(coordinators.bootstrap_servers, living, transactional_id=name, settings=settings)
    async with producer, producer.transaction() as transaction:
        await transaction.send(topic, value)


async def test_instances_are_replaced_one_by_one_under_load(coordinators: Coordinators, new_topic: TopicFactory):
    topic = await asyncio.to_thread(new_topic)
    old: list[ChildProcess] = [await asyncio.to_thread(coordinators.start) for _ in range(2)]
    stopped = asyncio.Event()
    committed = [0] * PARTITIONS

    async def work(partition: int) -> None:
        """An id in each log partition, so that each one's move is felt."""
        name = name_in(partition)
        async with Producer(coordinators.bootstrap_servers, coordinators.addresses, transactional_id=name) as producer:
            while not stopped.is_set():
                async with producer.transaction() as transaction:
                    await transaction.send(topic, f"{name} {committed[partition]}".encode())
                committed[partition] += 1

    working = [asyncio.create_task(work(partition)) for partition in range(PARTITIONS)]
    for process in old:
        await asyncio.to_thread(coordinators.start)
        await asyncio.to_thread(process.stop)
    before = list(committed)
    async with asyncio.timeout(60):
        while any(now <= then for now, then in zip(committed, before, strict=True)):  # noqa: ASYNC110 - clients' work
            await asyncio.sleep(0.05)
    stopped.set()
    await asyncio.gather(*working)
    seen = await asyncio.to_thread(values, coordinators.bootstrap_servers, topic)
    expected = [f"{name_in(p)} {n}".encode() for p in range(PARTITIONS) for n in range(committed[p])]
    assert sorted(seen) == sorted(expected)
    assert len(await asyncio.to_thread(manifests, coordinators)) == len(expected)


async def test_records_of_a_later_version_are_refused_and_nothing_is_lost(
    coordinators: Coordinators, new_topic: TopicFactory
):
    topic = await asyncio.to_thread(new_topic)
    new = await asyncio.to_thread(lambda: coordinators.start(module=NEWER))
    for partition in range(PARTITIONS):
        await commit(coordinators, name_in(partition), topic, b"new")
    # Side by side: the old one gets partitions, and may not serve what it cannot read.
    old = await asyncio.to_thread(lambda: coordinators.start(wait_ready=False))
    refused = r"the (log|feed) holds records of version 2, this process reads up to 1; upgrade it"
    await asyncio.to_thread(old.wait_ready, lambda: old.log_contains(refused), timeout_s=60)
    await asyncio.to_thread(new.kill)
    with pytest.raises(CoordinatorNotAvailableError, match=r"upgrade it|no coordinator"):
        await commit(coordinators, name_in(0), topic, b"lost", timeout_ms=12_000)
    await asyncio.to_thread(old.stop)
    # With the release that wrote them everything is there, and goes on.
    await asyncio.to_thread(lambda: coordinators.start(module=NEWER))
    for partition in range(PARTITIONS):
        await commit(coordinators, name_in(partition), topic, b"again")
    seen = await asyncio.to_thread(values, coordinators.bootstrap_servers, topic)
    assert sorted(seen) == [b"again"] * PARTITIONS + [b"new"] * PARTITIONS
