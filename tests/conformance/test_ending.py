"""Ending a transaction: one test per rule."""

import pytest

from coordinator.core.commands import (
    Abort,
    Blocked,
    ErrorCode,
    GetOutcome,
    OutcomeForgotten,
    OutcomeKnown,
    Undecided,
    Wait,
)
from coordinator.core.grants import Limits
from coordinator.core.owed import owed
from coordinator.core.records import (
    NOTHING,
    OFFSETS_TOPIC,
    Cause,
    Contents,
    Grant,
    GroupOffset,
    GroupOffsets,
    Result,
    Run,
    TopicPartition,
    Written,
)
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
    init,
    newest_state,
    owned,
    prepare,
    refusal_code,
    state_of,
    state_of_number,
    wrote,
)
from tests.model.desk import Desk


@pytest.fixture
def desk() -> Desk:
    return Desk()


def outcome_of(desk: Desk, number: int) -> object:
    return accepted(desk, GetOutcome(transactional_id="a", number=number)).reply


def written(*runs: tuple[int, int], count: int | None = None, partition: int = 0) -> Contents:
    total = sum(following - first for first, following in runs)
    entry = Written(
        topic="t",
        partition=partition,
        record_count=total if count is None else count,
        runs=tuple(Run(first, following) for first, following in runs),
    )
    return Contents(written=(entry,))


# --- who may end what -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("producer_id", "epoch", "code"),
    [
        (1, 0, ErrorCode.INVALID_PRODUCER_ID_MAPPING),
        (0, 2, ErrorCode.INVALID_PRODUCER_EPOCH),
        (0, -2, ErrorCode.INVALID_PRODUCER_EPOCH),
    ],
)
def test_a_call_is_valid_only_with_the_grant_of_its_number(
    desk: Desk, producer_id: int, epoch: int, code: ErrorCode
) -> None:
    """A call is valid if its producer id and epoch are those recorded with its number, undecided or decided."""
    grant = owned(desk, P0)
    forged = Grant(number=1, producer_id=grant.producer_id + producer_id, epoch=grant.epoch + epoch)
    for command in (add(forged, P1), prepare(forged), end(forged, COMMIT, wrote(P0)), init(grant=forged)):
        assert refusal_code(desk, command) is code
    desk.call(end(grant, COMMIT, wrote(P0)))
    assert refusal_code(desk, end(forged, COMMIT)) is code


def test_a_number_that_was_not_granted_is_an_invalid_request(desk: Desk) -> None:
    """Numbers from the future mean a broken client."""
    grant = owned(desk)
    future = Grant(number=2, producer_id=grant.producer_id, epoch=2)
    assert refusal_code(desk, end(future, ABORT)) is ErrorCode.INVALID_REQUEST
    assert refusal_code(desk, GetOutcome(transactional_id="a", number=2)) is ErrorCode.INVALID_REQUEST
    assert refusal_code(desk, GetOutcome(transactional_id="a", number=0)) is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("result", [COMMIT, ABORT])
def test_a_decided_number_answers_its_outcome_to_whoever_held_it(desk: Desk, result: Result) -> None:
    """A repeated End is answered with the first outcome; an owner fenced since gets it too, but no next grant."""
    grant = owned(desk, P0)
    first = ended(desk, end(grant, result, wrote(P0)))
    assert ended(desk, end(grant, result, wrote(P0))) == first
    granted(desk, init(by="two"))
    late = ended(desk, end(grant, result, wrote(P0)))
    assert late.outcome == first.outcome
    assert late.next_grant is None


def test_a_repeat_says_whether_the_chain_is_registered(desk: Desk) -> None:
    """The repeat of a chaining End is answered as the first was, as long as the chain stands."""
    grant = owned(desk, P0)
    command = end(grant, COMMIT, wrote(P0), chain=(P0, P1))
    first = ended(desk, command)
    assert first.next_registered
    assert ended(desk, command) == first
    assert not ended(desk, end(grant, COMMIT, wrote(P0))).next_registered


# --- outcomes -------------------------------------------------------------------------------------------------------


def test_undecided_is_an_answer_of_its_own(desk: Desk) -> None:
    """GetOutcome of an open number says UNDECIDED; End(abort) with that number settles it."""
    grant = owned(desk, P0)
    reply = outcome_of(desk, 1)
    assert isinstance(reply, Undecided)
    assert reply.grant == grant
    ended(desk, end(reply.grant, ABORT))
    assert isinstance(outcome_of(desk, 1), OutcomeKnown)


def test_an_id_knows_its_last_outcomes(desk: Desk) -> None:
    """The last K outcomes are answered from the log; of older ones the core says that it has forgotten them."""
    desk.limits = Limits(outcomes_kept=8)
    grant = owned(desk)
    for _ in range(10):
        grant = following(desk, end(grant, ABORT))
    assert isinstance(outcome_of(desk, 2), OutcomeForgotten)
    assert isinstance(outcome_of(desk, 3), OutcomeKnown)
    assert refusal_code(desk, end(Grant(number=2, producer_id=1000, epoch=2), ABORT)) is ErrorCode.OUTCOME_EXPIRED


