"""One seed, from its plan to the checker's findings: a phase of faults, then everything heals and comes to an end."""

import asyncio
import gc
import hashlib
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any
from unittest.mock import patch

from coordinator import producer_ids
from coordinator.core import grants
from coordinator.core.commands import GetOutcome
from coordinator.core.records import TopicPartition
from coordinator.core.state import INDEBTED
from coordinator.log import lead
from coordinator.log.port import Stored
from coordinator.log.replay import Replay
from coordinator.markers import plan as marker_plan
from coordinator.shard import Shard, ShardState
from oncebox import wire
from proof.checker import history as h
from proof.checker.checks import Finding, check
from proof.checker.endings import untold
from proof.sim.actors import Administrator, Monitor, Reader, ask
from proof.sim.cluster import Cluster
from proof.sim.database import Database
from proof.sim.instance import Group, Instance
from proof.sim.jobs import Job
from proof.sim.loop import ProcessState, StuckError, VirtualLoop
from proof.sim.nemesis import Nemesis
from proof.sim.network import Network, Weather
from proof.sim.plan import Fault, Plan, plan
from proof.sim.population import Population
from proof.sim.recorder import FEED_TOPIC, LOG_TOPIC, Recorder
from proof.sim.resolver import Resolver
from proof.sim.world import OFFSETS_TOPIC, World

# Virtual seconds. Everything that can delay an end is far below: timeouts, back-offs, sessions.
LIVENESS_S = 90.0
STRANGER_S = 20.0
LOOK_EVERY_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    plan: Plan
    findings: tuple[Finding, ...]
    history: h.History
    virtual_s: float
    # Whether the leader came as far as `crash_at_step`.
    crashed: bool

    @property
    def digest(self) -> str:
        """Equal histories have equal digests."""
        digest = hashlib.sha256()
        for event in self.history:
            digest.update(repr(event).encode())
        return digest.hexdigest()[:16]


def run(seed: int) -> Outcome:
    """The same seed gives the same run."""
    return run_plan(plan(seed))


def run_plan(wanted: Plan) -> Outcome:
    loop = VirtualLoop()
    recorder = Recorder()

    def unheard(error: object) -> None:
        recorder.history.append(h.Broken(where="an error that nobody caught", error=repr(error)))

    loop.set_exception_handler(lambda _loop, context: unheard(context.get("exception") or context["message"]))
    with squeezed(wanted), _without_collection():
        try:
            crashed = loop.run_until_complete(Run(loop, wanted, recorder).run())
        except StuckError:
            recorder.history.append(h.Stuck(what="nothing is scheduled any more"))
            crashed = False
        for error in loop.unheard_errors():
            unheard(error)
        virtual_s = loop.time()
        loop.finish()
    return Outcome(
        plan=wanted,
        findings=tuple(check(recorder.history)),
        history=recorder.history,
        virtual_s=virtual_s,
        crashed=crashed,
    )


