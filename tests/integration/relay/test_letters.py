"""Dead letters that are mended and replayed, while the world goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import relay.writer
from relay.config import RelaySettings
from relay.database import ensure_sources
from relay.plan import Unit
from relay.queries import query
from relay.status import Status
from relay.writer import Writer
from tests.integration.relay.conftest import TOPIC_IDS, record
from tests.support.relay import GUARD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from oncebox.reader import Record


class Desk:
    """A relay's writing end, without Kafka."""

    def __init__(self, dsn: str) -> None:
        self.other = psycopg.connect(dsn, autocommit=True)
        self.other.execute(f"CREATE TABLE orders (id bigint PRIMARY KEY, state text, {GUARD})")
        settings = RelaySettings.model_validate(
            {
                "name": "test",
                "mode": "partition",
                "kafka": {"bootstrap_servers": "localhost:9092"},
                "postgres": {"dsn": dsn},
                "tables": [{"topic": "orders", "table": "orders", "key": ["id"]}],
                "on_error": "park",
            }
        )
        self.writer = Writer(settings, "test", Status(name="test", instance="test"))
        sources = ensure_sources(self.writer.connection, TOPIC_IDS, [("orders", 0)])
        self.owned = set(sources.values())
        self.writer.begin(sources, {})

    def apply(self, *records: Record) -> None:
        self.writer.write(self.writer.prepare([Unit([each]) for each in records]), lambda _: None)

    def settle(self, check: Any = lambda _: None) -> None:
        self.writer.settle(self.owned, check)

    def fix(self, offset: int, value: bytes) -> None:
        self.other.execute(
            "UPDATE oncebox.dead_letter SET value = %s, state = 'queued' WHERE record_offset = %s", [value, offset]
        )

    def rows(self) -> list[tuple[Any, ...]]:
        return self.other.execute("SELECT id, state FROM public.orders ORDER BY id").fetchall()

    def states(self) -> list[tuple[Any, ...]]:
        return self.other.execute("SELECT record_offset, state FROM oncebox.dead_letter ORDER BY id").fetchall()


@pytest.fixture
def desk(database: str) -> Iterator[Desk]:
    made = Desk(database)
    yield made
    made.writer.close()
    made.other.close()


def test_a_mended_letter_neither_overwrites_nor_resurrects(desk: Desk) -> None:
    """What could not be read says of no row that it stands before it: only the guard knows, when it is replayed."""
    desk.apply(record(0, b"bad"), record(1, b"bad too"), record(2, b"bad as well"))
    desk.apply(record(3, b'{"id": 1, "state": "kept"}'), record(4, b'{"id": 2, "state": "a"}'))
    desk.apply(record(5, None, key=b"2"))
    for offset in range(3):
        desk.fix(offset, b'{"id": %d, "state": "old"}' % (offset + 1))
    desk.settle()
    assert desk.rows() == [(1, "kept"), (3, "old")]
    assert desk.states() == [(0, "replayed"), (1, "replayed"), (2, "replayed")]


def test_who_discards_or_mends_meanwhile_is_heard(desk: Desk) -> None:
    desk.apply(*(record(offset, b"bad") for offset in range(4)))
    for offset in range(4):
        desk.fix(offset, b'{"id": %d, "state": "first"}' % offset)

    turns = iter(range(4))

    def meanwhile(_: object) -> None:
        """While the first is applied."""
        if next(turns):
            return
        desk.other.execute("UPDATE oncebox.dead_letter SET state = 'discarded' WHERE record_offset = 1")
        desk.other.execute("UPDATE oncebox.dead_letter SET state = 'parked' WHERE record_offset = 2")
        desk.fix(3, b'{"id": 3, "state": "second"}')

    desk.settle(meanwhile)
    assert desk.states() == [(0, "replayed"), (1, "discarded"), (2, "parked"), (3, "replayed")]
    assert desk.rows() == [(0, "first"), (3, "second")]
    desk.fix(2, b"still bad")
    desk.settle()
    assert desk.states()[2] == (2, "parked")
    assert desk.rows() == [(0, "first"), (3, "second")]


def test_letters_are_read_only_when_some_have_changed(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.apply(record(0, b"bad", key=b"k"), record(1, b'{"id": 1, "state": "held"}', key=b"k"))
    asked: list[str] = []

    def asking(name: str) -> Any:
        asked.append(name)
        return query(name)

    monkeypatch.setattr(relay.writer, "query", asking)
    desk.settle()
    assert "take_letters" not in asked
    asked.clear()
    desk.settle()
    assert asked == ["sum_of_letters"]
    desk.other.execute("UPDATE oncebox.dead_letter SET state = 'discarded' WHERE record_offset = 0")
    desk.settle()
    assert desk.rows() == [(1, "held")]
    desk.settle()
    asked.clear()
    desk.settle()
    assert asked == ["sum_of_letters"]


@pytest.mark.parametrize("form", ["new", "old"])
def test_a_long_transaction_is_parked_and_replayed(desk: Desk, form: str) -> None:
    """Letters of older versions have the holds of all their unit each."""
    count = 3_000 if form == "new" else 100
    records = [record(at, b'{"id": %d, "state": "first"}' % at, key=b"%d" % at) for at in range(count)]
    records[7] = record(7, b"bad", key=b"7")
    desk.writer.write(desk.writer.prepare([Unit(records, "long", 1)]), lambda _: None)
    if form == "old":
        desk.other.execute(
            "UPDATE oncebox.dead_letter l SET holds = f.holds FROM oncebox.dead_letter f WHERE f.id = l.unit"
        )
    else:
        stored = (
            "SELECT sum(jsonb_array_length(holds)), sum(length(holds::text)) < 100 * count(*) FROM oncebox.dead_letter"
        )
        assert desk.other.execute(stored).fetchone() == (2 * count - 1, True)
    before = desk.writer.holds
    desk.writer.load_holds()
    assert desk.writer.holds == before
    assert len(before) == 2 * count - 1
    last = count - 1
    desk.apply(record(count, b'{"id": %d, "state": "second"}' % last, key=b"%d" % last))
    desk.settle()
    assert desk.rows() == []
    desk.other.execute("UPDATE oncebox.dead_letter SET state = 'queued' WHERE state = 'parked'")
    desk.fix(7, b'{"id": 7, "state": "mended"}')
    desk.settle()
    rows = dict(desk.rows())
    assert len(rows) == count
    assert (rows[0], rows[7], rows[last]) == ("first", "mended", "second")
    assert {state for _, state in desk.states()} == {"replayed"}
    assert not desk.writer.holds


def test_the_rest_of_a_unit_is_held_as_before_where_its_first_letter_is_settled(desk: Desk) -> None:
    """By somebody's own SQL: the program settles whole units."""
    unit = Unit([record(0, b"bad", key=b"0"), record(1, b'{"id": 1, "state": "a"}', key=b"1")], "id", 1)
    desk.writer.write(desk.writer.prepare([unit]), lambda _: None)
    before = desk.writer.holds
    desk.other.execute("UPDATE oncebox.dead_letter SET state = 'discarded' WHERE record_offset = 0")
    desk.writer.load_holds()
    assert desk.writer.holds == before
