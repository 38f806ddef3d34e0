"""Real bugs of other systems, as far as the core alone can show that it has none of them."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from coordinator.core.clocks import Clocks
from coordinator.core.commands import (
    Accepted,
    Command,
    Complete,
    Ended,
    ErrorCode,
    Expire,
    GetOutcome,
    Granted,
    OutcomeForgotten,
    Refused,
)
from coordinator.core.grants import EPOCH_MAX
from coordinator.core.invariants import InvariantBrokenError
from coordinator.core.owed import Debt, owed
from coordinator.core.records import Cause, Grant, Result
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
    following,
    granted,
    heartbeat,
    held_back,
    init,
    newest_state,
    owned,
    prepare,
    refusal_code,
    refused,
    set_slot,
    state_of,
    state_of_number,
    timeout,
    wrote,
)
from tests.model.broker import INVALID_PRODUCER_EPOCH, Broker, Marker, Value
from tests.model.desk import HOUR_MS, Desk


@pytest.fixture
def desk() -> Desk:
    return Desk()


def markers(debt: Debt) -> list[Marker]:
    return [
        Marker(debt.transactional_id, debt.number, debt.producer_id, debt.marker_epoch, debt.commit, partition)
        for partition in sorted(debt.partitions)
    ]


def write(broker: Broker, grant: Grant, sequence: int = 0) -> int | None:
    return broker.produce(grant.producer_id, grant.epoch, sequence, P0, Value("a", grant.number, "one", sequence))


@pytest.mark.parametrize("late", [COMMIT, ABORT])
@pytest.mark.parametrize("first", [COMMIT, ABORT])
def test_r1_a_delayed_end_does_not_end_the_next_transaction(desk: Desk, first: Result, late: Result) -> None:
    """An End that arrives late, once more or contradicting, finds its own number decided and leaves the next alone."""
    grant = owned(desk, P0)
    after = following(desk, end(grant, first, wrote(P0), chain=(P0,)))
    desk.pay("a")
    granted(desk, add(after, P1, begun_ms_ago=1))
    before = state_of(desk)
    decision = desk.call(end(grant, late, wrote(P0)))
    assert isinstance(decision, Accepted if first is late else Refused)
    assert state_of(desk) == before
    assert newest_state(desk) is TransactionState.ONGOING


def test_r2_a_late_produce_after_an_abort_leaves_nothing_hanging(desk: Desk) -> None:
    """The abort's marker raises the epoch on every registered partition, also where nothing had been written yet."""
    broker = Broker()
    grant = owned(desk, P0)
    desk.call(timeout(grant))
    for marker in markers(desk.debt("a", grant.number)):
        assert broker.mark(marker) == 0
    assert write(broker, grant) is None
    assert broker.open_values() == []


def test_r6_epoch_exhaustion_and_an_init_repeated_across_it(desk: Desk) -> None:
    """Past the last epoch the slot gets a new producer id; the same Init asked again gets that one, not another."""
    owned(desk)
    grant = granted(desk, add(set_slot(desk, EPOCH_MAX), P0))
    first = accepted(desk, init(grant=grant))
    desk.crash(compact=True)
    again = accepted(desk, init(grant=grant))
    assert isinstance(first.reply, Granted)
    assert (first.reply.grant.producer_id, first.reply.grant.epoch) == (1001, 0)
    assert again.reply == first.reply
    assert again.producer_ids_used == 0
    assert [debt.marker_epoch for debt in owed(state_of(desk))] == [EPOCH_MAX + 1]


def test_r7_two_concurrent_inits_share_no_epoch(desk: Desk) -> None:
    """Of two instances that initialise at once, one gets an epoch that the other has not, and fences it."""
    one, two = granted(desk, init(by="one")), granted(desk, init(by="two"))
    assert (one.producer_id, one.epoch) != (two.producer_id, two.epoch)
    assert refusal_code(desk, add(one, P0)) is ErrorCode.PRODUCER_FENCED
    assert granted(desk, add(two, P0)) == two


def test_r7_two_inits_decided_on_one_state_cannot_both_be_written(desk: Desk) -> None:
    """If a shard ever decided both before either was applied, the second record is refused, not appended."""
    owned(desk, P0)
    one, two = desk.ask(init(by="two")), desk.ask(init(by="three"))
    assert isinstance(one, Accepted)
    assert isinstance(two, Accepted)
    desk.append(one)
    with pytest.raises(InvariantBrokenError, match="number 2 changed hands"):
        desk.append(two)


