"""What a state still owes the world. Paying after a crash and in normal life is one code path.

A decided transaction owes, in this order: its manifest in the feed (a commit only), a control marker on each
partition, and then its completion in the log.
"""

from msgspec import Struct

from coordinator.core.records import OFFSETS_TOPIC, IdState, TopicPartition, Transaction
from coordinator.core.state import INDEBTED, TransactionState

# Ids of topics are asked for again long before; but a PREPARED transaction may wait for days.
OLD_AFTER_MS = 10_000


class Debt(Struct, frozen=True, kw_only=True):
    transactional_id: str
    number: int
    producer_id: int
    # The data's epoch + 1: fences every late write of the transaction, and can end no other.
    marker_epoch: int
    commit: bool
    partitions: frozenset[TopicPartition]
    decision: int
    transaction: Transaction
    # So old that its topics may have been deleted and created again since their ids were last asked for.
    is_old: bool = False


def owed(state: IdState) -> tuple[Debt, ...]:
    return tuple(
        Debt(
            transactional_id=state.transactional_id,
            number=transaction.grant.number,
            producer_id=transaction.grant.producer_id,
            marker_epoch=transaction.grant.epoch + 1,
            commit=transaction.state is TransactionState.PREPARE_COMMIT,
            partitions=marked_partitions(transaction),
            decision=transaction.decision,
            transaction=transaction,
            # One begun in the future was begun by another clock: nobody knows how long it has waited.
            is_old=not 0 <= transaction.decided_at_ms - transaction.started_at_ms <= OLD_AFTER_MS,
        )
        for transaction in state.transactions
        if transaction.state in INDEBTED
    )


def marked_partitions(transaction: Transaction) -> frozenset[TopicPartition]:
    """A commit marks where the transaction wrote; an abort marks all it registered, for a write may be under way."""
    if transaction.state is TransactionState.PREPARE_ABORT:
        groups = {group.partition for group in transaction.groups}
        return transaction.partitions | {TopicPartition(OFFSETS_TOPIC, partition) for partition in groups}
    with_offsets = {offsets.group_id for offsets in transaction.contents.group_offsets}
    groups = {group.partition for group in transaction.groups if group.group_id in with_offsets}
    written = {
        TopicPartition(entry.topic, entry.partition) for entry in transaction.contents.written if entry.record_count
    }
    return frozenset(written | {TopicPartition(OFFSETS_TOPIC, partition) for partition in groups})
