"""The steps that decisions are made of."""

import pytest

from coordinator.core.commands import ErrorCode
from coordinator.core.ending import check_contents, decide_newest, register, registration_obstacle
from coordinator.core.grants import Context, Limits
from coordinator.core.records import (
    NOTHING,
    OFFSETS_TOPIC,
    Cause,
    Contents,
    GroupOffsets,
    GroupPartition,
    Result,
    Run,
    TopicPartition,
    Written,
    newest_transaction,
)
from coordinator.core.state import TransactionState
from tests.unit.core.states import NOW_MS, P0, P1, id_state, outcome, transaction

CONTEXT = Context(now_ms=NOW_MS + 5, decision=12, feed_offset_next=34)
GROUP = frozenset({GroupPartition("g", 7)})
NO_GROUPS: frozenset[GroupPartition] = frozenset()
ABORTING = TransactionState.PREPARE_ABORT


def test_the_first_registration_opens_the_transaction() -> None:
    opened = newest_transaction(register(id_state(), frozenset({P0}), GROUP, CONTEXT))
    assert opened is not None
    assert (opened.state, opened.partitions, opened.groups) == (TransactionState.ONGOING, frozenset({P0}), GROUP)
    assert opened.started_at_ms == NOW_MS + 5


def test_further_registrations_add() -> None:
    grown = newest_transaction(register(id_state(transaction()), frozenset({P1}), GROUP, CONTEXT))
    assert grown is not None
    assert (grown.partitions, grown.groups, grown.started_at_ms) == (frozenset({P0, P1}), GROUP, NOW_MS)


def test_a_partition_owed_by_two_is_an_obstacle_unless_one_has_its_marker() -> None:
    debts = (transaction(1, ABORTING), transaction(2, ABORTING, producer_id=1001))
    state = id_state(*debts, number=3)
    assert "t:0" in (registration_obstacle(state, frozenset({P0}), NO_GROUPS, CONTEXT) or "")
    assert registration_obstacle(state, frozenset({P1}), NO_GROUPS, CONTEXT) is None
    acknowledged = Context(now_ms=NOW_MS, owed={1: frozenset(), 2: frozenset({P0})})
    assert registration_obstacle(state, frozenset({P0}), NO_GROUPS, acknowledged) is None


def test_a_groups_partition_counts_as_any_other() -> None:
    debts = (transaction(1, ABORTING, groups=GROUP), transaction(2, ABORTING, producer_id=1001, groups=GROUP))
    obstacle = registration_obstacle(id_state(*debts, number=3), frozenset(), GROUP, CONTEXT)
    assert obstacle is not None
    assert f"{OFFSETS_TOPIC}:7" in obstacle


def test_too_many_debts_are_an_obstacle() -> None:
    few = Context(now_ms=NOW_MS, limits=Limits(debts_max=1))
    assert registration_obstacle(id_state(transaction(1, ABORTING), number=2), frozenset(), NO_GROUPS, few)


def entry(*runs: tuple[int, int], partition: TopicPartition = P0, count: int | None = None) -> Written:
    total = sum(following - first for first, following in runs)
    return Written(
        topic=partition.topic,
        partition=partition.partition,
        record_count=total if count is None else count,
        runs=tuple(Run(first, following) for first, following in runs),
    )


@pytest.mark.parametrize("written", [(), (entry(),), (entry((0, 1)),), (entry((0, 2), (3, 9)), entry(partition=P1))])
def test_good_contents(written: tuple[Written, ...]) -> None:
    both = transaction(partitions=frozenset({P0, P1}))
    assert check_contents(both, Contents(written=written)) is None


@pytest.mark.parametrize(
    ("written", "what"),
    [
        ((entry((0, 1), partition=P1),), "not registered"),
        ((entry((0, 1)), entry((2, 3))), "named twice"),
        ((entry((2, 3), (0, 1)),), "not ascending"),
        ((entry((0, 1), count=2),), "2 records are claimed, the runs hold 1"),
        ((entry(count=1),), "1 records are claimed, the runs hold 0"),
    ],
)
def test_bad_contents(written: tuple[Written, ...], what: str) -> None:
    refusal = check_contents(transaction(), Contents(written=written))
    assert refusal is not None
    assert refusal.code is ErrorCode.INVALID_REQUEST
    assert what in refusal.message


def test_offsets_need_their_group() -> None:
    contents = Contents(group_offsets=(GroupOffsets(group_id="g", offsets=()),))
    assert check_contents(transaction(groups=GROUP), contents) is None
    assert check_contents(transaction(), contents) is not None


def test_a_decision_becomes_an_outcome_and_a_debt() -> None:
    contents = Contents(written=(entry((0, 1)),), metadata=b"x")
    after = decide_newest(id_state(transaction()), Result.COMMITTED, Cause.OWNER, contents, CONTEXT)
    (debt,) = after.transactions
    assert (debt.state, debt.contents, debt.cause) == (TransactionState.PREPARE_COMMIT, contents, Cause.OWNER)
    assert (debt.decided_at_ms, debt.decision, debt.feed_offset_first) == (NOW_MS + 5, 12, 34)
    assert [known.result for known in after.outcomes] == [Result.COMMITTED]
    assert (after.resume_token, after.number) == (b"x", 1)


def test_a_decision_on_nothing_owes_nothing() -> None:
    after = decide_newest(id_state(), Result.ABORTED, Cause.NEWER_INSTANCE, NOTHING, CONTEXT)
    assert after.transactions == ()
    assert [(known.result, known.cause) for known in after.outcomes] == [(Result.ABORTED, Cause.NEWER_INSTANCE)]


def test_only_the_last_outcomes_are_kept() -> None:
    few = Context(now_ms=NOW_MS, limits=Limits(outcomes_kept=3))
    known = tuple(outcome(number) for number in range(1, 4))
    after = decide_newest(id_state(number=4, outcomes=known), Result.ABORTED, Cause.OWNER, NOTHING, few)
    assert [entry.grant.number for entry in after.outcomes] == [2, 3, 4]
