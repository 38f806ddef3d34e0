"""A topic created again has forgotten every producer id (R12); one whose marker was given up may be open there."""

import pytest
from msgspec.structs import replace

from coordinator.core.commands import Complete, ErrorCode, TopicIds
from coordinator.core.records import NOWHERE, Cause, Grant, Result, TopicPartition, TopicState, Written
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
    following,
    granted,
    init,
    newest_state,
    owned,
    prepare,
    refused,
    state_of,
    wrote,
)
from tests.model.broker import Broker, Marker, Value
from tests.model.desk import Desk

OLD: TopicIds = {"t": b"old"}
NEW: TopicIds = {"t": b"new"}
GONE: TopicIds = {"t": b""}
OTHER = TopicPartition("other", 0)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def add_to(topic_ids: TopicIds, grant: Grant, *partitions: TopicPartition):
    return replace(add(grant, *partitions), topic_ids=topic_ids)


def ending(desk: Desk, grant: Grant, topic_ids: TopicIds, *, chain: tuple[TopicPartition, ...] = ()):
    return replace(end(grant, COMMIT, wrote(P0), chain=chain), topic_ids=topic_ids)


def committed(desk: Desk, grant: Grant, topic_ids: TopicIds = OLD) -> Grant:
    """One whole transaction; the next grant."""
    registered = granted(desk, add_to(topic_ids, grant, P0))
    after = following(desk, ending(desk, registered, topic_ids))
    desk.pay("a")
    accepted(desk, Complete(transactional_id="a"))
    return after


def test_the_first_topic_of_a_name_is_remembered(desk: Desk) -> None:
    grant = granted(desk, init())
    assert granted(desk, add_to(OLD, grant, P0)) == grant
    assert desk.state.topics == {"t": TopicState(topic="t", topic_id=b"old", change=0)}
    desk.crash(compact=True)
    assert desk.state.topics == {"t": TopicState(topic="t", topic_id=b"old", change=0)}
    # Known already: nothing is written of it again.
    written = len(desk.log)
    granted(desk, add_to(OLD, grant, P1))
    assert len(desk.log) == written + 1


def test_r12_a_late_write_to_a_topic_created_again_is_never_committed(desk: Desk) -> None:
    """The new topic takes a late batch of an old epoch; the producer id that it carries is not used there again."""
    broker = Broker()
    zombie = granted(desk, init())
    after = committed(desk, zombie)
    broker.recreate("t")
    assert broker.produce(zombie.producer_id, zombie.epoch, 0, P0, Value("a", zombie.number, "late", 0)) == 0
    registered = granted(desk, add_to(NEW, after, P0))
    assert (registered.number, registered.epoch) == (after.number + 1, 0)
    assert registered.producer_id not in {zombie.producer_id, after.producer_id}
    skipped = state_of(desk).outcomes[-1]
    assert (skipped.grant, skipped.result, skipped.cause) == (after, Result.ABORTED, Cause.UNSPECIFIED)
    broker.produce(registered.producer_id, 0, 0, P0, Value("a", registered.number, "one", 1))
    following(desk, ending(desk, registered, NEW))
    debt = desk.debt("a", registered.number)
    marker = Marker("a", debt.number, debt.producer_id, debt.marker_epoch, debt.commit, P0)
    assert broker.mark(marker) == 0
    assert [value.writer for value in broker.visible_values()] == ["one"]


def test_r12_who_has_the_grant_already_goes_on_with_the_new_one(desk: Desk) -> None:
    """As where a slot cannot be had: the registration that comes again, with the old grant, gets the same answer."""
    grant = committed(desk, granted(desk, init()))
    registered = granted(desk, add_to(NEW, grant, P0))
    assert granted(desk, add_to(NEW, grant, P0)) == registered
    assert newest_state(desk) is TransactionState.ONGOING


def test_a_change_counts_for_all_ids_and_whatever_the_clock_says(desk: Desk) -> None:
    grant = committed(desk, granted(desk, init()))
    other = granted(desk, replace(init(), transactional_id="b"))
    desk.advance(-3_600_000)
    granted(desk, replace(add_to(NEW, other, P0), transactional_id="b"))
    desk.crash(compact=True)
    assert granted(desk, add_to(NEW, grant, P0)).producer_id != grant.producer_id


def test_a_younger_producer_id_is_kept(desk: Desk) -> None:
    grant = committed(desk, granted(desk, init()))
    # Each slot is renewed once.
    after = committed(desk, committed(desk, grant, NEW), NEW)
    first = {slot.producer_id for slot in state_of(desk).slots}
    for _ in range(4):
        after = committed(desk, after, NEW)
    assert {slot.producer_id for slot in state_of(desk).slots} == first


def test_other_topics_are_not_affected(desk: Desk) -> None:
    grant = committed(desk, granted(desk, init()))
    b = granted(desk, replace(init(), transactional_id="b"))
    granted(desk, replace(add_to(NEW, b, P0), transactional_id="b"))
    assert granted(desk, add_to({"other": b"same"}, grant, OTHER)) == grant


def test_a_chain_gets_a_new_producer_id_with_its_grant(desk: Desk) -> None:
    grant = committed(desk, granted(desk, init()))
    granted(desk, add(grant, OTHER))
    older = {slot.producer_id for slot in state_of(desk).slots}
    command = replace(end(grant, COMMIT, wrote(OTHER), chain=(P0,)), topic_ids=NEW)
    reply = ended(desk, command)
    assert reply.next_registered
    assert reply.next_grant is not None
    assert reply.next_grant.producer_id not in older
    again = ended(desk, command)
    assert (again.next_grant, again.next_registered) == (reply.next_grant, True)


