"""The steps that decisions are made of: registering partitions, checking contents, deciding the newest number."""

from msgspec.structs import replace

from coordinator.core.commands import ErrorCode, Refused
from coordinator.core.grants import Context
from coordinator.core.owed import marked_partitions
from coordinator.core.records import (
    OFFSETS_TOPIC,
    Cause,
    Contents,
    GroupPartition,
    IdState,
    Outcome,
    Result,
    TopicPartition,
    Transaction,
    grant_of,
    newest_transaction,
)
from coordinator.core.state import INDEBTED, TRANSITIONS, Event, TransactionState

# A third transaction must not pile onto a partition that is down: it could not be completed before the first two.
OWED_PER_PARTITION_MAX = 2


def registration_obstacle(
    state: IdState,
    partitions: frozenset[TopicPartition],
    groups: frozenset[GroupPartition],
    context: Context,
) -> str | None:
    """Why these partitions cannot be registered just now, if so. Keeps the debts of an id bounded."""
    indebted = [t for t in state.transactions if t.state in INDEBTED]
    if len(indebted) >= context.limits.debts_max:
        return f"{len(indebted)} transactions of this id are still being completed"
    wanted = partitions | {TopicPartition(OFFSETS_TOPIC, group.partition) for group in groups}
    owed = [context.owed.get(t.grant.number, marked_partitions(t)) for t in indebted]
    for partition in wanted:
        if sum(partition in still for still in owed) >= OWED_PER_PARTITION_MAX:
            return f"{partition.topic}:{partition.partition} still owes the markers of two transactions of this id"
    return None


def register(
    state: IdState,
    partitions: frozenset[TopicPartition],
    groups: frozenset[GroupPartition],
    context: Context,
) -> IdState:
    """Adds to the newest number's transaction, which is ONGOING from here on."""
    newest = newest_transaction(state)
    if newest is None:
        newest = Transaction(
            grant=grant_of(state),
            state=TRANSITIONS[TransactionState.EMPTY, Event.REGISTER],
            partitions=partitions,
            groups=groups,
            started_at_ms=context.now_ms,
        )
        return replace(state, transactions=(*state.transactions, newest), updated_at_ms=context.now_ms)
    grown = replace(newest, partitions=newest.partitions | partitions, groups=newest.groups | groups)
    return replace(state, transactions=(*state.transactions[:-1], grown), updated_at_ms=context.now_ms)


def check_contents(transaction: Transaction | None, contents: Contents) -> Refused | None:
    """A commit may only name what was registered, once, with counts that agree with the runs."""
    registered = transaction.partitions if transaction else frozenset()
    groups = {group.group_id for group in transaction.groups} if transaction else set()
    seen = set()
    for entry in contents.written:
        partition = TopicPartition(entry.topic, entry.partition)
        where = f"{entry.topic}:{entry.partition}"
        if partition not in registered:
            return _invalid(f"{where} is not registered with this transaction")
        if partition in seen:
            return _invalid(f"{where} is named twice")
        seen.add(partition)
        offset = -1
        count = 0
        for run in entry.runs:
            if run.offset_first <= offset or run.offset_next <= run.offset_first:
                return _invalid(f"the runs of {where} are not ascending")
            # Adjacent runs would be one run: `offset` is where the last one ended.
            offset = run.offset_next
            count += run.offset_next - run.offset_first
        if count != entry.record_count:
            return _invalid(f"{where}: {entry.record_count} records are claimed, the runs hold {count}")
    for offsets in contents.group_offsets:
        if offsets.group_id not in groups:
            return _invalid(f"the group {offsets.group_id!r} is not registered with this transaction")
    if transaction is None and not contents.metadata:
        return Refused(
            code=ErrorCode.INVALID_TXN_STATE,
            message="nothing is registered and no metadata is given: there is nothing to commit",
        )
    return None


def same_contents(one: Contents, other: Contents) -> bool:
    """Whether a client says the same again. Ids of topics are ours: they may have changed meanwhile."""
    return one == other or _without_topic_ids(one) == _without_topic_ids(other)


def _without_topic_ids(contents: Contents) -> Contents:
    return replace(contents, written=tuple(replace(entry, topic_id=b"") for entry in contents.written))


def _invalid(message: str) -> Refused:
    return Refused(code=ErrorCode.INVALID_REQUEST, message=message)


def decide_newest(state: IdState, result: Result, cause: Cause, contents: Contents, context: Context) -> IdState:
    """Decides the newest number: it gets its outcome, and a debt where anything is owed. Grants nothing."""
    grant = grant_of(state)
    newest = newest_transaction(state)
    event = Event.COMMIT if result is Result.COMMITTED else Event.ABORT
    after = TRANSITIONS[newest.state if newest else TransactionState.EMPTY, event]
    transactions = state.transactions[:-1] if newest else state.transactions
    if after in INDEBTED:
        base = newest or Transaction(
            grant=grant,
            state=after,
            partitions=frozenset(),
            groups=frozenset(),
            started_at_ms=context.now_ms,
        )
        decided = replace(
            base,
            state=after,
            contents=contents,
            cause=cause,
            decided_at_ms=context.now_ms,
            decision=context.decision,
            feed_offset_first=context.feed_offset_next,
        )
        transactions = (*transactions, decided)
    outcome = Outcome(grant=grant, result=result, cause=cause, decided_at_ms=context.now_ms)
    return replace(
        state,
        transactions=transactions,
        outcomes=(*state.outcomes, outcome)[-context.limits.outcomes_kept :],
        resume_token=contents.metadata or state.resume_token,
        updated_at_ms=context.now_ms,
    )
