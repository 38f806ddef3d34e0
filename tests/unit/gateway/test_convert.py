"""The client library's errors, as clients of the gateway are told."""

import pytest

from coordinator.gateway import convert
from oncebox.errors import (
    BrokersUnavailableError,
    DeliveryError,
    GroupFencedError,
    OffsetsRefusedError,
    OnceboxError,
    RecordTooLargeError,
    UnknownTopicError,
    UsageError,
    refused_by_broker,
)
from oncebox.v1 import transaction_pb2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (refused_by_broker("no", "TOPIC_AUTHORIZATION_FAILED"), transaction_pb2.TOPIC_AUTHORIZATION_FAILED),
        (refused_by_broker("no", "CORRUPT_MESSAGE"), transaction_pb2.INVALID_REQUEST),
        (OffsetsRefusedError("no", "GROUP_AUTHORIZATION_FAILED"), transaction_pb2.GROUP_AUTHORIZATION_FAILED),
        (GroupFencedError("no", "ILLEGAL_GENERATION"), transaction_pb2.INVALID_TXN_STATE),
        (OffsetsRefusedError("no answer"), transaction_pb2.INVALID_TXN_STATE),
        (RecordTooLargeError("large"), transaction_pb2.MESSAGE_TOO_LARGE),
        (UnknownTopicError("nowhere"), transaction_pb2.UNKNOWN_TOPIC_OR_PARTITION),
        (UsageError("what"), transaction_pb2.INVALID_REQUEST),
        (BrokersUnavailableError("gone"), transaction_pb2.COORDINATOR_NOT_AVAILABLE),
        (DeliveryError("late"), transaction_pb2.REQUEST_TIMED_OUT),
    ],
)
def test_each_error_has_kafkas_name(error: OnceboxError, code: int):
    told = convert.error_of(error, "t", 7)
    assert (told.code, told.transactional_id, told.number) == (code, "t", 7)
    assert told.retriable == isinstance(error, BrokersUnavailableError)
