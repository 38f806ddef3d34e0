"""Producers that commit small transactions, at a given rate or as fast as they can, and note how long each took."""

import asyncio
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import NamedTuple
from zlib import crc32

from oncebox.producer import Producer
from proof.bench.peer_confluent import Workload


def ids_led_by(partitions: Container[int], partition_count: int, prefix: str) -> Iterator[str]:
    """Transactional ids without end, all in these log partitions."""
    for number in count(1):
        name = f"{prefix}-{number}"
        if crc32(name.encode()) % partition_count in partitions:
            yield name


class Commit(NamedTuple):
    begun_s: float  # when it was due, so that what waits behind a slow one counts as slow as well
    ended_s: float

    @property
    def took_ms(self) -> float:
        return (self.ended_s - self.begun_s) * 1000


@dataclass(kw_only=True)
class Traffic:
    """Several may run one after the other on the same producers, but not at once."""

    producers: Sequence[Producer]
    topic: str
    workload: Workload = field(default_factory=Workload)
    commits: list[Commit] = field(default_factory=list)

    def between(self, first_s: float, last_s: float) -> list[float]:
        """How many milliseconds the commits took that were due in this time."""
        return [commit.took_ms for commit in self.commits if first_s <= commit.begun_s < last_s]

    async def flood(self, duration_s: float) -> float:
        """As fast as they can; the commits per second."""
        begun_s = perf_counter()
        until_s = begun_s + duration_s

        async def work(producer: Producer) -> int:
            done = 0
            while perf_counter() < until_s:
                await self.commit(producer)
                done += 1
            return done

        done = await asyncio.gather(*map(work, self.producers))
        return sum(done) / (perf_counter() - begun_s)

    async def flow(self, rate_per_s: float) -> None:
        """At this rate all together, until cancelled; every commit is noted."""
        interval_s = len(self.producers) / rate_per_s

        async def work(index: int, producer: Producer) -> None:
            due_s = perf_counter() + interval_s * index / len(self.producers)
            while True:
                await asyncio.sleep(max(due_s - perf_counter(), 0))
                await self.commit(producer)
                self.commits.append(Commit(due_s, perf_counter()))
                due_s += interval_s

        async with asyncio.TaskGroup() as group:
            for index, producer in enumerate(self.producers):
                group.create_task(work(index, producer))

    async def commit(self, producer: Producer) -> None:
        workload = self.workload
        value = b"x" * workload.record_bytes
        async with producer.transaction() as transaction:
            for index in range(workload.records_per_unit):
                await transaction.send(self.topic, value, partition=index % workload.partitions)
