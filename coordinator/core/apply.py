"""The state of one log partition: fold(log). Only `apply` changes it, live and on replay alike."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge

from coordinator.core.packed import PackedIds
from coordinator.core.records import IdState, NumberFloor, Record, Tombstone, TopicState

Pack = Callable[[IdState], bytes]
Unpack = Callable[[str, bytes], IdState]


@dataclass(slots=True)
class PartitionState:
    """Ids with transactions are kept as they are; idle ones may be kept packed, for there can be millions."""

    unpack: Unpack
    active: dict[str, IdState] = field(default_factory=dict)
    packed: PackedIds = field(default_factory=PackedIds)
    number_floor: int = 0
    # By name; how many of them changed is counted, not timed: the clocks of two leaders need not agree.
    topics: dict[str, TopicState] = field(default_factory=dict)
    topic_changes: int = 0

    def get(self, transactional_id: str) -> IdState | None:
        state = self.active.get(transactional_id)
        if state is None and (value := self.packed.get(transactional_id)) is not None:
            return self.unpack(transactional_id, value)
        return state

    def names_from(self, name: str) -> Iterator[str]:
        """In their order."""
        packed = (other for block in self.packed.blocks_from(name) for other in sorted(block) if other >= name)
        return merge(sorted(other for other in self.active if other >= name), packed)

    def __len__(self) -> int:
        return len(self.active) + len(self.packed)

    def __iter__(self) -> Iterator[IdState]:
        yield from self.active.values()
        for block in self.packed.blocks_from():
            for transactional_id, value in block.items():
                yield self.unpack(transactional_id, value)


def apply(state: PartitionState, record: Record) -> None:
    match record:
        case IdState():
            # Packed ones are asked only about ids that come to life: that takes time.
            if record.transactional_id not in state.active:
                state.packed.discard(record.transactional_id)
            state.active[record.transactional_id] = record
        case Tombstone():
            state.packed.discard(record.transactional_id)
            state.active.pop(record.transactional_id, None)
        case NumberFloor():
            state.number_floor = max(state.number_floor, record.number_floor)
        case TopicState():
            state.topics[record.topic] = record
            state.topic_changes = max(state.topic_changes, record.change)


def pack_idle(state: PartitionState, pack: Pack, updated_before_ms: int) -> Iterator[None]:
    """Packs ids that have no transaction and were last changed before the given time: one with each step."""
    for entry in list(state.active.values()):
        idle = not entry.transactions and entry.updated_at_ms < updated_before_ms
        # Between two steps it may have come to life again.
        if idle and state.active.get(entry.transactional_id) is entry:
            del state.active[entry.transactional_id]
            state.packed.put(entry.transactional_id, pack(entry))
            yield
    while state.packed.press():
        yield


def idle_ids(
    state: PartitionState, updated_at_ms: Callable[[bytes], int], updated_before_ms: int
) -> Iterator[Sequence[str]]:
    """Ids that have no transaction and were last changed before the given time: some with each step."""
    yield [
        entry.transactional_id
        for entry in state.active.values()
        if not entry.transactions and entry.updated_at_ms < updated_before_ms
    ]
    for block in state.packed.blocks_from():
        yield [name for name, value in block.items() if updated_at_ms(value) < updated_before_ms]
