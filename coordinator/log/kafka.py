"""The store that is Kafka: appends through our own requests, reads as coordinator.log.reading does.

Appends of several partitions to one broker, of log and feed, travel in one request: while one is under way the next
gathers. They have a connection of their own, shared with nothing else.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from time import monotonic
from typing import NamedTuple

from coordinator.log.consumer import ReadError, consumer_config
from coordinator.log.packer import Job, Packer
from coordinator.log.port import (
    FencedError,
    Kind,
    OutOfSequenceError,
    Stored,
    UnavailableError,
    UnknownOutcomeError,
    Writer,
)
from coordinator.log.reading import KafkaReader
from coordinator.log.replay import Replay
from oncebox.wire import (
    ErrorCode,
    KafkaSettings,
    OutcomeUnknownError,
    TopicPartition,
    Wire,
    WireError,
    batch_builder,
)

Records = Sequence[tuple[bytes, bytes | None]]

APPEND_TIMEOUT_MS = 5_000
REPLAY_THREADS = 4
# A log that is longer is read by a process of its own; to start one would take longer than to read this many records.
LONG = 10_000
# Where there was an append so recently, somebody is being served.
BUSY_S = 1.0
LANE = "log"

_LOST = frozenset(
    {ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.DUPLICATE_SEQUENCE_NUMBER, ErrorCode.UNKNOWN_PRODUCER_ID}
)
# The broker may have stored the batch all the same.
_UNKNOWN = frozenset(
    {ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND, ErrorCode.REQUEST_TIMED_OUT, ErrorCode.NETWORK_EXCEPTION}
)

log = logging.getLogger(__name__)


class KafkaStore:
    def __init__(self, wire: Wire, settings: KafkaSettings, *, log_topic: str, feed_topic: str) -> None:
        self._wire = wire
        self._settings = settings
        self._topics = {Kind.LOG: log_topic, Kind.FEED: feed_topic}
        self._lanes: dict[int, _Lane] = {}
        self._reader = KafkaReader(wire, settings, self._topics, threads=REPLAY_THREADS)
        self._packer = Packer()
        self._appended_at_s = 0.0
        # By partition: what was sent and not acknowledged. Sent again, it is the same, byte for byte.
        self._unacknowledged: dict[TopicPartition, _Attempt] = {}

    async def close(self) -> None:
        for lane in self._lanes.values():
            await lane.close()
        self._packer.close()
        self._reader.close()

    async def append(self, kind: Kind, partition: int, writer: Writer, sequence: int, records: Records) -> int:
        self._appended_at_s = monotonic()
        where = TopicPartition(self._topics[kind], partition)
        leader_id = self._wire.leader_id(where)
        if leader_id is None:
            leader_id = await self._find_leader(where)
        attempt = self._unacknowledged.get(where)
        if attempt is None or (attempt.writer, attempt.sequence, attempt.records) != (writer, sequence, records):
            batch = _batch(writer, sequence, records)
            attempt = self._unacknowledged[where] = _Attempt(writer, sequence, records, batch)
        lane = self._lanes.get(leader_id)
        if lane is None:
            lane = self._lanes[leader_id] = _Lane(self._wire, leader_id)
        error, offset = await lane.append(where, attempt.batch)
        if error is ErrorCode.NONE:
            # It may be of a later leadership by now.
            if self._unacknowledged.get(where) is attempt:
                del self._unacknowledged[where]
            return offset
        if error is ErrorCode.INVALID_PRODUCER_EPOCH:
            raise FencedError("a newer leader writes this partition")
        if error in _LOST:
            raise OutOfSequenceError(f"the broker answers {error.name}")
        if error in _UNKNOWN:
            # A leader that has lost touch with the others does not know that it was replaced, and can only say this.
            await lane.refresh([where])
            raise UnknownOutcomeError(error.name)
        if error.retriable:
            if error is ErrorCode.NOT_LEADER_OR_FOLLOWER:
                # Or whoever named it has lost touch with the others.
                self._wire.doubt()
            await self._find_leader(where)
            raise UnavailableError(error.name)
        raise RuntimeError(f"{where.topic}:{where.partition} cannot be written: the broker answers {error.name}")

    async def _find_leader(self, where: TopicPartition) -> int:
        try:
            await self._wire.metadata([where.topic], timeout_ms=APPEND_TIMEOUT_MS)
        except WireError as error:
            raise UnavailableError(str(error)) from error
        leader_id = self._wire.leader_id(where)
        if leader_id is None:
            raise UnavailableError(f"{where.topic}:{where.partition} has no leader")
        return leader_id

    async def log_topic_id(self) -> bytes:
        topic = self._topics[Kind.LOG]
        try:
            metadata = await self._wire.metadata([topic], timeout_ms=APPEND_TIMEOUT_MS)
        except WireError as error:
            raise ReadError(f"no broker tells the id of topic {topic}: {error}") from error
        topic_id = metadata.topics[topic].topic_id
        if topic_id is None:
            raise ReadError(f"topic {topic} is not there")
        return topic_id.bytes

    async def end_offset(self, kind: Kind, partition: int) -> int:
        return await self._reader.end_offset(kind, partition)

    def read(
        self, kind: Kind, partition: int, offset_first: int, offset_next: int | None
    ) -> AsyncIterator[Sequence[Stored]]:
        return self._reader.read(kind, partition, offset_first, offset_next)

    async def replay(self, partition: int, offset_first: int, offset_next: int, replay: Replay) -> None:
        if offset_first > 0 or offset_next <= LONG:
            async for chunk in self.read(Kind.LOG, partition, offset_first, offset_next):
                replay.fold(chunk)
            while replay.press():  # noqa: ASYNC110 - work in small steps, not a wait
                await asyncio.sleep(0)
            return
        job = Job(
            config=consumer_config(self._settings, self._topics[Kind.LOG]),
            topic=self._topics[Kind.LOG],
            partition=partition,
            offset_first=offset_first,
            offset_next=offset_next,
        )
        gently = monotonic() - self._appended_at_s < BUSY_S
        replay.become(await self._packer.replay(job, gently=gently))


class _Attempt(NamedTuple):
    writer: Writer
    sequence: int
    records: Records
    batch: bytes


def _batch(writer: Writer, sequence: int, records: Records) -> bytes:
    builder = batch_builder(
        transactional=False, producer_id=writer.producer_id, producer_epoch=writer.epoch, base_sequence=sequence
    )
    for index, (key, value) in enumerate(records):
        builder.append(index, None, key, value, [])
    return bytes(builder.build())


Gathered = dict[TopicPartition, tuple[bytes, "asyncio.Future[tuple[ErrorCode, int]]"]]


def _fail(sent: Gathered, why: str) -> None:
    for _, future in sent.values():
        if not future.done():
            future.set_exception(UnknownOutcomeError(why))


class _Lane:
    """One connection to one broker: one request under way, the next gathers meanwhile."""

    def __init__(self, wire: Wire, node_id: int) -> None:
        self._wire = wire
        self._node_id = node_id
        self._sent: Gathered = {}
        self._gathered: Gathered = {}
        self._task: asyncio.Task[None] | None = None

    def append(self, where: TopicPartition, batch: bytes) -> "asyncio.Future[tuple[ErrorCode, int]]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[ErrorCode, int]] = loop.create_future()
        self._gathered[where] = (batch, future)
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._send())
        return future

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        _fail(self._sent | self._gathered, "the log is closed")

    async def _send(self) -> None:
        while self._gathered:
            # One more round of the loop: shards that are about to append travel along.
            await asyncio.sleep(0)
            sent, self._gathered = self._gathered, {}
            self._sent = sent
            try:
                answer = await self._wire.produce(
                    self._node_id,
                    {where: batch for where, (batch, _) in sent.items()},
                    timeout_ms=APPEND_TIMEOUT_MS,
                    lane=LANE,
                )
            except Exception as error:  # noqa: BLE001 - whatever it is, what gathers behind it must not wait for ever
                if not isinstance(error, OutcomeUnknownError):
                    log.warning("an append to broker %d failed: %r", self._node_id, error)
                await self.refresh(sent)
                _fail(sent, str(error) if isinstance(error, OutcomeUnknownError) else repr(error))
                continue
            for where, (_, future) in sent.items():
                appended = answer.get(where)
                if future.done():
                    continue
                if appended is None:
                    future.set_exception(UnknownOutcomeError("the broker's answer does not name the partition"))
                else:
                    future.set_result((appended.error, appended.base_offset))

    async def refresh(self, sent: Iterable[TopicPartition]) -> None:
        """The broker may be gone for good: the next attempt must know the new leaders. If not even that can be had, the
        next attempt is told.
        """
        self._wire.doubt(self._node_id)
        with suppress(Exception):
            await self._wire.metadata({where.topic for where in sent}, timeout_ms=APPEND_TIMEOUT_MS)
