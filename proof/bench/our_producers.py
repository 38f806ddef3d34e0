"""Our side of the transaction benches: N producers in one process of their own, as an application would run them.

`python -m proof.bench.our_producers` reads one JSON job per line and answers each with one line of figures: the process
stays, so that its start is not measured.
"""

import asyncio
import time
from dataclasses import asdict, dataclass
from typing import Any

from oncebox.producer import Producer, ProducerSettings
from proof.bench.jobs import serve
from proof.bench.peer_confluent import WARM_UP_UNITS, Measured, Workload, percentile


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    bootstrap_servers: str
    coordinator: str
    topic: str
    workload: Workload
    wait: str = "complete"
    # Everything is written before commit() is called, so that the latter can be measured by itself.
    flushes: bool = False
    # The least that passes from a transaction's begin to its commit.
    pace_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OurMeasured(Measured):
    """Also how long commit() itself took: once everything is written, from the call to the answer."""

    commit_p50_ms: float


async def measure(job: Job) -> OurMeasured:
    workload = job.workload
    value = b"x" * workload.record_bytes
    everybody = asyncio.Barrier(workload.producers)
    latencies_s: list[float] = []
    commits_s: list[float] = []

    async def work(number: int) -> tuple[float, float]:
        producer = Producer(
            job.bootstrap_servers,
            job.coordinator,
            transactional_id=f"{job.topic}-ours-{number}",
            settings=ProducerSettings(),
        )
        async with producer:

            async def unit() -> None:
                begun_s = time.perf_counter()
                transaction = await producer.begin()
                for index in range(workload.records_per_unit):
                    await transaction.send(job.topic, value, partition=index % workload.partitions)
                if job.flushes:
                    await transaction.flush()
                if job.pace_s:
                    await asyncio.sleep(max(begun_s + job.pace_s - time.perf_counter(), 0))
                flushed_s = time.perf_counter()
                await transaction.commit(wait=job.wait)  # type: ignore[arg-type]
                commits_s.append(time.perf_counter() - flushed_s)

            for _ in range(WARM_UP_UNITS):
                await unit()
            await everybody.wait()
            commits_s.clear()
            begin_s = now_s = time.perf_counter()
            while now_s - begin_s < workload.duration_s:
                await unit()
                before_s, now_s = now_s, time.perf_counter()
                latencies_s.append(now_s - before_s)
            return begin_s, now_s

    runs = await asyncio.gather(*(work(number) for number in range(workload.producers)))
    elapsed_s = max(end for _, end in runs) - min(begin for begin, _ in runs)
    ordered = sorted(latency * 1000 for latency in latencies_s)
    return OurMeasured(
        units_per_s=len(ordered) / elapsed_s,
        p50_ms=percentile(ordered, 50),
        p99_ms=percentile(ordered, 99),
        commit_p50_ms=percentile(sorted(commit * 1000 for commit in commits_s), 50),
    )


def make_job(*, workload: dict[str, Any], **given: Any) -> Job:
    return Job(workload=Workload(**workload), **given)


async def figures(job: Job) -> dict[str, float]:
    return asdict(await measure(job))


if __name__ == "__main__":
    serve(figures, make_job)
