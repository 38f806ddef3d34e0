"""What is said of records that were not written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncebox.errors import DeliveryError, OnceboxError, refused_by_broker
from oncebox.wire import ErrorCode

if TYPE_CHECKING:
    from oncebox.wire import Appended, TopicPartition


def refused(where: TopicPartition, appended: Appended, batch_bytes: int) -> OnceboxError:
    told = f"{where.topic}:{where.partition} refuses the records: {appended.error.name}"
    if appended.error_message:
        told += f" ({appended.error_message})"
    if appended.error is ErrorCode.MESSAGE_TOO_LARGE:
        told += f"; its max.message.bytes is below the {batch_bytes} bytes of a batch"
    return refused_by_broker(told, appended.error.name)


def overdue(where: TopicPartition, timeout_ms: int, problem: str) -> DeliveryError:
    return DeliveryError(
        f"records to {where.topic}:{where.partition} were not written within the delivery timeout of "
        f"{timeout_ms} ms: {problem}"
    )


def not_written(told: str, cause: BaseException) -> DeliveryError:
    error = DeliveryError(f"records cannot be written: {told}")
    error.__cause__ = cause
    return error
