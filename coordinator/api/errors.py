"""Refusals as gRPC knows them: a status that fits, with the typed Error inside grpc-status-details-bin.

What nobody expected is told by an id alone; the coordinator's log has the rest under that id.
"""

import logging
import secrets
from typing import Any, NoReturn

import grpc

from coordinator.api.replies import error_of
from coordinator.core.commands import ErrorCode, Refused
from oncebox.v1 import status_pb2, transaction_pb2

logger = logging.getLogger(__name__)

DETAILS_KEY = "grpc-status-details-bin"
ERROR_TYPE_URL = "type.googleapis.com/oncebox.v1.Error"

_Status = grpc.StatusCode

STATUS: dict[int, Any] = {
    transaction_pb2.UNKNOWN_SERVER_ERROR: _Status.INTERNAL,
    transaction_pb2.REQUEST_TIMED_OUT: _Status.DEADLINE_EXCEEDED,
    transaction_pb2.COORDINATOR_LOAD_IN_PROGRESS: _Status.UNAVAILABLE,
    transaction_pb2.COORDINATOR_NOT_AVAILABLE: _Status.UNAVAILABLE,
    # The call may succeed elsewhere: what balances over all instances retries it there.
    transaction_pb2.NOT_COORDINATOR: _Status.UNAVAILABLE,
    transaction_pb2.UNKNOWN_TOPIC_OR_PARTITION: _Status.NOT_FOUND,
    transaction_pb2.INVALID_TOPIC_EXCEPTION: _Status.INVALID_ARGUMENT,
    transaction_pb2.INVALID_REQUEST: _Status.INVALID_ARGUMENT,
    transaction_pb2.OUT_OF_ORDER_SEQUENCE_NUMBER: _Status.FAILED_PRECONDITION,
    transaction_pb2.DUPLICATE_SEQUENCE_NUMBER: _Status.ALREADY_EXISTS,
    transaction_pb2.INVALID_PRODUCER_EPOCH: _Status.FAILED_PRECONDITION,
    transaction_pb2.INVALID_TXN_STATE: _Status.FAILED_PRECONDITION,
    transaction_pb2.INVALID_PRODUCER_ID_MAPPING: _Status.NOT_FOUND,
    transaction_pb2.INVALID_TRANSACTION_TIMEOUT: _Status.INVALID_ARGUMENT,
    transaction_pb2.CONCURRENT_TRANSACTIONS: _Status.ABORTED,
    transaction_pb2.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: _Status.PERMISSION_DENIED,
    transaction_pb2.TOPIC_AUTHORIZATION_FAILED: _Status.PERMISSION_DENIED,
    transaction_pb2.GROUP_AUTHORIZATION_FAILED: _Status.PERMISSION_DENIED,
    transaction_pb2.CLUSTER_AUTHORIZATION_FAILED: _Status.PERMISSION_DENIED,
    transaction_pb2.SASL_AUTHENTICATION_FAILED: _Status.UNAUTHENTICATED,
    transaction_pb2.MESSAGE_TOO_LARGE: _Status.RESOURCE_EXHAUSTED,
    transaction_pb2.PRODUCER_FENCED: _Status.FAILED_PRECONDITION,
    transaction_pb2.TRANSACTIONAL_ID_NOT_FOUND: _Status.NOT_FOUND,
    transaction_pb2.THROTTLING_QUOTA_EXCEEDED: _Status.RESOURCE_EXHAUSTED,
    transaction_pb2.TRANSACTION_ABORTABLE: _Status.FAILED_PRECONDITION,
    transaction_pb2.OUTCOME_EXPIRED: _Status.NOT_FOUND,
}

UNDECODABLE = Refused(
    code=ErrorCode.INVALID_REQUEST,
    message="the message cannot be decoded: it is no valid protobuf of this call, or a text in it is not UTF-8",
)
EXPIRED = Refused(
    code=ErrorCode.SASL_AUTHENTICATION_FAILED,
    message="the bearer token of this stream has expired; open another with a new one",
)
GOING_DOWN = Refused(
    code=ErrorCode.COORDINATOR_NOT_AVAILABLE,
    message="this instance is going down; find the coordinator again and repeat what was not answered",
    retriable=True,
)


async def abort(context: Any, refused: Refused, transactional_id: str = "", number: int = 0) -> NoReturn:
    await abort_as(STATUS[refused.code], context, error_of(refused, transactional_id, number))


async def abort_as(status: Any, context: Any, error: transaction_pb2.Error) -> NoReturn:
    details = status_pb2.Status(code=status.value[0], message=error.message)
    details.details.add(type_url=ERROR_TYPE_URL, value=error.SerializeToString())
    text = f"{transaction_pb2.ErrorCode.Name(error.code)}: {error.message}"
    await context.abort(status, text, ((DETAILS_KEY, details.SerializeToString()),))
    raise RuntimeError("abort always raises")


def code_told(context: Any) -> int:
    """The error that a call was aborted with; 0: none, or its caller went away."""
    for key, value in context.trailing_metadata() or ():
        if key == DETAILS_KEY:
            return int(transaction_pb2.Error.FromString(status_pb2.Status.FromString(value).details[0].value).code)
    return 0


def unexpected(error: Exception, where: str) -> Refused:
    """Logs the error, and says no more of it than where in the log it stands."""
    error_id = secrets.token_hex(4)
    logger.error("internal error %s in %s", error_id, where, exc_info=error)
    return Refused(
        code=ErrorCode.UNKNOWN_SERVER_ERROR,
        message=f"internal error {error_id}: the coordinator's log tells more under this id. "
        "What became of the transaction: GetOutcome",
        retriable=True,
    )
