"""Reading a Kafka partition through confluent-kafka's fast consumer. Blocks: not for the event loop's thread."""

from collections.abc import Mapping, Sequence

from confluent_kafka import Consumer, KafkaError, TopicPartition

from coordinator.log.port import Stored
from oncebox.wire import FETCH_BACKOFF_MS, KafkaSettings, librdkafka_config

READ_TIMEOUT_S = 30.0
CHUNK = 500


class ReadError(Exception):
    """The log cannot be read now."""


class StalledError(ReadError):
    """Nothing came, and no error either."""


def leaders_group(log_topic: str) -> str:
    """The consumer group that shares the log's partitions out."""
    return f"{log_topic}.leaders"


def consumer_config(settings: KafkaSettings, log_topic: str) -> dict[str, str | int]:
    # The library asks where its group is, though it is never joined here: so it is one that we may use anyway.
    return librdkafka_config(settings) | {"group.id": leaders_group(log_topic)}


def open_consumer(config: Mapping[str, str | int], topic: str, partition: int, offset_first: int) -> Consumer:
    """`config` as consumer_config() makes it."""
    consumer = Consumer(
        {
            **config,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_uncommitted",
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 10,
            # Of a long log a little lies ready.
            "fetch.message.max.bytes": 2 * 1024 * 1024,
            "queued.max.messages.kbytes": 8 * 1024,
            "fetch.queue.backoff.ms": FETCH_BACKOFF_MS,
        }
    )
    consumer.assign([TopicPartition(topic, partition, offset_first)])
    return consumer


def read_chunk(
    consumer: Consumer, position: int, end: int, timeout_s: float = READ_TIMEOUT_S
) -> tuple[int, Sequence[Stored]]:
    """The next position, and what stands before it. Compaction leaves holes: only the position tells the progress."""
    # With a timeout, consume() would wait for its full number: take what is there, and wait only for the first one.
    messages = consumer.consume(CHUNK, timeout=0)
    if not messages:
        first = consumer.poll(timeout_s)
        if first is None:
            raise StalledError(f"nothing came from the log at offset {position} for {timeout_s:.0f} s")
        messages = [first]
    chunk: list[Stored] = []
    for message in messages:
        error = message.error()
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - librdkafka's name
                position = max(position, message.offset() or 0)
                continue
            if error.retriable():
                continue
            raise ReadError(f"the log cannot be read at offset {position}: {error.str()}")
        offset = message.offset() or 0
        if offset >= end:
            return end, chunk
        chunk.append(Stored(offset, message.key(), message.value()))
        position = offset + 1
    return position, chunk
