"""The typed error inside a failed unary call: what grpc-status-details-bin holds, as our exceptions."""

from typing import Any

from google.protobuf.message import DecodeError

from oncebox.errors import CoordinatorError, error_from
from oncebox.v1 import status_pb2, transaction_pb2

DETAILS_KEY = "grpc-status-details-bin"


def error_of_call(error: Any) -> CoordinatorError | None:
    """Of a grpc.aio.AioRpcError; None: it came from below the coordinator (no connection, a deadline)."""
    details = dict(error.trailing_metadata() or ()).get(DETAILS_KEY)
    if details is None:
        return None
    try:
        status = status_pb2.Status.FromString(details)
        return error_from(transaction_pb2.Error.FromString(status.details[0].value)) if status.details else None
    except DecodeError:
        return None
