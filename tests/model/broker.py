"""A broker as far as transactions go, with the marker semantic of version 1, which forgives nothing.

Per (producer id, partition): the epoch, the next sequence, and the records that are open. A batch of an old epoch is
refused; one of a higher epoch joins what is still open; a marker of the current or a higher epoch ends what is open.
"""

from dataclasses import dataclass, field

from coordinator.core.records import TopicPartition

INVALID_PRODUCER_EPOCH = 47


@dataclass(frozen=True, slots=True)
class Value:
    """A record; it says which transaction it was written under, so that a checker can tell."""

    transactional_id: str
    number: int
    writer: str
    serial: int


@dataclass(slots=True)
class ProducerState:
    epoch: int = -1
    sequence_next: int = 0
    open: list[tuple[int, Value]] = field(default_factory=list)


@dataclass(slots=True)
class Marker:
    transactional_id: str
    number: int
    producer_id: int
    epoch: int
    commit: bool
    partition: TopicPartition


@dataclass(slots=True)
class Broker:
    producers: dict[tuple[int, TopicPartition], ProducerState] = field(default_factory=dict)
    offsets: dict[TopicPartition, int] = field(default_factory=dict)
    # What a read_committed consumer can see, and what it never will.
    visible: dict[TopicPartition, list[tuple[int, Value]]] = field(default_factory=dict)
    dropped: list[Value] = field(default_factory=list)
    # Topics that were deleted and created again.
    recreated: set[str] = field(default_factory=set)

    def recreate(self, topic: str) -> None:
        """Another topic of that name: it has neither the records nor the producers of the old one."""
        self.recreated.add(topic)
        self.producers = {key: state for key, state in self.producers.items() if key[1].topic != topic}
        for kept in (self.offsets, self.visible):
            for partition in [partition for partition in kept if partition.topic == topic]:
                del kept[partition]

    def produce(
        self, producer_id: int, epoch: int, sequence: int, partition: TopicPartition, value: Value
    ) -> int | None:
        """The record's offset, also of a repeated sequence (which is not stored); None: an old epoch or a gap."""
        # Of a producer id that it does not know a broker takes any sequence.
        is_new = (producer_id, partition) not in self.producers
        producer = self.producers.setdefault((producer_id, partition), ProducerState())
        if epoch < producer.epoch:
            return None
        if epoch > producer.epoch:
            producer.epoch, producer.sequence_next = epoch, 0
        if sequence < producer.sequence_next:
            # Acknowledged although the bytes may differ: nothing but producer id, epoch and sequence counts.
            return self.offsets[partition] - 1
        if sequence > producer.sequence_next and not is_new:
            return None
        producer.sequence_next = max(producer.sequence_next, sequence)
        producer.sequence_next += 1
        offset = self._take_offset(partition)
        producer.open.append((offset, value))
        return offset

    def mark(self, marker: Marker) -> int:
        """0 or error 47. Captures are errors of the caller, found here because only here they can be seen."""
        producer = self.producers.setdefault((marker.producer_id, marker.partition), ProducerState())
        if marker.epoch < producer.epoch:
            return INVALID_PRODUCER_EPOCH
        if marker.epoch > producer.epoch:
            producer.epoch, producer.sequence_next = marker.epoch, 0
        for offset, value in producer.open:
            # What came late to another topic of that name may be aborted together with what is there now.
            is_harmless = not marker.commit and marker.partition.topic in self.recreated
            if (value.transactional_id, value.number) != (marker.transactional_id, marker.number) and not is_harmless:
                raise AssertionError(f"cross-transaction capture: {marker} ends {value}")
            if marker.commit:
                self.visible.setdefault(marker.partition, []).append((offset, value))
            else:
                self.dropped.append(value)
        producer.open.clear()
        self._take_offset(marker.partition)
        return 0

    def open_values(self) -> list[Value]:
        return [value for producer in self.producers.values() for _, value in producer.open]

    def visible_values(self) -> list[Value]:
        return [value for values in self.visible.values() for _, value in values]

    def _take_offset(self, partition: TopicPartition) -> int:
        offset = self.offsets.get(partition, 0)
        self.offsets[partition] = offset + 1
        return offset
