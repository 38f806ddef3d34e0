"""Who finds a PREPARED transaction at its start: what it may do, and what becomes of it when somebody newer starts."""

import pytest

from coordinator.core.commands import Abort, ErrorCode, Expire, ForceFence, Granted, InitProducer, Refused
from coordinator.core.records import Cause, Grant
from coordinator.core.state import TransactionState
from tests.conformance.calls import (
    ABORT,
    COMMIT,
    P0,
    P1,
    accepted,
    add,
    end,
    ended,
    granted,
    init,
    newest_state,
    owned,
    prepare,
    refusal_code,
    refused,
    state_of,
    wrote,
)
from tests.model.desk import Desk

WEEK_MS = 7 * 24 * 3_600_000


@pytest.fixture
def desk() -> Desk:
    return Desk()


def found(desk: Desk, *, by: str = "two") -> Grant:
    """The transaction that instance one has prepared."""
    grant = owned(desk, P0)
    desk.call(prepare(grant, wrote(P0)))
    assert granted(desk, starts(by)) == grant
    return grant


def starts(by: str) -> InitProducer:
    return init(by=by, keep_prepared=True)


def goes_on(grant: Grant, by: str) -> InitProducer:
    """As a client asks once what it found is decided, or may be."""
    return init(by=by, grant=grant, keep_prepared=True)


def decided_by_another(desk: Desk, grant: Grant, how: str) -> None:
    desk.call(Abort(transactional_id="a", number=grant.number) if how == "abort" else end(grant, COMMIT))
    desk.pay("a")


def fenced_by(refusal: Refused) -> str:
    assert refusal.code is ErrorCode.PRODUCER_FENCED
    assert refusal.owner is not None
    return refusal.owner.instance


@pytest.mark.parametrize("how", ["commit", "abort"])
def test_who_found_it_goes_on_once_it_is_decided(desk: Desk, how: str) -> None:
    """Whoever has decided it: its finder names it, is told its outcome, and stays the owner. One InitProducer asked
    twice gets one answer.
    """
    grant = found(desk)
    owner = state_of(desk).owner
    decided_by_another(desk, grant, how)
    reply = accepted(desk, goes_on(grant, "two")).reply
    assert isinstance(reply, Granted)
    assert reply.outcome is not None
    assert (reply.prepared, reply.outcome.result) == (None, COMMIT if how == "commit" else ABORT)
    again = accepted(desk, goes_on(grant, "two"))
    assert (again.reply, again.records) == (reply, ())
    assert state_of(desk).owner == owner
    granted(desk, add(reply.grant, P1))
    assert ended(desk, end(reply.grant, COMMIT, wrote(P1))).next_grant is not None
    assert "grant 1 has been followed" in refused(desk, goes_on(grant, "two")).message


def test_who_has_prepared_it_is_fenced_by_who_found_it(desk: Desk) -> None:
    """Both hold one grant, and only one of them is granted the next."""
    grant = found(desk)
    assert fenced_by(refused(desk, goes_on(grant, "one"))) == "two"
    decided_by_another(desk, grant, "commit")
    assert fenced_by(refused(desk, goes_on(grant, "one"))) == "two"


def test_while_it_is_prepared_its_finder_finds_it_again(desk: Desk) -> None:
    """Nothing is changed by that; without keep_prepared it is refused as any Init is."""
    grant = found(desk)
    again = accepted(desk, goes_on(grant, "two"))
    assert isinstance(again.reply, Granted)
    assert (again.reply.grant, again.reply.prepared is not None, again.records) == (grant, True, ())
    assert refusal_code(desk, init(by="two", grant=grant)) is ErrorCode.INVALID_TXN_STATE


@pytest.mark.parametrize("order", ["found, found, decided", "found, decided, taken"])
def test_an_older_finder_does_not_take_the_id_back(desk: Desk, order: str) -> None:
    """The newer one goes on undisturbed, and is who has fenced the older one."""
    grant = found(desk)
    if order == "found, found, decided":
        assert granted(desk, starts("three")) == grant
        decided_by_another(desk, grant, "commit")
        newer = granted(desk, goes_on(grant, "three"))
    else:
        decided_by_another(desk, grant, "commit")
        newer = granted(desk, starts("three"))
    granted(desk, add(newer, P1))
    assert fenced_by(refused(desk, goes_on(grant, "two"))) == "three"
    assert newest_state(desk) is TransactionState.ONGOING
    ended(desk, end(newer, COMMIT, wrote(P1)))


def test_while_it_is_prepared_too_the_older_finder_is_fenced(desk: Desk) -> None:
    """It may still decide it, and is granted nothing."""
    grant = found(desk)
    accepted(desk, starts("three"))
    assert fenced_by(refused(desk, goes_on(grant, "two"))) == "three"
    assert ended(desk, end(grant, COMMIT)).next_grant is None


@pytest.mark.parametrize("when", ["while it is prepared", "once it is decided"])
def test_an_administrator_fences_the_finder(desk: Desk, when: str) -> None:
    """Also one that goes by the same name."""
    grant = found(desk, by="root")
    if when == "once it is decided":
        decided_by_another(desk, grant, "commit")
    accepted(desk, ForceFence(transactional_id="a", administrator="root", abort_prepared=True))
    refusal = refused(desk, goes_on(grant, "root"))
    assert fenced_by(refusal) == "root"
    assert refusal.owner is not None
    assert refusal.owner.cause is Cause.ADMINISTRATOR
    if when == "while it is prepared":
        assert fenced_by(refused(desk, end(grant, COMMIT))) == "root"


def test_who_has_no_name_is_not_known_again(desk: Desk) -> None:
    """Any other may be unnamed, too."""
    grant = found(desk, by="")
    decided_by_another(desk, grant, "commit")
    assert fenced_by(refused(desk, goes_on(grant, ""))) == ""
    granted(desk, starts(""))


def test_a_number_that_its_own_init_has_aborted_is_no_claim(desk: Desk) -> None:
    """Only what was found PREPARED is: this one was ONGOING, and is followed by what that Init has granted."""
    grant = owned(desk, P0)
    granted(desk, init(by="two"))
    assert fenced_by(refused(desk, init(by="two", grant=grant))) == "two"


@pytest.mark.parametrize("how", ["abort", "end"])
def test_its_finder_is_not_told_to_be_fenced_by_itself(desk: Desk, how: str) -> None:
    """A commit that comes too late is told the outcome: its finder may go on, whoever prepared it hears more then."""
    grant = found(desk)
    desk.call(Abort(transactional_id="a", number=1) if how == "abort" else end(grant, ABORT))
    refusal = refused(desk, end(grant, COMMIT))
    assert (refusal.code, refusal.owner) == (ErrorCode.INVALID_TXN_STATE, None)
    assert refusal.outcome is not None
    assert refusal.outcome.cause is (Cause.ADMINISTRATOR if how == "abort" else Cause.OWNER)
    desk.pay("a")
    granted(desk, goes_on(grant, "two"))


def test_an_expired_id_is_as_unknown_to_its_finder_as_to_any_owner(desk: Desk) -> None:
    grant = found(desk)
    decided_by_another(desk, grant, "abort")
    desk.advance(WEEK_MS)
    desk.call(Expire(transactional_id="a", idle_since_before_ms=desk.now_ms))
    assert refusal_code(desk, goes_on(grant, "two")) is ErrorCode.INVALID_PRODUCER_ID_MAPPING
