"""The coordinator's log and feed on simulated brokers: the same port, and the same meaning of errors, as on Kafka."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from random import Random

from coordinator.log.port import (
    FencedError,
    Kind,
    OutOfSequenceError,
    Stored,
    UnavailableError,
    UnknownOutcomeError,
    Writer,
)
from coordinator.log.replay import Replay
from oncebox.wire import ErrorCode, TopicPartition
from proof.sim.cluster import Cluster
from proof.sim.network import NoAnswerError
from proof.sim.recorder import FEED_TOPIC, LOG_TOPIC

APPEND_TIMEOUT_S = 1.0
READ_RETRY_S = 0.05
TOPICS = {Kind.LOG: LOG_TOPIC, Kind.FEED: FEED_TOPIC}


class SimStore:
    def __init__(self, cluster: Cluster, rng: Random) -> None:
        self._cluster = cluster
        self._rng = rng

    async def append(
        self, kind: Kind, partition: int, writer: Writer, sequence: int, records: Sequence[tuple[bytes, bytes | None]]
    ) -> int:
        where = TopicPartition(TOPICS[kind], partition)
        try:
            led = self._cluster.led[where]
            error, offset, _ = await self._cluster.produce(
                led.leader_id,
                where,
                producer_id=writer.producer_id,
                epoch=writer.epoch,
                sequence=sequence,
                records=records,
                transactional=False,
                timeout_s=APPEND_TIMEOUT_S,
            )
        except NoAnswerError as failure:
            raise UnknownOutcomeError(str(failure)) from failure
        match error:
            case ErrorCode.NONE:
                return offset
            case ErrorCode.INVALID_PRODUCER_EPOCH:
                raise FencedError("a newer leader writes this partition")
            case ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER:
                raise OutOfSequenceError("the broker answers OUT_OF_ORDER_SEQUENCE_NUMBER")
            case _:
                raise UnavailableError(error.name)

    async def log_topic_id(self) -> bytes:
        return LOG_TOPIC.encode()

    async def end_offset(self, kind: Kind, partition: int) -> int:
        where = TopicPartition(TOPICS[kind], partition)
        while True:
            led = self._cluster.led[where]
            try:
                return await self._cluster.end_offset(led, timeout_s=APPEND_TIMEOUT_S)
            except NoAnswerError:
                await asyncio.sleep(READ_RETRY_S)

    def read(
        self, kind: Kind, partition: int, offset_first: int, offset_next: int | None
    ) -> AsyncIterator[Sequence[Stored]]:
        return _Reading(self, self._cluster, self._rng, kind, partition, offset_first, offset_next)

    async def replay(self, partition: int, offset_first: int, offset_next: int, replay: Replay) -> None:
        async for chunk in self.read(Kind.LOG, partition, offset_first, offset_next):
            replay.fold(chunk)


class _Reading:
    """An iterator, not a generator: one that a dead process has left behind must not be cleaned up later."""

    def __init__(
        self,
        store: SimStore,
        cluster: Cluster,
        rng: Random,
        kind: Kind,
        partition: int,
        offset_first: int,
        offset_next: int | None,
    ) -> None:
        self._store = store
        self._cluster = cluster
        self._rng = rng
        self._kind = kind
        self._partition = partition
        self._position = offset_first
        self._end = offset_next

    def __aiter__(self) -> "_Reading":
        return self

    async def __anext__(self) -> Sequence[Stored]:
        if self._end is None:
            self._end = await self._store.end_offset(self._kind, self._partition)
        while self._position < self._end:
            chunk = await self._chunk(self._end)
            if chunk:
                return chunk
        raise StopAsyncIteration

    async def _chunk(self, end: int) -> Sequence[Stored]:
        """Some of what is left. Others write, and compaction removes, between two of them."""
        led = self._cluster.led[TopicPartition(TOPICS[self._kind], self._partition)]
        chunk_next = min(end, self._position + self._rng.randint(1, 64))
        position = self._position
        try:
            found: list[tuple[int, tuple[bytes, bytes | None]]] = await self._cluster.ask(
                led.leader_id,
                lambda reply: reply(list(led.partition.read(position, chunk_next))),
                timeout_s=APPEND_TIMEOUT_S,
            )
        except NoAnswerError:
            await asyncio.sleep(READ_RETRY_S)
            return ()
        self._position = chunk_next
        return [Stored(offset, key, value) for offset, (key, value) in found]
