"""One log partition without I/O: decides, keeps every record, applies, and can lose its memory.

What a shard does around the core, in its plainest form, so that tests of the core speak of commands and outcomes only.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from coordinator.core.apply import PartitionState, apply
from coordinator.core.commands import Accepted, Command, Decision, NeedsProducerId
from coordinator.core.decide import decide
from coordinator.core.grants import Context, Limits
from coordinator.core.invariants import check, check_step
from coordinator.core.owed import Debt, owed
from coordinator.core.records import IdState, Record, Tombstone, TopicPartition, TopicState

HOUR_MS = 3_600_000
# Some instant in 2023: real clocks are far from 0, and so are the numbers in records.
START_MS = 1_700_000_000_000

Number = tuple[str, int]


def fold(records: Iterable[Record]) -> PartitionState:
    state = PartitionState(unpack=_nothing_is_packed)
    for record in records:
        apply(state, record)
    return state


def compacted(records: Iterable[Record]) -> list[Record]:
    """What log compaction leaves: of each key the last record."""
    last: dict[tuple[str, str], Record] = {}
    for record in records:
        match record:
            case IdState(transactional_id=name) | Tombstone(transactional_id=name):
                key = ("id", name)
            case TopicState(topic=name):
                key = ("topic", name)
            case _:
                key = ("partition", "")
        last.pop(key, None)
        last[key] = record
    return list(last.values())


def _nothing_is_packed(transactional_id: str, value: bytes) -> IdState:
    raise NotImplementedError(transactional_id)


@dataclass(slots=True)
class Desk:
    limits: Limits = field(default_factory=Limits)
    now_ms: int = START_MS
    # Durable: what a crash leaves.
    log: list[Record] = field(default_factory=list)
    feed: list[Number] = field(default_factory=list)
    # Volatile: the fold of the log, and the markers acknowledged so far.
    state: PartitionState = field(default_factory=lambda: fold(()))
    acknowledged: dict[Number, set[TopicPartition]] = field(default_factory=dict)
    # Numbers of which a marker was given up.
    dropped: set[Number] = field(default_factory=set)
    # Out of the world: never the same twice.
    producer_id_next: int = 1000
    producer_ids_at_hand: int = 4
    decision_next: int = 1
    feed_is_available: bool = True

    def call(self, command: Command) -> Decision:
        """Decides, appends, applies."""
        decision = self.ask(command)
        if isinstance(decision, Accepted):
            self.append(decision)
        return decision

    def ask(self, command: Command) -> Decision:
        """Decides only; without `append` that is an append that failed."""
        state = self.state.get(command.transactional_id)
        decision = decide(state, command, self.context(command.transactional_id))
        if isinstance(decision, NeedsProducerId):
            # As a shard does: it draws some and asks again.
            self.producer_ids_at_hand = 4
            decision = decide(state, command, self.context(command.transactional_id))
        if isinstance(decision, Accepted):
            # Taken even if the append fails: a producer id that may have been granted is never granted again.
            self.producer_id_next += decision.producer_ids_used
            self.producer_ids_at_hand -= decision.producer_ids_used
        return decision

    def append(self, decision: Accepted) -> None:
        for record in decision.records:
            if isinstance(record, IdState):
                check_step(self.state.get(record.transactional_id), record)
                self.decision_next += 1
            self.log.append(record)
            apply(self.state, record)
        self._forget_completed()

    def context(self, transactional_id: str) -> Context:
        unpaid, paid = {}, set()
        for debt in self.owed(transactional_id):
            remaining = debt.partitions - self.acknowledged.get((transactional_id, debt.number), set())
            if remaining or self.owes_manifest(debt):
                unpaid[debt.number] = remaining
            else:
                paid.add(debt.number)
        return Context(
            now_ms=self.now_ms,
            producer_ids=tuple(range(self.producer_id_next, self.producer_id_next + self.producer_ids_at_hand)),
            decision=self.decision_next,
            feed_offset_next=len(self.feed),
            feed_is_available=self.feed_is_available,
            number_floor=self.state.number_floor,
            paid=frozenset(paid),
            owed=unpaid,
            dropped=frozenset(number for number in paid if (transactional_id, number) in self.dropped),
            topics=self.state.topics,
            topic_changes=self.state.topic_changes,
            limits=self.limits,
        )

    # --- debts ------------------------------------------------------------------------------------------------------

    def owed(self, transactional_id: str) -> tuple[Debt, ...]:
        state = self.state.get(transactional_id)
        return owed(state) if state is not None else ()

    def debt(self, transactional_id: str, number: int) -> Debt:
        return next(debt for debt in self.owed(transactional_id) if debt.number == number)

    def owes_manifest(self, debt: Debt) -> bool:
        return debt.commit and (debt.transactional_id, debt.number) not in self.feed

    def unpaid(self, transactional_id: str) -> Mapping[int, frozenset[TopicPartition]]:
        return self.context(transactional_id).owed

    def write_manifest(self, debt: Debt) -> None:
        if self.owes_manifest(debt):
            self.feed.append((debt.transactional_id, debt.number))

    def acknowledge(self, debt: Debt, partition: TopicPartition) -> None:
        self.acknowledged.setdefault((debt.transactional_id, debt.number), set()).add(partition)

    def drop(self, debt: Debt, partition: TopicPartition) -> None:
        """Brokers have said for long enough that the partition is gone: its marker is given up."""
        self.acknowledge(debt, partition)
        self.dropped.add((debt.transactional_id, debt.number))

    def pay(self, transactional_id: str, *numbers: int) -> None:
        """All that these numbers owe (none named: all that the id owes)."""
        for debt in self.owed(transactional_id):
            if not numbers or debt.number in numbers:
                self.write_manifest(debt)
                for partition in debt.partitions:
                    self.acknowledge(debt, partition)

    def _forget_completed(self) -> None:
        incomplete = {(state.transactional_id, debt.number) for state in self.state for debt in owed(state)}
        self.acknowledged = {number: done for number, done in self.acknowledged.items() if number in incomplete}

    # --- time and crashes -------------------------------------------------------------------------------------------

    def advance(self, milliseconds: int) -> None:
        self.now_ms += milliseconds

    def crash(self, *, compact: bool = False) -> None:
        """A new leader: it has the log and the feed, and nothing else."""
        self.state = fold(compacted(self.log) if compact else self.log)
        self.acknowledged.clear()
        self.dropped.clear()
        for state in self.state:
            check(state)

    def plant(self, state: IdState, **changes: object) -> None:
        """Puts a record into the log that would take very long to reach by calls."""
        record = replace(state, **changes)
        check(record)
        self.log.append(record)
        apply(self.state, record)
