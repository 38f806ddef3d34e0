"""How long clients wait when the coordinator instance that leads their ids is gone: killed, stopped, or told to go."""

import asyncio
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from math import inf
from statistics import median
from time import perf_counter
from typing import NamedTuple

import uvloop

from oncebox.errors import FatalError, OnceboxError
from oncebox.producer import Producer
from proof.bench.context import Context
from proof.bench.instances import Coordinator, on_log, wait_until_shared
from proof.bench.result import Result
from proof.bench.traffic import Traffic, ids_led_by

PARTITIONS = 16
PRODUCERS = 4
BEFORE_S = 1.0
AFTER_S = 60.0


class Trouble(NamedTuple):
    name: str
    cause: Callable[[Coordinator], object]
    limit_s: float
    is_target: bool = True


TROUBLES = (
    Trouble("kill", lambda victim: victim.process.kill(), 3.0),
    Trouble("stop", lambda victim: victim.process.pause(), 12.0),
    # Nobody has set one: what a kill may take.
    Trouble("term", lambda victim: victim.process.stop(), 3.0, is_target=False),
)


def bench(context: Context) -> Iterator[Result]:
    """Two instances on three brokers with default timeouts; four producers commit all the time with ids that one of the
    two leads. That one gets SIGKILL (`kill`), SIGSTOP (`stop`) or SIGTERM (`term`). Counted is the longest that a
    producer waited from then on until a commit was done, at the latest by the other instance: the worst of all
    producers and rounds; `-median` is their median.
    """
    servers = context.replicated_servers
    topic = context.new_topic(partitions=2, servers=servers)
    folder, log = context.new_folder(), on_log(uuid.uuid4().hex[:8])
    with ExitStack() as started:

        def start() -> Coordinator:
            return started.enter_context(Coordinator(servers, folder, log))

        instances = [start()]
        for trouble in TROUBLES:
            waits_s: list[float] = []
            for number in range(1, context.rounds + 1):
                instances.append(start())
                led = wait_until_shared([instance.address for instance in instances], PARTITIONS)
                victim = instances.pop(0)
                own = {partition for partition, address in led.items() if address == victim.address}
                names = ids_led_by(own, PARTITIONS, f"{topic}-{trouble.name}-{number}")
                addresses = [victim.address, *(instance.address for instance in instances)]
                producers = [Producer(servers, addresses, transactional_id=next(names)) for _ in range(PRODUCERS)]
                waits_s += uvloop.run(_wait(producers, topic, partial(trouble.cause, victim)))
                context.progress(
                    f"{trouble.name}, round {number} of {context.rounds}: {max(waits_s[-PRODUCERS:]):.2f} s"
                )
                victim.process.kill()
            yield from _results(trouble, waits_s)


async def _wait(producers: Sequence[Producer], topic: str, trouble: Callable[[], object]) -> list[float]:
    """How long each of them was without a commit."""
    traffic = Traffic(producers=producers, topic=topic)
    begun_s = ended_s = inf

    async def longest_without(producer: Producer) -> float:
        longest_s = 0.0
        while True:
            started_s = perf_counter()
            await _commit(traffic, producer)
            committed_s = perf_counter()
            if committed_s > begun_s:
                longest_s = max(longest_s, committed_s - max(started_s, begun_s))
            if started_s > ended_s:
                return longest_s

    async with AsyncExitStack() as stack:
        for producer in producers:
            await stack.enter_async_context(producer)
        waiting = asyncio.gather(*map(longest_without, producers))
        await asyncio.wait((waiting,), timeout=BEFORE_S)
        begun_s = perf_counter()
        await asyncio.to_thread(trouble)
        ended_s = perf_counter()
        return await asyncio.wait_for(waiting, AFTER_S)


async def _commit(traffic: Traffic, producer: Producer) -> None:
    """Until one succeeds: a transaction may be lost together with its coordinator."""
    while True:
        try:
            await traffic.commit(producer)
        except FatalError:
            raise
        except OnceboxError:
            continue
        return


def _results(trouble: Trouble, waits_s: Sequence[float]) -> Iterator[Result]:
    for name, figure, is_target in (
        (f"failover/{trouble.name}", max(waits_s), trouble.is_target),
        (f"failover/{trouble.name}-median", median(waits_s), False),
    ):
        yield Result(
            name=name,
            unit="s",
            better="lower",
            ours=(figure,),
            peer=(trouble.limit_s,),
            ours_name="Oncebox",
            peer_name="target",
            target=1.0 if is_target else None,
        )
