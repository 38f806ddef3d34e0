"""Record batches read back by kio, an independent implementation of the format."""

from typing import Any

import pytest
from aiokafka.record.default_records import DefaultRecordBatch
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.records.readers import read_batch

from oncebox.wire import Compression, Record, batch_builder, encode_batch, sequence_after

PRODUCER: dict[str, Any] = {"producer_id": 2**62 + 5, "producer_epoch": 6, "base_sequence": 40}
small = st.none() | st.binary(max_size=20)
records = st.lists(
    st.builds(
        Record,
        key=small,
        value=small,
        headers=st.lists(st.tuples(st.text(max_size=8), small), max_size=3).map(tuple),
        timestamp_ms=st.integers(0, 2**32).map(lambda seconds: seconds * 1000),  # kio drops the milliseconds
    ),
    min_size=1,
    max_size=8,
)


@given(
    records,
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**15 - 1),
    st.integers(0, 2**31 - 1),
    st.booleans(),
)
@settings(deadline=None)
def test_a_batch_holds_its_records_and_its_producer(records, producer_id, epoch, sequence, transactional):
    encoded = encode_batch(
        records,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        transactional=transactional,
    )
    batch, size = read_batch(encoded, 0)
    assert size == len(encoded)
    assert (batch.producer_id, batch.producer_epoch, batch.base_sequence) == (producer_id, epoch, sequence)
    assert batch.attributes == (0b1_0000 if transactional else 0)
    assert batch.last_offset_delta == len(records) - 1
    assert DefaultRecordBatch(encoded).validate_crc()
    assert [
        Record(
            key=record.key,
            value=record.value,
            headers=tuple(((header.key or b"").decode(), header.value) for header in record.headers),
            timestamp_ms=round(record.timestamp.timestamp() * 1000),
        )
        for record in batch.records
    ] == records


@pytest.mark.parametrize("compression", Compression)
def test_every_compression_is_undone_by_the_reader(compression):
    record = Record(key=b"k", value=b"v" * 1000)
    encoded = encode_batch([record] * 20, **PRODUCER, transactional=True, compression=compression)
    batch = DefaultRecordBatch(encoded)
    assert batch.compression_type == compression
    assert batch.validate_crc()
    assert [(record.offset, record.value) for record in batch] == [(offset, record.value) for offset in range(20)]
    assert compression is Compression.NONE or len(encoded) < 2000


def test_a_builder_filled_record_by_record_takes_its_producer_late():
    builder = batch_builder(transactional=True, max_bytes=1000, compression=Compression.ZSTD)
    count = 0
    while builder.append(count, 1, None, b"v" * 100, []) is not None:
        count += 1
    builder.set_producer_state(*PRODUCER.values())
    batch = DefaultRecordBatch(bytes(builder.build()))
    assert len(list(batch)) == count == 8
    assert (batch.producer_id, batch.producer_epoch, batch.base_sequence) == tuple(PRODUCER.values())


def test_the_first_record_is_taken_whatever_its_size():
    builder = batch_builder(transactional=False, max_bytes=100)
    assert builder.append(0, 1, None, b"v" * 1000, []) is not None
    assert builder.append(1, 1, None, b"v", []) is None


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="at least one record"):
        encode_batch([], **PRODUCER, transactional=True)


def test_a_batch_without_a_producer_id_is_refused():
    with pytest.raises(ValueError, match="no producer id"):
        encode_batch([Record(key=None, value=None)], **PRODUCER | {"producer_id": -1}, transactional=True)


@pytest.mark.parametrize(
    "producer", [{"producer_id": 2**63}, {"producer_epoch": 2**15}, {"base_sequence": 2**31}], ids=str
)
def test_numbers_that_do_not_fit_are_refused(producer):
    with pytest.raises(OverflowError):
        encode_batch([Record(key=None, value=None)], **PRODUCER | producer, transactional=True)


def test_sequences_wrap_to_zero():
    assert sequence_after(0, 5) == 5
    assert sequence_after(2**31 - 2, 1) == 2**31 - 1
    assert sequence_after(2**31 - 1, 1) == 0
    assert sequence_after(2**31 - 3, 10) == 7
