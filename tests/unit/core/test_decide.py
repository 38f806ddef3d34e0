"""What decide adds to its parts: dispatch, refusals of what makes no sense, and the producer ids it takes."""

import pytest

from coordinator.core.commands import (
    Accepted,
    Blocked,
    Command,
    Complete,
    Done,
    End,
    Ended,
    ErrorCode,
    Expire,
    GetOutcome,
    Heartbeat,
    InitProducer,
    NeedsProducerId,
    Refused,
    Register,
    Registered,
    Timeout,
)
from coordinator.core.decide import decide
from coordinator.core.grants import Context
from coordinator.core.records import Grant, Result, Slot, grant_of
from coordinator.core.state import TransactionState
from tests.unit.core.states import NOW_MS, P0, id_state, outcome, transaction

CONTEXT = Context(now_ms=NOW_MS, producer_ids=(2000,))
GRANT = Grant(number=1, producer_id=1000, epoch=0)


def init(slots_max: int = 2, grant: Grant | None = None) -> InitProducer:
    return InitProducer(
        transactional_id="a", instance="i", address="", transaction_timeout_ms=1, slots_max=slots_max, grant=grant
    )


@pytest.mark.parametrize(
    "command",
    [
        Register(transactional_id="a", grant=GRANT),
        End(transactional_id="a", grant=GRANT, result=Result.UNDECIDED),
        init(slots_max=0),
        init(slots_max=5),
    ],
)
@pytest.mark.parametrize("state", [None, id_state()])
def test_malformed(command: Command, state: object) -> None:
    decision = decide(state, command, CONTEXT)  # type: ignore[arg-type]
    assert isinstance(decision, Refused)
    assert decision.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    "command",
    [
        Timeout(transactional_id="a", number=1),
        Complete(transactional_id="a"),
        Expire(transactional_id="a", idle_since_before_ms=0),
    ],
)
def test_our_own_commands_find_nothing_at_an_unknown_id(command: Command) -> None:
    assert decide(None, command, CONTEXT) == Accepted(reply=Done())


@pytest.mark.parametrize("command", [init(grant=GRANT), GetOutcome(transactional_id="a", number=1)])
def test_others_are_told_that_it_is_unknown(command: Command) -> None:
    decision = decide(None, command, CONTEXT)
    assert isinstance(decision, Refused)
    assert decision.code is ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert "'a'" in decision.message


def test_a_new_id_starts_above_the_floor() -> None:
    decision = decide(None, init(), Context(now_ms=NOW_MS, producer_ids=(2000,), number_floor=41))
    assert isinstance(decision, Accepted)
    (state,) = decision.records
    assert grant_of(state) == Grant(number=42, producer_id=2000, epoch=0)  # type: ignore[arg-type]


def test_no_producer_id_no_decision() -> None:
    empty = Context(now_ms=NOW_MS)
    assert decide(None, init(), empty) == NeedsProducerId()
    # Its only slot is in debt from here on, so the next number needs a second one.
    end = End(transactional_id="a", grant=GRANT, result=Result.ABORTED)
    assert decide(id_state(transaction()), end, empty) == NeedsProducerId()
    decision = decide(id_state(transaction()), end, CONTEXT)
    assert isinstance(decision, Accepted)
    assert decision.producer_ids_used == 1


def test_a_heartbeat_writes_nothing() -> None:
    decision = decide(id_state(), Heartbeat(transactional_id="a", grant=GRANT), CONTEXT)
    assert decision == Accepted(reply=Registered(grant=GRANT))


def test_completing_writes_the_state_without_what_is_paid() -> None:
    state = id_state(transaction(1, TransactionState.PREPARE_ABORT), number=2, outcomes=(outcome(1),))
    decision = decide(state, Complete(transactional_id="a"), Context(now_ms=NOW_MS, paid=frozenset({1})))
    assert isinstance(decision, Accepted)
    (after,) = decision.records
    assert after.transactions == ()  # type: ignore[union-attr]


def test_a_subset_that_is_held_writes_nothing() -> None:
    register = Register(transactional_id="a", grant=GRANT, partitions=frozenset({P0}))
    assert decide(id_state(transaction()), register, CONTEXT) == Accepted(reply=Registered(grant=GRANT))


def chained_end(slots_max: int = 2, **context: object) -> object:
    """Of number 2, which runs in the second slot while 1 owes its marker in the first."""
    state = id_state(
        transaction(1, TransactionState.PREPARE_COMMIT),
        transaction(2, producer_id=1001),
        slots=tuple(Slot(producer_id=producer_id, epoch=0, since_ms=NOW_MS) for producer_id in (1000, 1001)),
        number=2,
        slot=1,
        slots_max=slots_max,
        outcomes=(outcome(1),),
    )
    grant = Grant(number=2, producer_id=1001, epoch=0)
    command = End(transactional_id="a", grant=grant, result=Result.ABORTED, next_partitions=frozenset({P0}))
    return decide(state, command, Context(now_ms=NOW_MS, **context))  # type: ignore[arg-type]


def test_an_end_waits_once_for_older_debts_so_that_it_can_chain() -> None:
    decision = chained_end(may_wait=True)
    assert isinstance(decision, Blocked)
    assert decision.again_at_ms == NOW_MS + 20
    assert decision.refusal.retriable


@pytest.mark.parametrize(
    ("slots_max", "context", "registered"),
    [
        (2, {"may_wait": True, "paid": frozenset({1})}, True),
        # It has waited: decided without the chain.
        (2, {"may_wait": False}, False),
        # There would be no free slot with older debts paid either.
        (1, {"may_wait": True}, False),
    ],
)
def test_an_end_does_not_wait_in_vain(slots_max: int, context: dict[str, object], *, registered: bool) -> None:
    decision = chained_end(slots_max, **context)
    assert isinstance(decision, Accepted)
    assert isinstance(decision.reply, Ended)
    assert decision.reply.next_registered is registered