def test_r8_a_timeout_is_not_reported_as_fencing(desk: Desk) -> None:
    """The owner of a timed-out transaction hears TIMEOUT, from every call, and its Init is granted."""
    grant = owned(desk, P0)
    desk.call(timeout(grant))
    for command in (add(grant, P1, begun_ms_ago=1), end(grant, COMMIT, wrote(P0)), heartbeat(grant, begun_ms_ago=1)):
        refusal = refused(desk, command)
        assert refusal.code is ErrorCode.INVALID_TXN_STATE
        assert refusal.outcome is not None
        assert refusal.outcome.cause is Cause.TIMEOUT
    assert granted(desk, init(grant=grant)).number == 3


def test_r8_not_even_of_a_transaction_its_owner_never_heard_of(desk: Desk) -> None:
    """If the chained transaction timed out before its owner heard of it, the owner is still not fenced."""
    grant = owned(desk, P0)
    chained = following(desk, end(grant, COMMIT, wrote(P0), chain=(P0,)))
    desk.call(timeout(chained))
    assert granted(desk, init(grant=grant)).number == 4


def test_r10_a_zombies_init_does_not_abort_the_newer_owners_transaction(desk: Desk) -> None:
    """A stale grant is refused before anything is aborted."""
    old = owned(desk, P0)
    new = granted(desk, init(by="two"))
    desk.pay("a")
    granted(desk, add(new, P0))
    before = state_of(desk)
    refusal = refused(desk, init(by="one", grant=old))
    assert refusal.code is ErrorCode.PRODUCER_FENCED
    assert refusal.owner is not None
    assert refusal.owner.instance == "two"
    assert state_of(desk) == before


def test_r11_a_failed_append_does_not_raise_twice(desk: Desk) -> None:
    """A decision that never reached the log has raised nothing: the next one raises once."""
    grant = owned(desk, P0)
    for command in (init(by="two"), timeout(grant), end(grant, ABORT)):
        for _ in range(3):
            desk.ask(command)
    desk.crash()
    after = granted(desk, init(by="two"))
    assert (after.number, after.epoch) == (2, 2)


def test_r15_a_repeated_marker_does_not_end_the_next_transaction(desk: Desk) -> None:
    """Markers written again after a crash are refused, or find nothing open, on version 1 too."""
    broker = Broker()
    grant = owned(desk, P0, slots_max=1)
    assert write(broker, grant) == 0
    after = following(desk, end(grant, COMMIT, wrote(P0)))
    sent = markers(desk.debt("a", 1))
    assert [broker.mark(marker) for marker in sent] == [0]
    desk.pay("a")
    assert granted(desk, add(after, P0)) == after
    assert [broker.mark(marker) for marker in sent] == [0]
    assert write(broker, after) is not None
    assert [broker.mark(marker) for marker in sent] == [INVALID_PRODUCER_EPOCH]
    assert [value.number for value in broker.open_values()] == [2]


@pytest.mark.parametrize(
    ("first", "second", "breach"),
    [
        pytest.param(lambda g: end(g, COMMIT, wrote(P0)), timeout, "outcome of 1 changed", id="commit and timeout"),
        pytest.param(lambda g: end(g, ABORT), lambda g: end(g, COMMIT, wrote(P0)), "outcome", id="abort and commit"),
        pytest.param(lambda g: add(g, P1), lambda g: add(g, P0, group="g"), "lost", id="two registrations"),
        pytest.param(lambda g: add(g, P1), timeout, "lost", id="registration and timeout"),
        pytest.param(
            lambda g: prepare(g, wrote(P0)), lambda g: add(g, P1), "PREPARED to ONGOING", id="prepare and add"
        ),
        pytest.param(timeout, lambda g: add(g, P1), "number fell", id="timeout and registration"),
    ],
)
def test_r16_two_decisions_on_one_id_in_one_group_commit(
    desk: Desk, first: Callable[[Grant], Command], second: Callable[[Grant], Command], breach: str
) -> None:
    """A second decision made on the same state contradicts the first: its record is stopped loudly."""
    grant = owned(desk, P0)
    decisions = desk.ask(first(grant)), desk.ask(second(grant))
    assert isinstance(decisions[0], Accepted)
    assert isinstance(decisions[1], Accepted)
    desk.append(decisions[0])
    with pytest.raises(InvariantBrokenError, match=breach):
        desk.append(decisions[1])


