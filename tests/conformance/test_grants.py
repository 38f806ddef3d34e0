"""Epochs, slots and fencing: one test per rule."""

import pytest

from coordinator.core.commands import Accepted, ErrorCode, ForceFence, Granted, Wait
from coordinator.core.grants import EPOCH_MAX, Limits
from coordinator.core.owed import owed
from coordinator.core.records import Cause, Grant
from coordinator.core.state import TransactionState
from tests.conformance.calls import (
    ABORT,
    COMMIT,
    P0,
    P1,
    P2,
    accepted,
    add,
    end,
    ended,
    following,
    granted,
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
from tests.model.desk import HOUR_MS, Desk


@pytest.fixture
def desk() -> Desk:
    return Desk()


# --- epochs ---------------------------------------------------------------------------------------------------------


def test_the_first_grant_has_epoch_zero_and_number_one(desk: Desk) -> None:
    """An id starts with number 1 in one slot, whose producer id is fresh and whose epoch is 0."""
    assert owned(desk) == Grant(number=1, producer_id=1000, epoch=0)


def test_epochs_of_a_slot_are_raised_by_two(desk: Desk) -> None:
    """Whatever ends a number, the slot's next grant is two epochs higher: data epochs are even."""
    grant = owned(desk, P0, slots_max=1)
    seen = [grant.epoch]
    for _ in range(3):
        grant = following(desk, end(grant, ABORT))
        seen.append(grant.epoch)
        desk.pay("a")
        grant = granted(desk, add(grant, P0))
    assert seen == [0, 2, 4, 6]


@pytest.mark.parametrize("result", [COMMIT, ABORT])
def test_the_marker_carries_the_epoch_after_the_data(desk: Desk, result: object) -> None:
    """The marker that ends data of epoch e carries e + 1, whether it commits or aborts."""
    grant = owned(desk, P0)
    desk.call(end(grant, result, wrote(P0)))  # type: ignore[arg-type]
    (debt,) = owed(state_of(desk))
    assert (debt.producer_id, debt.marker_epoch) == (grant.producer_id, grant.epoch + 1)


def test_a_producer_id_and_epoch_stand_for_one_transaction(desk: Desk) -> None:
    """No (producer id, epoch) is ever granted twice, through inits, ends, timeouts, fences and crashes."""
    seen = []
    for turn in range(40):
        grant = granted(desk, init(by=f"i{turn}", slots_max=1 + turn % 4, without_waiting=True))
        seen.append(grant)
        if turn % 2:
            desk.crash(compact=bool(turn % 4))
        if turn % 3:
            desk.pay("a")
            grant = granted(desk, add(grant, P0))
            seen.append(following(desk, end(grant, ABORT)))
    assert len({(grant.producer_id, grant.epoch) for grant in seen}) == len(seen)
    assert [grant.number for grant in seen] == sorted({grant.number for grant in seen})


def test_at_the_top_the_slot_takes_a_new_producer_id(desk: Desk) -> None:
    """Data epochs go up to 32,766 (the last marker is 32,767); then the slot starts anew with a fresh producer id."""
    owned(desk, slots_max=1)
    grant = granted(desk, add(set_slot(desk, EPOCH_MAX), P0))
    after = following(desk, end(grant, ABORT))
    assert (grant.producer_id, grant.epoch) == (1000, 32_766)
    assert owed(state_of(desk))[0].marker_epoch == 32_767
    assert (after.producer_id, after.epoch) == (1001, 0)


def test_half_a_day_after_its_first_grant_a_producer_id_is_replaced(desk: Desk) -> None:
    """12 h after its first grant, well before brokers forget it, a producer id is granted no more."""
    grant = owned(desk)
    desk.advance(12 * HOUR_MS - 1)
    grant = following(desk, end(grant, ABORT))
    assert grant.producer_id == 1000
    desk.advance(1)
    assert following(desk, end(grant, ABORT)) == Grant(number=3, producer_id=1001, epoch=0)


def test_the_debts_of_a_replaced_producer_id_live_on(desk: Desk) -> None:
    """A debt holds its own producer id: it is paid under that, whatever the slot has become."""
    owned(desk, slots_max=1)
    grant = granted(desk, add(set_slot(desk, EPOCH_MAX), P0))
    after = following(desk, end(grant, COMMIT, wrote(P0)))
    granted(desk, add(after, P0))
    (debt,) = owed(state_of(desk))
    assert (debt.producer_id, debt.commit, debt.partitions) == (1000, True, frozenset({P0}))


# --- slots ----------------------------------------------------------------------------------------------------------


def test_the_next_transaction_runs_in_another_slot_while_markers_are_owed(desk: Desk) -> None:
    """While the last transaction's markers are being written, the next one runs in a free slot."""
    grant = owned(desk, P0)
    after = following(desk, end(grant, COMMIT, wrote(P0)))
    assert after.producer_id != grant.producer_id
    assert granted(desk, add(after, P0)) == after


@pytest.mark.parametrize("slots_max", [1, 2, 3, 4])
def test_an_id_owns_as_many_slots_as_it_asked_for(desk: Desk, slots_max: int) -> None:
    """New slots are opened only while all present ones owe something, and never more than the limit."""
    grant = owned(desk, P0, slots_max=slots_max)
    for turn in range(slots_max + 2):
        answer = ended(
            desk, end(grant, COMMIT, wrote(*((P0, P1, P2)[turn % 3],)), chain=((P0, P1, P2)[(turn + 1) % 3],))
        )
        assert answer.next_grant is not None
        grant = answer.next_grant
        assert len(state_of(desk).slots) == min(turn + 2, slots_max)
        if not answer.next_registered:
            assert turn + 2 > slots_max
            break


def test_fewer_slots_are_kept_when_fewer_are_asked_for(desk: Desk) -> None:
    """An Init that asks for one slot gets the behaviour of one, though the id had two; old debts are still paid."""
    grant = owned(desk, P0)
    following(desk, end(grant, COMMIT, wrote(P0)))
    assert len(state_of(desk).slots) == 2
    granted(desk, init(by="two", slots_max=1, without_waiting=True))
    assert len(state_of(desk).slots) == 1
    assert [debt.number for debt in owed(state_of(desk))] == [1]


def test_nothing_is_registered_in_a_slot_with_debts(desk: Desk) -> None:
    """With its only slot in debt a registration waits until the markers are acknowledged; then it is granted."""
    grant = owned(desk, P0, slots_max=1)
    after = following(desk, end(grant, COMMIT, wrote(P0)))
    held_back(desk, add(after, P0))
    desk.pay("a", 1)
    assert granted(desk, add(after, P0)) == after


def test_nothing_is_chained_in_a_slot_with_debts(desk: Desk) -> None:
    """With one slot the chain cannot be registered in the same record: the answer says so, and grants the number."""
    grant = owned(desk, P0, slots_max=1)
    answer = ended(desk, end(grant, COMMIT, wrote(P0), chain=(P0,)))
    assert answer.next_grant is not None
    assert not answer.next_registered
    assert newest_state(desk) is TransactionState.EMPTY


def test_a_slot_that_stays_in_debt_is_replaced_by_a_new_producer_id(desk: Desk) -> None:
    """Past a bounded wait the number is passed over unused, and the next one gets a producer id of its own."""
    grant = owned(desk, P0, slots_max=1)
    after = following(desk, end(grant, COMMIT, wrote(P0)))
    desk.advance(desk.limits.patience_ms)
    moved = granted(desk, add(after, P1))
    assert (moved.number, moved.epoch) == (after.number + 1, 0)
    assert moved.producer_id not in {grant.producer_id, after.producer_id}
    # Its answer may be lost: the repeat, begun or not, goes on with the same grant.
    assert granted(desk, add(after, P1)) == granted(desk, add(after, P1, begun_ms_ago=5)) == moved


def test_a_debt_of_a_clock_that_was_ahead_is_not_waited_for_until_then(desk: Desk) -> None:
    """The next leader's clock may be hours behind that of the one who decided."""
    grant = owned(desk, P0, slots_max=1)
    after = following(desk, end(grant, COMMIT, wrote(P0)))
    desk.now_ms -= HOUR_MS
    moved = granted(desk, add(after, P1))
    assert moved.number == after.number + 1
    assert moved.producer_id not in {grant.producer_id, after.producer_id}


def test_markers_of_a_producer_id_are_owed_one_transaction_at_a_time(desk: Desk) -> None:
    """Per producer id at most one transaction owes markers, so they stand in epoch order on every partition."""
    grant = owned(desk, P0, slots_max=4)
    for turn in range(12):
        desk.advance(desk.limits.patience_ms)
        answer = desk.call(end(grant, COMMIT if turn % 2 else ABORT, wrote(P0)))
        assert isinstance(answer, Accepted)
        if turn % 3 == 2:
            desk.pay("a")
        grant = granted(desk, init(by=f"i{turn}", slots_max=1 + turn % 4, without_waiting=True))
        if turn % 5 == 4:
            desk.pay("a")
        decision = desk.call(add(grant, P0))
        grant = decision.reply.grant if isinstance(decision, Accepted) else grant  # type: ignore[union-attr]
        producer_ids = [debt.producer_id for debt in owed(state_of(desk)) if debt.partitions]
        assert len(set(producer_ids)) == len(producer_ids)


# --- a partition that is down ---------------------------------------------------------------------------------------


def test_an_id_goes_on_while_a_partition_is_down(desk: Desk) -> None:
    """A partition that is down delays only the transactions that wrote to it; others are completed meanwhile."""
    grant = owned(desk, P0)
    grant = following(desk, end(grant, COMMIT, wrote(P0), chain=(P1,)))
    desk.advance(desk.limits.patience_ms)
    for _ in range(20):
        number = grant.number
        grant = following(desk, end(grant, COMMIT, wrote(P1)))
        desk.pay("a", number)
        grant = granted(desk, add(grant, P1))
    assert [debt.number for debt in owed(state_of(desk)) if debt.number in desk.unpaid("a")] == [1]


def test_a_commit_owes_no_marker_where_nothing_was_sent(desk: Desk) -> None:
    """A commit marks the partitions that hold data of it; an abort marks all that were registered."""
    grant = owned(desk, P0, P1)
    after = following(desk, end(grant, COMMIT, wrote(P1), chain=(P0, P1)))
    desk.call(end(after, ABORT))
    committed, aborted = owed(state_of(desk))
    assert committed.partitions == {P1}
    assert aborted.partitions == {P0, P1}


def test_a_third_transaction_on_a_partition_that_two_owe_is_refused_as_retriable(desk: Desk) -> None:
    """Registering a partition that two of the id's transactions already owe is refused for now, others are not."""
    grant = owned(desk, P0, slots_max=4)
    grant = following(desk, end(grant, COMMIT, wrote(P0), chain=(P0,)))
    grant = following(desk, end(grant, COMMIT, wrote(P0)))
    held_back(desk, add(grant, P0))
    held_back(desk, add(grant, P1, P0))
    assert granted(desk, add(grant, P1)) == grant
    held_back(desk, add(grant, P0))
    desk.pay("a", 1)
    assert granted(desk, add(grant, P0)) == grant


def test_the_debts_of_an_id_are_bounded(desk: Desk) -> None:
    """When too many of its transactions are incomplete, an id registers nothing more until one is paid."""
    desk.limits = Limits(debts_max=3)
    grant = owned(desk, P0, slots_max=4)
    for partition in (P0, P1, P2):
        grant = granted(desk, add(grant, partition))
        grant = following(desk, end(grant, ABORT))
    assert len(owed(state_of(desk))) == 3
    held_back(desk, add(grant, P2))
    held_back(desk, end(grant, COMMIT, wrote(metadata=b"cursor")))
    desk.pay("a", 2)
    assert granted(desk, add(grant, P1)) == grant


def test_a_commit_of_metadata_waits_for_no_partition(desk: Desk) -> None:
    """A commit that touches no partition is decided although every slot owes markers."""
    grant = owned(desk, P0, slots_max=1)
    after = following(desk, end(grant, COMMIT, wrote(P0)))
    assert ended(desk, end(after, COMMIT, wrote(metadata=b"cursor"))).outcome.result is COMMIT
    desk.pay("a", 2)
    assert desk.unpaid("a") == {1: {P0}}


# --- InitProducer ---------------------------------------------------------------------------------------------------


def test_init_raises_and_aborts_what_was_left_open(desk: Desk) -> None:
    """Init without a grant raises; an ONGOING transaction is aborted, with markers on all its partitions."""
    grant = owned(desk, P0, P1)
    after = granted(desk, init(by="two"))
    assert (after.number, after.producer_id, after.epoch) == (2, grant.producer_id, grant.epoch + 2)
    (debt,) = owed(state_of(desk))
    assert (debt.commit, debt.partitions) == (False, frozenset({P0, P1}))
    assert debt.transaction.cause is Cause.NEWER_INSTANCE


def test_init_waits_until_every_debt_is_paid(desk: Desk) -> None:
    """Init answers once all debts are paid, or by option at once: also when it is asked again."""
    grant = owned(desk, P0)
    assert accepted(desk, init(grant=grant)).wait is Wait.ALL_IS_PAID
    assert accepted(desk, init(grant=grant)).wait is Wait.ALL_IS_PAID
    assert accepted(desk, init(grant=grant, without_waiting=True)).wait is Wait.NOTHING
    assert accepted(desk, init(by="two", without_waiting=True)).wait is Wait.NOTHING


def test_init_without_waiting_goes_on_in_a_free_slot(desk: Desk) -> None:
    """Who does not wait gets a slot without debts where there is one."""
    owned(desk, P0)
    after = granted(desk, init(by="two", without_waiting=True))
    assert granted(desk, add(after, P0)) == after


def test_an_owner_goes_on_from_its_newest_grant(desk: Desk) -> None:
    """Init with the owner's newest grant raises, aborts, returns that number's outcome, and keeps the owner."""
    grant = owned(desk, P0)
    reply = accepted(desk, init(grant=grant)).reply
    assert isinstance(reply, Granted)
    assert reply.grant.number == 2
    assert reply.outcome is not None
    assert (reply.outcome.grant, reply.outcome.result, reply.outcome.cause) == (grant, ABORT, Cause.OWNER)
    assert state_of(desk).owner.number_first == 1


def test_an_owner_that_missed_an_answer_goes_on_from_the_grant_it_knows(desk: Desk) -> None:
    """Init with the grant of the last End is granted, for its answer may have been lost; the outcome comes along."""
    grant = owned(desk, P0)
    desk.call(end(grant, COMMIT, wrote(P0), chain=(P1,)))
    reply = accepted(desk, init(grant=grant)).reply
    assert isinstance(reply, Granted)
    assert reply.grant.number == 3
    assert reply.outcome is not None
    assert reply.outcome.result is COMMIT
    assert state_of_number(desk, 2) is TransactionState.PREPARE_ABORT


@pytest.mark.parametrize("expirations", [1, 2, 3])
def test_an_owner_may_be_behind_by_what_others_ended(desk: Desk, expirations: int) -> None:
    """What timeouts and administrators ended since, the owner may not have heard of: it is still the owner."""
    grant = owned(desk, P0)
    chained = following(desk, end(grant, COMMIT, wrote(P0), chain=(P1,)))
    desk.pay("a")
    for _ in range(expirations):
        desk.call(timeout(chained))
        desk.pay("a")
        chained = granted(desk, add(chained, P1))
    assert granted(desk, init(grant=grant)).number == chained.number + 1


def test_the_same_init_gets_the_same_answer(desk: Desk) -> None:
    """An Init with a grant, asked again by the same owner with nobody else in between, is answered as before."""
    grant = owned(desk, P0)
    first = accepted(desk, init(grant=grant))
    again = accepted(desk, init(grant=grant))
    assert again.reply == first.reply
    assert again.records == ()


def test_an_init_that_has_been_followed_is_fenced(desk: Desk) -> None:
    """Once the grant that it brought is in use, a repeated Init with the old grant changes nothing any more."""
    grant = owned(desk, P0)
    after = granted(desk, init(grant=grant))
    desk.pay("a")
    granted(desk, add(after, P0))
    assert refusal_code(desk, init(grant=grant)) is ErrorCode.PRODUCER_FENCED


def test_another_init_ends_the_owners_claim(desk: Desk) -> None:
    """After somebody else's Init the former owner's grant is fenced, and it is told who came, and when."""
    grant = owned(desk, P0)
    desk.advance(5)
    granted(desk, init(by="two"))
    refusal = refused(desk, init(grant=grant))
    assert refusal.code is ErrorCode.PRODUCER_FENCED
    assert refusal.owner is not None
    assert (refusal.owner.instance, refusal.owner.address) == ("two", "two:1")
    assert (refusal.owner.since_ms, refusal.owner.cause) == (desk.now_ms, Cause.NEWER_INSTANCE)


def test_force_fence_ends_the_owners_claim(desk: Desk) -> None:
    """ForceFence aborts what is open and fences the owner, naming the administrator; then anybody may initialise."""
    grant = owned(desk, P0)
    desk.call(ForceFence(transactional_id="a", administrator="root"))
    for command in (init(grant=grant), add(grant, P1), end(grant, COMMIT, wrote(P0))):
        refusal = refused(desk, command)
        assert refusal.code is ErrorCode.PRODUCER_FENCED
        assert refusal.owner is not None
        assert (refusal.owner.instance, refusal.owner.cause) == ("root", Cause.ADMINISTRATOR)
    assert granted(desk, init(by="two")).number == 3


def test_a_timeout_fences_nobody(desk: Desk) -> None:
    """PRODUCER_FENCED means a newer instance or an administrator; a timeout is reported as one, and Init is granted."""
    grant = owned(desk, P0)
    desk.call(timeout(grant))
    refusal = refused(desk, end(grant, COMMIT, wrote(P0)))
    assert refusal.code is ErrorCode.INVALID_TXN_STATE
    assert refusal.outcome is not None
    assert refusal.outcome.cause is Cause.TIMEOUT
    assert granted(desk, init(grant=grant)).number == 3


def test_who_takes_a_prepared_transaction_over_shares_no_grant(desk: Desk) -> None:
    """With keep_prepared two instances hold one grant: either may decide, but the next grant goes to neither."""
    grant = owned(desk, P0)
    desk.call(prepare(grant, wrote(P0)))
    reply = accepted(desk, init(by="two", keep_prepared=True)).reply
    assert isinstance(reply, Granted)
    assert (reply.grant, reply.prepared is not None) == (grant, True)
    for _ in range(2):
        answer = ended(desk, end(grant, COMMIT, chain=(P0,)))
        assert (answer.next_grant, answer.next_registered) == (None, False)
    assert refusal_code(desk, init(grant=grant, keep_prepared=True)) is ErrorCode.PRODUCER_FENCED
    assert granted(desk, init(by="two")).number == 3
