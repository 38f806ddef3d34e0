"""Transaction mode waits for what stands before its rows, and for what they refer to: no longer and with no more memory
than it has to. The reader and the writer are stubs; everything between them is real.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from oncebox.reader import PartitionPosition, Position, Record
from oncebox.reader.gathering import Gathering
from oncebox.wire import TopicPartition
from relay.batch import Batch
from relay.config import Limits, RelaySettings
from relay.kafka import Topics
from relay.mapping import RowMapper
from relay.plan import Planner
from relay.splitting import MissingReferenceError
from relay.status import Status
from relay.transaction_mode import TransactionSession
from relay.types import Column, RelayError, TableName, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

P = TopicPartition("t", 0)
TARGET = Target(
    topic="t",
    table=TableName(schema="public", name="t"),
    format="json",
    insert_mode="upsert",
    columns=(Column(name="id", type="bigint", path=("id",)),),
    key=("id",),
)


class StubReader:
    """Hands out single records, one for each take(); number n is known from the start if n < known."""

    def __init__(self, *, known: int, whole_after: int = 0, told_after: int = 0) -> None:
        """`told_after`: the feed is read up to its ends when so many were taken."""
        self.known = known
        self.told_after = told_after
        self.ends_asked = 0
        self.taken = 0
        # How many were taken each time that it was asked whether the late one is whole.
        self.asked: list[int] = []
        self.whole_after = whole_after
        # The record at offset 0 is not handed out before so many others are.
        self.late_until = 0

    def take(self, *, records_max: int, bytes_max: int) -> list[Gathering]:
        del records_max, bytes_max
        self.taken += 1
        offset = 0 if self.late_until and self.taken == self.late_until else self.taken
        item = Gathering(self.taken)
        item.add(P, [self._record(offset)])
        return [item]

    def _record(self, offset: int) -> Record:
        row = 0 if offset <= 1 else offset
        return Record("t", 0, offset, 1000 + offset, None, b'{"id": %d}' % row, ())

    async def wait(self, timeout_s: float) -> bool:
        del timeout_s
        await asyncio.sleep(0)
        return True

    async def wait_until_whole(self, where: TopicPartition, offset: int, timeout_s: float) -> bool:
        del timeout_s
        assert (where, offset) == (P, 0)
        await asyncio.sleep(0)
        self.asked.append(self.taken)
        return len(self.asked) > self.whole_after

    def is_late(self) -> bool:
        return self.taken < self.late_until

    def waiting(self, where: TopicPartition, below: int) -> Iterator[Record]:
        del below
        if where == P and self.is_late():
            yield self._record(0)

    def unload(self) -> None:
        """Nothing is too large."""

    def first_unloaded(self, where: TopicPartition, below: int) -> None:
        """Nothing was."""

    def position(self) -> Position:
        after = self.taken + 1
        at = (
            PartitionPosition(next_offset=0, done=((1, after),))
            if self.is_late()
            else PartitionPosition(next_offset=after)
        )
        return Position(feed={}, partitions={P: at})

    async def feed_ends(self) -> dict[int, int] | None:
        """Nobody answers at first."""
        self.ends_asked += 1
        return {0: 7} if self.ends_asked > 1 else None

    def has_read_feed(self, ends: dict[int, int]) -> bool:
        assert ends == {0: 7}
        return self.taken >= self.told_after

    def mark(self) -> int:
        assert self.taken >= self.told_after
        return self.known

    def is_pending(self, mark: int) -> bool:
        return self.taken < mark


class StubSink:
    waits_from: int | None = None


class Units(NamedTuple):
    units: Sequence[Any]


class StubWriter:
    """Refuses the first record's row while it may wait; and of others what refers to a unit that is not there."""

    def __init__(self) -> None:
        self.sink = StubSink()
        self.planner = Planner(mappers={"t": [(0, RowMapper(TARGET))]}, sources={}, high_offsets={}, on_error="park")
        self.attempts: list[int] = []
        self.refuses = True
        self.has_references = False
        # By unit, from 1.
        self.refers_to: dict[int, int] = {}
        self.judged: list[int] = []

    takes_pieces = True

    def prepare(self, units: Sequence[Any], lowest: dict[Any, int], *, has_large: bool) -> Units:
        assert not has_large
        assert lowest[P] == min(unit.records[0].offset for unit in units)
        return Units(units)

    def write(self, prepared: Units, save: Callable[[Any], None]) -> None:
        del save
        count = len(prepared.units)
        self.attempts.append(count)
        lacking = [1] if self.refuses else []
        lacking += [unit for unit, other in self.refers_to.items() if unit <= count < other]
        waits_from = self.sink.waits_from
        if waits_from is not None and lacking and lacking[-1] > waits_from:
            raise MissingReferenceError(f"t partition 0 offset {lacking[-1]}", count)
        self.judged = lacking


class StubAdmin:
    """Knows the topics by the ids that it is told, one after the other."""

    def __init__(self, *topic_ids: str) -> None:
        self.topic_ids = [*topic_ids]

    def topics(self, names: Sequence[str]) -> Topics:
        topic_id = self.topic_ids.pop(0) if len(self.topic_ids) > 1 else self.topic_ids[0]
        return Topics(ids=dict.fromkeys(names, topic_id), partitions=[("t", 0)])

    def ask_topics(self, names: Sequence[str]) -> Callable[[], Topics]:
        found = self.topics(names)
        return lambda: found


