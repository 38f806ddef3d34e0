"""The layout of each Kafka request we send and its response, in aiokafka's schema language.

Only layouts: what the fields mean is in requests.py. Those that aiokafka has already are wrapped here, not
repeated; the two that must be quick are in frequent.py.
"""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from aiokafka.protocol.admin import DescribeGroupsRequest_v0
from aiokafka.protocol.api import RequestStruct, Response
from aiokafka.protocol.coordination import FindCoordinatorRequest_v1
from aiokafka.protocol.offset import OffsetRequest_v3
from aiokafka.protocol.transaction import InitProducerIdRequest_v0
from aiokafka.protocol.types import (
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
)

if TYPE_CHECKING:
    from collections.abc import Callable


class Uuid:
    """A type that aiokafka lacks: sixteen bytes, all zero for none."""

    @staticmethod
    def encode(value: UUID | None) -> bytes:
        return bytes(16) if value is None else value.bytes

    @staticmethod
    def decode(data: BytesIO) -> UUID | None:
        value = UUID(bytes=data.read(16))
        return value if value.int else None

    @staticmethod
    def repr(value: UUID | None) -> str:
        return repr(value)


class Layout(NamedTuple):
    """One version of one API: how the body of a request is written, and how the body of its answer is read."""

    name: str
    api_key: int
    version: int
    flexible: bool  # whether the headers end with tags
    write: Callable[..., list[bytes]]  # parts, to be joined
    read: Callable[[bytes | bytearray, int], Any]  # a frame, and where the body starts in it


def _of_struct(request_type: Any) -> Layout:
    """A class in aiokafka's manner. The answer is read as an object with a field per name in the schema."""
    return Layout(
        request_type.__name__.partition("Request")[0],
        request_type.API_KEY,
        request_type.API_VERSION,
        request_type.FLEXIBLE_VERSION,
        write=lambda *values: [request_type(*values).encode()],
        read=lambda frame, position: request_type.RESPONSE_TYPE.decode(BytesIO(frame[position:])),
    )


def _layout(name: str, api_key: int, version: int, *, request: Schema, response: Schema) -> Layout:
    """All of ours have flexible headers."""
    common = {"API_KEY": api_key, "API_VERSION": version}
    response_type = type(f"{name}Response_v{version}", (Response,), {**common, "SCHEMA": response})
    members = {**common, "FLEXIBLE_VERSION": True, "RESPONSE_TYPE": response_type, "SCHEMA": request}
    return _of_struct(type(f"{name}Request_v{version}", (RequestStruct,), members))


_string = CompactString()
_tags = ("tags", TaggedFields)


DESCRIBE_GROUPS_V0 = _of_struct(DescribeGroupsRequest_v0)
FIND_COORDINATOR_V1 = _of_struct(FindCoordinatorRequest_v1)
INIT_PRODUCER_ID_V0 = _of_struct(InitProducerIdRequest_v0)
LIST_OFFSETS_V3 = _of_struct(OffsetRequest_v3)

METADATA_V11 = _layout(
    "Metadata",
    3,
    11,
    request=Schema(
        ("topics", CompactArray(("topic_id", Uuid), ("name", _string), _tags)),
        ("allow_auto_topic_creation", Boolean),
        ("include_topic_authorized_operations", Boolean),
        _tags,
    ),
    response=Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(("node_id", Int32), ("host", _string), ("port", Int32), ("rack", _string), _tags),
        ),
        ("cluster_id", _string),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("name", _string),
                ("topic_id", Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader_id", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("in_sync_replicas", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        _tags,
                    ),
                ),
                ("authorized_operations", Int32),
                _tags,
            ),
        ),
        _tags,
    ),
)

TXN_OFFSET_COMMIT_V3 = _layout(
    "TxnOffsetCommit",
    28,
    3,
    request=Schema(
        ("transactional_id", _string),
        ("group_id", _string),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("generation_id", Int32),
        ("member_id", _string),
        ("group_instance_id", _string),
        (
            "topics",
            CompactArray(
                ("name", _string),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("offset", Int64),
                        ("leader_epoch", Int32),
                        ("metadata", _string),
                        _tags,
                    ),
                ),
                _tags,
            ),
        ),
        _tags,
    ),
    response=Schema(
        ("throttle_time_ms", Int32),
        (
            "topics",
            CompactArray(
                ("name", _string),
                ("partitions", CompactArray(("partition", Int32), ("error_code", Int16), _tags)),
                _tags,
            ),
        ),
        _tags,
    ),
)

DESCRIBE_PRODUCERS_V0 = _layout(
    "DescribeProducers",
    61,
    0,
    request=Schema(
        ("topics", CompactArray(("name", _string), ("partitions", CompactArray(Int32)), _tags)),
        _tags,
    ),
    response=Schema(
        ("throttle_time_ms", Int32),
        (
            "topics",
            CompactArray(
                ("name", _string),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("error_code", Int16),
                        ("error_message", _string),
                        (
                            "producers",
                            CompactArray(
                                ("producer_id", Int64),
                                ("producer_epoch", Int32),
                                ("last_sequence", Int32),
                                ("last_timestamp", Int64),
                                ("coordinator_epoch", Int32),
                                ("txn_start_offset", Int64),
                                _tags,
                            ),
                        ),
                        _tags,
                    ),
                ),
                _tags,
            ),
        ),
        _tags,
    ),
)

LIST_TRANSACTIONS_V0 = _layout(
    "ListTransactions",
    66,
    0,
    request=Schema(("states", CompactArray(_string)), ("producer_ids", CompactArray(Int64)), _tags),
    response=Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("unknown_states", CompactArray(_string)),
        (
            "transactions",
            CompactArray(("transactional_id", _string), ("producer_id", Int64), ("state", _string), _tags),
        ),
        _tags,
    ),
)

DESCRIBE_TRANSACTIONS_V0 = _layout(
    "DescribeTransactions",
    65,
    0,
    request=Schema(("transactional_ids", CompactArray(_string)), _tags),
    response=Schema(
        ("throttle_time_ms", Int32),
        (
            "transactions",
            CompactArray(
                ("error_code", Int16),
                ("transactional_id", _string),
                ("state", _string),
                ("timeout_ms", Int32),
                ("started_at_ms", Int64),
                ("producer_id", Int64),
                ("producer_epoch", Int16),
                ("topics", CompactArray(("name", _string), ("partitions", CompactArray(Int32)), _tags)),
                _tags,
            ),
        ),
        _tags,
    ),
)
