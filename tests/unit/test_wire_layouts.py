"""Every layout against kio, byte by byte: kio's classes are generated from Kafka's own message definitions."""

from dataclasses import fields
from datetime import datetime, timedelta
from importlib import import_module
from io import BytesIO
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from kio.serial import entity_writer
from kio.static.constants import EntityType
from kio.static.primitive import Records

from oncebox.wire import Appended, TopicPartition, frequent, schemas
from oncebox.wire.connection import framed

MARKERS = {
    "write_txn_markers": frequent.WRITE_TXN_MARKERS_V1,
    "write_txn_markers_2": frequent.WRITE_TXN_MARKERS_V2,
}
SCHEMAS = {
    "metadata": schemas.METADATA_V11,
    "txn_offset_commit": schemas.TXN_OFFSET_COMMIT_V3,
    "init_producer_id": schemas.INIT_PRODUCER_ID_V0,
    "list_offsets": schemas.LIST_OFFSETS_V3,
    "describe_producers": schemas.DESCRIBE_PRODUCERS_V0,
    "list_transactions": schemas.LIST_TRANSACTIONS_V0,
    "describe_transactions": schemas.DESCRIBE_TRANSACTIONS_V0,
    "describe_groups": schemas.DESCRIBE_GROUPS_V0,
    "find_coordinator": schemas.FIND_COORDINATOR_V1,
}
FROM_ROWS = {"produce": frequent.PRODUCE_V8} | SCHEMAS
LAYOUTS = FROM_ROWS | MARKERS
# kio's strategies build deep entities; that they are slow to draw says nothing about the layout.
st.register_type_strategy(Records, st.binary().map(Records))
thorough = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


def kio_module(api: str, version: int, kind: str) -> Any:
    return import_module(f"kio.schema.{api}.v{version}.{kind}")


def kio_type(name: str, kind: str) -> Any:
    module = kio_module(name.removesuffix("_2"), LAYOUTS[name].version, kind)
    return next(value for value in vars(module).values() if getattr(value, "__type__", None) is EntityType[kind])


def kio_bytes(entity: Any) -> bytes:
    buffer = BytesIO()
    entity_writer(type(entity))(buffer, entity)
    return buffer.getvalue()


def plain(value: Any, kafka_type: str | None = None) -> Any:
    """A kio entity as the nested tuples and lists that aiokafka's schemas take and give."""
    if hasattr(value, "__flexible__"):
        row = [plain(getattr(value, field.name), field.metadata.get("kafka_type")) for field in fields(value)]
        return (*row, {}) if value.__flexible__ else tuple(row)
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, timedelta):
        return round(value / timedelta(milliseconds=1))
    if isinstance(value, datetime):
        return round(value.timestamp() * 1000)
    if value is None and kafka_type == "datetime_i64":
        return -1
    return value


# Markers are written from our own data: test_wire_requests.py compares them.
@pytest.mark.parametrize("name", FROM_ROWS)
@given(data=st.data())
@thorough
def test_a_request_is_encoded_as_kafka_defines_it(name, data):
    entity = data.draw(st.from_type(kio_type(name, "request")))
    if name == "produce":  # a batch is never null with us
        assume(all(partition.records is not None for topic in entity.topic_data for partition in topic.partition_data))
    assert b"".join(LAYOUTS[name].write(*plain(entity))) == kio_bytes(entity)


@pytest.mark.parametrize("name", SCHEMAS)
@given(data=st.data())
@thorough
def test_a_response_is_decoded_as_kafka_defines_it(name, data):
    entity = data.draw(st.from_type(kio_type(name, "response")))
    struct = LAYOUTS[name].read(b"head" + kio_bytes(entity), 4)
    assert tuple(struct.get_item(field) for field in struct.SCHEMA.names) == plain(entity)


@given(data=st.data())
@thorough
def test_a_produce_response_is_decoded_as_kafka_defines_it(data):
    entity = data.draw(st.from_type(kio_type("produce", "response")))
    topics, _throttle_ms = plain(entity)
    assert LAYOUTS["produce"].read(b"head" + kio_bytes(entity), 4) == {
        TopicPartition(topic, partition): Appended._make((*answer, message))
        for topic, rows in topics
        for partition, *answer, _record_errors, message in rows
    }


@pytest.mark.parametrize("name", MARKERS)
@given(data=st.data())
@thorough
def test_a_marker_response_is_decoded_as_kafka_defines_it(name, data):
    entity = data.draw(st.from_type(kio_type(name, "response")))
    markers, _tags = plain(entity)
    assert LAYOUTS[name].read(b"head" + kio_bytes(entity), 4) == {
        producer_id: {
            TopicPartition(topic, partition): error for topic, rows, _ in topics for partition, error, _ in rows
        }
        for producer_id, topics, _ in markers
    }


@pytest.mark.parametrize("name", LAYOUTS)
@given(correlation_id=st.integers(0, 2**31 - 1), client_id=st.text(max_size=20), body=st.lists(st.binary(max_size=9)))
@thorough
def test_headers_are_those_of_the_version(name, correlation_id, client_id, body):
    layout, request_type, response_type = LAYOUTS[name], kio_type(name, "request"), kio_type(name, "response")
    header = request_type.__header_schema__(
        request_api_key=layout.api_key,
        request_api_version=layout.version,
        correlation_id=correlation_id,
        client_id=client_id,
    )
    assert request_type.__api_key__ == layout.api_key
    encoded = client_id.encode()
    frame = framed(layout, body, correlation_id, len(encoded).to_bytes(2, "big") + encoded)
    assert frame[4:] == kio_bytes(header) + b"".join(body)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    answer = response_type.__header_schema__(correlation_id=correlation_id)
    assert kio_bytes(answer) == correlation_id.to_bytes(4, "big") + (b"\0" if layout.flexible else b"")
