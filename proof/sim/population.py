"""The clients of a run: one or more per job, with habits of their own; they crash, stop, wake up and compete."""

from random import Random

from coordinator.core.records import TopicPartition
from proof.sim.jobs import Habits, Job
from proof.sim.loop import ProcessState
from proof.sim.plan import Fault
from proof.sim.producer import Producer
from proof.sim.world import World


class Population:
    def __init__(self, world: World, rng: Random) -> None:
        self._world = world
        self._rng = rng
        self._over = False
        plan = world.plan
        self.jobs = [
            Job(
                f"id-{index}",
                plan.items_per_id,
                resumable=rng.random() < (0.4 if plan.has(Fault.EXPIRY) else 0.8),
                two_phase=rng.random() < 0.4,
            )
            for index in range(plan.ids)
        ]
        self.producers: list[Producer] = []

    def start(self) -> None:
        for job in self.jobs:
            self.add(job)

    def add(self, job: Job, partitions: tuple[TopicPartition, ...] = ()) -> Producer:
        name = f"{job.transactional_id}:{len(self.producers) + 1}"
        producer = Producer(self._world, name, job, self._habits(partitions), Random(self._rng.getrandbits(32)))
        self.producers.append(producer)
        return producer

    def _habits(self, partitions: tuple[TopicPartition, ...]) -> Habits:
        rng, plan = self._rng, self._world.plan
        dawdles = plan.has(Fault.DAWDLING) and rng.random() < 0.6 and not self._over
        expires = plan.has(Fault.EXPIRY) and not self._over
        return Habits(
            slots_max=rng.choice((1, 2, 2, 4)),
            chains=rng.random() < 0.7,
            decided_is_enough=rng.random() < 0.3,
            without_waiting=rng.random() < 0.2,
            commits_offsets=rng.random() < 0.3,
            stubborn=self._over or rng.random() < 0.6,
            pause_max_s=6.0 if expires else 0.1 if self._over else rng.choice((0.1, 0.6)),
            dwell_max_s=1.2 * plan.transaction_timeout_ms / 1000 if dawdles else rng.choice((0.0, 0.2, 1.0)),
            commit_late_max_s=0.0 if self._over else rng.choice((0.0, 0.2, 3.0)),
            aborts=0.0 if self._over else 0.15,
            partitions=partitions or tuple(TopicPartition(*where) for where in self._world.data_partitions()),
        )

    def _running(self) -> list[Producer]:
        return [
            producer
            for producer in self.producers
            if producer.process.state is ProcessState.RUNNING and not producer.task.done()
        ]

    def crash_one(self) -> None:
        """It starts anew, without any memory; or it does not."""
        running = self._running()
        if running:
            producer = self._rng.choice(running)
            producer.process.die()
            if self._rng.random() < 0.7:
                self._world.loop.after(2 * self._rng.random(), self._add_unless_over, producer.job)

    def stop_one(self) -> None:
        """It wakes up later, and goes on as if nothing had happened."""
        running = self._running()
        if running:
            producer = self._rng.choice(running)
            producer.process.stop()
            self._world.loop.after(8 * self._rng.random(), producer.process.resume)
            if self._rng.random() < 0.7:
                self._world.loop.after(2 * self._rng.random(), self._add_unless_over, producer.job)

    def add_rival(self) -> None:
        self._add_unless_over(self._rng.choice(self.jobs))

    def _add_unless_over(self, job: Job) -> None:
        if not self._over and not job.done:
            self.add(job)

    def finish(self) -> None:
        """Nobody crashes any more; what is not done gets a fresh client that wants to be done."""
        self._over = True
        for producer in self.producers:
            producer.retired = True
            producer.process.resume()
        for job in self.jobs:
            if not job.done:
                self.add(job)
