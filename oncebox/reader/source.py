"""Reads Kafka for the assembly: stock consumers in threads of their own, and offsets from the partitions' leaders.

One batch is under way at a time, so that nothing piles up here. Whatever cannot be mended by waiting is a ReadError.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from oncebox.errors import BrokersUnavailableError, UsageError
from oncebox.reader.types import ReadError, Record
from oncebox.wire import (
    FETCH_BACKOFF_MS,
    ErrorCode,
    KafkaSettings,
    TopicPartition,
    Wire,
    WireError,
    librdkafka_config,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from oncebox.wire import TopicMetadata

BATCH_MAX = 2_000
POLL_S = 0.1
RETRY_S = 0.1
OFFSETS_TIMEOUT_S = 30.0
UNKNOWN_TOPIC_S = 3.0

log = logging.getLogger(__name__)


class ConsumerThread:
    """A consumer of partitions that it is told, not of a group."""

    def __init__(self, settings: KafkaSettings, *, queue_kbytes: int) -> None:
        from confluent_kafka import Consumer

        config: dict[str, Any] = librdkafka_config(settings) | {
            "group.id": f"oncebox-reader-{uuid.uuid4().hex[:8]}",  # asked for by the library; nothing is committed
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "queued.max.messages.kbytes": queue_kbytes,
            "fetch.queue.backoff.ms": FETCH_BACKOFF_MS,
            "allow.auto.create.topics": False,
        }
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="oncebox-reader")
        self._consumer = Consumer(config, logger=log)

    async def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        await self._call(self._consumer.incremental_assign, _native(positions))

    async def pause(self, partitions: Iterable[TopicPartition]) -> None:
        await self._call(self._consumer.pause, _native(dict.fromkeys(partitions, 0)))

    async def resume(self, partitions: Iterable[TopicPartition]) -> None:
        await self._call(self._consumer.resume, _native(dict.fromkeys(partitions, 0)))

    async def poll(self) -> list[Any]:
        """What has come; waits a moment if nothing has."""
        messages: list[Any] = await self._call(self._poll)
        return messages

    def _poll(self) -> list[Any]:
        first = self._consumer.poll(POLL_S)
        return [] if first is None else [first, *self._consumer.consume(BATCH_MAX, timeout=0)]

    async def close(self) -> None:
        await self._call(self._consumer.close)
        self._executor.shutdown(wait=False)

    async def _call(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)


def _native(positions: Mapping[TopicPartition, int]) -> list[Any]:
    from confluent_kafka import TopicPartition as Native

    return [Native(where.topic, where.partition, offset) for where, offset in positions.items()]


def position_of(message: Any) -> int | None:
    """Where its partition's end was met; None: it is a record. Raises what no waiting mends."""
    error = message.error()
    if error is None:
        return None
    from confluent_kafka import KafkaError

    where = f"{message.topic()}:{message.partition()}"
    if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the library's name for it
        position: int = message.offset()
        return position
    if error.code() == KafkaError._AUTO_OFFSET_RESET:  # noqa: SLF001
        raise ReadError(f"{where}: the records to be read next have been deleted ({error.str()})")
    if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
        # A broker that has just started may say so; whether it is true is looked at now and then.
        log.warning("%s: %s", where, error.str())
        return 0
    raise ReadError(f"{where}: {error.str()}")


def records_by_partition(messages: Sequence[Any]) -> Iterator[tuple[TopicPartition, list[Record], int]]:
    """Runs of records of one partition, each with the end of the partition where that was met (else 0)."""
    run: list[Record] = []
    topic, partition = "", -1
    for message in messages:
        if message.error() is None:
            record = record_of(message)
            if record[1] != partition or record[0] != topic:
                if run:
                    yield TopicPartition(topic, partition), run, 0
                topic, partition, run = record[0], record[1], []
            run.append(record)
            continue
        end = position_of(message) or 0
        if run:
            yield TopicPartition(topic, partition), run, 0
        topic, partition, run = "", -1, []
        yield TopicPartition(message.topic(), message.partition()), [], end
    if run:
        yield TopicPartition(topic, partition), run, 0


def by_partition(messages: Sequence[Any]) -> Iterator[tuple[TopicPartition, list[Any]]]:
    """Runs of messages of one partition."""
    run: list[Any] = []
    for message in messages:
        if run and (message.partition() != run[0].partition() or message.topic() != run[0].topic()):
            yield TopicPartition(run[0].topic(), run[0].partition()), run
            run = []
        run.append(message)
    if run:
        yield TopicPartition(run[0].topic(), run[0].partition()), run


def record_of(message: Any) -> Record:
    # Not Record(…): one is made for each message, and this takes half the time.
    return tuple.__new__(
        Record,
        (
            message.topic(),
            message.partition(),
            message.offset(),
            message.timestamp()[1],
            message.key(),
            message.value(),
            message.headers() or (),
        ),
    )


async def list_offsets(
    wire: Wire, partitions: Collection[TopicPartition], timestamp_ms: int, *, read_committed: bool = False
) -> dict[TopicPartition, int]:
    """From each partition's leader, asked after this was called."""
    deadline = asyncio.get_running_loop().time() + OFFSETS_TIMEOUT_S
    found: dict[TopicPartition, int] = {}
    while left := set(partitions) - found.keys():
        problem = "no leader"
        by_leader: dict[int, dict[TopicPartition, int]] = {}
        for where in left:
            leader_id = wire.leader_id(where)
            if leader_id is not None:
                by_leader.setdefault(leader_id, {})[where] = timestamp_ms
        for leader_id, wanted in by_leader.items():
            try:
                answer = await wire.list_offsets(leader_id, wanted, read_committed=read_committed)
            except WireError as error:
                problem = str(error)
                continue
            found |= {where: listed.offset for where, listed in answer.items() if listed.error is ErrorCode.NONE}
            problem = next((listed.error.name for listed in answer.values() if listed.error), problem)
        if left - found.keys():
            if asyncio.get_running_loop().time() > deadline:
                raise BrokersUnavailableError(f"the offsets of {min(left)} cannot be had: {problem}")
            await asyncio.sleep(RETRY_S)
            await topics_of(wire, {where.topic for where in left})
    return found


async def topics_of(wire: Wire, topics: Collection[str]) -> Mapping[str, TopicMetadata]:
    """A broker that has just started may not know a topic yet, so one that is unknown is asked for again a while."""
    deadline = asyncio.get_running_loop().time() + UNKNOWN_TOPIC_S
    while True:
        try:
            metadata = await wire.metadata(topics)
        except WireError as error:
            raise BrokersUnavailableError(str(error)) from error
        problems = {topic: problem for topic in topics if (problem := _problem(metadata.topics.get(topic)))}
        if not problems:
            return metadata.topics
        temporary = all(problem.retriable for problem in problems.values())
        if not temporary or asyncio.get_running_loop().time() > deadline:
            topic, problem = min(problems.items())
            raise UsageError(f"the topic {topic!r} cannot be read: {problem.name}")
        await asyncio.sleep(RETRY_S)


def _problem(found: TopicMetadata | None) -> ErrorCode:
    if found is None or (found.topic_id is None and not found.error):
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    return found.error
