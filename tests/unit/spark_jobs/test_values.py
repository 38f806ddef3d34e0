"""A record's row by its columns' origins, and what a repair makes of a suspect."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import msgspec
import psycopg
import pytest

from spark_jobs.database import record_digests
from spark_jobs.findings import Kind, Settled, Suspect
from spark_jobs.jobs.repair import action_for
from spark_jobs.jsonb import jsonb_at
from spark_jobs.records import Record, from_json, row_values, to_json, value_text
from spark_jobs.targets import Table, Target, by_table, read_target
from spark_jobs.transforms import difference
from spark_jobs.values import value_sql


def column(name: str, kind: str, origin: str = "value", path: tuple[str, ...] = (), unit: str | None = None) -> Any:
    return {"name": name, "type": kind, "path": list(path or ((name,) if origin == "value" else ())), "from": origin,
            "unit": unit}  # fmt: skip


def target(*columns: Any, key: tuple[str, ...] = ("id",), **more: Any) -> Target:
    mapping = {"format": "json", "insert_mode": "upsert", "guard": True, "delete_on_tombstone": True}
    return read_target("t", "public", "t", mapping | {"key": list(key), "columns": list(columns)} | more)


def record(value: bytes | None, key: bytes | None = b"k") -> Record:
    return Record(topic="t", partition=3, offset=41, timestamp_ms=1_767_315_845_678, key=key, value=value)


def made(of: Target, each: Record) -> dict[str, Any]:
    values = row_values(of, each)
    assert values is not None
    return dict(zip(of.columns_named, values, strict=True))


def test_each_column_comes_from_where_the_mapping_says():
    of = target(
        column("id", "bigint", "key", ("id",)),
        column("whole", "text", "key"),
        column("topic", "text", "topic"),
        column("part", "integer", "partition"),
        column("off", "bigint", "offset"),
        column("at", "timestamp with time zone", "timestamp", unit="ms"),
        column("ms", "bigint", "timestamp"),
        column("day", "date", "timestamp", unit="ms"),
        column("v", "numeric", "value", ("a", "b")),
    )
    found = made(of, record(b'{"a": {"b": 1.10}, "id": 9, "topic": "no", "at": "no"}', key=b'{"payload": {"id": 7}}'))
    assert found == {
        "id": "7", "whole": '{"payload": {"id": 7}}', "topic": "t", "part": "3", "off": "41",
        "at": "2026-01-02T01:04:05.678000+00:00", "ms": "1767315845678", "day": "1767315845678", "v": "1.10",
    }  # fmt: skip
    # A time is not taken for a number of the unit, a date is.
    by_name = {each.name: each for each in of.columns}
    assert "INTERVAL" not in value_sql(by_name["at"], found["at"]).as_string(None)
    assert "INTERVAL" in value_sql(by_name["day"], found["day"]).as_string(None)


def test_a_bare_key_is_the_value_itself():
    of = target(column("id", "bigint", "key"), column("raw", "bytea", "key"))
    assert made(of, record(b"{}", key=b"12")) == {"id": "12", "raw": "MTI="}
    assert made(of, record(b"{}", key=None)) == {"id": None, "raw": None}


def test_a_key_that_is_the_document_null():
    """In a value null is no document; a key the relay takes as it is."""
    of = target(column("id", "bigint"), column("text", "json", "key"), column("binary", "jsonb", "key"))
    for key in (b"null", b' {"a": null}'):
        found = made(of, record(b'{"id": 1}', key=key))
        assert [value_text(each, found[each.name]) for each in of.columns] == [key.decode(), "1", key.decode()]
    assert made(of, record(b'{"id": 1}', key=None)) == {"id": "1", "text": None, "binary": None}


@pytest.mark.parametrize(
    ("text", "rounded"),
    [
        ("2026-01-02T03:04:05.678901Z", "2026-01-02T03:04:05.678901Z"),
        ("2026-01-02T03:04:05.6789005Z", "2026-01-02T03:04:05.678901Z"),
        ("2026-01-02T03:04:05.678900499+02:00", "2026-01-02T03:04:05.678900+02:00"),
        ("2026-01-02T03:04:59.9999999", "2026-01-02T03:04:60.000000"),
        ("2026-01-02", "2026-01-02"),
        ("infinity", "infinity"),
    ],
)
def test_a_time_is_rounded_as_the_relay_rounds(text, rounded):
    of = target(column("at", "timestamp with time zone"), column("all", "timestamp with time zone[]"))
    each, at = of.columns  # by name
    assert value_text(at, text) == rounded
    assert value_text(each, [text]) == f'{{"{text}"}}', "of an array PostgreSQL reads the elements by itself"
    if rounded != text:
        rounded_time = datetime.fromisoformat(rounded.replace(":60.", ":59.")) + timedelta(seconds=":60." in rounded)
        assert msgspec.convert(text, datetime) == rounded_time


def test_numbers_keep_their_text():
    of = target(column("id", "numeric"), column("b", "jsonb"))
    found = made(of, record(b'{"id": 1.10, "b": {"x": 100000000000000000000.5}}'))
    assert found == {"id": "1.10", "b": '{"x": 100000000000000000000.5}'}


def test_a_zero_is_not_written_with_all_the_places_that_its_exponent_names():
    assert jsonb_at('{"b": 0e-9999999999}', ["b"]) == '"0e-9999999999"', "PostgreSQL refuses it"
    assert jsonb_at('{"b": -0.00}', ["b"]) == "0.00"


def test_a_document_that_is_deep():
    """What the relay and PostgreSQL take, our own code takes, too; and what they do not take ends no run."""
    of = target(column("id", "numeric"), column("b", "jsonb"))
    deep = "[" * 990 + "]" * 990
    assert msgspec.json.decode(f'{{"b": {deep}}}')["b"]
    assert jsonb_at(f'{{"b": {deep}}}', ["b"]) == deep
    assert jsonb_at("[" * 3_000 + "]" * 3_000, []) is None
    found = made(of, record(f'{{"id": 1, "b": {deep}}}'.encode()))
    assert [value_text(each, found[each.name]) for each in of.columns] == [deep, "1"]
    deeper = "[" * 100_000 + "]" * 100_000
    with pytest.raises(ValueError, match="deep"):
        row_values(of, record(f'{{"id": 1, "b": {deeper}}}'.encode()))


DEBEZIUM = target(column("id", "bigint"), format="debezium")


def test_what_deletes_a_row():
    assert row_values(target(column("id", "bigint")), record(None)) is None
    assert row_values(DEBEZIUM, record(None)) is None
    assert row_values(DEBEZIUM, record(b'{"op": "d", "before": {"id": 1}, "after": null}')) is None
    assert row_values(DEBEZIUM, record(b'{"payload": {"op": "d", "before": {"id": 1}}}')) is None
    assert row_values(DEBEZIUM, record(b'{"payload": {"op": "u", "after": {"id": 1}}}')) == ["1"]


@pytest.mark.parametrize(
    ("of", "value"),
    [
        (DEBEZIUM, b'{"op": "m"}'),
        (DEBEZIUM, b"[]"),
        (DEBEZIUM, b'{"payload": "c"}'),
        (target(column("id", "bigint"), delete_on_tombstone=False), None),
        (target(column("id", "bigint")), b"not JSON"),
    ],
)
def test_what_says_nothing_about_a_row(of, value):
    with pytest.raises(ValueError, match=r"."):
        row_values(of, record(value))


def test_a_record_goes_through_a_plan_unchanged():
    for each in (record(b"\xff\x00", key=None), record(None, key=b"\xfe")):
        assert from_json(to_json(each)) == each


def suspect(**more: Any) -> Suspect:
    given: dict[str, Any] = {"key_text": "1;", "expected": None, "found": (1, 9), "copies": 1, "digest": 5}
    return Suspect(**(given | {"opinion": difference.EXTRA} | more))


def planned(kind: Kind, each: Suspect, value: bytes | None = b'{"id": 1}', of: Target | None = None) -> Any:
    (table,) = by_table([of or target(column("id", "bigint"))])
    return action_for(Settled(suspect=each, kind=kind), table, {(1, 4): record(value)})


@pytest.mark.parametrize("kind", [Kind.ABORTED_DATA, Kind.ATOMICITY_BROKEN, Kind.ROW_EXTRA, Kind.ROW_DIFFERS])
def test_a_row_is_deleted_only_where_there_should_be_none(kind):
    assert planned(kind, suspect())["do"] == "delete"
    written = planned(kind, suspect(expected=(1, 4), opinion=difference.AHEAD))
    assert (written["do"], written["source"], written["record"]["offset"]) == ("write", 1, 41)
    assert (written["copies"], written["digest"], written["found"]) == (1, 5, [1, 9])


def test_a_delete_event_is_no_row_to_write():
    older = suspect(expected=(1, 4), opinion=difference.OLDER, is_delete=True)
    assert planned(Kind.ROW_OLDER, older, value=None)["do"] == "delete"
    assert planned(Kind.ROW_OLDER, older, value=b'{"op": "d", "before": {"id": 1}}', of=DEBEZIUM)["do"] == "delete"
    assert planned(Kind.ROW_DIFFERS, suspect(expected=(1, 4)), value=b"not JSON") is None
    assert planned(Kind.ROW_DIFFERS, suspect(expected=(1, 5))) is None


def table(**more: Any) -> Table:
    (one,) = by_table([target(column("id", "bigint"), **more)])
    return one


def test_a_database_that_fails_says_nothing_of_a_record():
    of, two = target(column("id", "bigint")), [(1, record(b'{"id": 1}'))] * 2

    def fail(error: psycopg.Error) -> Any:
        def ask(_: Any) -> Any:
            raise error

        return ask

    assert record_digests(fail(psycopg.DataError("no such value")), of, two) == [None, None]
    with pytest.raises(psycopg.OperationalError):
        record_digests(fail(psycopg.OperationalError("the connection is closed")), of, two)


def test_a_timestamp_past_the_years_of_python_is_not_told():
    of = target(column("id", "bigint"), column("at", "timestamp with time zone", "timestamp"))
    far = replace(record(b'{"id": 1}'), timestamp_ms=1_767_315_845_678_901)
    with pytest.raises(ValueError, match="past the year 9999"):
        row_values(of, far)
    assert record_digests(lambda _: [], of, [(1, far)]) == [None]
