"""One suspect per row, what its record makes of it, and when it is right after all."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from spark_jobs import settle
from spark_jobs.alarm import is_right_now
from spark_jobs.collect import shares
from spark_jobs.compare import compared_sources, unguarded_obstacle
from spark_jobs.cut import cut_source
from spark_jobs.database import RowState
from spark_jobs.findings import Kind, Suspect
from spark_jobs.older import since_touched
from spark_jobs.settle import behind_row, one_each
from spark_jobs.transforms import difference
from spark_jobs.whole import Transactions
from tests.unit.spark_jobs.test_cut import cut, facts, position
from tests.unit.spark_jobs.test_values import record, table


def suspect(opinion: str, **more: Any) -> Suspect:
    given: dict[str, Any] = {"key_text": "3;", "expected": None, "found": None, "copies": 0, "opinion": opinion}
    return Suspect(**(given | more))


MISSING = suspect(difference.MISSING, expected=(1, 5), expected_digest=50)


def test_a_row_outside_of_the_cut_is_not_missing_besides():
    """Half a transaction over an existing key: one row, which is not the one expected."""
    extra = suspect(difference.EXTRA, found=(1, 20), copies=1, digest=7)
    other = suspect(difference.MISSING, key_text="4;", expected=(1, 6))
    states = {"3;": RowState(copies=1, digest=7, place=(1, 20))}
    ahead, alone = one_each([MISSING, extra, other], states, lambda _: False)
    assert alone == other
    assert (ahead.opinion, ahead.expected, ahead.found) == (difference.AHEAD, (1, 5), (1, 20))
    assert (ahead.copies, ahead.digest, ahead.expected_digest) == (1, 7, 50)


def test_an_old_row_is_older_and_told_once():
    states = {"3;": RowState(copies=1, digest=7, place=(1, 2))}
    (older,) = one_each([MISSING], states, lambda _: False)
    assert (older.opinion, older.found) == (difference.OLDER, (1, 2))
    touched = suspect(difference.OLDER, expected=(1, 5), found=(1, 2), copies=1)
    assert one_each([MISSING, touched], states, lambda _: False) == [touched]


def test_a_row_that_nobody_can_check_is_not_missing():
    states = {"3;": RowState(copies=1, digest=7, place=(9, 2))}
    assert one_each([MISSING], states, lambda place: place == (9, 2)) == []


@pytest.mark.parametrize(
    ("expected", "committed", "written", "kind"),
    [
        (None, {(1, 20)}, set(), Kind.ROW_EXTRA),
        (None, set(), {(1, 20)}, Kind.ABORTED_DATA),
        ((1, 5), set(), {(1, 20)}, Kind.ABORTED_DATA),
        ((1, 5), {(1, 20)}, set(), Kind.ROW_DIFFERS),
        ((1, 5), set(), set(), Kind.ROW_DIFFERS),
    ],
)
def test_what_the_record_behind_a_row_says(expected, committed, written, kind):
    opinion = difference.EXTRA if expected is None else difference.AHEAD
    each = suspect(opinion, expected=expected, found=(1, 20), copies=1)
    assert behind_row(each, dict.fromkeys(committed), dict.fromkeys(written)).kind is kind


def test_tables_without_a_guard_are_compared_whole_or_not_at_all():
    later = cut_source(position(), facts(), verified=80)
    assert compared_sources(table(), cut(later)) == (later,)
    bare = table(guard=False)
    (source,) = compared_sources(bare, cut(later))
    assert source.ranges == ((0, 100),)
    assert unguarded_obstacle(bare, [source]) is None
    for each in (
        cut_source(position(), facts(log_start=40), verified=0),
        cut_source(position(), facts(topic_id="cd"), verified=0),
        cut_source(position(), facts(stable=90), verified=0),
        cut_source(position(next=50, high=100), facts(), verified=0),
    ):
        assert "t:0" in (unguarded_obstacle(bare, [each]) or "")
        assert unguarded_obstacle(table(), [each]) is None


def test_touched_rows_are_compared_without_what_is_not_applied():
    source = cut_source(position(beyond=((120, 130),), high=130), facts(), verified=80)
    assert since_touched(source, {1: 30}).ranges == ((30, 100), (120, 130))
    # Another partition may hold a newer record of the key: all of it counts.
    assert since_touched(source, {2: 30}).ranges == ((0, 100), (120, 130))


@pytest.mark.parametrize("found", [(1, None), (None, 5), (None, None)])
def test_a_row_that_names_half_of_a_record_or_none(found: tuple[int | None, int | None]):
    """Somebody has written NULL into the guard's columns."""
    asked: list[Any] = []

    def names(places: Any) -> dict[Any, Any]:
        asked.extend(places)
        return {}

    run = SimpleNamespace(cut=cut(cut_source(position(), facts(), verified=0)))
    feed: Any = SimpleNamespace(_run=run, names=names)
    each = behind_row(suspect(difference.AHEAD, expected=(1, 5), found=found, copies=1), {}, {})
    assert Transactions.attribute(feed, [each]) == [each]
    assert (each.kind, each.detail, asked) == (Kind.ROW_DIFFERS, "the row names no record", [(1, 5)])


BEFORE = {1: position()}
NOW = {1: position(next=150, high=150)}


