"""Which markers go together, in what order, and what answers mean."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.markers import plan
from coordinator.markers.plan import Ending, Owed, Turns, Verdict
from oncebox.wire import ActiveProducer, ErrorCode, TopicPartition


def ending(producer_id: int, epoch: int = 1, *, commit: bool = True) -> Ending:
    return Ending(producer_id=producer_id, marker_epoch=epoch, commit=commit, coordinator_epoch=7)


def owed(of: Ending, partition: int = 0) -> Owed:
    return Owed(of, TopicPartition("t", partition), lambda: None, 0.0)


def test_partitions_of_one_transaction_share_a_marker():
    first, second = ending(1), ending(2, 5, commit=False)
    taken = [owed(first, 0), owed(second, 0), owed(first, 1)]
    one, two = plan.request(taken)
    assert (one.producer_id, one.producer_epoch, one.committed, one.coordinator_epoch) == (1, 1, True, 7)
    assert one.partitions == (TopicPartition("t", 0), TopicPartition("t", 1))
    assert (two.producer_id, two.producer_epoch, two.committed) == (2, 5, False)
    assert two.partitions == (TopicPartition("t", 0),)
    assert one.transaction_version == 2


def test_two_transactions_of_one_producer_id_never_share_a_request():
    old, new, other = ending(1, 1), ending(1, 3, commit=False), ending(2)
    waiting = deque([owed(old, 0), owed(new, 1), owed(other, 0), owed(old, 2), owed(new, 3)])
    assert [each.ending for each in plan.take(waiting)] == [old, other, old]
    assert [each.ending for each in plan.take(waiting)] == [new, new]
    assert not waiting


def test_equal_endings_of_a_doubled_debt_may_share():
    waiting = deque([owed(ending(1), 0), owed(ending(1), 1)])
    assert len(plan.take(waiting)) == 2


def test_a_request_is_bounded_and_the_rest_keeps_its_order():
    waiting = deque(owed(ending(number)) for number in range(10))
    assert [each.ending.producer_id for each in plan.take(waiting, 4)] == [0, 1, 2, 3]
    assert [each.ending.producer_id for each in waiting] == [4, 5, 6, 7, 8, 9]


def test_what_was_cancelled_is_left_out():
    cancelled, wanted = owed(ending(1)), owed(ending(2))
    cancelled.settled = True
    assert plan.take(deque([cancelled, wanted])) == [wanted]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1, 3, 5]), st.integers(0, 2)), max_size=40))
def test_every_marker_is_taken_once_and_each_producers_in_order(rows: list[tuple[int, int, int]]):
    every = [owed(ending(producer_id, epoch), partition) for producer_id, epoch, partition in rows]
    waiting = deque(every)
    requests = []
    while taken := plan.take(waiting, 5):
        assert len(taken) <= 5
        assert len({(each.ending.producer_id, each.ending.marker_epoch) for each in taken}) == len(
            {each.ending.producer_id for each in taken}
        )
        requests.append(taken)
    assert sorted(map(id, (each for taken in requests for each in taken))) == sorted(map(id, every))


def test_r21_the_next_marker_of_a_producer_waits_for_the_one_before_it():
    turns = Turns()
    commit, abort, later = owed(ending(1, 1)), owed(ending(1, 3, commit=False)), owed(ending(1, 5))
    elsewhere = owed(ending(1, 3), 1)
    assert turns.take(commit)
    assert not turns.take(later)
    assert not turns.take(abort)
    assert turns.take(elsewhere)
    assert turns.pass_on(commit) is abort
    assert turns.pass_on(abort) is later
    assert turns.pass_on(later) is None
    assert turns.take(owed(ending(1, 7)))


def test_a_cancelled_one_loses_its_turn_and_takes_nobody_elses():
    turns = Turns()
    first, second, third = (owed(ending(1, epoch)) for epoch in (1, 3, 5))
    for each in (first, second, third):
        turns.take(each)
    second.settled = True
    assert turns.pass_on(second) is None
    assert turns.pass_on(first) is third


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ErrorCode.NONE, Verdict.PAID),
        (None, Verdict.AGAIN),
        (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, Verdict.AGAIN),
        (ErrorCode.NOT_LEADER_OR_FOLLOWER, Verdict.AGAIN),
        (ErrorCode.NOT_ENOUGH_REPLICAS, Verdict.AGAIN),
        (ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND, Verdict.AGAIN),
        (ErrorCode.REQUEST_TIMED_OUT, Verdict.AGAIN),
        (ErrorCode.KAFKA_STORAGE_ERROR, Verdict.AGAIN),
        (ErrorCode.UNKNOWN_SERVER_ERROR, Verdict.AGAIN),
        (ErrorCode(4321), Verdict.AGAIN),
        (ErrorCode.INVALID_PRODUCER_EPOCH, Verdict.NEWER),
        (ErrorCode.TRANSACTION_COORDINATOR_FENCED, Verdict.NEWER),
        (ErrorCode.CLUSTER_AUTHORIZATION_FAILED, Verdict.FORBIDDEN),
    ],
)
def test_verdicts(error: ErrorCode | None, expected: Verdict):
    assert plan.verdict(error) is expected


@pytest.mark.parametrize(
    ("epoch", "start", "expected"),
    [
        (0, 10, False),  # its data is open
        (0, None, False),  # nobody has fenced its late writes
        (1, None, True),
        (2, 10, True),  # the next transaction is open: only after this one's marker
        (3, None, True),
    ],
)
def test_what_shows_that_a_transaction_is_over(epoch: int, start: int | None, expected: bool):
    other = active(producer_id=2, epoch=9, start=None)
    assert plan.is_ended(ending(1, 1), [other, active(producer_id=1, epoch=epoch, start=start)]) is expected


def test_a_producer_that_is_not_known_shows_nothing():
    assert not plan.is_ended(ending(1), [])


def active(*, producer_id: int, epoch: int, start: int | None) -> ActiveProducer:
    return ActiveProducer(
        producer_id=producer_id,
        producer_epoch=epoch,
        last_sequence=0,
        last_timestamp_ms=0,
        coordinator_epoch=0,
        txn_start_offset=start,
    )


@pytest.mark.parametrize(
    ("answers", "brokers", "expected"),
    [
        ([ErrorCode.UNKNOWN_TOPIC_OR_PARTITION] * 2, 3, True),
        ([ErrorCode.UNKNOWN_TOPIC_OR_PARTITION], 3, False),
        ([ErrorCode.UNKNOWN_TOPIC_OR_PARTITION], 1, True),
        ([ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, None], 3, False),
        ([ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.NOT_LEADER_OR_FOLLOWER], 3, False),
        ([ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.TOPIC_AUTHORIZATION_FAILED], 3, False),
        ([], 0, False),
    ],
)
def test_who_must_agree_that_a_partition_is_gone(answers: list[ErrorCode | None], brokers: int, expected: bool):
    assert plan.is_absent(answers, brokers=brokers) is expected


def test_waits_grow_to_five_seconds_and_no_further():
    waits = [plan.backoff_s(failures, 1.0) for failures in (1, 2, 3, 9, 1_000_000)]
    assert waits == [0.02, 0.04, 0.08, 5.0, 5.0]
    assert plan.backoff_s(3, 0.0) == 0.04
