"""Clocks, timeouts, PREPARED and expiry: one test per rule."""

import pytest

from coordinator.core.clocks import Clocks
from coordinator.core.commands import (
    Abort,
    Accepted,
    Command,
    Complete,
    Done,
    ErrorCode,
    Expire,
    ForceFence,
    Granted,
    Heartbeat,
    Register,
    Timeout,
)
from coordinator.core.owed import owed
from coordinator.core.records import Cause, Contents, NumberFloor, Tombstone
from coordinator.core.state import TransactionState
from tests.conformance.calls import (
    ABORT,
    COMMIT,
    P0,
    P1,
    TIMEOUT_MS,
    accepted,
    add,
    end,
    ended,
    following,
    granted,
    heartbeat,
    init,
    newest_state,
    owned,
    prepare,
    refusal_code,
    refused,
    state_of,
    timeout,
    wrote,
)
from tests.model.desk import HOUR_MS, Desk

TIMEOUT_MAX_MS = 5 * TIMEOUT_MS
DAY_MS = 24 * HOUR_MS


@pytest.fixture
def desk() -> Desk:
    return Desk()


class Timed:
    """A desk whose clocks tick as a shard's do."""

    def __init__(self) -> None:
        self.desk = Desk()
        self.clocks = Clocks(TIMEOUT_MAX_MS)

    def call(self, command: Command) -> Accepted:
        decision = accepted(self.desk, command)
        if decision.records or isinstance(command, Heartbeat | Register):
            self.clocks.tick(state_of(self.desk), command, self.desk.now_ms)
        return decision

    def crash(self) -> None:
        self.desk.crash()
        self.clocks = Clocks(TIMEOUT_MAX_MS)
        for state in self.desk.state:
            self.clocks.tick(state, None, self.desk.now_ms)

    def expired(self, milliseconds: int) -> bool:
        """Whether the transaction is timed out so much later: not a millisecond earlier."""
        self.desk.advance(milliseconds - 1)
        early = list(self.clocks.expired(self.desk.now_ms))
        self.desk.advance(1)
        late = list(self.clocks.expired(self.desk.now_ms))
        return not early and late == [Timeout(transactional_id="a", number=state_of(self.desk).number)]


@pytest.fixture
def timed() -> Timed:
    timed = Timed()
    grant = owned(timed.desk)
    timed.call(add(grant, P0))
    return timed


# --- clocks ---------------------------------------------------------------------------------------------------------


def test_the_timer_starts_with_the_first_registration(timed: Timed) -> None:
    """A transaction that is never begun ends its timeout after the owner's last message."""
    assert timed.expired(TIMEOUT_MS)


def test_before_the_begin_every_message_resets_the_clock(timed: Timed) -> None:
    """Not begun: any message of the owner gives it the whole timeout again."""
    timed.desk.advance(TIMEOUT_MS - 1)
    grant = granted(timed.desk, add(timed.desk.state.active["a"].transactions[0].grant, P0))
    timed.call(heartbeat(grant))
    assert timed.expired(TIMEOUT_MS)


def test_once_begun_the_timeout_counts_from_the_begin(timed: Timed) -> None:
    """Begun: no message but an extension moves the deadline, not even one that says "not begun" and comes late."""
    grant = state_of(timed.desk).transactions[0].grant
    timed.desk.advance(10_000)
    timed.call(heartbeat(grant, begun_ms_ago=4_000))
    for begun_ms_ago in (None, 0, 4_000):
        timed.call(heartbeat(grant, begun_ms_ago=begun_ms_ago))
    assert timed.expired(TIMEOUT_MS - 4_000)


def test_a_producer_id_that_brokers_may_have_forgotten_is_not_written_with(desk: Desk) -> None:
    """12 h after a producer id's first grant the slot takes a new one, also if the grant in hand is as old as that."""
    grant = owned(desk)
    desk.advance(12 * HOUR_MS - 1)
    assert granted(desk, add(grant, P0)) == grant
    grant = owned(desk)
    desk.advance(12 * HOUR_MS)
    renewed = granted(desk, add(grant, P0))
    assert renewed.producer_id != grant.producer_id
    assert (renewed.number, renewed.epoch) == (grant.number + 1, 0)
    assert granted(desk, add(renewed, P1)) == renewed


