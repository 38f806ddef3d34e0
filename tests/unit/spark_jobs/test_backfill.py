"""What is left to stage, which tables are refused, which dead letters matter, and what is staged of a record."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from spark_jobs.backfill import letters_in, obstacles
from spark_jobs.cut import Cut, DeadLetter, PartitionFacts, Position, beyond, cut_source
from spark_jobs.records import row_texts
from spark_jobs.targets import by_table, read_target
from tests.unit.spark_jobs.test_values import column, target


@pytest.mark.parametrize(
    ("ranges", "known", "left"),
    [
        ([(0, 10)], [], ((0, 10),)),
        ([(0, 10)], [(0, 10)], ()),
        ([(0, 10), (12, 15)], [(0, 4), (6, 8)], ((4, 6), (8, 10), (12, 15))),
        ([(0, 4), (4, 10)], [(2, 6)], ((0, 2), (6, 10))),
        ([(0, 10)], [(0, 11)], None),
        ([(0, 10), (12, 15)], [(9, 13)], None),
    ],
)
def test_what_is_not_staged_yet(ranges: Any, known: Any, left: Any):
    assert beyond(ranges, known) == left


def source(*, start: int = 0, at: int = 10, high: int = 10, facts: PartitionFacts | None = None) -> Any:
    position = Position(
        source=1, topic="t", topic_id="a", partition=0, start=start, next=at, beyond=(), high=max(high, at)
    )
    return cut_source(position, facts, verified=0)


def facts(*, log_start: int = 0, stable: int = 10, topic_id: str = "a") -> PartitionFacts:
    return PartitionFacts(topic_id=topic_id, log_start=log_start, stable=stable, high=stable)


@pytest.mark.parametrize(
    ("of", "guard", "compacted", "reason"),
    [
        (source(facts=facts()), True, set(), None),
        (source(start=3, facts=facts(log_start=3)), True, {"t"}, None),
        (source(), True, set(), "the topic was deleted"),
        (source(facts=facts(topic_id="b")), True, set(), "the topic was deleted"),
        (source(facts=facts(log_start=4)), True, set(), "retention has removed the offsets 0 to 3"),
        (source(high=12, facts=facts(stable=12)), True, set(), "was rewound and is not back at 12"),
        (source(facts=facts(stable=9)), True, set(), "the relay is at 10, readers may read to 9 only"),
        (source(start=3, facts=facts()), False, set(), "the relay began at 3, and without the guard"),
        (source(facts=facts()), False, {"t"}, "the topic is compacted, and without the guard"),
    ],
)
def test_what_keeps_a_table_from_being_rebuilt(of: Any, guard: bool, compacted: set[str], reason: str | None):
    (table,) = by_table([target(column("id", "bigint"), guard=guard)])
    found = obstacles(table, [of], frozenset(compacted))
    assert len(found) == (0 if reason is None else 1)
    assert reason is None or reason in found[0]


def test_topics_that_do_not_agree_or_are_not_read_yet():
    times = [column("at", "timestamp with time zone", unit=unit) for unit in ("s", "ms")]
    mapping = {"format": "json", "insert_mode": "insert", "guard": True, "delete_on_tombstone": True, "key": []}
    targets = [
        read_target(topic, "public", "t", mapping | {"columns": [at]})
        for topic, at in zip(("t", "u"), times, strict=True)
    ]
    (table,) = by_table(targets)
    found = obstacles(table, [source(facts=facts())], frozenset())
    assert found == ["the relay has no position in the topic u yet", "its topics give times in different units"]


def test_letters_matter_where_something_is_staged():
    letters = tuple(DeadLetter(source=1, offset=offset, state="parked", error="") for offset in (2, 7))
    given: dict[str, Any] = dict.fromkeys(Cut.__dataclass_fields__)
    cut = Cut(**(given | {"dead_letters": letters, "replayed": {(1, 3): "mended", (2, 3): "elsewhere"}}))
    assert letters_in(cut, {1: ((0, 5),)}) == (frozenset({(1, 2)}), {(1, 3): "mended"})


def test_texts_as_postgresql_reads_them():
    of = target(
        column("id", "bigint"),
        column("document", "jsonb"),
        column("is_it", "boolean"),
        column("raw", "bytea"),
        column("words", "text[]"),
        column("at", "date", unit="days"),
    )
    value = (
        b'{"id": 7, "document": {"x": 1.10}, "is_it": true, "raw": "AP8=", "at": 1, '
        b'"words": ["a,b", "\\"", null, "\\\\"]}'
    )
    made = row_texts({"t": of}, "t", 0, 1, 2, None, bytearray(value))
    assert made is not None
    assert dict(zip(of.columns_named, made, strict=True)) == {
        "id": "7",
        "document": '{"x": 1.10}',
        "is_it": "true",
        "raw": "\\x00ff",
        "words": '{"a,b","\\"",NULL,"\\\\"}',
        "at": "1",
    }
    for nothing in (None, bytearray(b"not JSON")):
        assert row_texts({"t": of}, "t", 0, 1, 2, bytearray(b"7"), nothing) is None


def test_workers_make_rows_without_a_database_driver():
    program = "import sys; sys.modules['psycopg'] = None; import spark_jobs.records, spark_jobs.targets"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
