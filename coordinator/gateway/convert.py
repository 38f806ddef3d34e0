"""Between the gateway's messages and the client library. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

from oncebox.bulk import Outgoing
from oncebox.errors import (
    BrokersUnavailableError,
    ClosedError,
    CoordinatorError,
    DeliveryError,
    OffsetsRefusedError,
    OnceboxError,
    RecordsRefusedError,
    RecordTooLargeError,
    RetriableError,
    UnknownTopicError,
    UsageError,
)
from oncebox.group_offsets import GroupMetadata
from oncebox.partition_queue import RecordMetadata
from oncebox.v1 import gateway_pb2 as pb
from oncebox.v1 import transaction_pb2
from oncebox.wire import CommittedOffset, GroupMember, TopicPartition

NO_GENERATION = -1


def outgoing(records: Iterable[pb.Record]) -> list[Outgoing]:
    return [
        Outgoing(
            record.topic,
            record.value if record.HasField("value") else None,
            record.key if record.HasField("key") else None,
            _headers(record.headers) if record.headers else (),
            record.partition if record.HasField("partition") else None,
            record.timestamp_ms if record.HasField("timestamp_ms") else None,
        )
        for record in records
    ]


def _headers(headers: Iterable[pb.Header]) -> list[tuple[str, bytes | None]]:
    return [(header.key, header.value if header.HasField("value") else None) for header in headers]


def sent_records(found: Sequence[RecordMetadata]) -> list[pb.RecordMetadata]:
    return [pb.RecordMetadata(topic=where.topic, partition=where.partition, offset=where.offset) for where in found]


def group_of(request: pb.SendOffsets) -> GroupMetadata:
    """Without a member id nobody is fenced, as with a consumer that has been assigned its partitions by hand."""
    return GroupMetadata(
        group_id=request.offsets.group_id,
        member=GroupMember(
            member_id=request.member_id,
            generation_id=request.generation if request.member_id else NO_GENERATION,
            group_instance_id=request.group_instance_id or None,
        ),
    )


def offsets_of(request: pb.SendOffsets) -> dict[TopicPartition, CommittedOffset]:
    return {
        TopicPartition(offset.topic, offset.partition): CommittedOffset(
            offset=offset.offset_next, metadata=offset.metadata
        )
        for offset in request.offsets.offsets
    }


def nothing_ended(transactional_id: str, result: "transaction_pb2.Result") -> transaction_pb2.Outcome:
    """Of a transaction in which nothing was sent: it has no number, and nobody else knows of it."""
    return transaction_pb2.Outcome(
        transactional_id=transactional_id, result=result, state=transaction_pb2.TransactionState.EMPTY
    )


def refusal(message: str, code: "transaction_pb2.ErrorCode" = transaction_pb2.INVALID_REQUEST) -> transaction_pb2.Error:
    retriable = code in {
        transaction_pb2.COORDINATOR_NOT_AVAILABLE,
        transaction_pb2.CONCURRENT_TRANSACTIONS,
        transaction_pb2.THROTTLING_QUOTA_EXCEEDED,
        transaction_pb2.NOT_COORDINATOR,
    }
    return transaction_pb2.Error(code=code, message=message, retriable=retriable)


def error_of(error: OnceboxError, transactional_id: str, number: int) -> transaction_pb2.Error:
    """The client library's errors by Kafka's names."""
    if isinstance(error, CoordinatorError):
        return error.detail
    return transaction_pb2.Error(
        code=_code(error),
        message=str(error),
        transactional_id=transactional_id,
        number=number,
        retriable=isinstance(error, RetriableError),
    )


def _code(error: OnceboxError) -> Any:
    if isinstance(error, RecordsRefusedError | OffsetsRefusedError):
        known = error.code in transaction_pb2.ErrorCode.keys()  # noqa: SIM118 - no dict
        if known:
            return transaction_pb2.ErrorCode.Value(error.code)
    return next((code for kind, code in _CODES if isinstance(error, kind)), transaction_pb2.INVALID_TXN_STATE)


_CODES: tuple[tuple[type[OnceboxError], "transaction_pb2.ErrorCode"], ...] = (
    (RecordTooLargeError, transaction_pb2.MESSAGE_TOO_LARGE),
    (UnknownTopicError, transaction_pb2.UNKNOWN_TOPIC_OR_PARTITION),
    (UsageError, transaction_pb2.INVALID_REQUEST),
    (BrokersUnavailableError, transaction_pb2.COORDINATOR_NOT_AVAILABLE),
    (ClosedError, transaction_pb2.COORDINATOR_NOT_AVAILABLE),
    (RecordsRefusedError, transaction_pb2.INVALID_REQUEST),
    (DeliveryError, transaction_pb2.REQUEST_TIMED_OUT),
)
