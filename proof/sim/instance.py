"""One coordinator instance: the real leadership, shards, marker writer and router, on simulated parts.

It can crash and start anew (as another process at the same address), stop, and be told wrong things of who leads what.
"""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from coordinator.calls import Answer
from coordinator.core.commands import Command, ErrorCode, GetOutcome, OutcomeForgotten, OutcomeKnown, Refused
from coordinator.core.grants import Limits
from coordinator.core.owed import Debt
from coordinator.core.records import newest_transaction
from coordinator.core.state import TransactionState
from coordinator.feed import Lookups
from coordinator.leadership import Leadership
from coordinator.markers.writer import MarkerWriter
from coordinator.producer_ids import ProducerIdPool
from coordinator.router import Router
from coordinator.serving import ShardSettings
from coordinator.shard import Shard, ShardState
from proof.checker import history as h
from proof.sim.brokers import SimBrokers
from proof.sim.loop import Process, ProcessState
from proof.sim.network import Reply
from proof.sim.plan import Fault
from proof.sim.store import SimStore
from proof.sim.topics import with_topic_ids
from proof.sim.world import World

# Some instant in 2023: real clocks are far from 0.
START_MS = 1_700_000_000_000
MARKER_TIMEOUT_MS = 2_000
LISTED_MAX = 100


@dataclass(slots=True)
class NoPeers:
    """Hears of nobody: clients find the leader by asking around."""

    leading: dict[str, Any] = field(default_factory=dict)


class Markers(MarkerWriter):
    """Here ids of topics are known at once, which else are believed for seconds: so the topics of what was prepared are
    looked at first, however short that was.
    """

    look_first_at: AbstractSet[tuple[str, int]] = frozenset()

    def pay(self, debt: Debt, **told: Any) -> Any:
        is_old = debt.is_old or (debt.transactional_id, debt.number) in self.look_first_at
        return super().pay(replace(debt, is_old=is_old), **told)


class Instance:
    def __init__(self, world: World, address: str) -> None:
        self.address = address
        # How far its clock is ahead.
        self.skew_s = 0.0
        self._world = world
        self._starts = 0
        self.start()

    def start(self) -> None:
        self._starts += 1
        self.name = f"{self.address}.{self._starts}"
        self.process = Process(self._world.loop, self.name)
        self.process.context.copy().run(self._build)

    @property
    def running(self) -> bool:
        return self.process.state is ProcessState.RUNNING

    @property
    def dead(self) -> bool:
        return self.process.state is ProcessState.DEAD

    def _build(self) -> None:
        world = self._world
        self._store = SimStore(world.cluster, world.rng)
        self._markers = Markers(SimBrokers(world.cluster), timeout_ms=MARKER_TIMEOUT_MS, jitter=world.rng.random)
        if world.plan.has(Fault.DELETED):
            self._markers.look_first_at = world.recorder.prepared
        self._lookups = Lookups(self._store, world.plan.log_partitions)
        self._producer_ids = ProducerIdPool(world.cluster.new_producer_id)
        self.leadership = Leadership(self.name, make_shard=self._make_shard, changed=_ignore)
        self._router = Router(
            instance=self.name,
            address=self.address,
            partition_count=world.plan.log_partitions,
            leadership=self.leadership,
            peers=NoPeers(),  # type: ignore[arg-type]
        )

    def _make_shard(self, partition: int) -> Shard:
        plan = self._world.plan

        def watch() -> None:
            if shard.state is ShardState.FAILED:
                where = f"log partition {partition} at {self.name}"
                self._world.recorder.history.append(h.Broken(where=where, error=shard.refusal().message))

        shard = Shard(
            partition=partition,
            store=self._store,
            markers=self._markers,
            producer_ids=self._producer_ids,
            instance=self.name,
            address=self.address,
            now_ms=self._now_ms,
            nonce=lambda: self._world.rng.randbytes(8),
            settings=ShardSettings(
                limits=Limits(patience_ms=300),
                marker_wait_ms=500,
                transaction_timeout_max_ms=2 * plan.transaction_timeout_ms,
                id_expiration_ms=4_000 if plan.has(Fault.EXPIRY) else 7 * 24 * 3_600_000,
                pack_after_ms=1_000,
                sign_of_life_ms=1_000,
                keep_alive_ms=2_000,
                long_debt_ms=700,
                feed_wait_ms=700,
                batch_max_records=plan.batch_max_records,
            ),
            watchers=self._router.watchers,
            listeners=self._router.listeners,
            state_changed=watch,
        )
        return shard

    def _now_ms(self) -> int:
        return START_MS + int((self._world.loop.time() + self.skew_s) * 1000)

    def serve(self, command: Command, timeout_ms: int, reply: Reply) -> None:
        if self.dead:
            self._world.network.refuse(reply)
        else:
            told = with_topic_ids(command, self._world.cluster)
            if isinstance(told, Refused):
                reply(told)
            else:
                self.process.spawn(self._answer(told, timeout_ms, reply))

    async def _answer(self, command: Command, timeout_ms: int, reply: Reply) -> None:
        try:
            answer = await self._router.call(command, timeout_ms)
            reply(await self._ask_feed(command, answer) if isinstance(command, GetOutcome) else answer)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            self._world.recorder.history.append(h.Broken(where=f"a call at {self.name}", error=repr(error)))
            reply(Refused(code=ErrorCode.COORDINATOR_NOT_AVAILABLE, message=repr(error), retriable=True))

    async def _ask_feed(self, command: GetOutcome, answer: Answer | Refused) -> Answer | Refused:
        """As the API does: the feed knows commits that the log has forgotten."""
        if isinstance(answer, Refused):
            is_forgotten = answer.code is ErrorCode.INVALID_PRODUCER_ID_MAPPING
        else:
            is_forgotten = isinstance(answer.reply, OutcomeForgotten)
        if not is_forgotten:
            return answer
        partition = self._router.partition_of(command.transactional_id)
        outcome = await self._lookups.find_outcome(partition, command.transactional_id, command.number)
        return answer if outcome is None else Answer(reply=OutcomeKnown(outcome=outcome))

    def list_prepared(self, reply: Reply) -> None:
        """As Admin's List does: from memory."""
        if self.dead:
            self._world.network.refuse(reply)
        else:
            self.process.spawn(self._list_prepared(reply))

    async def _list_prepared(self, reply: Reply) -> None:
        newest = (
            (state.transactional_id, newest_transaction(state)) for state in self._router.page("", "", LISTED_MAX)
        )
        reply([(name, each.grant) for name, each in newest if each and each.state is TransactionState.PREPARED])

    def tell(self, what: Callable[..., object], *args: Any) -> None:
        """Comes to its ears as soon as it runs."""
        self._world.loop.call_soon(what, *args, context=self.process.context.copy())

    def assign(self, partition: int) -> None:
        self.tell(self.leadership.assign, {partition})

    def adopt(self, partition: int, alive: set[str]) -> None:
        self.tell(self.leadership.adopt, {partition}, alive)

    def revoke(self, partition: int) -> None:
        self.process.spawn(self.leadership.revoke({partition}))


