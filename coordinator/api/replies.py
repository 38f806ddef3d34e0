"""Answers of the core as messages. Pure. Each function fills a message that is there already: one of its own for a
unary call, the one inside the session's response on a stream.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from coordinator.api import convert
from coordinator.api.rules import Rules
from coordinator.calls import Answer
from coordinator.core.commands import (
    Command,
    Ended,
    Granted,
    OutcomeKnown,
    Prepared,
    Refused,
    Registered,
    Undecided,
)
from coordinator.core.records import Grant, Outcome, Owner, Result, TopicPartition
from coordinator.core.state import TransactionState
from oncebox.v1 import coordinator_pb2 as pb
from oncebox.v1 import transaction_pb2

_COMPLETE = {
    Result.COMMITTED: TransactionState.COMPLETE_COMMIT,
    Result.ABORTED: TransactionState.COMPLETE_ABORT,
}
_INCOMPLETE = {
    Result.COMMITTED: TransactionState.PREPARE_COMMIT,
    Result.ABORTED: TransactionState.PREPARE_ABORT,
}
# An error's text travels in a header: what is quoted in it must not make it too long for one.
MESSAGE_MAX_CHARACTERS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How a call is made of a request, and a response of its answer."""

    to_command: Callable[[Any, Rules, str], Command]
    fill: Callable[[Any, Command, Answer], None]


def fill_init_producer(response: pb.InitProducerResponse, command: Command, answer: Answer) -> None:
    reply = answer.reply
    if not isinstance(reply, Granted):
        raise _unexpected(answer)
    if reply.prepared is not None:
        # No new grant exists until it is decided.
        response.prepared.resume_token = reply.prepared.contents.metadata
        fill_grant(response.prepared.grant, reply.prepared.grant)
    else:
        fill_grant(response.grant, reply.grant)
    response.resume_token = reply.resume_token
    if reply.outcome is not None:
        fill_outcome(
            response.outcome, command.transactional_id, reply.outcome, is_complete=answer.complete, owed=answer.owed
        )
    fill_partitions(response.owed, answer.owed_in_all)


def fill_registered(response: Any, _command: Command, answer: Answer) -> None:
    """To AddPartitions, AddOffsets and Heartbeat."""
    reply = answer.reply
    if not isinstance(reply, Registered):
        raise _unexpected(answer)
    fill_grant(response.grant, reply.grant)


def fill_prepare(response: pb.PrepareResponse, command: Command, answer: Answer) -> None:
    reply = answer.reply
    if not isinstance(reply, Prepared):
        raise _unexpected(answer)
    outcome = response.outcome
    outcome.transactional_id = command.transactional_id
    outcome.number = reply.transaction.grant.number
    outcome.state = reply.transaction.state  # type: ignore[assignment]  # the numbers are the same


def fill_end(response: pb.EndResponse, command: Command, answer: Answer) -> None:
    reply = answer.reply
    if not isinstance(reply, Ended):
        raise _unexpected(answer)
    fill_outcome(
        response.outcome, command.transactional_id, reply.outcome, is_complete=answer.complete, owed=answer.owed
    )
    if reply.next_grant is not None:
        fill_grant(response.next, reply.next_grant)
        response.next_registered = reply.next_registered


def fill_get_outcome(response: Any, command: Command, answer: Answer) -> None:
    """To GetOutcome, Abort and ForceFence."""
    reply = answer.reply
    outcome = response.outcome
    if isinstance(reply, OutcomeKnown):
        fill_outcome(outcome, command.transactional_id, reply.outcome, is_complete=answer.complete, owed=answer.owed)
    elif isinstance(reply, Undecided):
        state = reply.transaction.state if reply.transaction else TransactionState.EMPTY
        outcome.transactional_id = command.transactional_id
        outcome.number = reply.grant.number
        outcome.state = state
    else:
        raise _unexpected(answer)


METHODS = {
    "init_producer": Method(to_command=convert.init_producer, fill=fill_init_producer),
    "add_partitions": Method(to_command=convert.add_partitions, fill=fill_registered),
    "add_offsets": Method(to_command=convert.add_offsets, fill=fill_registered),
    "prepare": Method(to_command=convert.prepare, fill=fill_prepare),
    "end": Method(to_command=convert.end, fill=fill_end),
    "get_outcome": Method(to_command=convert.get_outcome, fill=fill_get_outcome),
    "heartbeat": Method(to_command=convert.heartbeat, fill=fill_registered),
}


def fill_grant(message: transaction_pb2.Grant, grant: Grant) -> None:
    message.number = grant.number
    message.producer_id = grant.producer_id
    message.epoch = grant.epoch


def fill_outcome(
    message: transaction_pb2.Outcome,
    transactional_id: str,
    outcome: Outcome,
    *,
    is_complete: bool | None,
    owed: Iterable[TopicPartition] = (),
) -> None:
    """is_complete=None: how far its completion has come is not known."""
    message.transactional_id = transactional_id
    message.number = outcome.grant.number
    message.result = outcome.result  # type: ignore[assignment]
    message.decided_at_ms = outcome.decided_at_ms
    if outcome.result is Result.ABORTED:
        message.cause = outcome.cause  # type: ignore[assignment]
    if is_complete is not None:
        message.state = (_COMPLETE if is_complete else _INCOMPLETE)[outcome.result]  # type: ignore[assignment]
    if owed:
        fill_partitions(message.owed, owed)


def fill_partitions(entries: Any, partitions: Iterable[TopicPartition]) -> None:
    topic = None
    for partition in sorted(partitions):
        if partition.topic != topic:
            topic = partition.topic
            entry = entries.add(topic=topic)
        entry.partitions.append(partition.partition)


def fill_owner(message: transaction_pb2.Owner, owner: Owner) -> None:
    message.instance = owner.instance
    message.address = owner.address
    message.since_ms = owner.since_ms
    message.number_first = owner.number_first
    message.cause = owner.cause  # type: ignore[assignment]


def error_of(refused: Refused, transactional_id: str = "", number: int = 0) -> transaction_pb2.Error:
    error = transaction_pb2.Error(
        code=int(refused.code),  # type: ignore[arg-type]
        message=refused.message[:MESSAGE_MAX_CHARACTERS],
        transactional_id=transactional_id,
        number=number,
        retriable=refused.retriable,
        leader_address=refused.leader_address,
    )
    if refused.owner is not None:
        fill_owner(error.owner, refused.owner)
    if refused.outcome is not None:
        fill_outcome(error.outcome, transactional_id, refused.outcome, is_complete=None)
    return error


def _unexpected(answer: Answer) -> TypeError:
    return TypeError(f"{type(answer.reply).__name__} does not answer this call")
