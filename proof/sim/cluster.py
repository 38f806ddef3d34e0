"""Brokers: which of them leads which partition, what each answers, and what goes wrong with them.

Requests arrive here after the network has carried them; an append is answered once it is durable.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple
from uuid import UUID

from coordinator.producer_ids import UnavailableError
from oncebox.wire import ActiveProducer, ErrorCode, PartitionProducers, TopicPartition, TxnMarker
from proof.sim.loop import VirtualLoop
from proof.sim.network import Network, NoAnswerError, Reply, Serve
from proof.sim.partition import Batch, Partition
from proof.sim.recorder import Recorder

# How often a new leader happens to have all that the old one had.
SUFFIX_KEPT = 0.3
# Markers are few, and a late or repeated one is what the epochs are there for.
MARKER_RISK = 5.0


class Appended(NamedTuple):
    error: ErrorCode
    offset: int = -1
    # Where it stands; a real answer does not tell.
    partition: str = ""


@dataclass(slots=True, eq=False)
class Led:
    """A partition and who leads it."""

    partition: Partition
    where: TopicPartition
    leader_id: int
    # Too few replicas: nothing can be appended.
    down: bool = False
    # Replicas lag: appended, but not durable yet.
    lagging: bool = False
    # Answers that wait until the partition is durable up to an offset.
    waiting: list[tuple[int, Callable[[], None]]] = field(default_factory=list)


def incarnation(topic: str, index: int, topic_id: bytes) -> str:
    """The name of a partition, and of no other that was or will be."""
    return f"{topic}-{index}@{int.from_bytes(topic_id)}"


class Cluster:
    def __init__(
        self,
        loop: VirtualLoop,
        rng: Random,
        network: Network,
        recorder: Recorder,
        *,
        nodes: int,
        marker_version_max: int,
    ) -> None:
        self._loop = loop
        self._rng = rng
        self._network = network
        self._recorder = recorder
        self._marker_version_max = marker_version_max
        self._producer_id_next = 1000
        self._incarnations = 0
        self.nodes = list(range(1, nodes + 1))
        self.down: set[int] = set()
        self.slow: set[int] = set()
        self.led: dict[TopicPartition, Led] = {}
        self.topic_ids: dict[str, UUID] = {}
        # How likely a marker request is carried out in part and never answered, or answered in part.
        self.mute_markers = 0.0
        # How likely a client's write arrives again, or late.
        self.write_risk = 0.0

    def create_topic(self, topic: str, partitions: int) -> None:
        self._incarnations += 1
        self.topic_ids[topic] = UUID(int=self._incarnations)
        for index in range(partitions):
            where = TopicPartition(topic, index)
            partition = Partition(incarnation(topic, index, self.topic_ids[topic].bytes))
            self.led[where] = Led(partition, where, self._rng.choice(self.nodes))

    def delete_topic(self, topic: str) -> int:
        """How many partitions it had."""
        self.topic_ids.pop(topic, None)
        gone = [where for where in self.led if where.topic == topic]
        for where in gone:
            self._recorder.deleted(self.led.pop(where).partition)
        return len(gone)

    def partition(self, where: TopicPartition) -> Partition | None:
        led = self.led.get(where)
        return led.partition if led else None

    # --- requests -----------------------------------------------------------------------------------------------

    async def ask(self, node_id: int, serve: Serve, *, timeout_s: float, risk: float = 1.0) -> Any:
        def arrive(reply: Reply) -> None:
            if node_id in self.down:
                self._network.refuse(reply)
            else:
                serve(reply)

        delay_s = 0.3 if node_id in self.slow else 0.0
        return await self._network.ask(arrive, timeout_s=timeout_s, delay_s=delay_s, risk=risk)

    async def produce(
        self,
        node_id: int,
        where: TopicPartition,
        *,
        producer_id: int,
        epoch: int,
        sequence: int,
        records: Sequence[Any],
        transactional: bool,
        timeout_s: float,
        registered: str = "",
    ) -> Appended:
        """Goes by name, however late. `registered`: which incarnation its transaction was registered with, if any."""

        def serve(reply: Reply) -> None:
            led, error = self._writable(node_id, where)
            if led is None:
                reply(Appended(error))
                return
            partition = led.partition
            offset_next = partition.offset_next
            error, batch = partition.append(
                producer_id=producer_id,
                epoch=epoch,
                sequence=sequence,
                records=list(records),
                transactional=transactional,
            )
            if batch is None:
                reply(Appended(error))
                return
            if batch.offset == offset_next:
                batch.stray = registered not in {"", partition.name}
                self._recorder.stored(partition, batch)
            self._when_durable(led, batch, lambda: reply(Appended(error, batch.offset, partition.name)))

        if transactional and self._rng.random() < self.write_risk:
            self._network.stray(serve)
        answer: Appended = await self.ask(node_id, serve, timeout_s=timeout_s)
        return answer

    async def write_markers(
        self, node_id: int, markers: Sequence[TxnMarker], *, timeout_s: float
    ) -> dict[int, dict[TopicPartition, ErrorCode]]:
        """By name too; but what was sent before a topic was created does not reach it: see docs/decisions/0060."""
        sent_to = {where: self.partition(where) for marker in markers for where in marker.partitions}

        def serve(reply: Reply) -> None:
            answer: dict[int, dict[TopicPartition, ErrorCode]] = {}
            owed = [(marker, where) for marker in markers for where in marker.partitions]
            mute = self._rng.random() < self.mute_markers
            if mute:
                owed = owed[: self._rng.randint(0, len(owed))]
            left = len(owed)

            def done(marker: TxnMarker, where: TopicPartition, error: ErrorCode) -> None:
                nonlocal left
                left -= 1
                if self._rng.random() >= self.mute_markers:
                    answer.setdefault(marker.producer_id, {})[where] = error
                if not left and not mute:
                    reply(answer)

            for marker, where in owed:
                if self.partition(where) is sent_to[where]:
                    self._mark(node_id, marker, where, done)
                else:
                    done(marker, where, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)

        answered: dict[int, dict[TopicPartition, ErrorCode]] = await self.ask(
            node_id, serve, timeout_s=timeout_s, risk=MARKER_RISK
        )
        return answered

    def _mark(
        self,
        node_id: int,
        marker: TxnMarker,
        where: TopicPartition,
        done: Callable[[TxnMarker, TopicPartition, ErrorCode], None],
    ) -> None:
        led, error = self._writable(node_id, where)
        if led is None:
            done(marker, where, error)
            return
        error, batch = led.partition.mark(
            producer_id=marker.producer_id,
            epoch=marker.producer_epoch,
            commit=marker.committed,
            coordinator_epoch=marker.coordinator_epoch,
            transaction_version=min(marker.transaction_version, self._marker_version_max),
        )
        if batch is None:
            done(marker, where, error)
            return
        self._recorder.marked(led.partition, batch)
        self._when_durable(led, batch, lambda: done(marker, where, ErrorCode.NONE))

    def end_hanging(self, led: Led, batch: Batch) -> None:
        """By the search for hanging transactions."""
        _, marker = led.partition.mark(
            producer_id=batch.producer_id,
            epoch=led.partition.producers[batch.producer_id].epoch + 1,
            commit=False,
            coordinator_epoch=led.partition.producers[batch.producer_id].coordinator_epoch,
            transaction_version=1,
        )
        if marker is not None:
            self._recorder.marked(led.partition, marker, hanging=True)
            self._when_durable(led, marker, lambda: None)

    async def describe_producers(
        self, node_id: int, wanted: Iterable[TopicPartition], *, timeout_s: float
    ) -> dict[TopicPartition, PartitionProducers]:
        def describe(where: TopicPartition) -> PartitionProducers:
            led = self.led.get(where)
            error = ErrorCode.NONE
            if led is None:
                error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            elif led.leader_id != node_id:
                error = ErrorCode.NOT_LEADER_OR_FOLLOWER
            if led is None or error:
                return PartitionProducers(error=error, error_message=None, producers=())
            producers = tuple(
                ActiveProducer(
                    producer_id=producer_id,
                    producer_epoch=producer.epoch,
                    last_sequence=producer.sequence_next - 1,
                    last_timestamp_ms=0,
                    coordinator_epoch=producer.coordinator_epoch,
                    txn_start_offset=producer.open[0].offset if producer.open else None,
                )
                for producer_id, producer in led.partition.producers.items()
            )
            return PartitionProducers(error=error, error_message=None, producers=producers)

        asked = tuple(wanted)
        answer: dict[TopicPartition, PartitionProducers] = await self.ask(
            node_id, lambda reply: reply({where: describe(where) for where in asked}), timeout_s=timeout_s
        )
        return answer

    async def end_offset(self, led: Led, *, timeout_s: float) -> int:
        end: int = await self.ask(led.leader_id, lambda reply: reply(led.partition.high_watermark), timeout_s=timeout_s)
        return end

    async def metadata(self, *, timeout_s: float) -> tuple[dict[TopicPartition, int], dict[str, UUID]]:
        """Leaders and topic ids, from any broker that is up."""
        up = [node for node in self.nodes if node not in self.down]
        if not up:
            raise NoAnswerError("no broker answers")

        def serve(reply: Reply) -> None:
            leaders = {where: led.leader_id for where, led in self.led.items() if led.leader_id not in self.down}
            reply((leaders, dict(self.topic_ids)))

        answer: tuple[dict[TopicPartition, int], dict[str, UUID]] = await self.ask(
            self._rng.choice(up), serve, timeout_s=timeout_s
        )
        return answer

    async def new_producer_id(self) -> int:
        def serve(reply: Reply) -> None:
            self._producer_id_next += 1
            reply(self._producer_id_next)

        try:
            producer_id: int = await self.ask(self._rng.choice(self.nodes), serve, timeout_s=5.0)
        except NoAnswerError as error:
            raise UnavailableError(str(error)) from error
        return producer_id

    def _writable(self, node_id: int, where: TopicPartition) -> tuple[Led | None, ErrorCode]:
        led = self.led.get(where)
        if led is None:
            return None, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if led.leader_id != node_id:
            return None, ErrorCode.NOT_LEADER_OR_FOLLOWER
        if led.down:
            return None, ErrorCode.NOT_ENOUGH_REPLICAS
        return led, ErrorCode.NONE

    def _when_durable(self, led: Led, batch: Batch, then: Callable[[], None]) -> None:
        if not led.lagging:
            self._replicate(led)
        if batch.offset_next <= led.partition.high_watermark:
            then()
        else:
            led.waiting.append((batch.offset_next, then))

    def _replicate(self, led: Led) -> None:
        for batch in led.partition.replicate():
            self._recorder.durable(led.where, batch)
        waiting, led.waiting = led.waiting, []
        for _, then in waiting:
            then()

    # --- mishaps ------------------------------------------------------------------------------------------------

    def catch_up(self, where: TopicPartition) -> None:
        """The replicas lag no longer."""
        led = self.led.get(where)
        if led is not None and led.lagging:
            led.lagging = False
            self._replicate(led)

    def elect(self, where: TopicPartition) -> None:
        """Another broker leads. What was not durable may be lost; what waited for it is never answered."""
        led = self.led.get(where)
        if led is None:
            return
        others = [node for node in self.nodes if node != led.leader_id and node not in self.down]
        if others:
            led.leader_id = self._rng.choice(others)
        led.waiting.clear()
        led.lagging = False
        if self._rng.random() < SUFFIX_KEPT:
            self._replicate(led)
        elif led.partition.lose_suffix():
            self._recorder.lost(led.partition)

    def fail(self, node_id: int) -> None:
        self.down.add(node_id)
        for where, led in list(self.led.items()):
            if led.leader_id == node_id:
                self.elect(where)

    def heal(self) -> None:
        self.down.clear()
        self.slow.clear()
        self.mute_markers = self.write_risk = 0.0
        for where, led in self.led.items():
            led.down = False
            self.catch_up(where)
