"""The table of calls and states, cell by cell; and the order of checks before it.

The column is the state of the transaction with the call's number (for Init: of the newest).
"""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from coordinator.core.commands import (
    Accepted,
    Command,
    Ended,
    ErrorCode,
    Granted,
    Prepared,
    Refused,
    Registered,
    Wait,
)
from coordinator.core.decide import decide
from coordinator.core.owed import owed
from coordinator.core.records import Cause, Grant, Result
from coordinator.core.state import INDEBTED, TRANSITIONS, Event, TransactionState
from tests.conformance.calls import (
    ABORT,
    COMMIT,
    P0,
    P1,
    add,
    end,
    granted,
    heartbeat,
    init,
    newest_state,
    owned,
    prepare,
    state_of,
    state_of_number,
    wrote,
)
from tests.model.desk import Desk

State = TransactionState


def bring_to(desk: Desk, column: str) -> Grant:
    """An id whose number 1 is in that state; the grant of number 1."""
    grant = owned(desk) if column == "NONE" else owned(desk, P0)
    if column == "PREPARED":
        desk.call(prepare(grant, wrote(P0)))
    if "COMMIT" in column:
        desk.call(end(grant, COMMIT, wrote(P0)))
    if "ABORT" in column:
        desk.call(end(grant, ABORT))
    if column.startswith("COMPLETE"):
        desk.pay("a")
        desk.call(add(Grant(number=2, producer_id=1001, epoch=0), P1))
        assert state_of_number(desk, 1) is None
    return grant


Call = Callable[[Grant], Command]
CALLS: dict[str, Call] = {
    "Init": lambda _: init(by="two"),
    "AddPartitions": lambda grant: add(grant, P0, P1),
    "AddPartitions-held": lambda grant: add(grant, P0),
    "AddOffsets": lambda grant: add(grant, group="g"),
    "Prepare": lambda grant: prepare(grant, wrote(P0)),
    # Of nothing, where nothing is registered: to name a partition there would be INVALID_REQUEST.
    "End(commit)": lambda grant: end(grant, COMMIT),
    "End(abort)": lambda grant: end(grant, ABORT),
}
# What each cell answers: the state that number 1 has then; `raise`: a new number, and 1 owes nothing; `repeat`: the
# same answer again, and nothing is written; `refuse`: INVALID_TXN_STATE.
TABLE = """
call               NONE    ONGOING        PREPARED       PREPARE_COMMIT PREPARE_ABORT COMPLETE_COMMIT COMPLETE_ABORT
Init               raise   PREPARE_ABORT  refuse         PREPARE_COMMIT PREPARE_ABORT raise           raise
AddPartitions      ONGOING ONGOING        refuse         refuse         refuse        refuse          refuse
AddPartitions-held ONGOING repeat         refuse         refuse         refuse        refuse          refuse
AddOffsets         ONGOING ONGOING        refuse         refuse         refuse        refuse          refuse
Prepare            refuse  PREPARED       repeat         refuse         refuse        refuse          refuse
End(commit)        refuse  PREPARE_COMMIT PREPARE_COMMIT repeat         refuse        repeat          refuse
End(abort)         raise   PREPARE_ABORT  PREPARE_ABORT  refuse         repeat        refuse          repeat
"""
HEAD, *ROWS = (line.split() for line in TABLE.strip().splitlines())
COLUMNS = HEAD[1:]
CELLS = [
    pytest.param(call, column, answer, id=f"{call} when {column}")
    for call, *row in ROWS
    for column, answer in zip(COLUMNS, row, strict=True)
]


@pytest.mark.parametrize(("call", "column", "answer"), CELLS)
def test_cell(call: str, column: str, answer: str) -> None:
    """Each call does in each state what the table says, and nothing else."""
    desk = Desk()
    grant = bring_to(desk, column)
    before, written = state_of(desk), len(desk.log)
    decision = desk.call(CALLS[call](grant))
    if answer == "refuse":
        assert isinstance(decision, Refused), decision
        assert decision.code is ErrorCode.INVALID_TXN_STATE
        assert (decision.outcome is not None) == (1 in {outcome.grant.number for outcome in before.outcomes})
        assert state_of(desk) == before
        return
    assert isinstance(decision, Accepted), decision
    if answer == "repeat":
        assert (decision.records, state_of(desk)) == ((), before)
        assert isinstance(decision.reply, Registered | Prepared | Ended)
        return
    assert len(desk.log) == written + 1
    if answer == "raise":
        assert state_of_number(desk, 1) is None
        assert state_of(desk).number == before.number + 1
    else:
        assert state_of_number(desk, 1) is TransactionState[answer]


@pytest.mark.parametrize("column", COLUMNS)
def test_init_waits_for_what_is_owed_and_grants_the_next_number(column: str) -> None:
    """In every state but PREPARED, Init grants a new number to the new owner once all debts are paid."""
    desk = Desk()
    bring_to(desk, column)
    number = state_of(desk).number
    decision = desk.call(init(by="two"))
    if column == "PREPARED":
        assert isinstance(decision, Refused)
        return
    assert isinstance(decision, Accepted)
    assert isinstance(decision.reply, Granted)
    assert (decision.reply.grant.number, decision.wait) == (number + 1, Wait.ALL_IS_PAID)
    assert state_of(desk).owner.instance == "two"


