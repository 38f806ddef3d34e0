"""The table of transitions as data."""

from coordinator.core.state import INDEBTED, TRANSITIONS, Event, TransactionState


def test_every_state_is_reached_or_is_the_beginning() -> None:
    assert set(TransactionState) == {TransactionState.EMPTY, *TRANSITIONS.values()}


def test_every_event_occurs() -> None:
    assert {event for _, event in TRANSITIONS} == set(Event)


def test_what_is_indebted_can_be_paid() -> None:
    assert {state for state, event in TRANSITIONS if event is Event.PAID} == INDEBTED