def test_signs_of_life_do_not_keep_what_is_registered_until_brokers_have_forgotten_its_producer_id(
    timed: Timed,
) -> None:
    """Not begun, it ends unused, and its owner's next call gets a new grant."""
    timed.clocks = Clocks(TIMEOUT_MAX_MS, unbegun_age_max_ms=18 * HOUR_MS)
    grant = state_of(timed.desk).transactions[0].grant
    beats = 0
    while not list(timed.clocks.expired(timed.desk.now_ms)):
        timed.call(heartbeat(grant))
        timed.desk.advance(TIMEOUT_MS // 2)
        beats += 1
    assert beats * (TIMEOUT_MS // 2) == 18 * HOUR_MS
    timed.call(timeout(grant))
    assert granted(timed.desk, add(grant, P0)).producer_id != grant.producer_id


def test_a_take_over_ends_nothing_for_the_age_of_its_producer_id(timed: Timed) -> None:
    """Clocks start anew: a new leader does not know what has begun, and only the owner can say that it has not."""
    grant = state_of(timed.desk).transactions[0].grant
    timed.desk.advance(19 * HOUR_MS)
    for begun_ms_ago in (0, None):
        timed.clocks = Clocks(TIMEOUT_MAX_MS, unbegun_age_max_ms=18 * HOUR_MS)
        timed.clocks.tick(state_of(timed.desk), None, timed.desk.now_ms)
        assert not list(timed.clocks.expired(timed.desk.now_ms))
        timed.clocks.tick(state_of(timed.desk), Complete(transactional_id="a"), timed.desk.now_ms)
        assert not list(timed.clocks.expired(timed.desk.now_ms))
        timed.call(heartbeat(grant, begun_ms_ago=begun_ms_ago))
        assert bool(timed.clocks.expired(timed.desk.now_ms)) is (begun_ms_ago is None)


@pytest.mark.parametrize("age_ms", [10**12, -(10**12)])
def test_a_wrong_age_cannot_end_a_transaction_early_or_keep_it(timed: Timed, age_ms: int) -> None:
    """A begin lies between the last message that said "not begun" and now, whatever a client's clock says."""
    grant = state_of(timed.desk).transactions[0].grant
    timed.desk.advance(1_000)
    timed.call(heartbeat(grant, begun_ms_ago=age_ms))
    assert timed.expired(TIMEOUT_MS - 1_000 if age_ms > 0 else TIMEOUT_MS)


def test_heartbeats_may_extend_a_long_batch_up_to_a_maximum(timed: Timed) -> None:
    """An extension gives the timeout again from now, but never beyond the maximum after the begin."""
    grant = state_of(timed.desk).transactions[0].grant
    extend = Heartbeat(transactional_id="a", grant=grant, begun_ms_ago=0, extend=True)
    timed.call(extend)
    for _ in range(9):
        timed.desk.advance(TIMEOUT_MS // 2)
        timed.call(extend)
    assert timed.expired(TIMEOUT_MAX_MS - 9 * (TIMEOUT_MS // 2))


def test_an_extension_counts_also_in_the_message_that_tells_the_begin(timed: Timed) -> None:
    """After a take-over the first heartbeat of a long batch may tell its begin and extend it at once."""
    grant = state_of(timed.desk).transactions[0].grant
    timed.crash()
    timed.desk.advance(TIMEOUT_MS // 2)
    timed.call(Heartbeat(transactional_id="a", grant=grant, begun_ms_ago=4 * TIMEOUT_MS, extend=True))
    assert timed.expired(TIMEOUT_MS)


def test_clocks_start_anew_at_a_take_over(timed: Timed) -> None:
    """A new leader gives every open transaction its whole timeout again, begun or not."""
    grant = state_of(timed.desk).transactions[0].grant
    timed.call(heartbeat(grant, begun_ms_ago=0))
    timed.desk.advance(TIMEOUT_MS - 1)
    timed.crash()
    timed.call(heartbeat(grant, begun_ms_ago=TIMEOUT_MS - 1))
    assert timed.expired(TIMEOUT_MS)


def test_no_clock_runs_without_an_open_transaction(timed: Timed) -> None:
    """Numbers with nothing registered, decided and PREPARED ones never time out."""
    grant = state_of(timed.desk).transactions[0].grant
    timed.call(prepare(grant, wrote(P0)))
    timed.desk.advance(365 * DAY_MS)
    assert list(timed.clocks.expired(timed.desk.now_ms)) == []
    timed.call(end(grant, COMMIT))
    timed.desk.advance(365 * DAY_MS)
    assert list(timed.clocks.expired(timed.desk.now_ms)) == []


# --- timeouts -------------------------------------------------------------------------------------------------------


def test_a_timeout_logs_the_abort_with_the_next_grant(desk: Desk) -> None:
    """A timeout is one record: PREPARE_ABORT with markers owed everywhere, its cause, and the epoch raised."""
    grant = owned(desk, P0, P1)
    decision = accepted(desk, timeout(grant))
    assert len(decision.records) == 1
    (debt,) = owed(state_of(desk))
    assert (debt.commit, debt.partitions, debt.transaction.cause) == (False, frozenset({P0, P1}), Cause.TIMEOUT)
    assert state_of(desk).number == 2


def test_a_timeout_that_comes_too_late_does_nothing(desk: Desk) -> None:
    """A timer that fires for a number which is decided, not open, or unknown changes nothing."""
    grant = owned(desk, P0)
    after = following(desk, end(grant, COMMIT, wrote(P0)))
    for command in (timeout(grant), timeout(after), Timeout(transactional_id="nobody", number=1)):
        decision = accepted(desk, command)
        assert (decision.reply, decision.records) == (Done(), ())


@pytest.mark.parametrize("call", [add, heartbeat])
def test_an_unbegun_expired_transaction_answers_with_a_new_grant(desk: Desk, call: object) -> None:
    """A chained transaction that expired before its begin answers its owner's next call with a new grant, no error."""
    grant = owned(desk, P0)
    chained = following(desk, end(grant, COMMIT, wrote(P0), chain=(P0,)))
    desk.pay("a")
    desk.call(timeout(chained))
    renewed = granted(desk, add(chained, P0) if call is add else heartbeat(chained))
    assert renewed.number == chained.number + 1
    assert ended(desk, end(chained, ABORT)).next_grant == renewed


def test_a_begun_expired_transaction_is_reported_as_timed_out(desk: Desk) -> None:
    """If the owner had begun it, data is lost to the timeout: it must be told."""
    grant = owned(desk, P0)
    desk.call(timeout(grant))
    for command in (
        add(grant, P0, begun_ms_ago=1),
        heartbeat(grant, begun_ms_ago=1),
        prepare(grant),
        end(grant, COMMIT, wrote(P0)),
    ):
        refusal = refused(desk, command)
        assert refusal.code is ErrorCode.INVALID_TXN_STATE
        assert refusal.outcome is not None
        assert refusal.outcome.cause is Cause.TIMEOUT


# --- PREPARED -------------------------------------------------------------------------------------------------------


def prepared(desk: Desk) -> object:
    grant = owned(desk, P0)
    desk.call(prepare(grant, wrote(P0, metadata=b"row-1")))
    return grant


def test_prepared_holds_its_contents_and_no_later_grant_exists(desk: Desk) -> None:
    """PREPARED holds its runs and token; the number stays the newest until it is decided."""
    grant = prepared(desk)
    (transaction,) = state_of(desk).transactions
    assert transaction.contents == wrote(P0, metadata=b"row-1")
    assert (transaction.grant, state_of(desk).number) == (grant, 1)


def test_prepared_never_ends_by_timer(desk: Desk) -> None:
    """Only the owner, an administrator or the resolver decides a PREPARED transaction."""
    prepared(desk)
    desk.advance(365 * DAY_MS)
    assert accepted(desk, Timeout(transactional_id="a", number=1)).records == ()
    assert newest_state(desk) is TransactionState.PREPARED


def test_plain_init_does_not_touch_a_prepared_transaction(desk: Desk) -> None:
    """InitProducer is refused while one waits; with keep_prepared it comes back, token and all, and stays PREPARED."""
    prepared(desk)
    assert refusal_code(desk, init(by="two")) is ErrorCode.INVALID_TXN_STATE
    reply = accepted(desk, init(by="two", keep_prepared=True)).reply
    assert isinstance(reply, Granted)
    assert reply.prepared is not None
    assert reply.prepared.contents.metadata == b"row-1"
    assert newest_state(desk) is TransactionState.PREPARED


def test_its_owner_keeps_a_prepared_transaction_by_its_grant(desk: Desk) -> None:
    """Init with the grant and keep_prepared changes nothing: the owner decides and goes on."""
    grant = prepared(desk)
    before = state_of(desk)
    accepted(desk, init(grant=grant, keep_prepared=True))  # type: ignore[arg-type]
    assert state_of(desk) == before
    assert ended(desk, end(grant, COMMIT)).next_grant is not None  # type: ignore[arg-type]


@pytest.mark.parametrize("contents", [Contents(), wrote(P0, metadata=b"row-1")])
def test_a_prepared_transaction_commits_what_it_holds(desk: Desk, contents: Contents) -> None:
    """End after Prepare says nothing new: no contents, or the same; its token becomes the resume token then."""
    grant = prepared(desk)
    assert state_of(desk).resume_token == b""
    assert refusal_code(desk, end(grant, COMMIT, wrote(P0))) is ErrorCode.INVALID_REQUEST  # type: ignore[arg-type]
    desk.call(end(grant, COMMIT, contents))  # type: ignore[arg-type]
    assert state_of(desk).resume_token == b"row-1"
    assert owed(state_of(desk))[0].transaction.contents == wrote(P0, metadata=b"row-1")


def test_an_aborted_prepared_transaction_leaves_no_token(desk: Desk) -> None:
    """What was prepared and then aborted never becomes the resume token."""
    grant = prepared(desk)
    desk.call(end(grant, ABORT))  # type: ignore[arg-type]
    assert state_of(desk).resume_token == b""


def test_an_administrator_may_abort_a_prepared_transaction(desk: Desk) -> None:
    """Abort names it by number; ForceFence needs a word more, for the other system may have committed."""
    prepared(desk)
    fence = ForceFence(transactional_id="a", administrator="root")
    assert refusal_code(desk, fence) is ErrorCode.INVALID_TXN_STATE
    desk.call(Abort(transactional_id="a", number=1))
    assert state_of(desk).outcomes[-1].cause is Cause.ADMINISTRATOR


# --- expiry ---------------------------------------------------------------------------------------------------------


def expire(desk: Desk, idle_ms: int = 7 * DAY_MS) -> Expire:
    return Expire(transactional_id="a", idle_since_before_ms=desk.now_ms - idle_ms)


def test_an_idle_id_expires_with_a_tombstone_and_a_floor(desk: Desk) -> None:
    """After 7 idle days an id leaves a tombstone, and a floor above its number in the same append."""
    grant = owned(desk)
    following(desk, end(grant, ABORT))
    desk.advance(7 * DAY_MS)
    assert accepted(desk, expire(desk)).records == ()
    desk.advance(1)
    decision = accepted(desk, expire(desk))
    assert decision.records == (NumberFloor(number_floor=2), Tombstone(transactional_id="a"))


def test_a_floor_never_falls(desk: Desk) -> None:
    """The floor stays above the number of every expired id, in whichever order they expire."""
    desk.state.number_floor = 40
    owned(desk)
    desk.advance(8 * DAY_MS)
    assert accepted(desk, expire(desk)).records[0] == NumberFloor(number_floor=41)
    granted(desk, init())
    desk.state.number_floor = 99
    desk.advance(8 * DAY_MS)
    assert accepted(desk, expire(desk)).records[0] == NumberFloor(number_floor=99)


def test_an_id_with_a_token_a_transaction_or_a_debt_does_not_expire(desk: Desk) -> None:
    """To forget a resume token, an open transaction or a debt would lose something."""
    grant = owned(desk, P0)
    desk.advance(8 * DAY_MS)
    assert accepted(desk, expire(desk)).records == ()
    grant = following(desk, end(grant, ABORT))
    desk.advance(8 * DAY_MS)
    assert accepted(desk, expire(desk)).records == ()
    desk.pay("a")
    desk.call(end(grant, COMMIT, wrote(metadata=b"cursor")))
    desk.pay("a")
    desk.advance(8 * DAY_MS)
    assert accepted(desk, expire(desk)).records == ()


def test_an_expired_id_is_unknown(desk: Desk) -> None:
    """After expiry every call but a fresh Init is INVALID_PRODUCER_ID_MAPPING; numbers go on above the floor."""
    grant = owned(desk)
    desk.advance(8 * DAY_MS)
    desk.call(expire(desk))
    for command in (init(grant=grant), add(grant, P0), end(grant, ABORT), heartbeat(grant), prepare(grant)):
        assert refusal_code(desk, command) is ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert granted(desk, init()).number == 2
