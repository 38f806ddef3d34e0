"""fold(log): reads a log partition's records into its state. Fails closed on anything it cannot read.

Idle ids stay the bytes that they are in the log: there can be millions, and most are never asked for.
"""

from collections.abc import Sequence

from coordinator.core.apply import PartitionState, apply
from coordinator.core.packed import PackedIds
from coordinator.core.records import NumberFloor, TopicState
from coordinator.log import codec
from coordinator.log.port import Stored


class Replay:
    def __init__(self) -> None:
        self._packed = PackedIds()
        self._with_transactions: set[str] = set()
        self._number_floor = 0
        self._topics: dict[str, TopicState] = {}
        # Of the newest leader: its generation and epoch, and the topic that it led.
        self.leader: tuple[int, int] | None = None
        self.leader_topic_id = b""

    def fold(self, chunk: Sequence[Stored]) -> None:
        # As compaction would: of an id in use there are many records, and only the last counts.
        for entry in {entry.key: entry for entry in chunk}.values():
            transactional_id = codec.id_of(entry.key)
            if transactional_id is not None:
                self._fold_id(transactional_id, entry.value)
            else:
                self._fold_other(entry)

    def _fold_id(self, transactional_id: str, value: bytes | None) -> None:
        if value is None:
            self._packed.discard(transactional_id)
            self._with_transactions.discard(transactional_id)
            return
        parsed = codec.parse_value(value)
        if not parsed.HasField("id"):
            raise codec.CorruptLogError(f"the record of the id {transactional_id!r} is not an id's state")
        self._packed.put(transactional_id, value)
        if parsed.id.transactions:
            self._with_transactions.add(transactional_id)
        elif self._with_transactions:
            self._with_transactions.discard(transactional_id)

    def _fold_other(self, entry: Stored) -> None:
        key = codec.parse_key(entry.key)
        kind = key.WhichOneof("key")
        if entry.value is None:
            raise codec.CorruptLogError(f"the {kind} record at offset {entry.offset} of the log is a tombstone")
        value = codec.parse_value(entry.value)
        if value.WhichOneof("value") != kind:
            raise codec.CorruptLogError(f"the {kind} record at offset {entry.offset} of the log is something else")
        if kind == "partition":
            self._number_floor = max(self._number_floor, value.partition.number_floor)
        elif kind == "topic":
            topic = TopicState(topic=key.topic, topic_id=value.topic.topic_id, change=value.topic.change)
            self._topics[key.topic] = topic
        else:
            self.leader = (value.leader.generation, value.leader.epoch)
            self.leader_topic_id = value.leader.log_topic_id

    def decided_max(self, transactional_id: str) -> int:
        """No higher number of the id can be decided, as far as the log tells."""
        value = self._packed.get(transactional_id)
        return self._number_floor if value is None else codec.parse_value(value).id.number - 1

    def become(self, other: "Replay") -> None:
        """What this has folded counts no more, only what the other has."""
        self.__dict__.update(other.__dict__)

    def press(self) -> bool:
        """Makes some of what was folded smaller; whether there is more to do."""
        return self._packed.press()

    def finish(self) -> PartitionState:
        state = PartitionState(unpack=codec.decode_id, packed=self._packed)
        apply(state, NumberFloor(number_floor=self._number_floor))
        for topic in self._topics.values():
            apply(state, topic)
        for transactional_id in sorted(self._with_transactions):
            value = self._packed.get(transactional_id)
            if value is not None:
                apply(state, codec.decode_id(transactional_id, value))
        return state
