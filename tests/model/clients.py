"""Clients that keep the rules: they write only where they know to be registered, never after they asked to end, and
commit only what was acknowledged. Whether they have been fenced they cannot know: so each of them may be a zombie.
"""

from dataclasses import dataclass, field

from coordinator.core.commands import (
    Command,
    End,
    Ended,
    ErrorCode,
    Granted,
    Heartbeat,
    InitProducer,
    Prepare,
    Prepared,
    Refused,
    Register,
    Registered,
    Reply,
)
from coordinator.core.records import (
    NOTHING,
    OFFSETS_TOPIC,
    Contents,
    Grant,
    GroupOffset,
    GroupOffsets,
    GroupPartition,
    Result,
    Run,
    TopicPartition,
    Written,
)
from tests.model.broker import Broker, Value

GROUP = GroupPartition("readers", 7)
# Where the group's offsets are written: for the broker a partition like any other.
OFFSETS = TopicPartition(OFFSETS_TOPIC, GROUP.partition)


@dataclass(slots=True)
class Produce:
    """A batch on its way to the broker."""

    grant: Grant
    sequence: int
    partition: TopicPartition
    value: Value


@dataclass(slots=True)
class Client:
    transactional_id: str
    name: str
    grant: Grant | None = None
    # What it names when it asks for the next grant: of one that was found PREPARED the end brings none.
    claim: Grant | None = None
    registered: frozenset[TopicPartition] = frozenset()
    groups: frozenset[GroupPartition] = frozenset()
    acknowledged: dict[TopicPartition, list[int]] = field(default_factory=dict)
    sequences: dict[TopicPartition, int] = field(default_factory=dict)
    # Which of the topics that had the name, one after the other, have acknowledged something.
    incarnations: set[int] = field(default_factory=set)
    begun: bool = False
    # Asked to end (or prepare) it: nothing may be written any more.
    ending: bool = False
    # What it asked to prepare: to be committed as it is, or not at all.
    prepared: Contents | None = None
    # A send has no answer, or a bad one.
    must_abort: bool = False
    serial: int = 0
    # The call whose answer it waits for.
    request: int = 0

    def take(self, grant: Grant | None) -> None:
        self.grant = self.claim = grant
        self.registered, self.groups = frozenset(), frozenset()
        self.acknowledged, self.sequences, self.incarnations = {}, {}, set()
        self.begun = self.ending = self.must_abort = False
        self.prepared = None

    # --- calls ------------------------------------------------------------------------------------------------------

    def init(self, *, claim: bool, without_waiting: bool, keep_prepared: bool, slots_max: int) -> Command:
        return InitProducer(
            transactional_id=self.transactional_id,
            instance=self.name,
            address=f"{self.name}:1",
            transaction_timeout_ms=60_000,
            grant=self.claim if claim else None,
            without_waiting=without_waiting,
            keep_prepared=keep_prepared,
            slots_max=slots_max,
        )

    def register(self, partitions: frozenset[TopicPartition], *, group: bool, begun: bool) -> Command | None:
        if self.grant is None or self.ending:
            return None
        self.begun |= begun
        return Register(
            transactional_id=self.transactional_id,
            grant=self.grant,
            partitions=partitions,
            groups=frozenset({GROUP}) if group else frozenset(),
            begun_ms_ago=1 if self.begun else None,
        )

    def heartbeat(self) -> Command | None:
        if self.grant is None:
            return None
        begun_ms_ago = 1 if self.begun else None
        return Heartbeat(transactional_id=self.transactional_id, grant=self.grant, begun_ms_ago=begun_ms_ago)

    def prepare(self, metadata: bytes) -> Command | None:
        if self.grant is None or self.must_abort or (self.ending and self.prepared is None):
            return None
        self.ending = True
        self.prepared = self.prepared or self.contents(metadata)
        return Prepare(transactional_id=self.transactional_id, grant=self.grant, contents=self.prepared)

    def end(self, *, commit: bool, metadata: bytes, chain: frozenset[TopicPartition], decided: bool) -> Command | None:
        if self.grant is None or (commit and self.must_abort):
            return None
        self.ending = True
        return End(
            transactional_id=self.transactional_id,
            grant=self.grant,
            result=Result.COMMITTED if commit else Result.ABORTED,
            contents=self.contents(metadata) if self.prepared is None else self.prepared,
            decided_is_enough=decided,
            next_partitions=chain,
        )

    def contents(self, metadata: bytes) -> Contents:
        written = tuple(
            Written(topic=p.topic, partition=p.partition, record_count=len(set(offsets)), runs=_runs(offsets))
            for p, offsets in sorted(self.acknowledged.items())
            if p != OFFSETS
        )
        offsets = GroupOffsets(group_id=GROUP.group_id, offsets=(GroupOffset(topic="in", partition=0, offset_next=1),))
        group_offsets = (offsets,) if OFFSETS in self.acknowledged else ()
        return Contents(written=written, group_offsets=group_offsets, metadata=metadata)

    # --- answers ----------------------------------------------------------------------------------------------------

    def hear(self, command: Command, answer: Reply | Refused) -> None:
        match answer:
            case Granted(prepared=None):
                self.take(answer.grant)
            case Granted():
                # What was prepared is only to be decided.
                self.take(answer.grant)
                self.ending, self.prepared = True, NOTHING
            case Registered() if isinstance(command, Register | Heartbeat):
                if answer.grant != self.grant:
                    self.take(answer.grant)
                if isinstance(command, Register):
                    self.registered |= command.partitions
                    self.groups |= command.groups
                    self.begun |= command.begun_ms_ago is not None
            case Ended() if isinstance(command, End):
                self.take(answer.next_grant)
                self.claim = answer.next_grant or command.grant
                if answer.next_registered:
                    self.registered, self.groups = command.next_partitions, command.next_groups
            case Prepared():
                pass
            case Refused(code=ErrorCode.PRODUCER_FENCED | ErrorCode.INVALID_PRODUCER_ID_MAPPING):
                self.take(None)
            case Refused(retriable=False):
                self.must_abort = True

    # --- data -------------------------------------------------------------------------------------------------------

    def writable(self) -> list[TopicPartition]:
        if self.grant is None or self.ending:
            return []
        return [*sorted(self.registered), *([OFFSETS] if self.groups else [])]

    def write(self, partition: TopicPartition) -> Produce:
        """To one of the writable ones."""
        assert self.grant is not None
        self.begun = True
        self.serial += 1
        sequence = self.sequences.get(partition, 0)
        self.sequences[partition] = sequence + 1
        value = Value(self.transactional_id, self.grant.number, self.name, self.serial)
        return Produce(grant=self.grant, sequence=sequence, partition=partition, value=value)

    def hear_broker(self, produce: Produce, offset: int | None) -> None:
        if offset is None:
            self.must_abort = True
        else:
            self.acknowledged.setdefault(produce.partition, []).append(offset)


def deliver(broker: Broker, produce: Produce) -> int | None:
    grant = produce.grant
    return broker.produce(grant.producer_id, grant.epoch, produce.sequence, produce.partition, produce.value)


def _runs(offsets: list[int]) -> tuple[Run, ...]:
    runs: list[Run] = []
    for offset in sorted(set(offsets)):
        if runs and runs[-1].offset_next == offset:
            runs[-1] = Run(runs[-1].offset_first, offset + 1)
        else:
            runs.append(Run(offset, offset + 1))
    return tuple(runs)