def _ignore() -> None:
    """Nobody listens."""


class Group:
    """Which instance is to lead which partition: an opinion that comes late and may be wrong."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._wanted: dict[int, Instance] = {}
        for partition in range(world.plan.log_partitions):
            self._give(partition, world.rng.choice(world.instances))

    def leader_of(self, partition: int) -> Instance:
        return self._wanted[partition]

    def _give(self, partition: int, instance: Instance) -> None:
        self._wanted[partition] = instance
        instance.assign(partition)

    def lost(self, instance: Instance) -> None:
        """It does not answer any more: others take over what it led."""
        rng = self._world.rng
        others = [other for other in self._world.instances if other is not instance and not other.dead]
        for partition, wanted in self._wanted.items():
            if wanted is instance and others:
                if rng.random() < 0.3:
                    for other in others:
                        other.adopt(partition, {each.name for each in others})
                self._give(partition, rng.choice(others))

    def joined(self, instance: Instance) -> None:
        for partition, wanted in self._wanted.items():
            if wanted.dead or wanted is instance:
                self._give(partition, instance)

    def move(self) -> None:
        """In good order."""
        partition = self._world.rng.choice(sorted(self._wanted))
        old = self._wanted[partition]
        others = [other for other in self._world.instances if other is not old and not other.dead]
        if others:
            old.revoke(partition)
            self._wanted[partition] = self._world.rng.choice(others)
            self._world.loop.after(0.05 * self._world.rng.random(), self._tell, partition)

    def _tell(self, partition: int) -> None:
        if not self._wanted[partition].dead:
            self._wanted[partition].assign(partition)

    def disagree(self) -> None:
        """One more instance believes to lead it."""
        partition = self._world.rng.choice(sorted(self._wanted))
        others = [other for other in self._world.instances if other is not self._wanted[partition]]
        self._world.rng.choice(others).assign(partition)

    def agree(self) -> None:
        """Each partition has one leader, and everybody knows."""
        for partition in self._wanted:
            for instance in self._world.instances:
                if instance is not self._wanted[partition]:
                    instance.revoke(partition)
            self._wanted[partition].assign(partition)
