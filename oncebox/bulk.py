"""Many records with one call: all of them are buffered, or none.

What could refuse one is looked at before the first is buffered. No future per record: offsets are counted from what the
partitions have acknowledged, once somebody asks.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from oncebox.errors import RecordTooLargeError, UsageError
from oncebox.partition_queue import RecordMetadata

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oncebox.placement import Placement
    from oncebox.wire import TopicPartition
    from oncebox.writer import Writer

# Of a record beside its key, value and headers, and of a header beside its key and value; never less.
RECORD_OVERHEAD_BYTES = 96
HEADER_OVERHEAD_BYTES = 10
# Kafka's timestamps are signed 64-bit numbers.
TIMESTAMP_MAX_MS = 2**63 - 1
_BYTES = (bytes, bytearray, memoryview)


class Outgoing(NamedTuple):
    """A record to be sent."""

    topic: str
    value: bytes | None
    key: bytes | None = None
    headers: Sequence[tuple[str, bytes | None]] = ()
    partition: int | None = None
    timestamp_ms: int | None = None


class Receipt:
    """For records that were sent together."""

    __slots__ = ("_firsts", "_writer", "places")

    def __init__(self, writer: Writer, places: list[TopicPartition], firsts: dict[TopicPartition, int]) -> None:
        """`firsts`: how many records of the writer stand before them on each partition."""
        # Where each will stand, in the order in which they were given.
        self.places = places
        self._writer = writer
        self._firsts = firsts

    async def metadata(self) -> list[RecordMetadata]:
        """Once all of them are written: their offsets, in the order in which they were given."""
        counts = Counter(self.places)
        for where, first in self._firsts.items():
            await self._writer.written_up_to(where, first + counts[where])
        return self.offsets()

    def offsets(self) -> list[RecordMetadata]:
        """To be called when all are known to be written."""
        runs = {where: self._writer.offsets(where, first) for where, first in self._firsts.items()}
        return [RecordMetadata(where.topic, where.partition, next(runs[where])) for where in self.places]


def size_of(record: Outgoing) -> int:
    """Never less than it takes in a batch of its own. TypeError: it cannot be a record."""
    size = RECORD_OVERHEAD_BYTES + _length("value", record.value) + _length("key", record.key)
    for header in record.headers:
        # Of these the builder of batches takes no other types, and would say so when others are buffered already.
        if type(header) is not tuple:
            raise TypeError(f"a header is a tuple of name and value, not {type(header).__name__}")
        name, value = header
        size += HEADER_OVERHEAD_BYTES + len(name.encode()) + len(value or b"")
        if type(name) is not str or (value is not None and type(value) is not bytes):
            told = f"{type(name).__name__} and {type(value).__name__}"
            raise TypeError(f"a header's name is str and its value bytes or None, not {told}")
    return size


def _length(what: str, data: Any) -> int:
    if data is None:
        return 0
    if not isinstance(data, _BYTES):
        raise TypeError(f"the {what} of a record is bytes or None, not {type(data).__name__}")
    if not isinstance(data, memoryview):
        return len(data)
    if not data.c_contiguous:
        raise TypeError(f"the {what} of a record is in one piece")
    return data.nbytes


async def place_many(writer: Writer, placement: Placement, records: Sequence[Outgoing]) -> list[TopicPartition]:
    """Where each of them goes, or what is wrong with one."""
    places = []
    size_max = writer.record_bytes_max
    for record in records:
        where = placement.place(record.topic, record.key, record.partition)
        if where is None:
            where = await placement.find(record.topic, record.key, record.partition)
        if (size := size_of(record)) > size_max:
            raise RecordTooLargeError(f"a record to {where.topic} needs {size} bytes, a request holds {size_max}")
        if record.timestamp_ms is not None and not 0 <= record.timestamp_ms <= TIMESTAMP_MAX_MS:
            raise UsageError(f"a timestamp of {record.timestamp_ms} ms is not possible")
        places.append(where)
    return places


def buffer_many(writer: Writer, places: list[TopicPartition], records: Sequence[Outgoing]) -> Receipt:
    """Waits for nothing: nobody sees, and no end comes between, a part of them."""
    firsts: dict[TopicPartition, int] = {}
    for where, record in zip(places, records, strict=True):
        if where not in firsts:
            firsts[where] = writer.count(where)
        writer.append(where, record.value, record.key, list(record.headers), record.timestamp_ms)
    return Receipt(writer, places, firsts)
