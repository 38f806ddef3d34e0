"""What a transaction is named, where it stands, and what all transactions of a producer share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from oncebox.claim import NOTHING, Registered, grouped
from oncebox.errors import AbortedError, CoordinatorError, RetriableError, UsageError
from oncebox.partition_queue import Identity
from oncebox.v1 import coordinator_pb2, transaction_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncebox.claim import Claim, ProducerSettings
    from oncebox.errors import OnceboxError
    from oncebox.group_offsets import GroupOffsetsSender
    from oncebox.placement import Placement
    from oncebox.transaction import Transaction
    from oncebox.v1.transaction_pb2 import Result
    from oncebox.wire import TopicPartition, Wire

EXPLAIN_TIMEOUT_S = 5.0
# Partitions of a transaction that are registered ahead for the next one.
AHEAD_MAX = 100


class State(Enum):
    OPEN = "open"
    # Its preparation was asked for: nothing more can be sent, and only the coordinator knows whether it is prepared.
    PREPARING = "preparing"
    PREPARED = "prepared"
    # Its end was asked for, and the answer did not come.
    IN_DOUBT = "in doubt"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionName:
    """Names a transaction for ever; what to store in the other system when it is prepared."""

    transactional_id: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What all transactions of a producer share."""

    claim: Claim
    settings: ProducerSettings
    wire: Wire
    placement: Placement
    offsets: GroupOffsetsSender
    # Called when it ends, and again should its end be refused.
    on_state: Callable[[Transaction], None]


def identity_of(claim: Claim, grant: transaction_pb2.Grant) -> Identity:
    """As whom brokers know who writes under this grant."""
    return Identity(
        producer_id=grant.producer_id,
        epoch=grant.epoch,
        transactional_id=claim.transactional_id,
        number=grant.number,
    )


def ahead_of(result: Result, partitions: frozenset[TopicPartition], groups: frozenset[str]) -> Registered:
    """What the end of a transaction registers for the next one."""
    if result != transaction_pb2.COMMITTED:
        return NOTHING
    return Registered(partitions=frozenset(sorted(partitions)[:AHEAD_MAX]), groups=groups)


def misused(name: TransactionName, told: str) -> UsageError:
    error = UsageError(told)
    error.about(name.transactional_id, name.number)
    return error


def still_open(transaction: Transaction) -> UsageError:
    """Why the next one cannot begin."""
    if transaction.state is State.OPEN:
        return misused(transaction.name, "the last transaction is still open: commit or abort it first")
    stands = "may be prepared" if transaction.state is State.PREPARING else "is prepared"
    told = f"the last transaction {stands} and still open: call recover(), or commit or abort Producer.prepared, first"
    return misused(transaction.name, told)


async def register_partitions(
    claim: Claim, grant: transaction_pb2.Grant, partitions: frozenset[TopicPartition], begun_ms_ago: int | None
) -> transaction_pb2.Grant:
    """The grant to use from here on."""
    request = coordinator_pb2.AddPartitionsRequest(
        transactional_id=claim.transactional_id,
        grant=grant,
        partitions=grouped(partitions),
        begun_ms_ago=begun_ms_ago,
    )
    try:
        granted: transaction_pb2.Grant = (await claim.call("add_partitions", request)).grant
    except RetriableError as error:
        # It was asked for until its deadline; what has been sent since waits for it, and can only be aborted.
        raise AbortedError(f"its partitions could not be registered in time: {error}") from error
    return granted


async def register_group(
    claim: Claim, grant: transaction_pb2.Grant, group_id: str, begun_ms_ago: int | None
) -> transaction_pb2.Grant:
    """The grant to use from here on."""
    request = coordinator_pb2.AddOffsetsRequest(
        transactional_id=claim.transactional_id, grant=grant, group_ids=[group_id], begun_ms_ago=begun_ms_ago
    )
    granted: transaction_pb2.Grant = (await claim.call("add_offsets", request)).grant
    return granted


async def outcome_of(claim: Claim, number: int) -> transaction_pb2.Outcome:
    request = coordinator_pb2.GetOutcomeRequest(transactional_id=claim.transactional_id, number=number)
    outcome: transaction_pb2.Outcome = (await claim.call("get_outcome", request)).outcome
    return outcome


async def explained(claim: Claim, grant: transaction_pb2.Grant, begun_ms_ago: int, error: OnceboxError) -> OnceboxError:
    """A broker refused our epoch: the coordinator knows why."""
    try:
        await claim.heartbeat(grant, begun_ms_ago, EXPLAIN_TIMEOUT_S)
    except RetriableError:
        return error
    except CoordinatorError as reason:
        return reason
    return error
