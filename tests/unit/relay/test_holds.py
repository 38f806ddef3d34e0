"""What is held behind parked records, and what is stored of it. The database is a stub; everything else is real."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from psycopg.pq import TransactionStatus

from oncebox.reader import Record
from oncebox.wire import TopicPartition
from relay.plan import Planner, Unit
from relay.sink import Sink
from relay.status import Status
from relay.writer import Prepared, Writer

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
