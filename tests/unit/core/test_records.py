"""The two questions that records answer about themselves."""

from coordinator.core.records import Grant, Slot, grant_of, newest_transaction
from coordinator.core.state import TransactionState
from tests.unit.core.states import NOW_MS, id_state, transaction


def test_the_newest_grant_is_that_of_the_present_slot() -> None:
    slots = (
        Slot(producer_id=1000, epoch=4, since_ms=NOW_MS),
        Slot(producer_id=1001, epoch=2, since_ms=NOW_MS),
    )
    assert grant_of(id_state(slots=slots, number=7, slot=1)) == Grant(number=7, producer_id=1001, epoch=2)


def test_the_newest_transaction_is_the_open_one() -> None:
    debt, opened = transaction(1, TransactionState.PREPARE_COMMIT), transaction(2, producer_id=1001)
    assert newest_transaction(id_state(debt, opened, number=2)) == opened
    assert newest_transaction(id_state(debt, number=2)) is None
    assert newest_transaction(id_state()) is None