@pytest.mark.parametrize(
    ("each", "state", "is_right"),
    [
        (MISSING, RowState(), False),
        (MISSING, RowState(copies=1, digest=50, place=(1, 5)), True),
        (MISSING, RowState(copies=2, digest=100, place=(1, 5)), False),
        (MISSING, RowState(copies=1, digest=8, place=(1, 120)), True),  # written by the relay since
        (MISSING, RowState(copies=1, digest=8, place=(1, 70)), False),
        (MISSING, RowState(copies=1, digest=8, place=(1, 170)), False),
        (MISSING, RowState(copies=1, digest=8), False),
        (suspect(difference.EXTRA, found=(1, 9), copies=1, digest=4), RowState(), True),
        (suspect(difference.EXTRA, found=(1, 9), copies=1, digest=4), RowState(copies=1, digest=4), False),
        (suspect(difference.OLDER, expected=(1, 5), is_delete=True, copies=1, digest=4), RowState(), True),
        (suspect(difference.OLDER, expected=(1, 5), copies=1, digest=4), RowState(), False),
    ],
)
def test_what_is_right_at_a_second_look(each, state, is_right):
    assert is_right_now(each, state, BEFORE, NOW) is is_right


@pytest.mark.parametrize(
    ("counts", "room", "expected"),
    [
        ({}, 10, {}),
        ({"a": 3}, 10, {"a": 3}),
        ({"a": 30_000, "b": 2}, 10, {"b": 2, "a": 8}),
        ({"a": 30, "b": 30, "c": 30}, 10, {"a": 3, "b": 3, "c": 4}),
        ({"a": 5, "b": 5}, 1, {"a": 1, "b": 1}),
    ],
)
def test_of_each_opinion_some_are_looked_at(counts, room, expected):
    assert shares(counts, room) == expected


@pytest.mark.parametrize("verified", [0, 90])
def test_a_row_whose_record_was_compacted_is_superseded_below_the_mark_too(
    verified: int, monkeypatch: pytest.MonkeyPatch
):
    source = cut_source(position(), facts(), verified=verified)
    given = cut(source, compacted=frozenset({"t"}))
    settler = settle.Settler(None, None, SimpleNamespace(calculated=None), given)  # type: ignore[arg-type]
    monkeypatch.setattr(settler, "records", lambda *_, **__: {})
    monkeypatch.setattr(settler, "_keys_past_the_cut", lambda *_: {"3;"})
    each = suspect(difference.EXTRA, found=(1, 10), copies=1)
    (settled,) = settler.settle(table(), [each])
    assert (settled.kind, settled.detail) == (None, settle.SUPERSEDED)
    # Past the cut nothing is gone: what is not there now is no record of the relay's.
    (settled,) = settler.settle(table(), [replace(each, found=(1, 110))])
    assert settled.kind is Kind.ROW_EXTRA


def test_nothing_is_missing_while_the_relay_is_rewound(monkeypatch: pytest.MonkeyPatch):
    for high, kind in ((100, Kind.ROW_MISSING), (150, None)):
        given = cut(cut_source(position(high=high), facts(), verified=0))
        settler = settle.Settler(None, None, SimpleNamespace(calculated=None), given)  # type: ignore[arg-type]
        monkeypatch.setattr(settler, "records", lambda *_, **__: {})
        assert [each.kind for each in settler.settle(table(), [MISSING])] == [kind]


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize(("start", "kind"), [(0, Kind.ROW_EXTRA), (40, None)])
def test_rows_that_were_there_before_the_relay_are_not_extra(
    start: int, kind: Kind | None, monkeypatch: pytest.MonkeyPatch, *, guard: bool
):
    """A relay may begin where its table holds what came before; those rows name no record."""
    given = cut(cut_source(position(start=start), facts(), verified=0))
    settler = settle.Settler(None, None, SimpleNamespace(calculated=None), given)  # type: ignore[arg-type]
    monkeypatch.setattr(settler, "records", lambda *_, **__: {})
    monkeypatch.setattr(settler, "_keys_past_the_cut", lambda *_: set())
    old = suspect(difference.EXTRA, found=(None, None), copies=1)
    (settled,) = settler.settle(table(guard=guard), [old])
    assert (settled.kind, settled.detail == settle.BEFORE) == (kind, kind is None)
    # One that a record has deleted since should be gone, and one that names half of a record is nobody's.
    deleted = replace(old, expected=(1, 50), is_delete=True)
    assert [each.kind for each in settler.settle(table(guard=guard), [deleted])] == [Kind.ROW_EXTRA]
    if guard:
        half = replace(old, found=(1, None))
        assert [each.kind for each in settler.settle(table(), [half])] == [Kind.ROW_EXTRA]


@pytest.mark.parametrize(("right", "asked"), [(set(), 4), ({3}, 10)])
def test_where_one_is_right_after_all_the_others_are_asked_for_too(right, asked, monkeypatch: pytest.MonkeyPatch):
    """`right`: offsets of rows that PostgreSQL makes as they stand there, though Spark does not."""
    put: list[int] = []

    def digests(_: Any, __: Any, records: Any) -> list[int]:
        put.extend(record.offset for _, record in records)
        return [7 if record.offset in right else 8 for _, record in records]

    monkeypatch.setattr(settle, "ASKED_MAX", 4)
    monkeypatch.setattr(settle, "record_digests", digests)
    settler = settle.Settler(None, None, SimpleNamespace(calculated=None), cut())  # type: ignore[arg-type]
    monkeypatch.setattr(
        settler, "records", lambda places, **_: {each: replace(record(b"{}"), offset=each[1]) for each in places}
    )
    suspects = [
        suspect(difference.DIFFERS, key_text=f"{at};", expected=(1, at), found=(1, at), digest=7, expected_digest=9)
        for at in range(10)
    ]
    settled = settler.settle(table(), suspects)
    assert sorted(put) == list(range(asked))
    assert {each.suspect.expected[1] for each in settled if each.kind is None and each.suspect.expected} == right
