"""What a state owes."""

from coordinator.core.owed import marked_partitions, owed
from coordinator.core.records import (
    OFFSETS_TOPIC,
    Contents,
    GroupOffsets,
    GroupPartition,
    Run,
    TopicPartition,
    Written,
)
from coordinator.core.state import TransactionState
from tests.unit.core.states import P0, P1, id_state, transaction

GROUPS = frozenset({GroupPartition("g", 7), GroupPartition("h", 7), GroupPartition("i", 9)})
OFFSETS_7, OFFSETS_9 = TopicPartition(OFFSETS_TOPIC, 7), TopicPartition(OFFSETS_TOPIC, 9)


def wrote(partition: TopicPartition, *runs: Run) -> Written:
    count = sum(run.offset_next - run.offset_first for run in runs)
    return Written(topic=partition.topic, partition=partition.partition, record_count=count, runs=runs)


def test_open_transactions_owe_nothing() -> None:
    assert owed(id_state(transaction())) == ()
    assert owed(id_state(transaction(state=TransactionState.PREPARED))) == ()


def test_a_debt_has_its_own_producer_id_and_the_odd_epoch() -> None:
    (debt,) = owed(id_state(transaction(3, TransactionState.PREPARE_ABORT, producer_id=77, epoch=40), number=9))
    assert (debt.number, debt.producer_id, debt.marker_epoch, debt.commit) == (3, 77, 41, False)


def test_an_abort_marks_all_that_was_registered_once() -> None:
    aborted = transaction(state=TransactionState.PREPARE_ABORT, partitions=frozenset({P0, P1}), groups=GROUPS)
    assert marked_partitions(aborted) == {P0, P1, OFFSETS_7, OFFSETS_9}


def test_a_commit_marks_what_holds_data() -> None:
    contents = Contents(
        written=(wrote(P0), wrote(P1, Run(3, 5))),
        group_offsets=(GroupOffsets(group_id="h", offsets=()),),
    )
    committed = transaction(
        state=TransactionState.PREPARE_COMMIT, partitions=frozenset({P0, P1}), groups=GROUPS, contents=contents
    )
    assert marked_partitions(committed) == {P1, OFFSETS_7}


def test_a_commit_of_metadata_owes_its_manifest_only() -> None:
    bare = transaction(state=TransactionState.PREPARE_COMMIT, partitions=frozenset(), contents=Contents(metadata=b"x"))
    (debt,) = owed(id_state(bare, number=2))
    assert (debt.commit, debt.partitions) == (True, frozenset())