def test_an_outcome_is_known_as_long_as_its_debts(desk: Desk) -> None:
    """A transaction that still owes markers answers its outcome, however many came after it."""
    desk.limits = Limits(outcomes_kept=2)
    grant = owned(desk, P0)
    command = end(grant, COMMIT, wrote(P0))
    first = ended(desk, command)
    after = first.next_grant
    assert after is not None
    for _ in range(5):
        after = following(desk, end(after, ABORT))
    reply = outcome_of(desk, 1)
    assert isinstance(reply, OutcomeKnown)
    assert reply.outcome == first.outcome
    assert ended(desk, command).outcome == first.outcome


def test_outcomes_never_change(desk: Desk) -> None:
    """Of a decided number the other result is refused, whoever asks for it."""
    grant = owned(desk, P0)
    desk.call(end(grant, COMMIT, wrote(P0)))
    assert refusal_code(desk, end(grant, ABORT)) is ErrorCode.INVALID_TXN_STATE
    assert refusal_code(desk, Abort(transactional_id="a", number=1)) is ErrorCode.INVALID_TXN_STATE


def test_an_outcome_says_why(desk: Desk) -> None:
    """An abort carries its cause: owner, timeout, newer instance, administrator."""
    grant = owned(desk, P0)
    following(desk, end(grant, ABORT))
    granted(desk, init(by="two"))
    desk.pay("a")
    granted(desk, add(granted(desk, init(by="two", without_waiting=True)), P0))
    desk.call(Abort(transactional_id="a", number=4))
    causes = [outcome.cause for outcome in state_of(desk).outcomes]
    assert causes == [Cause.OWNER, Cause.NEWER_INSTANCE, Cause.NEWER_INSTANCE, Cause.ADMINISTRATOR]


# --- what a commit holds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "contents",
    [
        pytest.param(written((0, 3), count=2), id="count and runs differ"),
        pytest.param(written((3, 3)), id="empty run"),
        pytest.param(written((4, 3), count=-1), id="backward run"),
        pytest.param(written((-1, 2)), id="negative offset"),
        pytest.param(written((5, 6), (1, 2)), id="descending runs"),
        pytest.param(written((0, 2), (1, 3)), id="overlapping runs"),
        pytest.param(written((0, 2), (2, 3)), id="adjacent runs"),
        pytest.param(written((0, 1), partition=2), id="not registered"),
        pytest.param(Contents(written=written((0, 1)).written * 2), id="named twice"),
        pytest.param(
            Contents(
                group_offsets=(
                    GroupOffsets(group_id="g", offsets=(GroupOffset(topic="in", partition=0, offset_next=1),)),
                )
            ),
            id="group not registered",
        ),
    ],
)
def test_contents_must_be_exact(desk: Desk, contents: Contents) -> None:
    """A commit names the exact runs of its own offsets, of registered partitions, with counts that agree."""
    grant = owned(desk, P0)
    assert refusal_code(desk, end(grant, COMMIT, contents)) is ErrorCode.INVALID_REQUEST
    assert refusal_code(desk, prepare(grant, contents)) is ErrorCode.INVALID_REQUEST


def test_contents_are_kept_with_the_decision(desk: Desk) -> None:
    """PREPARE_COMMIT holds all that the manifest will say, with its place among the decisions and the feed's end."""
    desk.feed.append(("other", 1))
    desk.decision_next = 41
    grant = owned(desk, P0)
    desk.call(end(grant, COMMIT, wrote(P0, metadata=b"row-1")))
    (debt,) = owed(state_of(desk))
    assert debt.transaction.contents == wrote(P0, metadata=b"row-1")
    assert (debt.transaction.decision, debt.transaction.feed_offset_first) == (43, 1)
    assert debt.transaction.decided_at_ms == desk.now_ms


def test_an_abort_marks_the_offsets_of_every_registered_group(desk: Desk) -> None:
    """An abort owes a marker to the group's partition of __consumer_offsets whether offsets were sent or not."""
    grant = granted(desk, add(granted(desk, init()), P0, group="g"))
    desk.call(end(grant, ABORT))
    (debt,) = owed(state_of(desk))
    assert debt.partitions == {P0, TopicPartition(OFFSETS_TOPIC, 7)}


def test_commits_and_their_offsets_are_marked_apart(desk: Desk) -> None:
    """Each commit owes markers to what it wrote: data here, offsets there."""
    grant = granted(desk, add(granted(desk, init()), P0, group="g"))
    offsets = GroupOffsets(group_id="g", offsets=(GroupOffset(topic="in", partition=0, offset_next=1),))
    after = following(desk, end(grant, COMMIT, Contents(group_offsets=(offsets,))))
    granted(desk, add(after, P0, group="g"))
    desk.call(end(after, COMMIT, wrote(P0)))
    first, second = owed(state_of(desk))
    assert (first.partitions, second.partitions) == (frozenset({TopicPartition(OFFSETS_TOPIC, 7)}), frozenset({P0}))


