"""Plain states for unit tests."""

from msgspec.structs import replace

from coordinator.core.records import (
    Cause,
    Contents,
    Grant,
    GroupPartition,
    IdState,
    Origin,
    Outcome,
    Owner,
    Result,
    Slot,
    TopicPartition,
    Transaction,
)
from coordinator.core.state import TransactionState

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
NOW_MS = 1_700_000_000_000


def transaction(
    number: int = 1,
    state: TransactionState = TransactionState.ONGOING,
    *,
    producer_id: int = 1000,
    epoch: int = 0,
    partitions: frozenset[TopicPartition] = frozenset({P0}),
    groups: frozenset[GroupPartition] = frozenset(),
    contents: Contents | None = None,
) -> Transaction:
    return Transaction(
        grant=Grant(number=number, producer_id=producer_id, epoch=epoch),
        state=state,
        partitions=partitions,
        groups=groups,
        started_at_ms=NOW_MS,
        contents=contents or Contents(),
    )


def id_state(*transactions: Transaction, **changes: object) -> IdState:
    """Number 1 in one slot; `changes` say what is different."""
    state = IdState(
        transactional_id="a",
        slots=(Slot(producer_id=1000, epoch=0, since_ms=NOW_MS),),
        number=1,
        slot=0,
        origin=Origin.INIT,
        origin_number=0,
        owner=Owner(instance="one", address="one:1", since_ms=NOW_MS, number_first=1, cause=Cause.NEWER_INSTANCE),
        transaction_timeout_ms=60_000,
        slots_max=2,
        transactions=transactions,
        outcomes=(),
        resume_token=b"",
        updated_at_ms=NOW_MS,
    )
    return replace(state, **changes)


def outcome(number: int, result: Result = Result.COMMITTED, *, producer_id: int = 1000, epoch: int = 0) -> Outcome:
    grant = Grant(number=number, producer_id=producer_id, epoch=epoch)
    return Outcome(grant=grant, result=result, cause=Cause.OWNER, decided_at_ms=NOW_MS)
