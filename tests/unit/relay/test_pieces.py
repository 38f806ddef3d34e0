"""Transactions that come in bulk are planned as if they came one by one."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import pytest

from oncebox.reader import PartitionPosition, Record
from oncebox.reader.express import Express
from relay.batch import Batch
from relay.config import Limits
from relay.plan import Hold, Pieces, Planner, StopError, Unit, make_plan
from tests.unit.relay.test_order import PLANNER, TOPIC_ID, A, B, manifest

if TYPE_CHECKING:
    from oncebox.wire import TopicPartition

SOURCES = {("t", 0): 1, ("t", 1): 2}


class BulkReader:
    """Gives all it has at once."""

    def __init__(self, *transactions: tuple[str, dict[TopicPartition, list[tuple[int, bytes]]]]) -> None:
        start = PartitionPosition(next_offset=0)
        self.express = Express({A: start, B: start}, {0: 0}, {"t": TOPIC_ID.hex})
        records: dict[TopicPartition, list[Record]] = {A: [], B: []}
        for number, (name, written) in enumerate(transactions):
            runs = {where: [(offset, offset + 1) for offset, _ in each] for where, each in written.items()}
            told = manifest(name, runs)
            told.number = number
            self.express.manifest(0, number, told)
            for where, each in written.items():
                records[where] += [Record(*where, offset, 0, None, value, ()) for offset, value in each]
        for where, some in records.items():
            self.express.records(where, some)

    def take(self, *, records_max: int, bytes_max: int) -> list[object]:
        bulks = [*self.express.release()]
        for bulk in bulks:
            self.express.done(bulk)
        return [*bulks]

    def position(self) -> None:
        return None


def batch_of(*transactions: tuple[str, dict[TopicPartition, list[tuple[int, bytes]]]]) -> Batch:
    return Batch(BulkReader(*transactions), Limits())  # type: ignore[arg-type]


class LateReader(BulkReader):
    """Has, behind the first of them, one of which compaction has left nothing."""

    def take(self, *, records_max: int, bytes_max: int) -> list[object]:
        first = [*self.express.release()]
        self.express.manifest(0, 9, manifest("empty", {A: [(8, 9)]}))
        self.express.position(A, 9)
        return [*first, *self.express.release()]


def planner(on_error: str = "stop") -> Planner:
    return Planner(mappers=PLANNER.mappers, sources=SOURCES, high_offsets={}, on_error=on_error)


ROWS = [b'{"id": "%d"}' % number for number in range(4)]


def test_its_units_are_the_transactions_in_order():
    batch = batch_of(
        ("a", {B: [(0, ROWS[0])], A: [(0, ROWS[1])]}), ("a", {A: [(1, ROWS[2])]}), ("b", {B: [(1, ROWS[3])]})
    )
    numbers = [unit.number for unit in batch.units]
    assert sorted(zip(numbers, [unit.transactional_id for unit in batch.units], strict=True)) == [*enumerate("aab")]
    assert numbers.index(0) < min(numbers.index(1), numbers.index(2)), "it stands before both"
    assert {*chain.from_iterable(unit.records for unit in batch.units)} == {*batch.units.records}
    assert batch.lowest == {A: 0, B: 0}
    plan = make_plan(planner(), batch.units, frozenset(), lowest=batch.lowest)
    assert plan.row_count == 4
    assert len(plan.rounds[0][0].last) == 4


@pytest.mark.parametrize(("first", "second"), [(A, B), (B, A)])
def test_a_row_that_moves_to_another_partition_is_the_later_transactions(first: TopicPartition, second: TopicPartition):
    batch = batch_of(("a", {first: [(0, ROWS[0])]}), ("a", {second: [(0, ROWS[0])]}))
    plan = make_plan(planner(), batch.units, frozenset())
    ((source, _, _, _),) = plan.rounds[-1][0].last.values()
    assert source == SOURCES[second.topic, second.partition]
    one_by_one = make_plan(planner(), [Unit(unit.records, *unit[1:]) for unit in batch.units], frozenset())
    assert plan.rounds == one_by_one.rounds


def test_a_bad_record_takes_its_own_transaction_along_and_no_other():
    transactions = (("a", {A: [(0, ROWS[0])], B: [(0, b"bad")]}), ("b", {A: [(1, ROWS[1])]}))
    plan = make_plan(planner("park"), batch_of(*transactions).units, frozenset())
    assert [(letter.transactional_id, letter.record.partition) for letter in plan.letters] == [("a", 0), ("a", 1)]
    assert plan.row_count == 1
    with pytest.raises(StopError, match="partition 1 offset 0"):
        make_plan(planner(), batch_of(*transactions).units, frozenset())


def test_what_compaction_has_left_nothing_of_is_no_unit():
    batch = Batch(LateReader(("a", {A: [(0, ROWS[0])], B: [(0, ROWS[1])]})), Limits())  # type: ignore[arg-type]
    first, empty = batch.pieces
    assert not empty.records
    assert not [*empty.units()]
    assert batch.lowest == batch.newest == {A: 0, B: 0}
    assert len(batch.units) == len([*first.units()]) == 1
    for on_error, holds in (("stop", frozenset[Hold]()), ("park", frozenset({("record", "t", "x")}))):
        assert make_plan(planner(on_error), batch.units, holds, lowest=batch.lowest).row_count == 2
    assert make_plan(planner(), Pieces([empty]), frozenset(), lowest={}).row_count == 0
