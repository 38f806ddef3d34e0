"""Those who look on: read_committed consumers, a monitor that asks for outcomes, an administrator who interferes."""

import asyncio
from random import Random

from coordinator.core.commands import Abort, Command, ForceFence, GetOutcome
from proof.checker import history as h
from proof.sim.caller import Caller
from proof.sim.instance import Instance
from proof.sim.jobs import Job
from proof.sim.network import NoAnswerError
from proof.sim.partition import Partition
from proof.sim.world import World

READ_EVERY_S = 0.25
MONITOR_TIMEOUT_MS = 10_000
LOOKS_FOR_PREPARED = 40
LOOK_FOR_PREPARED_EVERY_S = 0.2
# Of what happened last, the monitor asks for one.
RECENT = 40


class Reader:
    """A read_committed consumer of every data partition."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name
        self._positions: dict[str, int] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(READ_EVERY_S)
            self.poll()

    def poll(self) -> None:
        for where in self._world.data_partitions():
            partition = self._world.cluster.partition(where)
            if partition is not None:
                self._poll(partition)

    def _poll(self, partition: Partition) -> None:
        position = self._positions.get(partition.name, 0)
        if position >= partition.high_watermark:
            return
        for offset, value in partition.read_committed(position):
            self._world.recorder.history.append(
                h.Read(reader=self._name, partition=partition.name, offset=offset, value=value)
            )
        self._positions[partition.name] = max(position, partition.last_stable_offset)


class Monitor:
    """Asks any instance, leader or not, what became of recent transactions."""

    def __init__(self, world: World, rng: Random) -> None:
        self._world = world
        self._rng = rng

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0.7 * self._rng.random())
            number = self._recent()
            if number is not None:
                self._world.loop.create_task(self._ask(number))

    def _recent(self) -> h.Logged | None:
        history = self._world.recorder.history
        recent = [event for event in history[-RECENT:] if isinstance(event, h.Logged)]
        return self._rng.choice(recent) if recent else None

    async def _ask(self, logged: h.Logged) -> None:
        numbers = [*(decided.grant.number for decided in logged.decided[-2:]), logged.grant.number]
        command = GetOutcome(transactional_id=logged.transactional_id, number=self._rng.choice(numbers))
        await ask(self._world, "monitor", command, self._rng.choice(self._world.instances))


class Administrator:
    def __init__(self, world: World, rng: Random, jobs: list[Job]) -> None:
        self._world = world
        self._rng = rng
        self._jobs = jobs

    def interfere(self) -> None:
        if any(job.two_phase for job in self._jobs) and self._rng.random() < 0.5:
            self._world.loop.create_task(self._fence_prepared())
        else:
            self._interfere(self._rng.choice(self._jobs))

    async def _fence_prepared(self) -> None:
        """The next transaction that is: few are, at any one moment."""
        for _ in range(LOOKS_FOR_PREPARED):
            prepared = self._prepared()
            if prepared:
                self._interfere(self._rng.choice(prepared))
                return
            await asyncio.sleep(LOOK_FOR_PREPARED_EVERY_S * self._rng.random())

    def _interfere(self, job: Job) -> None:
        newest = [
            event
            for event in self._world.recorder.history
            if isinstance(event, h.Logged) and event.transactional_id == job.transactional_id
        ]
        if not newest:
            return
        command: Command = Abort(transactional_id=job.transactional_id, number=newest[-1].grant.number)
        # What is PREPARED must be decided as the database has decided it: fencing refuses, aborting would not.
        if job.two_phase or self._rng.random() < 0.5:
            command = ForceFence(transactional_id=job.transactional_id, administrator="admin")
        self._world.loop.create_task(Caller(self._world, "admin", self._rng).call(command))

    def _prepared(self) -> list[Job]:
        """Those whose last transaction was prepared, and nobody has asked to end it."""
        last: dict[str, h.Kind] = {}
        for event in self._world.recorder.history:
            if isinstance(event, h.Called) and event.kind in {h.Kind.PREPARE, h.Kind.END}:
                last[event.transactional_id] = event.kind
        return [job for job in self._jobs if last.get(job.transactional_id) is h.Kind.PREPARE]


async def ask(world: World, client: str, command: Command, instance: Instance) -> None:
    """Once, whatever it answers."""
    try:
        await world.call(instance, client, command, timeout_ms=MONITOR_TIMEOUT_MS)
    except NoAnswerError:
        return
