"""Moving on to the next number, and telling whose call it is."""

import pytest
from msgspec.structs import replace

from coordinator.core.commands import ErrorCode, Refused
from coordinator.core.grants import (
    EPOCH_MAX,
    Context,
    Limits,
    OutOfProducerIdsError,
    ProducerIds,
    grant_next,
    identify,
    limit_slots,
    outcome_of,
    refuse_decided,
    refuse_fenced,
    settle,
    slot_is_free,
)
from coordinator.core.records import Cause, Grant, IdState, Origin, Owner, Result, Slot, grant_of
from coordinator.core.state import TransactionState
from tests.unit.core.states import NOW_MS, id_state, outcome, transaction

CONTEXT = Context(now_ms=NOW_MS, producer_ids=(2000, 2001))
PAYING = TransactionState.PREPARE_COMMIT


def slots(*epochs: int) -> tuple[Slot, ...]:
    return tuple(Slot(producer_id=1000 + i, epoch=epoch, since_ms=NOW_MS) for i, epoch in enumerate(epochs))


def step(state: IdState, context: Context = CONTEXT, *, stay: bool = False) -> Grant:
    ids = ProducerIds(context.producer_ids)
    return grant_of(grant_next(state, context, ids, origin=Origin.END, stay=stay))


def test_a_free_slot_is_kept() -> None:
    assert step(id_state()) == Grant(number=2, producer_id=1000, epoch=2)


def test_a_free_slot_is_found() -> None:
    state = id_state(transaction(1, PAYING), slots=slots(0, 6))
    assert step(state) == Grant(number=2, producer_id=1001, epoch=8)


def test_a_slot_is_opened() -> None:
    assert step(id_state(transaction(1, PAYING))) == Grant(number=2, producer_id=2000, epoch=0)


def test_without_a_free_slot_it_is_the_one_that_is_oldest_in_debt() -> None:
    debts = (transaction(1, PAYING, producer_id=1001), transaction(2, PAYING, producer_id=1000))
    assert step(id_state(*debts, slots=slots(4, 6), number=2)) == Grant(number=3, producer_id=1001, epoch=8)


def test_who_waits_stays() -> None:
    assert step(id_state(transaction(1, PAYING)), stay=True) == Grant(number=2, producer_id=1000, epoch=2)


@pytest.mark.parametrize(("epoch", "producer_id"), [(EPOCH_MAX - 2, 1000), (EPOCH_MAX, 2000)])
def test_epochs_end(epoch: int, producer_id: int) -> None:
    assert step(id_state(slots=slots(epoch))).producer_id == producer_id


@pytest.mark.parametrize(("age_ms", "producer_id"), [(0, 1000), (999, 1000), (1000, 2000), (-1, 2000)])
def test_producer_ids_grow_old(age_ms: int, producer_id: int) -> None:
    limits = Limits(producer_id_age_max_ms=1000)
    context = Context(now_ms=NOW_MS + age_ms, producer_ids=(2000,), limits=limits)
    assert step(id_state(), context).producer_id == producer_id


def test_producer_ids_run_out() -> None:
    ids = ProducerIds((5,))
    assert (ids.take(), ids.used) == (5, 1)
    with pytest.raises(OutOfProducerIdsError):
        ids.take()


def test_slots_are_given_up_but_not_the_present_one() -> None:
    state = limit_slots(id_state(slots=slots(0, 2, 4), slot=2), 2)
    assert ([slot.producer_id for slot in state.slots], state.slot, state.slots_max) == ([1002, 1000], 0, 2)
    assert limit_slots(id_state(slots=slots(0, 2), slot=1), 4).slots == slots(0, 2)


def test_a_slot_is_free_unless_its_producer_id_owes() -> None:
    state = id_state(transaction(1, PAYING), transaction(2, producer_id=1001), slots=slots(0, 2), number=2, slot=1)
    assert [slot_is_free(state, slot) for slot in state.slots] == [False, True]


def test_settling_completes_what_is_paid_and_nothing_else() -> None:
    debts = (transaction(1, PAYING), transaction(2, PAYING, producer_id=1001), transaction(3, producer_id=1002))
    paid = Context(now_ms=NOW_MS, paid=frozenset({1, 3}))
    settled = settle(id_state(*debts, number=3), paid)
    assert [t.grant.number for t in settled.transactions] == [2, 3]
    assert settle(settled, CONTEXT) is settled


def test_an_outcome_is_found_among_outcomes_and_debts() -> None:
    aborting = transaction(2, TransactionState.PREPARE_ABORT, producer_id=1001)
    state = id_state(transaction(1, PAYING), aborting, transaction(4), number=4, outcomes=(outcome(3),))
    results = [known.result if (known := outcome_of(state, number)) else None for number in (1, 2, 3, 4)]
    assert results == [Result.COMMITTED, Result.ABORTED, Result.COMMITTED, None]


@pytest.mark.parametrize(
    ("grant", "code"),
    [
        ((5, 1000, 0), ErrorCode.INVALID_REQUEST),
        ((4, 1001, 0), ErrorCode.INVALID_PRODUCER_ID_MAPPING),
        ((4, 1000, 2), ErrorCode.INVALID_PRODUCER_EPOCH),
        ((3, 1000, 2), ErrorCode.INVALID_PRODUCER_EPOCH),
        ((2, 1000, 0), ErrorCode.OUTCOME_EXPIRED),
        ((1, 1000, 0), ErrorCode.PRODUCER_FENCED),
        ((-1, 1000, 0), ErrorCode.PRODUCER_FENCED),
    ],
)
def test_strangers_are_told_apart(grant: tuple[int, int, int], code: ErrorCode) -> None:
    owner = id_state().owner
    state = id_state(number=4, outcomes=(outcome(3),), owner=_from(owner, 2))
    number, producer_id, epoch = grant
    identity = identify(state, Grant(number=number, producer_id=producer_id, epoch=epoch))
    assert isinstance(identity, Refused)
    assert identity.code is code


def test_holders_are_known() -> None:
    state = id_state(number=4, outcomes=(outcome(3),))
    assert identify(state, Grant(number=4, producer_id=1000, epoch=0)) is None
    assert identify(state, Grant(number=3, producer_id=1000, epoch=0)) == outcome(3)


def test_a_refusal_says_who_and_why() -> None:
    fenced = refuse_fenced(id_state())
    assert "a newer instance: one at one:1" in fenced.message
    root = _from(id_state().owner, 2, cause=Cause.ADMINISTRATOR)
    assert "an administrator" in refuse_fenced(id_state(owner=root, number=2)).message
    aborted = outcome(1, Result.ABORTED)
    assert refuse_decided(id_state(number=2), aborted).code is ErrorCode.INVALID_TXN_STATE
    assert refuse_decided(id_state(number=2, owner=root), aborted).code is ErrorCode.PRODUCER_FENCED
    assert refuse_decided(id_state(number=2, owner=root), outcome(1)).code is ErrorCode.INVALID_TXN_STATE


def _from(owner: Owner, number_first: int, cause: Cause = Cause.NEWER_INSTANCE) -> Owner:
    return replace(owner, number_first=number_first, cause=cause)
