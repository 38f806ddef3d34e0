"""What millions of idle ids cost: memory, the time to load them, and what those who commit meanwhile notice."""

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import AsyncExitStack
from statistics import median
from typing import NamedTuple

import uvloop

from coordinator.cluster import OwnTopics
from oncebox.producer import Producer
from proof.bench import idle_ids
from proof.bench.context import Context
from proof.bench.instances import Coordinator, on_log, wait_until_shared
from proof.bench.peer_confluent import percentile
from proof.bench.result import Result
from proof.bench.traffic import Traffic, ids_led_by
from proof.bench.usage import resident_mb

IDS, IDS_QUICK = 1_800_000, 200_000
PARTITIONS = 16
# With all ids, and without any: what lies between is the ids' share, and smaller where they are fewer.
MEMORY_MB, MEMORY_NO_IDS_MB = 600.0, 90.0
LOAD_S, LOAD_NO_IDS_S = 30.0, 3.0
PRODUCERS = 16
SLOWDOWN = 0.9
SETTLE_S = 1.0


class Loaded(NamedTuple):
    seconds: float
    memory_mb: float


class Noticed(NamedTuple):
    """What each commit took before an instance began to load ids, and until it had loaded them; in order."""

    before_ms: list[float]
    meanwhile_ms: list[float]


def bench(context: Context) -> Iterator[Result]:
    """1.8 million ids that nobody uses (quick: 200,000, and targets in proportion), each with two producer ids and its
    last five outcomes. `memory` is what one instance has resident when it serves them all, `load` the time from its
    start until it does. Then a second instance takes half of the partitions and is killed: `load-slowdown` is what a
    commit takes (the median) on the first one's own partitions, at half of the rate that it can do, while it loads the
    others, against what it took just before; `load-p99` the same of the slowest in a hundred.
    """
    count = IDS_QUICK if context.quick else IDS
    environment = on_log(uuid.uuid4().hex[:8])
    log_topic, feed_topic = environment.values()
    context.progress(f"writing {count:,} ids")
    own = OwnTopics(log=log_topic, feed=feed_topic, partitions=PARTITIONS)
    now_ms = time.time_ns() // 1_000_000
    context.delete_at_end([log_topic, feed_topic])
    uvloop.run(idle_ids.write(context.bootstrap_servers, own, count=count, now_ms=now_ms))
    topic = context.new_topic(partitions=2)
    folder = context.new_folder()

    def new_instance() -> Coordinator:
        return Coordinator(context.bootstrap_servers, folder, environment)

    loads = []
    for number in range(1, context.rounds + 1):
        loads.append(_load(new_instance()))
        context.progress(f"round {number}: loaded in {loads[-1].seconds:.1f} s, {loads[-1].memory_mb:.0f} MB")
    yield from _load_results(loads, count / IDS)
    with new_instance() as staying:
        noticed = []
        for number in range(1, context.rounds + 1):
            noticed.append(found := _disturb(context, topic, staying, new_instance()))
            before_ms, meanwhile_ms = median(found.before_ms), median(found.meanwhile_ms)
            context.progress(f"round {number}: a commit took {before_ms:.1f} ms, while loading {meanwhile_ms:.1f} ms")
    yield _slowdown("ids/load-slowdown", noticed, 50, target=SLOWDOWN)
    yield _slowdown("ids/load-p99", noticed, 99, target=None)


def _load(instance: Coordinator) -> Loaded:
    begun_s = time.monotonic()
    with instance:
        loaded = Loaded(time.monotonic() - begun_s, resident_mb(instance.process.pid))
        # In good order, lest the next one waits until the group notices that this one is gone.
        instance.process.stop()
    return loaded


def _load_results(loads: list[Loaded], share: float) -> Iterator[Result]:
    memory_mb = MEMORY_NO_IDS_MB + share * (MEMORY_MB - MEMORY_NO_IDS_MB)
    load_s = LOAD_NO_IDS_S + share * (LOAD_S - LOAD_NO_IDS_S)
    for name, unit, figures, target in (
        ("ids/memory", "MB", tuple(load.memory_mb for load in loads), memory_mb),
        ("ids/load", "s", tuple(load.seconds for load in loads), load_s),
    ):
        yield Result(
            name=name,
            unit=unit,
            better="lower",
            ours=figures,
            peer=(target,) * len(figures),
            ours_name="Oncebox",
            peer_name="target",
            target=1.0,
        )


def _disturb(context: Context, topic: str, staying: Coordinator, leaving: Coordinator) -> Noticed:
    with leaving:
        context.progress("waiting until two instances share the partitions")
        led = wait_until_shared([staying.address, leaving.address], PARTITIONS)
        own = {partition for partition, address in led.items() if address == staying.address}
        return uvloop.run(_notice(context, topic, staying, leaving, own))


async def _notice(context: Context, topic: str, staying: Coordinator, leaving: Coordinator, own: set[int]) -> Noticed:
    names = ids_led_by(own, PARTITIONS, topic)
    async with AsyncExitStack() as stack:
        producers = [
            await stack.enter_async_context(
                Producer(context.bootstrap_servers, staying.address, transactional_id=next(names))
            )
            for _ in range(PRODUCERS)
        ]
        traffic = Traffic(producers=producers, topic=topic)
        await traffic.flood(context.duration_s)
        rate_per_s = await traffic.flood(context.duration_s) / 2
        flow = asyncio.create_task(traffic.flow(rate_per_s))
        await asyncio.sleep(SETTLE_S)
        begun_s = time.perf_counter()
        await asyncio.sleep(context.duration_s)
        killed_s = time.perf_counter()
        await asyncio.to_thread(leaving.process.kill)
        loading = asyncio.create_task(asyncio.to_thread(wait_until_shared, [staying.address], PARTITIONS))
        await asyncio.wait((flow, loading), return_when=asyncio.FIRST_COMPLETED)
        if flow.done():
            flow.result()  # the producers have failed
        loaded_s = time.perf_counter()
        flow.cancel()
        await asyncio.gather(flow, return_exceptions=True)
    context.progress(f"loaded in {loaded_s - killed_s:.1f} s")
    return Noticed(
        before_ms=sorted(traffic.between(begun_s, killed_s)), meanwhile_ms=sorted(traffic.between(killed_s, loaded_s))
    )


def _slowdown(name: str, noticed: list[Noticed], percent: int, *, target: float | None) -> Result:
    return Result(
        name=name,
        unit="ms",
        better="lower",
        ours=tuple(percentile(found.meanwhile_ms, percent) for found in noticed),
        peer=tuple(percentile(found.before_ms, percent) for found in noticed),
        ours_name="commits while loading",
        peer_name="before",
        target=target,
    )
