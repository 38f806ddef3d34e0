"""Reads log and feed through confluent-kafka's fast consumer, in threads of its own.

Who reads much keeps nobody else from reading: each reader has its own threads.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from confluent_kafka import Consumer

from coordinator.log.consumer import ReadError, StalledError, consumer_config, open_consumer, read_chunk
from coordinator.log.port import Kind, Stored
from oncebox.reader.ends import ends_of
from oncebox.wire import (
    LATEST,
    ErrorCode,
    KafkaSettings,
    OutcomeUnknownError,
    TopicPartition,
    Wire,
    WireError,
)

logger = logging.getLogger(__name__)

ASK_TIMEOUT_MS = 5_000
END_TIMEOUT_S = 30.0
# A consumer to which nothing comes for so long is replaced by a new one, a few times: a take-over waits for it.
STALLED_S = 4.0
STALLS_MAX = 8


class KafkaReader:
    """Implements coordinator.log.port.Reader."""

    def __init__(self, wire: Wire, settings: KafkaSettings, topics: Mapping[Kind, str], *, threads: int) -> None:
        self._wire = wire
        self._settings = settings
        self._topics = topics
        self._threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="read")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def end_offset(self, kind: Kind, partition: int) -> int:
        where = TopicPartition(self._topics[kind], partition)
        pause_s = 0.05
        deadline = asyncio.get_running_loop().time() + END_TIMEOUT_S
        while asyncio.get_running_loop().time() < deadline:
            leader_id = self._wire.leader_id(where)
            try:
                if leader_id is not None:
                    listed = (await self._wire.list_offsets(leader_id, {where: LATEST}, timeout_ms=ASK_TIMEOUT_MS))[
                        where
                    ]
                    if listed.error is ErrorCode.NONE:
                        return listed.offset
                await self._wire.metadata([where.topic], timeout_ms=ASK_TIMEOUT_MS)
            except OutcomeUnknownError:
                await self._refresh_leader(where)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 1.0)
        raise ReadError(f"the end of {where.topic}:{where.partition} cannot be found: its broker does not answer")

    async def _end_for_certain(self, kind: Kind, partition: int) -> int:
        """Behind all that was acknowledged before. For questions about what is not there: a leader that was replaced,
        and does not know it, would hide the rest.
        """
        topic = self._topics[kind]
        ends = await ends_of(self._wire, topic, [partition])
        if ends is None:
            raise ReadError(f"the end of {topic}:{partition} is not certain: too few of its brokers answer")
        return ends[partition]

    async def _refresh_leader(self, where: TopicPartition) -> None:
        with suppress(WireError):
            await self._wire.metadata([where.topic], timeout_ms=ASK_TIMEOUT_MS)

    async def read(
        self, kind: Kind, partition: int, offset_first: int, offset_next: int | None
    ) -> AsyncIterator[Sequence[Stored]]:
        end = await self._end_for_certain(kind, partition) if offset_next is None else offset_next
        if offset_first >= end:
            return
        position, stalls = offset_first, 0
        while position < end:
            try:
                async for next_position, chunk in self._read_on(self._topics[kind], partition, position, end):
                    position, stalls = next_position, 0
                    if chunk:
                        yield chunk
            except StalledError as error:
                stalls += 1
                if offset_next is None:
                    # What was there and never acknowledged may have been cut off since.
                    end = min(end, await self._end_for_certain(kind, partition))
                if stalls == STALLS_MAX and position < end:
                    raise
                logger.warning("%s; trying again with a new consumer", error)

    async def _read_on(
        self, topic: str, partition: int, position: int, end: int
    ) -> AsyncIterator[tuple[int, Sequence[Stored]]]:
        """With one consumer."""
        config = consumer_config(self._settings, self._topics[Kind.LOG])
        opening = self._threads.submit(open_consumer, config, topic, partition, position)
        consumer = await asyncio.wrap_future(opening)
        reading: Future[tuple[int, Sequence[Stored]]] | None = None
        try:
            while position < end:
                reading = self._threads.submit(read_chunk, consumer, position, end, STALLED_S)
                position, chunk = await asyncio.wrap_future(reading)
                yield position, chunk
        finally:
            # Not awaited in this generator's clean-up: closing only frees sockets and threads. But whoever gives up may
            # do so while a thread still reads, and what is being read must not be closed.
            if reading is None:
                self._close(consumer)
            else:
                reading.add_done_callback(lambda _: self._close(consumer))

    def _close(self, consumer: Consumer) -> None:
        with suppress(RuntimeError):  # the threads are gone: then it is closed as garbage
            self._threads.submit(consumer.close)
