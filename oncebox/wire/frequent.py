"""Produce and WriteTxnMarkers, written and read by hand: they are nearly all that a busy coordinator and its clients
send, and a generic encoder costs more than the connection does. The bytes are those of Kafka's message definitions.
"""

from __future__ import annotations

from functools import lru_cache, partial
from struct import Struct
from typing import TYPE_CHECKING, Final

from oncebox.wire.errors import ERROR_CODES
from oncebox.wire.schemas import Layout
from oncebox.wire.types import Appended, TopicPartition
from oncebox.wire.varints import after_tags, read_varint, varint

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from oncebox.wire.errors import ErrorCode
    from oncebox.wire.types import TxnMarker

# Named tuples made from a tuple, past the keywords of their own constructors.
_new: Final = tuple.__new__
_int16: Final = Struct(">h")
_int32: Final = Struct(">i")
_produce_head: Final = Struct(">hii")  # acks, timeout_ms, number of topics
_batch_head: Final = Struct(">ii")  # partition, size
# partition, error, base_offset, log_append_time_ms, log_start_offset, number of record errors, length of the message
_appended: Final = Struct(">ihqqqih")
_marker_head: Final = Struct(">qh?")  # producer_id, producer_epoch, committed
_marker_ends: Final = {1: Struct(">ix"), 2: Struct(">ibx")}  # coordinator_epoch, transaction_version, no tags
_marked_head: Final = Struct(">qB")  # producer_id, number of topics
_marked: Final = Struct(">ihB")  # partition, error, number of tags
_NULL_STRING: Final = b"\xff\xff"
_NO_TAGS: Final = b"\0"


def _string(text: str | None) -> bytes:
    if text is None:
        return _NULL_STRING
    encoded = text.encode()
    return _int16.pack(len(encoded)) + encoded


# Names of topics, which are few and come again and again.
_topic: Final = lru_cache(maxsize=1024)(_string)


@lru_cache(maxsize=1024)
def _compact_topic(name: str) -> bytes:
    encoded = name.encode()
    return varint(len(encoded) + 1) + encoded


@lru_cache(maxsize=128)
def _partitions(count: int) -> Callable[..., bytes]:
    """Writes so many partitions in one go: their number, each of them, no tags."""
    number = varint(count + 1)
    return partial(Struct(f">{len(number)}s{count}ix").pack, number)


def _write_produce(
    transactional_id: str | None,
    acks: int,
    timeout_ms: int,
    topics: Collection[tuple[str, Sequence[tuple[int, bytes]]]],
) -> list[bytes]:
    body = [_string(transactional_id), _produce_head.pack(acks, timeout_ms, len(topics))]
    for topic, batches in topics:
        body += (_topic(topic), _int32.pack(len(batches)))
        for partition, batch in batches:
            body += (_batch_head.pack(partition, len(batch)), batch)
    return body


def _read_produce(frame: bytes | bytearray, position: int) -> dict[TopicPartition, Appended]:
    answers: dict[TopicPartition, Appended] = {}
    (topics,) = _int32.unpack_from(frame, position)
    position += 4
    for _ in range(topics):
        (length,) = _int16.unpack_from(frame, position)
        position += 2 + length
        topic = frame[position - length : position].decode()
        (partitions,) = _int32.unpack_from(frame, position)
        position += 4
        for _ in range(partitions):
            partition, error, offset, time, log_start, record_errors, length = _appended.unpack_from(frame, position)
            if record_errors > 0:
                position = _after_record_errors(frame, position + 34, record_errors)
                (length,) = _int16.unpack_from(frame, position)
                position += 2
            else:
                position += 36
            message = None
            if length >= 0:
                position += length
                message = frame[position - length : position].decode()
            appended = _new(Appended, (ERROR_CODES[error], offset, time, log_start, message))
            answers[_new(TopicPartition, (topic, partition))] = appended
    return answers


def _after_record_errors(frame: bytes | bytearray, position: int, count: int) -> int:
    """They name records of a batch that was refused as a whole: the message says enough."""
    for _ in range(count):
        (length,) = _int16.unpack_from(frame, position + 4)
        position += 6 + max(length, 0)
    return position


def _write_markers(version: int, markers: Sequence[TxnMarker]) -> list[bytes]:
    end = _marker_ends[version].pack
    body = [varint(len(markers) + 1)]
    for producer_id, producer_epoch, committed, partitions, coordinator_epoch, transaction_version in markers:
        topics: dict[str, list[int]] = {}
        for topic, partition in partitions:
            if topic in topics:
                topics[topic].append(partition)
            else:
                topics[topic] = [partition]
        body += (_marker_head.pack(producer_id, producer_epoch, committed), varint(len(topics) + 1))
        for topic, indexes in topics.items():
            body += (_compact_topic(topic), _partitions(len(indexes))(*indexes))
        body.append(end(coordinator_epoch, transaction_version) if version >= 2 else end(coordinator_epoch))
    body.append(_NO_TAGS)
    return body


def _read_markers(frame: bytes | bytearray, position: int) -> dict[int, dict[TopicPartition, ErrorCode]]:
    """What counts is nearly always below 128, a varint of one byte; and there are no tags."""
    answers: dict[int, dict[TopicPartition, ErrorCode]] = {}
    markers, position = read_varint(frame, position)
    for _ in range(markers - 1):
        producer_id, topics = _marked_head.unpack_from(frame, position)
        position += 9
        if topics > 127:
            topics, position = read_varint(frame, position - 1)
        marked = answers[producer_id] = {}
        for _ in range(topics - 1):
            length = frame[position]
            position += 1
            if length > 127:
                length, position = read_varint(frame, position - 1)
            position += length - 1
            topic = frame[position - length + 1 : position].decode()
            partitions = frame[position]
            position += 1
            if partitions > 127:
                partitions, position = read_varint(frame, position - 1)
            for _ in range(partitions - 1):
                partition, error, tags = _marked.unpack_from(frame, position)
                position = position + 7 if not tags else after_tags(frame, position + 6)
                marked[_new(TopicPartition, (topic, partition))] = ERROR_CODES[error]
            position = position + 1 if not frame[position] else after_tags(frame, position)
        position = position + 1 if not frame[position] else after_tags(frame, position)
    return answers


PRODUCE_V8: Final = Layout("Produce", 0, 8, flexible=False, write=_write_produce, read=_read_produce)
WRITE_TXN_MARKERS_V1: Final = Layout(
    "WriteTxnMarkers", 27, 1, flexible=True, write=partial(_write_markers, 1), read=_read_markers
)
WRITE_TXN_MARKERS_V2: Final = Layout(
    "WriteTxnMarkers", 27, 2, flexible=True, write=partial(_write_markers, 2), read=_read_markers
)