def test_r16_what_was_completed_does_not_come_back(desk: Desk) -> None:
    """A decision made before a debt was completed cannot bring the debt back."""
    grant = owned(desk, P0)
    after = following(desk, end(grant, COMMIT, wrote(P0)))
    stale = desk.ask(add(after, P1))
    desk.pay("a")
    desk.call(Complete(transactional_id="a"))
    assert isinstance(stale, Accepted)
    with pytest.raises(InvariantBrokenError, match="transaction 1 came back"):
        desk.append(stale)


def test_r18_a_lost_begin_notice_leaves_no_data_open_for_ever(desk: Desk) -> None:
    """Whoever falls silent is timed out; whoever speaks says that it has begun, and then its timeout counts."""
    grant = owned(desk, P0)
    clocks = Clocks(TIMEOUT_MS)
    clocks.tick(state_of(desk), add(grant, P0), desk.now_ms)
    # The notice is lost, and its sender dies.
    desk.advance(TIMEOUT_MS)
    assert [command.number for command in clocks.expired(desk.now_ms)] == [1]
    # Or lives, and the next message makes up for it.
    desk.advance(-10_000)
    clocks.tick(state_of(desk), heartbeat(grant, begun_ms_ago=TIMEOUT_MS), desk.now_ms)
    for _ in range(9):
        desk.advance(1_000)
        clocks.tick(state_of(desk), heartbeat(grant), desk.now_ms)
    desk.advance(1_000)
    assert [command.number for command in clocks.expired(desk.now_ms)] == [1]


def test_r21_no_abort_marker_overtakes_an_owed_commit_marker(desk: Desk) -> None:
    """While a commit marker of a producer id is owed, nothing is registered under it: no later marker can exist."""
    grant = owned(desk, P0, slots_max=1)
    after = following(desk, end(grant, COMMIT, wrote(P0)))
    held_back(desk, add(after, P0))
    for command in (timeout(after), end(after, ABORT), init(by="two", without_waiting=True)):
        desk.call(command)
        assert [(debt.number, debt.commit) for debt in owed(state_of(desk))] == [(1, True)]


def test_r22_a_number_is_not_reused_after_expiry(desk: Desk) -> None:
    """The outcome of a number of a former life is never answered with that of another transaction."""
    grant = owned(desk, P0)
    after = following(desk, end(grant, COMMIT, wrote(P0)))
    desk.pay("a")
    desk.call(Complete(transactional_id="a"))
    desk.advance(200 * HOUR_MS)
    desk.call(Expire(transactional_id="a", idle_since_before_ms=desk.now_ms))
    desk.crash(compact=True)
    new = granted(desk, init(by="two"))
    assert new.number > after.number
    granted(desk, add(new, P0))
    desk.call(end(new, ABORT))
    assert isinstance(accepted(desk, GetOutcome(transactional_id="a", number=1)).reply, OutcomeForgotten)
    assert refusal_code(desk, end(grant, ABORT)) is ErrorCode.PRODUCER_FENCED


def test_r24_idle_chained_transactions_survive_a_fail_over(desk: Desk) -> None:
    """A chained transaction whose owner is idle gets its whole time again; if it expires, its owner simply goes on."""
    grant = owned(desk, P0)
    chained = following(desk, end(grant, COMMIT, wrote(P0), chain=(P0,)))
    desk.advance(100 * TIMEOUT_MS)
    desk.crash()
    clocks = Clocks(TIMEOUT_MS)
    clocks.tick(state_of(desk), None, desk.now_ms)
    assert list(clocks.expired(desk.now_ms + TIMEOUT_MS - 1)) == []
    (command,) = clocks.expired(desk.now_ms + TIMEOUT_MS)
    desk.call(command)
    assert state_of_number(desk, chained.number) is TransactionState.PREPARE_ABORT
    desk.pay("a")
    renewed = granted(desk, add(chained, P0))
    reply = accepted(desk, end(renewed, COMMIT, wrote(P0))).reply
    assert isinstance(reply, Ended)
    assert reply.outcome.result is COMMIT


def test_a_deposed_owner_and_its_successor_write_under_one_epoch_never(desk: Desk) -> None:
    """The next grant after a PREPARED transaction goes to neither of the two who hold the right to decide it."""
    grant = owned(desk, P0)
    state = state_of(desk)
    prepared = replace(state.transactions[0], state=TransactionState.PREPARED, contents=wrote(P0))
    desk.plant(state, transactions=(prepared,))
    accepted(desk, init(by="two", keep_prepared=True))
    replies = [accepted(desk, end(grant, COMMIT)).reply for _ in ("one", "two")]
    assert [reply.next_grant for reply in replies if isinstance(reply, Ended)] == [None, None]
