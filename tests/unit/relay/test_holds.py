"""What is held behind parked records, and what is stored of it. The database is a stub; everything else is real."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from psycopg.pq import TransactionStatus

from oncebox.reader import Record
from oncebox.wire import TopicPartition
from relay.mapping import RowMapper
from relay.plan import Planner, StopError, Unit, make_plan
from relay.sink import Sink
from relay.status import Status
from relay.types import Column, TableName, Target
from relay.writer import Prepared, Writer
from tests.unit.relay.test_order import PLANNER

if TYPE_CHECKING:
    from collections.abc import Iterator


class StubConnection:
    """Takes everything, and has as many open letters as it is told."""

    class info:  # noqa: N801 - as the library calls it
        transaction_status = TransactionStatus.IDLE

    def __init__(self, open_count: int = 0) -> None:
        self.open_count = open_count
        self.inserted: list[dict[str, Any]] = []

    @contextmanager
    def transaction(self) -> Iterator[None]:
        yield

    def execute(self, _statement: object, values: dict[str, Any] | None = None) -> StubConnection:
        if values is not None and "holds" in values:
            self.inserted.append(values)
        return self

    def fetchone(self) -> tuple[int]:
        return (self.open_count,)


def sink(connection: StubConnection, letters_max: int = 10) -> Sink:
    made = Sink.__new__(Sink)
    given: Any = connection
    made._connection = given
    made._relay = "test"
    made._targets = []
    made._staged = set()
    made._letters_max = letters_max
    return made


class StubLarge:
    """Has one record of the one large transaction."""

    def pieces(self, _unit: Unit) -> Iterator[list[Record]]:
        yield [Record("t", 0, 5, 1, b"k", b"{}", [])]

    def drop(self, _units: object) -> None:
        """Nothing is there."""

    forget = drop


def test_a_large_transaction_that_is_left_out_leaves_the_holds_as_they_are():
    """It is parked, and only a part of it is read again."""
    connection: Any = StubConnection()
    writer = Writer.__new__(Writer)
    writer.connection = connection
    writer.sink = sink(connection)
    large: Any = StubLarge()
    writer.large = large
    writer._relay = {"relay": "test"}
    writer._status = Status(name="test", instance="test")
    writer.planner = Planner(mappers={}, sources={("t", 0): 1}, high_offsets={}, on_error="park")
    writer._again = {(1, 5): False}
    holds = writer.holds = frozenset({("record", "t", "aw==")})
    unit = Unit([], "id", 1, {TopicPartition("t", 0): 5})
    writer.write(Prepared([unit], None, holds), lambda _: None)
    assert writer.holds == holds


PARKING = Planner(mappers=PLANNER.mappers, sources={("t", 0): 1}, high_offsets={}, on_error="park")


def transaction(count: int, first: int = 0) -> Unit:
    """Its first record is bad."""
    offsets = range(first, first + count)
    values = [b"bad" if offset == first else b'{"id": "%d"}' % offset for offset in offsets]
    return Unit(
        [Record("t", 0, at, 1, b"%d" % at, value, []) for at, value in zip(offsets, values, strict=True)], "id", 1
    )


def test_the_holds_of_a_long_transaction_are_stored_once():
    first, second = transaction(500), transaction(300, first=500)
    plan = make_plan(PARKING, [first, second], frozenset())
    connection = StubConnection()
    sink(connection, letters_max=800).write_letters(PARKING, plan.letters)
    stored = [len(values["holds"].obj) for values in connection.inserted]
    assert len(stored) == 800
    # The record's key and the row; the bad one's row is not known.
    assert {at: count for at, count in enumerate(stored) if count} == {0: 999, 500: 599}
    assert len(plan.holds) == 999 + 599


def test_more_letters_than_there_is_room_for_are_not_even_begun():
    connection = StubConnection(open_count=4)
    made = sink(connection, letters_max=10)
    plan = make_plan(PARKING, [transaction(7)], frozenset())
    with pytest.raises(StopError, match=r"t partition 0 offset 0: .*7 dead letters, and 4 wait already"):
        made.write_letters(PARKING, plan.letters)
    assert not connection.inserted
    made.write_letters(PARKING, make_plan(PARKING, [transaction(6)], frozenset()).letters)
    assert len(connection.inserted) == 6


def test_what_is_skipped_needs_no_room():
    connection = StubConnection(open_count=10)
    skipped = [letter._replace(state="skipped") for letter in make_plan(PARKING, [transaction(3)], frozenset()).letters]
    sink(connection, letters_max=10).write_letters(PARKING, skipped)
    assert len(connection.inserted) == 3


@pytest.mark.parametrize(
    ("of_type", "one", "same", "another"),
    [
        ("numeric", "1.50", "1.5", "1.51"),
        ("numeric", "100", "1e2", "10"),
        ("numeric", "-0.0", "0", "1"),
        ("numeric", "1" + "0" * 40 + "1", "1" + "0" * 40 + "1.0", "1" + "0" * 40 + "2"),
        ("timestamp with time zone", '"2026-01-02T00:00:00Z"', '"2026-01-02T01:00:00+01:00"', '"2026-01-02T01:00:00Z"'),
        ("timestamp without time zone", '"2026-01-02T00:00:00"', '"2026-01-02T00:00:00Z"', '"2026-01-03T00:00:00"'),
        ("character(3)", '"a"', '"a "', '" a"'),
    ],
)
def test_a_row_is_held_however_its_key_is_written(of_type: str, one: str, same: str, another: str) -> None:
    target = Target(
        topic="t",
        table=TableName(schema="public", name="rows"),
        format="json",
        insert_mode="upsert",
        columns=(Column(name="id", type=of_type, path=("id",)),),
        key=("id",),
    )
    planner = Planner(mappers={"t": [(0, RowMapper(target))]}, sources={("t", 0): 1}, high_offsets={}, on_error="park")

    def unit(offset: int, key: str) -> Unit:
        return Unit([Record("t", 0, offset, 0, None, f'{{"id": {key}}}'.encode(), ())])

    parked = make_plan(planner, [unit(0, one)], frozenset(), refused=["a constraint"])
    later = make_plan(planner, [unit(1, same), unit(2, another)], parked.holds)
    assert [(letter.record.offset, letter.state) for letter in later.letters] == [(1, "held")]