def test_the_outcome_comes_with_every_refusal_of_a_decided_number() -> None:
    """A call on a decided number that cannot be repeated says what became of it, and why."""
    for column, result in (("PREPARE_COMMIT", COMMIT), ("COMPLETE_ABORT", ABORT)):
        for call in ("AddPartitions", "AddOffsets", "Prepare"):
            desk = Desk()
            decision = desk.call(CALLS[call](bring_to(desk, column)))
            assert isinstance(decision, Refused)
            assert decision.outcome is not None
            assert (decision.outcome.result, decision.outcome.cause) == (result, Cause.OWNER)


# --- the literal table ----------------------------------------------------------------------------------------------


def test_every_transition_is_reachable_and_no_other_happens() -> None:
    """A transaction moves only as the table of transitions says, and each entry of it is used."""
    assert TRANSITIONS == {
        (State.EMPTY, Event.REGISTER): State.ONGOING,
        (State.EMPTY, Event.COMMIT): State.PREPARE_COMMIT,
        (State.EMPTY, Event.ABORT): State.COMPLETE_ABORT,
        (State.EMPTY, Event.EXPIRE): State.DEAD,
        (State.ONGOING, Event.REGISTER): State.ONGOING,
        (State.ONGOING, Event.PREPARE): State.PREPARED,
        (State.ONGOING, Event.COMMIT): State.PREPARE_COMMIT,
        (State.ONGOING, Event.ABORT): State.PREPARE_ABORT,
        (State.PREPARED, Event.PREPARE): State.PREPARED,
        (State.PREPARED, Event.COMMIT): State.PREPARE_COMMIT,
        (State.PREPARED, Event.ABORT): State.PREPARE_ABORT,
        (State.PREPARE_COMMIT, Event.PAID): State.COMPLETE_COMMIT,
        (State.PREPARE_ABORT, Event.PAID): State.COMPLETE_ABORT,
    }
    assert frozenset({State.PREPARE_COMMIT, State.PREPARE_ABORT}) == INDEBTED


def test_what_is_decided_can_only_be_completed() -> None:
    """No event but payment leads out of PREPARE_*, and nothing leads out of COMPLETE_* or DEAD."""
    final = {State.COMPLETE_COMMIT, State.COMPLETE_ABORT, State.DEAD}
    assert not [state for state, _ in TRANSITIONS if state in final]
    assert {event for state, event in TRANSITIONS if state in INDEBTED} == {Event.PAID}


def test_only_what_is_decided_counts_as_paid() -> None:
    """Even if somebody claims so, an open transaction is never completed by payment."""
    desk = Desk()
    grant = owned(desk, P0)
    context = replace(desk.context("a"), paid=frozenset({grant.number}))
    decision = decide(state_of(desk), add(grant, P1), context)
    assert isinstance(decision, Accepted)
    desk.append(decision)
    assert newest_state(desk) is State.ONGOING


# --- order of checks ------------------------------------------------------------------------------------------------

ELSEWHERE = Grant(number=9, producer_id=9, epoch=8)


def test_malformed_comes_before_unknown() -> None:
    """A call that no state could make sense of is INVALID_REQUEST, known id or not."""
    for desk in (Desk(), Desk()):
        for command in (add(ELSEWHERE), end(ELSEWHERE, Result.UNDECIDED), init(slots_max=0), init(slots_max=5)):
            decision = desk.call(command)
            assert isinstance(decision, Refused)
            assert decision.code is ErrorCode.INVALID_REQUEST
        owned(desk)


def test_unknown_comes_before_everything_else() -> None:
    """An id that the log does not know is INVALID_PRODUCER_ID_MAPPING, whatever is asked of it."""
    for command in (init(grant=ELSEWHERE), add(ELSEWHERE, P0), prepare(ELSEWHERE), end(ELSEWHERE, COMMIT)):
        decision = Desk().call(command)
        assert isinstance(decision, Refused)
        assert decision.code is ErrorCode.INVALID_PRODUCER_ID_MAPPING


@pytest.mark.parametrize("result", [COMMIT, ABORT])
def test_a_decided_number_comes_before_fencing(result: Result) -> None:
    """A fenced owner that repeats its End learns the outcome, not that it is fenced."""
    desk = Desk()
    grant = owned(desk, P0)
    command = end(grant, result, wrote(P0))
    desk.call(command)
    granted(desk, init(by="two"))
    decision = desk.call(command)
    assert isinstance(decision, Accepted)
    assert isinstance(decision.reply, Ended)
    assert decision.reply.outcome.result is result


def test_fencing_comes_before_the_table() -> None:
    """A fenced owner hears PRODUCER_FENCED with the cause where the owner would hear INVALID_TXN_STATE."""
    desk = Desk()
    grant = owned(desk, P0)
    granted(desk, init(by="two"))
    for command in (add(grant, P0), prepare(grant), heartbeat(grant), end(grant, COMMIT, wrote(P0))):
        decision = desk.call(command)
        assert isinstance(decision, Refused)
        assert decision.code is ErrorCode.PRODUCER_FENCED
        assert decision.owner is not None
        assert decision.outcome is not None
        assert decision.outcome.cause is Cause.NEWER_INSTANCE


def test_the_table_comes_before_contents() -> None:
    """Of a number that is decided, wrong contents are of no interest any more."""
    desk = Desk()
    grant = owned(desk, P0)
    desk.call(end(grant, COMMIT, wrote(P0)))
    decision = desk.call(end(grant, COMMIT, wrote(P1)))
    assert isinstance(decision, Accepted)
    assert len(owed(state_of(desk))) == 1