@pytest.mark.parametrize("now", [NEW, GONE])
def test_a_commit_is_refused_where_its_topic_is_not_the_one_that_was_registered(desk: Desk, now: TopicIds) -> None:
    """A manifest must not name offsets of a topic that is gone. The transaction can be aborted, and the id goes on."""
    grant = granted(desk, init())
    granted(desk, add_to(OLD, grant, P0))
    assert refused(desk, ending(desk, grant, now)).code is ErrorCode.TRANSACTION_ABORTABLE
    assert newest_state(desk) is TransactionState.ONGOING
    after = following(desk, end(grant, ABORT))
    assert granted(desk, add_to(NEW, after, P0)).producer_id != grant.producer_id


def test_a_commit_is_refused_also_if_somebody_else_has_noticed_the_change(desk: Desk) -> None:
    grant = granted(desk, init())
    granted(desk, add_to(OLD, grant, P0))
    b = granted(desk, replace(init(), transactional_id="b"))
    granted(desk, replace(add_to(NEW, b, P0), transactional_id="b"))
    assert refused(desk, ending(desk, grant, NEW)).code is ErrorCode.TRANSACTION_ABORTABLE


def test_a_commit_is_refused_where_the_client_itself_tells_of_another_topic(desk: Desk) -> None:
    grant = granted(desk, init())
    granted(desk, add_to(NEW, grant, P0))
    command = ending(desk, grant, NEW)
    written: tuple[Written, ...] = tuple(replace(entry, topic_id=b"old") for entry in command.contents.written)
    told = replace(command, contents=replace(command.contents, written=written))
    assert refused(desk, told).code is ErrorCode.TRANSACTION_ABORTABLE


def test_a_topic_that_was_not_written_to_is_in_nobodys_way(desk: Desk) -> None:
    grant = granted(desk, init())
    granted(desk, add_to({"t": b"old", "other": b"same"}, grant, P0, OTHER))
    command = replace(end(grant, COMMIT, wrote(OTHER)), topic_ids={"other": b"same"})
    assert ended(desk, command).outcome.result is Result.COMMITTED


def test_nothing_is_added_to_a_transaction_that_the_change_has_overtaken(desk: Desk) -> None:
    grant = committed(desk, granted(desk, init()))
    granted(desk, add(grant, OTHER))
    assert refused(desk, add_to(NEW, grant, P0)).code is ErrorCode.TRANSACTION_ABORTABLE


def test_what_is_prepared_can_be_committed_whatever_becomes_of_the_topic(desk: Desk) -> None:
    """The other system may have committed: only before it is PREPARED may the change be a reason to refuse."""
    grant = granted(desk, init())
    granted(desk, add_to(OLD, grant, P0))
    assert refused(desk, replace(prepare(grant, wrote(P0)), topic_ids=NEW)).code is ErrorCode.TRANSACTION_ABORTABLE
    accepted(desk, replace(prepare(grant, wrote(P0)), topic_ids=OLD))
    # The same again, filled in with the id of the topic of today, is a repeat.
    contents = wrote(P0)
    written = tuple(replace(entry, topic_id=b"new") for entry in contents.written)
    accepted(desk, replace(prepare(grant, replace(contents, written=written)), topic_ids=NEW))
    assert ended(desk, replace(end(grant, COMMIT), topic_ids=NEW)).outcome.result is Result.COMMITTED


@pytest.mark.parametrize(("waited_ms", "is_old"), [(0, False), (10_000, False), (10_001, True), (-7 * 3_600_000, True)])
def test_the_topic_of_what_was_prepared_for_long_is_looked_at_first(desk: Desk, waited_ms: int, is_old: bool) -> None:
    """By the clock of one leader, or of two of which the later one is behind: then nobody knows how long it was."""
    grant = owned(desk, P0)
    accepted(desk, prepare(grant, wrote(P0)))
    desk.now_ms += waited_ms
    ended(desk, end(grant, COMMIT))
    assert desk.debt("a", grant.number).is_old is is_old


def drop(desk: Desk, number: int) -> None:
    debt = desk.debt("a", number)
    desk.write_manifest(debt)
    for partition in debt.partitions:
        desk.drop(debt, partition)


def test_a_producer_id_whose_marker_was_given_up_is_not_used_again(desk: Desk) -> None:
    """It may have left something open there: its next marker would end that, too."""
    grant = owned(desk, P0, slots_max=1)
    after = following(desk, end(grant, ABORT))
    # Handed out already: it ends unused, and the next one has another producer id.
    assert after.producer_id == grant.producer_id
    drop(desk, grant.number)
    registered = granted(desk, add(after, P0))
    assert registered.producer_id != grant.producer_id
    assert registered.number == after.number + 1


def test_a_given_up_marker_is_remembered_when_its_transaction_is_complete(desk: Desk) -> None:
    grant = owned(desk, P0)
    after = following(desk, end(grant, ABORT))
    assert after.producer_id != grant.producer_id
    drop(desk, grant.number)
    accepted(desk, Complete(transactional_id="a"))
    desk.crash(compact=True)
    assert [slot.topic_changes for slot in state_of(desk).slots] == [NOWHERE, 0]
    granted(desk, add(after, P0))
    # The other slot's turn: it has a new producer id by then.
    again = following(desk, end(after, COMMIT, wrote(P0)))
    assert again.producer_id not in {grant.producer_id, after.producer_id}


@pytest.mark.parametrize("claim", [True, False])
def test_an_init_after_a_given_up_marker_gets_a_new_producer_id(desk: Desk, claim: bool) -> None:
    grant = owned(desk, P0, slots_max=1)
    after = following(desk, end(grant, ABORT))
    drop(desk, grant.number)
    assert granted(desk, init(grant=after if claim else None, slots_max=1)).producer_id != grant.producer_id
