"""What a step means to those who watch: which transactions reached which state. Pure."""

from collections.abc import Iterator

from coordinator.calls import Change
from coordinator.core.records import IdState
from coordinator.core.state import TRANSITIONS, Event


def changes(before: IdState | None, after: IdState, log_partition: int, now_ms: int) -> Iterator[Change]:
    known = {t.grant.number: t.state for t in before.transactions} if before else {}
    for transaction in after.transactions:
        if known.get(transaction.grant.number) is not transaction.state:
            yield Change(
                transactional_id=after.transactional_id,
                log_partition=log_partition,
                transaction=transaction,
                state=transaction.state,
                cause=transaction.cause,
                at_ms=now_ms,
            )


def completed(state: IdState, number: int, log_partition: int, now_ms: int) -> Iterator[Change]:
    for transaction in state.transactions:
        if transaction.grant.number == number:
            yield Change(
                transactional_id=state.transactional_id,
                log_partition=log_partition,
                transaction=transaction,
                state=TRANSITIONS[transaction.state, Event.PAID],
                cause=transaction.cause,
                at_ms=now_ms,
            )
