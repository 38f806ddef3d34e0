"""Ids and transactions as operators see them. Pure: filters and messages made of states."""

from collections.abc import Iterator
from dataclasses import dataclass

from coordinator.api.replies import fill_grant, fill_outcome, fill_owner, fill_partitions
from coordinator.api.rules import NAME_MAX_BYTES, refuse
from coordinator.calls import Change
from coordinator.core.records import OFFSETS_TOPIC, IdState, TopicPartition, Transaction, grant_of, newest_transaction
from coordinator.core.state import TransactionState
from oncebox.v1 import admin_pb2 as pb

PAGE_SIZE_DEFAULT = 100
PAGE_SIZE_MAX = 1_000
# With a filter one call looks at so many ids at most: a page may come back short, with a token to go on.
IDS_MAX = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    # Empty: all.
    states: frozenset[int]
    age_min_ms: int
    page_size: int
    ids_max: int


def query(request: pb.ListRequest) -> Query:
    check_prefix(request.prefix)
    if len(request.page_token.encode()) > NAME_MAX_BYTES:
        refuse("the page token is none that this call has returned")
    if request.age_min_ms < 0 or request.page_size < 0:
        refuse("neither an age nor a page size can be negative")
    known = {int(state) for state in TransactionState}
    unknown = [state for state in request.states if state not in known]
    if unknown:
        refuse(f"{unknown[0]} is no state of a transaction")
    page_size = min(request.page_size or PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX)
    return Query(
        states=frozenset(int(state) for state in request.states),
        age_min_ms=request.age_min_ms,
        page_size=page_size,
        ids_max=IDS_MAX if request.states or request.age_min_ms else page_size,
    )


def check_prefix(prefix: str) -> None:
    if len(prefix.encode()) > NAME_MAX_BYTES:
        refuse(f"the prefix is longer than {NAME_MAX_BYTES} bytes")


def summaries(state: IdState, wanted: Query, log_partition: int, now_ms: int) -> Iterator[pb.TransactionSummary]:
    """One for each transaction of the id that is not complete; one with EMPTY where there is none."""
    for summary in _all_summaries(state, log_partition, now_ms):
        if summary.age_ms >= wanted.age_min_ms and (not wanted.states or summary.state in wanted.states):
            yield summary


def _all_summaries(state: IdState, log_partition: int, now_ms: int) -> Iterator[pb.TransactionSummary]:
    for transaction in state.transactions:
        yield _summary(state.transactional_id, transaction, transaction.state, log_partition, now_ms)
    if not state.transactions:
        grant = grant_of(state)
        yield pb.TransactionSummary(
            transactional_id=state.transactional_id,
            number=grant.number,
            state=int(TransactionState.EMPTY),  # type: ignore[arg-type]
            producer_id=grant.producer_id,
            epoch=grant.epoch,
            age_ms=max(now_ms - state.updated_at_ms, 0),
            log_partition=log_partition,
        )


def _summary(
    transactional_id: str, transaction: Transaction, state: TransactionState, log_partition: int, now_ms: int
) -> pb.TransactionSummary:
    summary = pb.TransactionSummary(
        transactional_id=transactional_id,
        number=transaction.grant.number,
        state=int(state),  # type: ignore[arg-type]
        producer_id=transaction.grant.producer_id,
        epoch=transaction.grant.epoch,
        age_ms=max(now_ms - transaction.started_at_ms, 0),
        log_partition=log_partition,
    )
    groups = {TopicPartition(OFFSETS_TOPIC, group.partition) for group in transaction.groups}
    fill_partitions(summary.partitions, transaction.partitions | groups)
    if state is TransactionState.PREPARED:
        summary.metadata = transaction.contents.metadata
    return summary


def description(state: IdState, log_partition: int, now_ms: int) -> pb.DescribeResponse:
    newest = newest_transaction(state)
    response = pb.DescribeResponse(
        transactional_id=state.transactional_id,
        log_partition=log_partition,
        state=int(newest.state if newest else TransactionState.EMPTY),  # type: ignore[arg-type]
        transaction_timeout_ms=state.transaction_timeout_ms,
        has_resume_token=bool(state.resume_token),
        updated_at_ms=state.updated_at_ms,
    )
    fill_owner(response.owner, state.owner)
    fill_grant(response.grant, grant_of(state))
    for transaction in state.transactions:
        entry = _summary(state.transactional_id, transaction, transaction.state, log_partition, now_ms)
        response.transactions.append(entry)
    incomplete = {transaction.grant.number for transaction in state.transactions}
    for outcome in state.outcomes:
        is_complete = outcome.grant.number not in incomplete
        fill_outcome(response.outcomes.add(), state.transactional_id, outcome, is_complete=is_complete)
    return response


def event(change: Change) -> pb.TransactionEvent:
    return pb.TransactionEvent(
        transaction=_summary(
            change.transactional_id, change.transaction, change.state, change.log_partition, change.at_ms
        ),
        cause=int(change.cause),  # type: ignore[arg-type]
        at_ms=change.at_ms,
    )
