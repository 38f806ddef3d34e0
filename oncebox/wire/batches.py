"""Record batches (format version 2) with a producer id, epoch and sequence of our choosing.

aiokafka's C builder does the work; nothing here touches the bytes. A batch is built once and its bytes are
kept: what is sent again after an unknown outcome must be the same batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

from aiokafka.record.default_records import DefaultRecordBatchBuilder

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_BATCH_BYTES: Final = 2**31 - 1


class Compression(IntEnum):
    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int | None = None


def batch_builder(
    *,
    transactional: bool,
    max_bytes: int = MAX_BATCH_BYTES,
    compression: Compression = Compression.NONE,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
) -> Any:
    """Aiokafka's own builder, for who fills a batch record by record.

    `append(offset_delta, timestamp_ms, key, value, headers)` returns None when the record does not fit; the
    first always does. `set_producer_state(producer_id, epoch, sequence)` may come at any time before
    `build()`, which is called once.
    """
    return DefaultRecordBatchBuilder(
        magic=2,
        compression_type=compression,
        is_transactional=transactional,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        batch_size=max_bytes,
    )


def encode_batch(
    records: Iterable[Record],
    *,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int,
    transactional: bool,
    compression: Compression = Compression.NONE,
) -> bytes:
    if producer_id < 0:
        # A broker stores such a batch without any of the guarantees, even if its transactional bit is set.
        raise ValueError(f"{producer_id} is no producer id")
    builder = batch_builder(
        transactional=transactional,
        compression=compression,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
    )
    count = 0
    for record in records:
        if builder.append(count, record.timestamp_ms, record.key, record.value, list(record.headers)) is None:
            raise ValueError(f"a record batch holds at most {MAX_BATCH_BYTES} bytes")
        count += 1
    if not count:
        raise ValueError("a record batch holds at least one record")
    return bytes(builder.build())


def sequence_after(base_sequence: int, record_count: int) -> int:
    """The sequence that follows a batch. Sequences wrap from 2^31 - 1 to 0, as brokers expect."""
    return (base_sequence + record_count) & 0x7FFF_FFFF
