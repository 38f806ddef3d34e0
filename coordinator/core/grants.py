"""Grants and slots: who may write which transaction, and in which slot the next one runs.

Epochs are raised by two from 0: data epochs are even, the marker that ends epoch e carries e + 1, the slot's next
transaction e + 2. So (producer id, epoch) is one transaction, and a late or repeated marker can end no other.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import Struct, field
from msgspec.structs import replace

from coordinator.core.commands import ErrorCode, Refused
from coordinator.core.records import (
    NOWHERE,
    Cause,
    Grant,
    IdState,
    Origin,
    Outcome,
    Result,
    Slot,
    TopicPartition,
    TopicState,
    Transaction,
    grant_of,
)
from coordinator.core.state import INDEBTED, TRANSITIONS, Event, TransactionState

EPOCH_MAX = 32_766
SLOTS_MAX = 4


class Limits(Struct, frozen=True, kw_only=True):
    # Decided numbers that an id's record remembers.
    outcomes_kept: int = 5
    # Transactions of one id that may owe markers at once.
    debts_max: int = 16
    # How long a registration waits for its slot's debts before it gets another producer id.
    patience_ms: int = 1_000
    # How long an End waits, once, for older debts of its id to be paid, so that it can chain: to register the next
    # transaction by itself would cost the client one more call, and the log one more record.
    chain_patience_ms: int = 20
    # A producer id is replaced at half of the time after which brokers forget it (producer.id.expiration.ms).
    producer_id_age_max_ms: int = 12 * 3_600_000


class Context(Struct, frozen=True, kw_only=True):
    """All that a decision needs beside state and command."""

    now_ms: int
    # Never used before; a decision says how many of them it took, from the left.
    producer_ids: tuple[int, ...] = ()
    # The next place in the log partition's order of decisions.
    decision: int = 1
    # The end of the feed as the leader knows it.
    feed_offset_next: int = 0
    # Whether manifests get there: a commit that can get none is not decided.
    feed_is_available: bool = True
    # As after every record written so far, those not acknowledged yet included: compaction keeps the last one only.
    number_floor: int = 0
    # This id's decided numbers that owe nothing any more, though the log does not say so yet.
    paid: frozenset[int] = frozenset()
    # Of its other decided numbers: the partitions whose marker is not acknowledged yet, where some are.
    owed: Mapping[int, frozenset[TopicPartition]] = field(default_factory=dict)
    # Of those paid: where markers were given up, because their partition is gone.
    dropped: frozenset[int] = frozenset()
    # Of decided numbers that have owed markers for long: where their manifest ends in the feed.
    manifests: Mapping[int, int] = field(default_factory=dict)
    # The topics that were registered in this log partition, and the count of their changes: as after every record so
    # far, as above.
    topics: Mapping[str, TopicState] = field(default_factory=dict)
    topic_changes: int = 0
    # Whether an End may still be put off for the sake of its chain.
    may_wait: bool = False
    limits: Limits = Limits()


class OutOfProducerIdsError(Exception):
    """Inside a decision only: it needs more fresh producer ids than it was given."""


@dataclass(slots=True)
class ProducerIds:
    """The fresh producer ids of one decision, counted as they are taken."""

    fresh: tuple[int, ...]
    used: int = 0

    def take(self) -> int:
        if self.used == len(self.fresh):
            raise OutOfProducerIdsError
        self.used += 1
        return self.fresh[self.used - 1]


def settle(state: IdState, context: Context) -> IdState:
    """Completes what is wholly paid, and notes what is not for long. Part of every step, so it costs no append."""
    if context.manifests:
        noted = tuple(_with_manifest(t, context.manifests.get(t.grant.number, 0)) for t in state.transactions)
        state = replace(state, transactions=noted)
    if context.paid:
        kept = tuple(
            t
            for t in state.transactions
            if t.grant.number not in context.paid or (t.state, Event.PAID) not in TRANSITIONS
        )
        return replace(state, transactions=kept, slots=_without_dropped(state, context))
    return state


def _with_manifest(transaction: Transaction, feed_offset_next: int) -> Transaction:
    if feed_offset_next and not transaction.feed_offset_next and transaction.state in INDEBTED:
        return replace(transaction, feed_offset_next=feed_offset_next)
    return transaction


def _without_dropped(state: IdState, context: Context) -> tuple[Slot, ...]:
    """A marker that was given up fences nobody: what its producer id wrote, or may still write, may be open there."""
    if not context.dropped:
        return state.slots
    spoiled = {t.grant.producer_id for t in state.transactions if t.grant.number in context.dropped}
    return tuple(replace(slot, topic_changes=NOWHERE) if slot.producer_id in spoiled else slot for slot in state.slots)


def new_slot(context: Context, ids: ProducerIds, epoch: int = 0) -> Slot:
    return Slot(producer_id=ids.take(), epoch=epoch, since_ms=context.now_ms, topic_changes=context.topic_changes)


def slot_is_free(state: IdState, slot: Slot) -> bool:
    """Nothing is registered in a slot with debts: its next epoch must not start before its last marker stands."""
    return all(t.grant.producer_id != slot.producer_id or t.state not in INDEBTED for t in state.transactions)


def debt_in_slot(state: IdState) -> Transaction | None:
    """The transaction that still owes markers under the producer id of the newest grant."""
    producer_id = state.slots[state.slot].producer_id
    indebted = (t for t in state.transactions if t.state in INDEBTED)
    return next((t for t in indebted if t.grant.producer_id == producer_id), None)


def has_debts_to_wait_for(state: IdState) -> bool:
    """Whether an End that cannot chain could once they are paid; with one slot its own debt would be in its way."""
    return state.slots_max > 1 and any(t.state in INDEBTED for t in state.transactions)


def grant_next(state: IdState, context: Context, ids: ProducerIds, *, origin: Origin, stay: bool = False) -> IdState:
    """Moves on to the next number: in a free slot, else a new one, else the slot whose debt is oldest.

    With `stay` the present slot is kept even if it has debts: the caller waits until they are paid.
    """
    slots = list(state.slots)
    index = state.slot
    if not stay and not slot_is_free(state, slots[index]):
        free = [i for i, slot in enumerate(slots) if slot_is_free(state, slot)]
        if free:
            index = free[0]
        elif len(slots) < state.slots_max:
            slots.append(new_slot(context, ids, epoch=-2))
            index = len(slots) - 1
        else:
            indebted = [t.grant.producer_id for t in state.transactions if t.state in INDEBTED]
            index = min(range(len(slots)), key=lambda i: _debt_rank(indebted, slots[i]))
    slots[index] = _raised(slots[index], context, ids)
    return replace(
        state,
        slots=tuple(slots),
        slot=index,
        number=state.number + 1,
        origin=origin,
        origin_number=state.number,
        updated_at_ms=context.now_ms,
    )


def _debt_rank(indebted: list[int], slot: Slot) -> int:
    return indebted.index(slot.producer_id) if slot.producer_id in indebted else -1


def is_too_old(slot: Slot, context: Context) -> bool:
    """Brokers forget a producer id that is not written with, and whom they have fenced under it."""
    # One taken in the future was taken by another clock: nobody knows how old it is.
    return not 0 <= context.now_ms - slot.since_ms < context.limits.producer_id_age_max_ms


def _raised(slot: Slot, context: Context, ids: ProducerIds) -> Slot:
    if slot.epoch + 2 > EPOCH_MAX or is_too_old(slot, context) or slot.topic_changes == NOWHERE:
        return new_slot(context, ids)
    return replace(slot, epoch=slot.epoch + 2)


def limit_slots(state: IdState, slots_max: int) -> IdState:
    """Gives up slots beyond the limit, but not the present one; the debts of the others live on by themselves."""
    if len(state.slots) <= slots_max:
        return replace(state, slots_max=slots_max)
    others = (slot for index, slot in enumerate(state.slots) if index != state.slot)
    slots = (state.slots[state.slot], *others)[:slots_max]
    return replace(state, slots=slots, slot=0, slots_max=slots_max)


def with_new_producer_id(state: IdState, context: Context, ids: ProducerIds) -> IdState:
    """Gives the present slot a fresh producer id; the debts of the old one live on by themselves."""
    slots = list(state.slots)
    slots[state.slot] = new_slot(context, ids)
    return replace(state, slots=tuple(slots))


def outcome_of(state: IdState, number: int) -> Outcome | None:
    """Of a decided number: among the last outcomes, or, however old, not complete yet."""
    known = next((outcome for outcome in state.outcomes if outcome.grant.number == number), None)
    if known is not None:
        return known
    debt = next((t for t in state.transactions if t.grant.number == number and t.state in INDEBTED), None)
    if debt is None:
        return None
    result = Result.COMMITTED if debt.state is TransactionState.PREPARE_COMMIT else Result.ABORTED
    return Outcome(grant=debt.grant, result=result, cause=debt.cause, decided_at_ms=debt.decided_at_ms)


def identify(state: IdState, grant: Grant) -> Refused | Outcome | None:
    """Whose call is it? None: the holder of the newest grant. An outcome: its number is decided."""
    if grant.number > state.number:
        return Refused(
            code=ErrorCode.INVALID_REQUEST,
            message=f"number {grant.number} has not been granted; the newest is {state.number}",
        )
    outcome = outcome_of(state, grant.number)
    known = outcome.grant if outcome else grant_of(state) if grant.number == state.number else None
    if known is None:
        if grant.number < state.owner.number_first:
            return refuse_fenced(state)
        return Refused(
            code=ErrorCode.OUTCOME_EXPIRED,
            message=f"number {grant.number} was decided too long ago; GetOutcome may find it in the feed",
        )
    if known.producer_id != grant.producer_id:
        return Refused(
            code=ErrorCode.INVALID_PRODUCER_ID_MAPPING,
            message=f"number {grant.number} belongs to producer id {known.producer_id}, not {grant.producer_id}",
        )
    if known.epoch != grant.epoch:
        return Refused(
            code=ErrorCode.INVALID_PRODUCER_EPOCH,
            message=f"number {grant.number} has epoch {known.epoch}, not {grant.epoch}",
        )
    return outcome


def was_found_prepared(state: IdState, number: int, outcome: Outcome | None) -> bool:
    """Whether the owner was not granted this number but found it PREPARED: it may decide it, as whoever prepared it
    may, and the numbers that follow are its own. `outcome`: of the number, if it is decided.
    """
    if number != state.owner.number_first - 1 or state.owner.cause is Cause.ADMINISTRATOR:
        return False
    # Else the owner's own InitProducer has aborted it.
    return outcome is None or outcome.cause is not Cause.NEWER_INSTANCE


def refuse_fenced(state: IdState, outcome: Outcome | None = None) -> Refused:
    who = "an administrator" if state.owner.cause is Cause.ADMINISTRATOR else "a newer instance"
    return Refused(
        code=ErrorCode.PRODUCER_FENCED,
        message=f"fenced by {who}: {state.owner.instance or 'unnamed'} at {state.owner.address or 'unknown'}; "
        "stop this instance, or call InitProducer to take the id back",
        owner=state.owner,
        outcome=outcome,
    )


def refuse_decided(state: IdState, outcome: Outcome) -> Refused:
    """For calls that come too late: the number has its outcome."""
    number = outcome.grant.number
    # One that was found PREPARED is asked about by the owner as well, which nobody has fenced.
    is_fenced = number < state.owner.number_first and not was_found_prepared(state, number, outcome)
    if outcome.result is Result.ABORTED and is_fenced:
        return refuse_fenced(state, outcome)
    what = "is committed" if outcome.result is Result.COMMITTED else f"was aborted (cause: {outcome.cause.name})"
    return Refused(
        code=ErrorCode.INVALID_TXN_STATE,
        message=f"transaction {number} {what}; go on with the next grant: End with the same result, "
        "or InitProducer, returns it",
        outcome=outcome,
    )
