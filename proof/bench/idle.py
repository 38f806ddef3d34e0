"""What a coordinator uses while nobody asks it for anything, or nobody for anything but to be kept in mind."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from statistics import median

import uvloop

from oncebox.session import Session
from oncebox.v1 import coordinator_pb2, transaction_pb2
from proof.bench.context import Context
from proof.bench.result import Result
from proof.bench.usage import cpu_s

SESSIONS = 1_000
OPENED_AT_ONCE = 20
TRANSACTION_TIMEOUT_S = 60
HEARTBEATS_PER_TIMEOUT = 3
CALL_TIMEOUT_S = 60.0
SETTLE_S = 3.0
DURATION_S, DURATION_QUICK_S = 20.0, 8.0
IDLE_PERCENT, SESSIONS_PERCENT = 1.0, 2.0
# The clock's own step, in percent of a second.
LEAST_PERCENT = 0.01


def bench(context: Context) -> Iterator[Result]:
    """`cpu`: what an instance with nothing to do uses of one core. `sessions-1000`: what it uses more with a thousand
    open sessions, each over a connection of its own, with one transaction that its client keeps alive by a heartbeat
    every 20 seconds.
    """
    instance = context.start_coordinator()
    duration_s = DURATION_QUICK_S if context.quick else DURATION_S
    time.sleep(SETTLE_S)
    idle = [_percent(instance.process.pid, duration_s) for _ in range(context.rounds)]
    context.progress(f"idle: {', '.join(f'{percent:.2f} %' for percent in idle)}")
    yield _result("idle/cpu", idle, IDLE_PERCENT)
    context.progress(f"opening {SESSIONS:,} sessions")
    topic = context.new_topic(partitions=1)
    open_percent = uvloop.run(_with_sessions(context, instance.address, topic, instance.process.pid, duration_s))
    context.progress(f"with sessions: {', '.join(f'{percent:.2f} %' for percent in open_percent)}")
    added = [max(percent - median(idle), LEAST_PERCENT) for percent in open_percent]
    yield _result("idle/sessions-1000", added, SESSIONS_PERCENT)


def _percent(pid: int, duration_s: float) -> float:
    """Of one core."""
    begun_s, used_s = time.monotonic(), cpu_s(pid)
    time.sleep(duration_s)
    return max(100 * (cpu_s(pid) - used_s) / (time.monotonic() - begun_s), LEAST_PERCENT)


async def _with_sessions(context: Context, address: str, topic: str, pid: int, duration_s: float) -> list[float]:
    few = asyncio.Semaphore(OPENED_AT_ONCE)
    async with AsyncExitStack() as stack:
        sessions = [Session([address]) for _ in range(SESSIONS)]
        for session in sessions:
            stack.push_async_callback(session.close)

        async def begin(number: int) -> coordinator_pb2.Heartbeat:
            async with few:
                return await _begin(sessions[number], f"{topic}-{number}", topic)

        heartbeats = await asyncio.gather(*map(begin, range(SESSIONS)))
        pairs = zip(sessions, heartbeats, strict=True)
        beating = [asyncio.create_task(_beat(number, *pair)) for number, pair in enumerate(pairs)]
        await asyncio.sleep(SETTLE_S)
        used = [await asyncio.to_thread(_percent, pid, duration_s) for _ in range(context.rounds)]
        for task in beating:
            if task.done():
                task.result()  # a heartbeat has failed
            task.cancel()
        await asyncio.gather(*beating, return_exceptions=True)
        return used


async def _begin(session: Session, name: str, topic: str) -> coordinator_pb2.Heartbeat:
    request = coordinator_pb2.InitProducerRequest(
        transactional_id=name, instance=name, transaction_timeout_ms=TRANSACTION_TIMEOUT_S * 1000
    )
    granted = await session.call(name, "init_producer", request, timeout_s=CALL_TIMEOUT_S)
    partitions = [transaction_pb2.TopicPartitions(topic=topic, partitions=[0])]
    add = coordinator_pb2.AddPartitionsRequest(transactional_id=name, grant=granted.grant, partitions=partitions)
    added = await session.call(name, "add_partitions", add, timeout_s=CALL_TIMEOUT_S)
    return coordinator_pb2.Heartbeat(transactional_id=name, grant=added.grant)


async def _beat(number: int, session: Session, heartbeat: coordinator_pb2.Heartbeat) -> None:
    pause_s = TRANSACTION_TIMEOUT_S / HEARTBEATS_PER_TIMEOUT
    # Clients do not beat in step.
    await asyncio.sleep(pause_s * number / SESSIONS)
    while True:
        await session.call(heartbeat.transactional_id, "heartbeat", heartbeat, timeout_s=CALL_TIMEOUT_S)
        await asyncio.sleep(pause_s)


def _result(name: str, percents: list[float], limit: float) -> Result:
    return Result(
        name=name,
        unit="% of a core",
        better="lower",
        ours=tuple(percents),
        peer=(limit,) * len(percents),
        ours_name="Oncebox",
        peer_name="target",
        target=1.0,
    )
