"""One clock, message by message."""

from msgspec.structs import replace

from coordinator.core.clocks import Clock, Clocks, tick
from coordinator.core.commands import Complete, Heartbeat, Timeout
from coordinator.core.records import IdState
from coordinator.core.state import TransactionState
from tests.unit.core.states import NOW_MS, id_state, transaction

OPEN = id_state(transaction())
TIMEOUT_MS = 60_000


def started(state: IdState = OPEN) -> Clock:
    clock = tick(None, state, now_ms=NOW_MS)
    assert clock is not None
    return clock


def test_only_ongoing_transactions_have_a_clock() -> None:
    assert tick(None, id_state(), now_ms=NOW_MS) is None
    assert tick(None, id_state(transaction(state=TransactionState.PREPARED)), now_ms=NOW_MS) is None
    decided = id_state(transaction(state=TransactionState.PREPARE_ABORT), number=2)
    assert tick(started(), decided, now_ms=NOW_MS) is None


def test_a_clock_is_that_of_its_number() -> None:
    following = id_state(transaction(2), number=2)
    begun = tick(started(), OPEN, now_ms=NOW_MS, begun_ms_ago=0)
    clock = tick(begun, following, now_ms=NOW_MS + 9)
    assert clock == Clock(number=2, since_ms=NOW_MS + 9, begun=False, deadline_ms=NOW_MS + 9 + TIMEOUT_MS)


def test_a_begin_is_told_once() -> None:
    begun = tick(started(), OPEN, now_ms=NOW_MS + 1_000, begun_ms_ago=400)
    assert begun == Clock(number=1, since_ms=NOW_MS + 600, begun=True, deadline_ms=NOW_MS + 600 + TIMEOUT_MS)
    assert tick(begun, OPEN, now_ms=NOW_MS + 5_000, begun_ms_ago=1) == begun
    assert tick(begun, OPEN, now_ms=NOW_MS + 5_000) == begun


def test_the_first_message_may_tell_a_begin_not_before_the_registration() -> None:
    begun = tick(None, OPEN, now_ms=NOW_MS + 10, begun_ms_ago=10**9)
    assert begun is not None
    assert begun.since_ms == NOW_MS


def test_an_extension_never_shortens() -> None:
    begun = tick(started(), OPEN, now_ms=NOW_MS, begun_ms_ago=0)
    extended = tick(begun, OPEN, now_ms=NOW_MS + 50_000, extend=True, timeout_max_ms=10**6)
    assert extended is not None
    assert extended.deadline_ms == NOW_MS + 50_000 + TIMEOUT_MS
    assert tick(extended, OPEN, now_ms=NOW_MS - 10**6, extend=True, timeout_max_ms=10**6) == extended
    assert tick(begun, OPEN, now_ms=NOW_MS + 50_000, extend=True, timeout_max_ms=0) == begun


def test_clocks_expire_by_id() -> None:
    clocks = Clocks(timeout_max_ms=0)
    clocks.tick(OPEN, None, NOW_MS)
    assert list(clocks.expired(NOW_MS + TIMEOUT_MS - 1)) == []
    assert list(clocks.expired(NOW_MS + TIMEOUT_MS)) == [Timeout(transactional_id="a", number=1)]
    grant = OPEN.transactions[0].grant
    clocks.tick(OPEN, Heartbeat(transactional_id="a", grant=grant, begun_ms_ago=0), NOW_MS + 1_000)
    assert list(clocks.expired(NOW_MS + TIMEOUT_MS)) == []
    clocks.tick(id_state(), Complete(transactional_id="a"), NOW_MS)
    assert list(clocks.expired(NOW_MS + 10 * TIMEOUT_MS)) == []


def test_what_is_set_to_expire_earlier_than_all_known_before_is_found() -> None:
    clocks = Clocks(timeout_max_ms=0)
    clocks.tick(OPEN, None, NOW_MS + 10 * TIMEOUT_MS)
    assert list(clocks.expired(NOW_MS)) == []
    other = replace(OPEN, transactional_id="b")
    clocks.tick(other, None, NOW_MS)
    b, a = Timeout(transactional_id="b", number=1), Timeout(transactional_id="a", number=1)
    # Until it is ended it is told by every look.
    for _ in range(2):
        assert list(clocks.expired(NOW_MS + TIMEOUT_MS)) == [b]
    clocks.tick(replace(id_state(), transactional_id="b"), Complete(transactional_id="b"), NOW_MS + TIMEOUT_MS)
    assert list(clocks.expired(NOW_MS + 11 * TIMEOUT_MS - 1)) == []
    assert list(clocks.expired(NOW_MS + 11 * TIMEOUT_MS)) == [a]