@contextmanager
def _without_collection() -> Iterator[None]:
    """What a dead process has left behind is cleaned up at the end, not at some moment in between."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def squeezed(wanted: Plan) -> Iterator[None]:
    """Limits that are never reached in a short run, made small; and no log lines, for thousands of runs."""
    logger = logging.getLogger("coordinator")
    level = logger.level
    with ExitStack() as stack:
        stack.callback(logger.setLevel, level)
        logger.setLevel(logging.CRITICAL + 1)
        stack.enter_context(patch.object(producer_ids, "STOCK", 4))
        stack.enter_context(patch.object(producer_ids, "LOW", 2))
        stack.enter_context(patch.object(marker_plan, "GONE_AFTER_S", 3.0))
        if wanted.has(Fault.EPOCHS):
            stack.enter_context(patch.object(grants, "EPOCH_MAX", 4))
        if wanted.has(Fault.LEADER_EPOCHS):
            stack.enter_context(patch.object(lead, "EPOCH_LAST", 3))
        yield


class Run:
    def __init__(self, loop: VirtualLoop, wanted: Plan, recorder: Recorder) -> None:
        rng = Random(f"run/{wanted.seed}")
        weather = Weather()
        network = Network(loop, rng, weather)
        cluster = Cluster(
            loop, rng, network, recorder, nodes=wanted.brokers, marker_version_max=wanted.marker_version_max
        )
        for topic, count in wanted.topics:
            cluster.create_topic(topic, count)
        cluster.create_topic(OFFSETS_TOPIC, 1)
        cluster.create_topic(LOG_TOPIC, wanted.log_partitions)
        cluster.create_topic(FEED_TOPIC, wanted.log_partitions)
        database = Database(loop, rng, network, recorder)
        self._world = World(loop, wanted, rng, weather, network, cluster, recorder, database)
        self._rng = rng

    async def run(self) -> bool:
        """Whether the first leader crashed at its step."""
        world, rng = self._world, self._rng
        world.instances.extend(Instance(world, f"i{index}") for index in range(world.plan.instances))
        group = Group(world)
        self._population = Population(world, rng)
        administrator = Administrator(world, rng, self._population.jobs)
        nemesis = Nemesis(world, rng, group, self._population, administrator)
        reader = Reader(world, "reader")
        monitor = world.loop.create_task(Monitor(world, rng).run())
        reading = world.loop.create_task(reader.run())
        resolving = self._resolve()
        self._population.start()
        nemesis.start()
        first = group.leader_of(0).process
        if world.plan.crash_at_step:
            first.dies_at_step = world.plan.crash_at_step
        await asyncio.sleep(world.plan.safety_s)
        nemesis.heal()
        if rng.random() < 0.5:
            # Nobody asks any more, so nobody tells a deposed leader that it is one.
            monitor.cancel()
        self._population.finish()
        if nemesis.dead_partition is not None:
            await self._probe(TopicPartition(*nemesis.dead_partition))
            nemesis.revive()
        await self._until(self._is_quiet, LIVENESS_S)
        monitor.cancel()
        if resolving is not None:
            resolving.cancel()
        self._tell_what_is_left()
        await self._replay()
        await self._ask_for_unknown_outcomes()
        reading.cancel()
        reader.poll()
        world.recorder.history.append(h.Finished())
        for _ in range(20):
            # Time stands still, but what is under way at this moment comes to its end: errors reach who waits for them.
            await asyncio.sleep(0)
        return first.state is ProcessState.DEAD

    def _resolve(self) -> asyncio.Task[None] | None:
        """Where there is anything to resolve, but not always: owners have to manage without."""
        world, rng = self._world, self._rng
        if any(job.two_phase for job in self._population.jobs) and rng.random() < 0.7:
            return world.loop.create_task(Resolver(world, Random(rng.getrandbits(32))).run())
        return None

    async def _until(self, is_true: Any, within_s: float) -> bool:
        deadline_s = self._world.loop.time() + within_s
        while not is_true():
            if self._world.loop.time() > deadline_s:
                return False
            await asyncio.sleep(LOOK_EVERY_S)
        return True

    async def _probe(self, dead: TopicPartition) -> None:
        """While one data partition is dead, an id in each log partition that does not use it gets its work done."""
        others = tuple(TopicPartition(*w) for w in self._world.data_partitions() if TopicPartition(*w) != dead)
        if not others:
            return
        jobs = [Job(f"probe-{index}", 2, resumable=True) for index in range(2 * self._world.plan.log_partitions)]
        for job in jobs:
            self._population.add(job, others)
        if not await self._until(lambda: not self._unfinished(jobs), STRANGER_S):
            late = self._unfinished(jobs)
            self._world.recorder.history.append(
                h.Stuck(what=f"{', '.join(late)} wait, {dead.topic}-{dead.partition} is dead", by_stranger=True)
            )

    def _unfinished(self, jobs: list[Job]) -> list[str]:
        """Not done, or decided and not complete."""
        owing = {
            state.transactional_id
            for shard in self._leading()
            for state in shard.ids.active.values()
            if any(transaction.state in INDEBTED for transaction in state.transactions)
        }
        return [job.transactional_id for job in jobs if not job.done or job.transactional_id in owing]

    # --- the end ------------------------------------------------------------------------------------------------

    def _leading(self) -> list[Shard]:
        return [
            shard
            for instance in self._world.instances
            for shard in instance.leadership.shards.values()
            if shard.state is ShardState.SERVING
        ]

    def _sweep(self) -> None:
        """The search for hanging transactions, for those alone that came late to another topic of the same name: all
        others the protocol must keep from hanging by itself.
        """
        leading = self._leading()
        # Of one partition two may believe to lead it, while another one has nobody.
        if len({shard.partition for shard in leading}) < self._world.plan.log_partitions:
            return
        known = {
            (transaction.grant.producer_id, transaction.grant.epoch)
            for shard in leading
            for state in shard.ids.active.values()
            for transaction in state.transactions
        }
        for led in list(self._world.cluster.led.values()):
            for batch in led.partition.open_batches():
                if batch.stray and (batch.producer_id, batch.epoch) not in known:
                    self._world.cluster.end_hanging(led, batch)

    def _is_quiet(self) -> bool:
        """All is done, and nothing is owed or open any more."""
        self._sweep()
        if not all(job.done for job in self._population.jobs):
            return False
        leading = self._leading()
        if sorted(shard.partition for shard in leading) != list(range(self._world.plan.log_partitions)):
            return False
        if any(state.transactions for shard in leading for state in shard.ids.active.values()):
            return False
        if any(led.partition.open_batches() for led in self._world.cluster.led.values()):
            return False
        # A deposed leader that has not noticed knows nothing of what its successor left open.
        return not any(self._differing(shard) for shard in leading)

    def _tell_what_is_left(self) -> None:
        history = self._world.recorder.history
        history.extend(
            h.Stuck(what=f"{job.transactional_id} is not done") for job in self._population.jobs if not job.done
        )
        leading = self._leading()
        led = sorted(shard.partition for shard in leading)
        if led != list(range(self._world.plan.log_partitions)):
            history.append(h.Stuck(what=f"of the log's partitions these are led: {led}"))
        history.extend(
            h.Stuck(what=f"{state.transactional_id}/{transaction.grant.number} is still {transaction.state.name}")
            for shard in leading
            for state in shard.ids.active.values()
            for transaction in state.transactions
        )
        history.extend(
            h.Open(partition=each.partition.name, offset=batch.offset, producer_id=batch.producer_id, epoch=batch.epoch)
            for each in self._world.cluster.led.values()
            for batch in each.partition.open_batches()
        )

    async def _ask_for_unknown_outcomes(self) -> None:
        """By now everybody can know: the check of unknown outcomes looks whether anybody was told."""
        asked: set[tuple[str, int]] = set()
        # Meanwhile another one may wake up and ask for an end.
        while left := untold(self._world.recorder.history) - asked:
            for transactional_id, number in sorted(left):
                command = GetOutcome(transactional_id=transactional_id, number=number)
                for instance in self._world.instances:
                    await ask(self._world, "at the end", command, instance)
            asked |= left

    async def _replay(self) -> None:
        """What a new leader would know is what the leaders know, but for what is just being acknowledged."""
        for shard in self._leading():
            differing = self._differing(shard)
            for _ in range(5):
                if differing:
                    await asyncio.sleep(0.02)
                    differing = self._differing(shard)
            self._world.recorder.history.extend(differing)

    def _differing(self, shard: Shard) -> list[h.Replayed]:
        log = self._world.cluster.led[wire.TopicPartition(LOG_TOPIC, shard.partition)].partition
        replay = Replay()
        replay.fold([Stored(offset, *record) for offset, record in log.read(0, log.high_watermark)])
        replayed = {state.transactional_id: state for state in replay.finish()}
        live = {state.transactional_id: state for state in shard.ids}
        return [
            h.Replayed(transactional_id=name, differs=f"{replayed.get(name)} != {live.get(name)}")
            for name in sorted(replayed.keys() | live.keys())
            if replayed.get(name) != live.get(name)
        ]