def session() -> tuple[TransactionSession, StubWriter]:
    settings = RelaySettings.model_validate(
        {
            "name": "test",
            "kafka": {"bootstrap_servers": "localhost:9092"},
            "postgres": {"dsn": "postgresql://localhost/x"},
            "tables": [{"topic": "t", "key": ["id"]}],
        }
    )
    made = TransactionSession(settings, "test", Status(name="test", instance="test"), asyncio.Event())
    writer: Any = StubWriter()
    made._writer = writer
    admin: Any = StubAdmin("id")
    made._admin = admin
    made._topic_ids = {"t": "id"}
    made._sources = {("t", 0): 1}
    return made, writer


def batch_of(reader: StubReader, buffer_bytes: int = 1 << 20) -> Batch:
    given: Any = reader
    return Batch(given, Limits(buffer_bytes=buffer_bytes))


async def test_a_reference_is_waited_for_in_what_was_known() -> None:
    """The feed never ends: more is always pending."""
    made, writer = session()
    reader = StubReader(known=100)
    batch = batch_of(reader)
    assert await made._write_with_references(batch, *made._prepare(batch))
    assert writer.attempts[-1] == 100, "all that was known, and nothing else"
    assert len(writer.attempts) < 10, "not one attempt for each that came"
    assert batch.newest == {("t", 0): 1100}
    assert writer.sink.waits_from is None


async def test_each_reference_is_waited_for_in_what_was_known_when_it_was_met() -> None:
    """What has come while the first one waited has not waited itself."""
    made, writer = session()
    writer.refers_to = {60: 70}

    class MoreComes(StubReader):
        def mark(self) -> int:
            return max(60, self.taken + 20)

    batch = batch_of(MoreComes(known=60))
    assert await made._write_with_references(batch, *made._prepare(batch))
    assert writer.judged == [1]
    assert len(writer.attempts) < 12


async def test_references_that_are_missing_all_the_time_keep_nothing_from_being_written() -> None:
    """With each wait others are met that have not waited themselves."""
    made, writer = session()
    writer.refers_to = dict.fromkeys(range(1, 10000), 1000000)

    class MoreComes(StubReader):
        def mark(self) -> int:
            return self.taken + 2

    batch = batch_of(MoreComes(known=0))
    async with asyncio.timeout(30):
        assert await made._write_with_references(batch, *made._prepare(batch))
    assert len(writer.judged) - 1 == writer.attempts[-1] < 100


async def test_a_reference_is_judged_only_after_the_feeds_ends() -> None:
    """What it refers to may be told of in a partition of the feed that has not been read so far."""
    made, writer = session()
    reader = StubReader(known=0, told_after=50)
    batch = batch_of(reader)
    assert await made._write_with_references(batch, *made._prepare(batch))
    assert writer.attempts[-1] >= 50
    assert reader.ends_asked == 2, "until they are known"


async def test_a_reference_may_be_waited_for_where_no_commit_is_known_to_be_pending() -> None:
    made, writer = session()
    reader: Any = StubReader(known=0)
    reader.pending_count = 0
    careful: list[Batch] = []

    async def write_with_references(batch: Batch, *_: object) -> bool:
        careful.append(batch)
        return False

    stubs: Any = made
    stubs._look = lambda: False
    stubs._write_position = lambda _: None
    stubs._write_with_references = write_with_references
    writer.has_references = True
    async with asyncio.timeout(60):
        await made._work(reader)
    assert len(careful) == 1
    assert not writer.attempts


async def test_the_feeds_ends_are_asked_for_only_where_a_reference_is_missing() -> None:
    made, writer = session()
    writer.refuses = False
    reader = StubReader(known=0)
    batch = batch_of(reader)
    assert await made._write_with_references(batch, *made._prepare(batch))
    assert writer.attempts == [1]
    assert not reader.ends_asked


async def test_a_reference_is_not_waited_for_beyond_the_memory_there_is() -> None:
    made, writer = session()
    reader = StubReader(known=1_000_000)
    batch = batch_of(reader, buffer_bytes=1000)
    assert await made._write_with_references(batch, *made._prepare(batch))
    assert writer.attempts[-1] < 200


async def test_nothing_is_written_when_it_is_told_to_stop() -> None:
    made, writer = session()
    reader = StubReader(known=1_000_000)
    batch = batch_of(reader)
    prepared = made._prepare(batch)
    asyncio.get_running_loop().call_later(0.05, made._stop.set)
    assert not await made._write_with_references(batch, *prepared)
    assert all(size < reader.taken + 1 for size in writer.attempts)


async def test_an_earlier_record_of_a_row_is_taken_along() -> None:
    made, _ = session()
    reader = StubReader(known=0)
    reader.late_until = 40
    batch = batch_of(reader)
    await made._take_those_before(batch)
    assert [unit.records[0].offset for unit in batch.units] == [*range(1, 40), 0]
    assert not reader.asked


async def test_it_stops_taking_rather_than_overtake() -> None:
    """Without room for more, and while it is not certain that the earlier record is to come."""
    made, _ = session()
    reader = StubReader(known=0, whole_after=500)
    reader.late_until = 40
    batch = batch_of(reader, buffer_bytes=100)
    await made._take_those_before(batch)
    assert len(set(reader.asked[:500])) == 1, "nothing was taken meanwhile"
    assert reader.asked[0] < 20
    assert [unit.records[0].offset for unit in batch.units] == [*range(1, 40), 0]


async def test_what_was_read_before_a_topic_was_found_to_be_another_is_not_written() -> None:
    """Also where only more that was waited for has come from it."""
    made, writer = session()
    admin: Any = StubAdmin("id", "another")
    made._admin = admin
    batch = batch_of(StubReader(known=100))
    with pytest.raises(RelayError, match="'t' was deleted and made again"):
        await made._write_with_references(batch, *made._prepare(batch))
    assert len(writer.attempts) == 1
