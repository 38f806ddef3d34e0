"""Each invariant is broken once, so that we know that it can be."""

import pytest
from msgspec.structs import replace

from coordinator.core.invariants import InvariantBrokenError, check, check_step
from coordinator.core.records import IdState, Result, Slot, Transaction
from coordinator.core.state import TransactionState
from tests.unit.core.states import NOW_MS, P0, P1, id_state, outcome, transaction

COMMITTING, ABORTING = TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT


def slot(producer_id: int = 1000, epoch: int = 0) -> Slot:
    return Slot(producer_id=producer_id, epoch=epoch, since_ms=NOW_MS)


def later(*transactions: Transaction, **changes: object) -> IdState:
    """Number 2, after number 1 was committed."""
    base = id_state(*transactions, number=2, slots=(slot(epoch=2),), outcomes=(outcome(1),))
    return replace(base, **changes)


OWNER_LATER = replace(id_state().owner, number_first=2)


@pytest.mark.parametrize(
    ("state", "what"),
    [
        (id_state(slot=1), "slot 1 does not exist"),
        (id_state(slots=(slot(epoch=3),)), "no data epoch"),
        (id_state(slots=(slot(epoch=32_768),)), "no data epoch"),
        (id_state(slots=(slot(), slot())), "two slots share"),
        (id_state(transaction(1, ABORTING), transaction(2, epoch=0), number=2), "two incomplete transactions share"),
        (id_state(transaction(2, ABORTING), transaction(1, producer_id=7, state=ABORTING), number=3), "in order"),
        (later(transaction(1, ABORTING)), "is PREPARE_ABORT, its outcome COMMITTED"),
        (later(transaction(1)), "is open, the newest number is 2"),
        (later(transaction(2)), "does not run in the granted slot"),
        (id_state(transaction(partitions=frozenset())), "open without a partition"),
        (later(outcomes=(outcome(2),)), "newest number 2 is decided"),
        (id_state(owner=OWNER_LATER), "holds no grant"),
        (id_state(transaction(), owner=OWNER_LATER), "holds no grant"),
    ],
)
def test_a_state_that_cannot_be(state: IdState, what: str) -> None:
    with pytest.raises(InvariantBrokenError, match=what):
        check(state)


@pytest.mark.parametrize(
    "state",
    [
        id_state(),
        id_state(transaction()),
        id_state(transaction(state=TransactionState.PREPARED), owner=OWNER_LATER),
        later(transaction(1, COMMITTING), transaction(2, producer_id=1001), slots=(slot(), slot(1001)), slot=1),
        # A commit of metadata alone owes no marker.
        later(
            transaction(1, ABORTING), transaction(2, COMMITTING, epoch=2, partitions=frozenset()), outcomes=(), number=3
        ),
    ],
)
def test_states_that_can_be(state: IdState) -> None:
    check(state)
    check_step(None, state)
    check_step(state, state)


BOTH = frozenset({P0, P1})


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        (later(), id_state(), "number fell"),
        (id_state(slots=(slot(epoch=4),)), id_state(slots=(slot(epoch=2),)), "epoch of producer id 1000 fell"),
        (id_state(slots=(slot(epoch=2),)), later(), "granted twice"),
        (later(), later(outcomes=(outcome(1, Result.ABORTED),)), "outcome of 1 changed"),
        (id_state(), later(outcomes=()), "passed over without an outcome"),
        (later(), later(owner=OWNER_LATER), "changed hands"),
        (id_state(transaction(partitions=BOTH)), id_state(transaction()), "lost what was registered"),
        (id_state(transaction(state=TransactionState.PREPARED)), id_state(transaction()), "PREPARED to ONGOING"),
        (id_state(transaction()), id_state(), "is gone"),
        (later(), later(transaction(1, COMMITTING, producer_id=9)), "came back"),
        (
            later(transaction(1, COMMITTING, partitions=BOTH)),
            later(transaction(1, COMMITTING)),
            "was decided and has changed",
        ),
    ],
)
def test_a_step_that_cannot_be(before: IdState, after: IdState, what: str) -> None:
    with pytest.raises(InvariantBrokenError, match=what):
        check_step(before, after)


def test_a_breach_names_the_id_and_every_reason() -> None:
    with pytest.raises(InvariantBrokenError, match=r"'a': the number fell.*; the epoch of producer id 1000 fell"):
        check_step(later(), id_state())