def test_a_commit_of_metadata_needs_no_partition(desk: Desk) -> None:
    """A transaction of metadata alone is decided and has its manifest; one of nothing at all is refused."""
    grant = owned(desk)
    assert refusal_code(desk, end(grant, COMMIT)) is ErrorCode.INVALID_TXN_STATE
    desk.call(end(grant, COMMIT, wrote(metadata=b"cursor")))
    (debt,) = owed(state_of(desk))
    assert (debt.commit, debt.partitions) == (True, frozenset())


def test_a_transaction_that_was_never_registered_is_withdrawn(desk: Desk) -> None:
    """End(abort) of a number with nothing registered owes nothing: it is complete at once."""
    grant = owned(desk)
    assert following(desk, end(grant, ABORT)).number == 2
    assert owed(state_of(desk)) == ()


def test_the_resume_token_is_that_of_the_newest_commit(desk: Desk) -> None:
    """Metadata of a commit comes back from Init; metadata of an abort, or its absence, changes nothing."""
    grant = owned(desk)
    for result, metadata in ((COMMIT, b"1"), (ABORT, b"2"), (COMMIT, b"3"), (ABORT, b"4")):
        grant = following(desk, end(grant, result, Contents(metadata=metadata)))
    desk.pay("a")
    granted(desk, add(grant, P0))
    grant = following(desk, end(grant, COMMIT, wrote(P0)))
    reply = accepted(desk, init(by="two")).reply
    assert reply.resume_token == b"3"  # type: ignore[union-attr]


def test_contents_of_an_abort_count_for_nothing(desk: Desk) -> None:
    """An abort keeps no contents, and wrong ones are no reason to refuse it."""
    grant = owned(desk, P0)
    desk.call(end(grant, ABORT, written((9, 3), partition=5)))
    (debt,) = owed(state_of(desk))
    assert debt.transaction.contents == NOTHING


# --- the answer -----------------------------------------------------------------------------------------------------


def test_the_answer_waits_as_asked(desk: Desk) -> None:
    """End answers when every marker stands (the default), or by wish when the decision is durable; so do repeats."""
    grant = owned(desk, P0)
    assert accepted(desk, end(grant, ABORT)).wait is Wait.ENDED_IS_PAID
    assert accepted(desk, end(grant, ABORT)).wait is Wait.ENDED_IS_PAID
    assert accepted(desk, end(grant, ABORT, decided_is_enough=True)).wait is Wait.NOTHING


def test_a_decision_and_the_chain_are_one_record(desk: Desk) -> None:
    """End with a chain ends n and registers n + 1 in one record; the chained one is ONGOING like any other."""
    grant = owned(desk, P0)
    decision = accepted(desk, end(grant, COMMIT, wrote(P0), chain=(P0, P2)))
    assert len(decision.records) == 1
    assert newest_state(desk) is TransactionState.ONGOING
    assert state_of_number(desk, 1) is TransactionState.PREPARE_COMMIT


def test_completion_needs_no_record_of_its_own(desk: Desk) -> None:
    """What is paid is completed by the id's next record, whatever that is."""
    grant = owned(desk, P0)
    after = following(desk, end(grant, COMMIT, wrote(P0)))
    desk.pay("a")
    written_before = len(desk.log)
    granted(desk, add(after, P1))
    assert state_of_number(desk, 1) is None
    assert len(desk.log) == written_before + 1


def test_a_commit_is_paid_only_with_its_manifest(desk: Desk) -> None:
    """Markers alone complete no commit: the manifest comes first, and is owed like them."""
    grant = owned(desk, P0)
    desk.call(end(grant, COMMIT, wrote(P0)))
    desk.acknowledge(desk.debt("a", 1), P0)
    assert desk.unpaid("a") == {1: frozenset()}
    desk.pay("a")
    assert desk.unpaid("a") == {}


@pytest.mark.parametrize("prepared", [False, True])
def test_no_commit_is_decided_while_its_manifest_could_not_be_written(desk: Desk, *, prepared: bool) -> None:
    grant = owned(desk, P0)
    if prepared:
        accepted(desk, prepare(grant, wrote(P0)))
    desk.feed_is_available = False
    before = newest_state(desk)
    decision = desk.call(end(grant, COMMIT, wrote(P0)))
    assert isinstance(decision, Blocked)
    assert (decision.refusal.code, decision.refusal.retriable) == (ErrorCode.COORDINATOR_NOT_AVAILABLE, True)
    assert newest_state(desk) is before
    desk.feed_is_available = True
    after = ended(desk, end(grant, COMMIT, wrote(P0)))
    desk.feed_is_available = False
    # It is decided: a repeat is told so. An abort needs no manifest.
    assert ended(desk, end(grant, COMMIT, wrote(P0))).outcome == after.outcome
    assert after.next_grant is not None
    ended(desk, end(granted(desk, add(after.next_grant, P1)), ABORT))
