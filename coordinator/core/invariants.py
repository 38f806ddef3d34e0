"""What must hold of every state and of every step, whatever happens. A breach stops the partition loudly."""

from collections.abc import Iterator

from msgspec.structs import replace

from coordinator.core.grants import EPOCH_MAX
from coordinator.core.records import IdState, Result, Transaction, grant_of, newest_transaction
from coordinator.core.state import INDEBTED, REACHABLE, TransactionState

_RESULTS = {
    TransactionState.PREPARE_COMMIT: Result.COMMITTED,
    TransactionState.PREPARE_ABORT: Result.ABORTED,
}


class InvariantBrokenError(Exception):
    """The state machine contradicts itself: never serve from here, look at the log."""


def check(state: IdState) -> None:
    _raise_on(state, _breaches(state))


def check_step(before: IdState | None, after: IdState) -> None:
    """Checks `after`, and that the way from `before` to it breaks no promise."""
    _raise_on(after, _breaches(after))
    if before is not None:
        _raise_on(after, _step_breaches(before, after))


def _raise_on(state: IdState, breaches: Iterator[str]) -> None:
    found = list(breaches)
    if found:
        raise InvariantBrokenError(f"{state.transactional_id!r}: {'; '.join(found)}")


def _breaches(state: IdState) -> Iterator[str]:
    if not 0 <= state.slot < len(state.slots):
        yield f"slot {state.slot} does not exist"
        return
    for slot in state.slots:
        if slot.epoch % 2 or not 0 <= slot.epoch <= EPOCH_MAX:
            yield f"epoch {slot.epoch} of producer id {slot.producer_id} is no data epoch"
    if len({slot.producer_id for slot in state.slots}) != len(state.slots):
        yield "two slots share a producer id"
    # A commit of metadata alone owes no marker, so it is in nobody's way.
    owing = [
        t.grant.producer_id
        for t in state.transactions
        if t.state is not TransactionState.PREPARE_COMMIT or t.contents.written or t.contents.group_offsets
    ]
    if len(set(owing)) != len(owing):
        yield "two incomplete transactions share a producer id"
    numbers = [t.grant.number for t in state.transactions]
    if numbers != sorted(set(numbers)):
        yield "transactions are not in order of their numbers"
    decided = {outcome.grant.number: outcome for outcome in state.outcomes}
    for transaction in state.transactions:
        number = transaction.grant.number
        if transaction.state in INDEBTED:
            outcome = decided.get(number)
            if outcome is not None and outcome.result is not _RESULTS[transaction.state]:
                yield f"transaction {number} is {transaction.state.name}, its outcome {outcome.result.name}"
        elif number != state.number:
            yield f"transaction {number} is open, the newest number is {state.number}"
        elif transaction.grant != grant_of(state):
            yield f"transaction {number} does not run in the granted slot"
        elif not transaction.partitions and not transaction.groups:
            yield f"transaction {number} is open without a partition"
    if state.number in decided:
        yield f"the newest number {state.number} is decided"
    newest = newest_transaction(state)
    prepared = newest is not None and newest.state is TransactionState.PREPARED
    if state.owner.number_first > state.number + prepared:
        yield "the owner holds no grant"


def _step_breaches(before: IdState, after: IdState) -> Iterator[str]:
    if after.number < before.number:
        yield f"the number fell from {before.number} to {after.number}"
    epochs = {slot.producer_id: slot.epoch for slot in before.slots}
    seen = {slot.producer_id: slot.topic_changes for slot in before.slots}
    for slot in after.slots:
        if slot.topic_changes > seen.get(slot.producer_id, slot.topic_changes):
            yield f"producer id {slot.producer_id} may be used on topics that are younger than it"
        if slot.epoch < epochs.get(slot.producer_id, 0):
            yield f"the epoch of producer id {slot.producer_id} fell"
    if after.owner != before.owner and after.owner.number_first <= before.number:
        yield f"number {before.number} changed hands"
    yield from _transaction_breaches(before, after)
    granted = grant_of(after)
    if after.number != before.number and epochs.get(granted.producer_id, -1) >= granted.epoch:
        yield f"epoch {granted.epoch} of producer id {granted.producer_id} was granted twice"
    outcomes = {outcome.grant.number: outcome for outcome in before.outcomes}
    for outcome in after.outcomes:
        known = outcomes.get(outcome.grant.number)
        if known is not None and known != outcome:
            yield f"the outcome of {outcome.grant.number} changed"
    passed = {outcome.grant.number for outcome in after.outcomes}
    if after.number > before.number and before.number not in passed:
        yield f"number {before.number} was passed over without an outcome"


def _is_noted(was: Transaction, transaction: Transaction) -> bool:
    """Nothing has changed but that its manifest's place is known."""
    return not was.feed_offset_next and replace(transaction, feed_offset_next=0) == was


def _transaction_breaches(before: IdState, after: IdState) -> Iterator[str]:
    """Finds, among others, a decision that was made on an older state than the one it is applied to (R16)."""
    known = {t.grant.number: t for t in before.transactions}
    for transaction in after.transactions:
        number, was = transaction.grant.number, known.pop(transaction.grant.number, None)
        if was is None:
            if number < before.number:
                yield f"transaction {number} came back"
        elif was.state in INDEBTED:
            if transaction != was and not _is_noted(was, transaction):
                yield f"transaction {number} was decided and has changed"
        elif not (was.partitions <= transaction.partitions and was.groups <= transaction.groups):
            yield f"transaction {number} lost what was registered with it"
        elif transaction.state not in REACHABLE[was.state]:
            yield f"transaction {number} went from {was.state.name} to {transaction.state.name}"
    for number, was in known.items():
        if was.state not in INDEBTED:
            yield f"transaction {number} was {was.state.name} and is gone"
