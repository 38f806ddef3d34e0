"""Lets the plan's faults happen, each at moments drawn from the seed, and heals everything in the end."""

from collections.abc import Callable
from random import Random
from typing import Any

from oncebox.wire import TopicPartition
from proof.sim.actors import Administrator
from proof.sim.instance import Group, Instance
from proof.sim.plan import Fault
from proof.sim.population import Population
from proof.sim.recorder import FEED_TOPIC, LOG_TOPIC
from proof.sim.world import World

HOUR_S = 3_600.0
# Enough to be late, early, past a producer id's age, past an idle leader's time, past an id's expiry.
CLOCK_JUMPS_S = (-2.0, 2.0, 5.0, -30.0, 7 * HOUR_S, 13 * HOUR_S, 8 * 24 * HOUR_S)


class Nemesis:
    def __init__(
        self, world: World, rng: Random, group: Group, population: Population, administrator: Administrator
    ) -> None:
        self._world = world
        self._rng = rng
        self._group = group
        self._population = population
        self._administrator = administrator
        self._over = False
        # Stays down through the first part of the liveness phase.
        self.dead_partition: TopicPartition | None = None

    def start(self) -> None:
        plan, rng, weather = self._world.plan, self._rng, self._world.weather
        if plan.has(Fault.LOST):
            weather.request_lost, weather.reply_lost = 0.03, 0.05
        if plan.has(Fault.DOUBLED):
            weather.doubled = 0.15
        if plan.has(Fault.LATE):
            weather.late = 0.04
        if plan.has(Fault.DELETED):
            # A topic created again must meet writes that were meant for the old one.
            self._world.cluster.write_risk = 0.15
        if plan.has(Fault.MUTE):
            self._world.cluster.mute_markers = 0.15
        if plan.has(Fault.CRASH_AT_STEP):
            for instance in self._world.instances:
                instance.process.dies_at_step = rng.randint(20, 500)
        for instance in self._world.instances:
            self._mind(instance)
        events: dict[Fault, tuple[int, Callable[[], object]]] = {
            Fault.CRASH: (5, self._crash),
            Fault.ZOMBIE: (5, self._stop_leader),
            Fault.RIVALS: (6, self._group.disagree),
            Fault.HAND_OVER: (6, self._group.move),
            Fault.CLOCKS: (3, self._jump),
            Fault.BROKER_DOWN: (2, self._broker_down),
            Fault.BROKER_SLOW: (2, self._broker_slow),
            Fault.ELECTIONS: (6, self._elect),
            Fault.LAG: (16, self._lag),
            Fault.LOG_DOWN: (2, self._log_down),
            Fault.DATA_DOWN: (3, self._data_down),
            Fault.DEAD_PARTITION: (1, self._kill_partition),
            Fault.DELETED: (4, self._delete),
            Fault.COMPACTION: (8, self._compact),
            Fault.CLIENT_CRASH: (4, self._population.crash_one),
            Fault.CLIENT_ZOMBIE: (4, self._population.stop_one),
            Fault.RIVAL_CLIENTS: (4, self._population.add_rival),
            Fault.ADMINISTRATOR: (4, self._administrator.interfere),
        }
        for fault, (count, happen) in events.items():
            if plan.has(fault):
                for _ in range(rng.randint(1, count)):
                    self._at(plan.safety_s * rng.random(), happen)

    def _at(self, delay_s: float, happen: Callable[..., object], *args: Any) -> None:
        def unless_over() -> None:
            if not self._over:
                happen(*args)

        self._world.loop.after(delay_s, unless_over)

    def heal(self) -> None:
        """From here on nothing goes wrong, except that the dead partition stays dead until it is revived."""
        self._over = True
        self._world.weather.clear()
        self._world.cluster.heal()
        if self.dead_partition is not None and self.dead_partition in self._world.cluster.led:
            self._world.cluster.led[self.dead_partition].down = True
        for topic, count in self._world.plan.topics:
            if TopicPartition(topic, 0) not in self._world.cluster.led:
                self._world.cluster.create_topic(topic, count)
        for instance in self._world.instances:
            instance.process.dies_at_step = 0
            if instance.dead:
                self._restart(instance)
            instance.process.resume()
        self._group.agree()

    def revive(self) -> None:
        if self.dead_partition is not None and self.dead_partition in self._world.cluster.led:
            self._world.cluster.led[self.dead_partition].down = False

    # --- instances ----------------------------------------------------------------------------------------------

    def _mind(self, instance: Instance) -> None:
        instance.process.died = lambda: self._died(instance)

    def _died(self, instance: Instance) -> None:
        self._at(0.1 + 2 * self._rng.random(), self._notice, instance)
        self._at(3 * self._rng.random(), self._restart, instance)

    def _notice(self, instance: Instance) -> None:
        if not instance.running:
            self._group.lost(instance)

    def _restart(self, instance: Instance) -> None:
        if instance.dead:
            instance.start()
            self._mind(instance)
            self._group.joined(instance)
            if self._world.plan.has(Fault.CRASH_AT_STEP) and not self._over:
                instance.process.dies_at_step = self._rng.randint(5, 300)

    def _crash(self) -> None:
        self._rng.choice(self._world.instances).process.die()

    def _stop_leader(self) -> None:
        instance = self._rng.choice(self._world.instances)
        instance.process.stop()
        self._at(0.3 + self._rng.random(), self._notice, instance)
        self._at(0.5 + 5 * self._rng.random(), self._wake, instance)

    def _wake(self, instance: Instance) -> None:
        instance.process.resume()

    def _jump(self) -> None:
        self._rng.choice(self._world.instances).skew_s += self._rng.choice(CLOCK_JUMPS_S)

    # --- brokers ------------------------------------------------------------------------------------------------

    def _broker_down(self) -> None:
        cluster = self._world.cluster
        node_id = self._rng.choice(cluster.nodes)
        cluster.fail(node_id)
        self._at(0.3 + 3 * self._rng.random(), cluster.down.discard, node_id)

    def _broker_slow(self) -> None:
        cluster = self._world.cluster
        node_id = self._rng.choice(cluster.nodes)
        cluster.slow.add(node_id)
        self._at(0.5 + 2 * self._rng.random(), cluster.slow.discard, node_id)

    def _elect(self) -> None:
        self._world.cluster.elect(self._rng.choice(sorted(self._world.cluster.led)))

    def _lag(self) -> None:
        cluster = self._world.cluster
        ours = [where for where in cluster.led if where.topic in {LOG_TOPIC, FEED_TOPIC}]
        where = self._rng.choice(self._rng.choice((sorted(cluster.led), ours)))
        cluster.led[where].lagging = True
        self._at(0.05 + self._rng.random(), self._rng.choice((cluster.elect, cluster.catch_up)), where)

    def _log_down(self) -> None:
        where = TopicPartition(
            self._rng.choice((LOG_TOPIC, FEED_TOPIC)), self._rng.randrange(self._world.plan.log_partitions)
        )
        self._down(where, 0.2 + 3 * self._rng.random())

    def _data_down(self) -> None:
        self._down(self._rng.choice(self._world.data_partitions()), 0.5 + 6 * self._rng.random())

    def _kill_partition(self) -> None:
        self.dead_partition = self._rng.choice(self._world.data_partitions())
        if self.dead_partition in self._world.cluster.led:
            self._world.cluster.led[self.dead_partition].down = True

    def _down(self, where: TopicPartition, for_s: float) -> None:
        led = self._world.cluster.led.get(where)
        if led is not None:
            led.down = True
            self._at(for_s, self._up, where)

    def _up(self, where: TopicPartition) -> None:
        led = self._world.cluster.led.get(where)
        if led is not None and where != self.dead_partition:
            led.down = False

    def _delete(self) -> None:
        topic, _ = self._rng.choice(self._world.plan.topics)
        count = self._world.cluster.delete_topic(topic)
        if count:
            # At times so soon that nobody notices, at times so late that its markers have been given up.
            self._at(4 * self._rng.random() ** 3, self._world.cluster.create_topic, topic, count)

    def _compact(self) -> None:
        for where, led in self._world.cluster.led.items():
            if where.topic == LOG_TOPIC:
                led.partition.compact(self._rng.randint(0, led.partition.high_watermark))
