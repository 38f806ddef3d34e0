"""Records into changes of rows: pure, so that every way a record can be wrong is told without a database."""

from __future__ import annotations

import struct
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from oncebox.reader import Record
from relay.encoding import UnfitError, canonical, time_of
from relay.inference import type_for, wider_type
from relay.mapping import RowMapper, parse_path
from relay.types import BadRecordError, Column, SchemaChangeError, TableName, Target

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TARGET = Target(
    topic="t",
    table=TableName(schema="public", name='o"dd'),
    format="json",
    insert_mode="upsert",
    columns=(Column(name="id", type="integer", path=("id",)), Column(name="note", type="text", path=("note",))),
    key=("id",),
    strict_fields=True,
)


def record(value: bytes | None, *, key: bytes | None = None, headers: Any = ()) -> Record:
    return Record("t", 3, 7, 1_700_000_000_123, key, value, headers)


def fields(row: bytes) -> list[bytes | None]:
    """Takes a row of COPY's binary format apart."""
    (count,) = struct.unpack_from("!h", row)
    found: list[bytes | None] = []
    at = 2
    while at < len(row):
        (size,) = struct.unpack_from("!i", row, at)
        at += 4
        found.append(None if size < 0 else row[at : at + size])
        at += max(size, 0)
    assert count - len(found) in {2, 3}, "source and offset come later, and of a delete that it is one"
    return found


def changed(target: Target, *given: Any, **more: Any) -> tuple[Any, list[bytes | None], bool]:
    change = RowMapper(target)(record(*given, **more))
    assert change is not None
    key, row, is_delete = change
    return key, fields(row), is_delete


def test_a_row() -> None:
    assert changed(TARGET, b'{"note": "x", "id": -1}') == ((-1,), [b"\xff\xff\xff\xff", b"x"], False)
    assert changed(TARGET, b'{"id": 1}')[1] == [b"\x00\x00\x00\x01", None]
    assert changed(TARGET, b'{"id": 1, "note": null}')[1] == [b"\x00\x00\x00\x01", None]


@pytest.mark.parametrize("key", [b"5", b'{"id": 5}', b'{"schema": {}, "payload": {"id": 5}}'])
def test_a_tombstone_deletes_what_its_key_names(key: bytes) -> None:
    deleted_key, row, is_delete = changed(TARGET, None, key=key)
    assert (deleted_key, row[0], is_delete) == ((5,), b"\x00\x00\x00\x05", True)
    assert RowMapper(replace(TARGET, delete_on_tombstone=False))(record(None, key=key)) is None


@pytest.mark.parametrize(
    ("value", "key", "told"),
    [
        (b"", None, "truncated"),
        (b'{"id": 1} x', None, "trailing"),
        (b"null", None, "Expected `object`"),
        (b'{"id": null}', None, "key column 'id' has no value"),
        (b'{"id": 2147483648}', None, r"column 'id' \(integer\): the number is out of range"),
        (b'{"id": 1.0}', None, "Expected `int"),
        (b'{"id": 1, "note": 5}', None, r"Expected `str.*\$\.note"),
        (b'{"id": 1, "more": 5}', None, "unknown field `more`"),
        (rb'{"id": 1, "note": "a\u0000b"}', None, "NUL"),
        (None, None, "has no key"),
        (None, b"x", "int"),
        (None, b'{"other": 1}', "key column 'id' has no value"),
    ],
)
def test_what_cannot_become_a_row(value: bytes | None, key: bytes | None, told: str) -> None:
    with pytest.raises(BadRecordError, match=told):
        RowMapper(TARGET)(record(value, key=key))


def test_documents_without_end() -> None:
    deep = b"[" * 5000 + b"]" * 5000
    document = replace(TARGET.columns[1], type="jsonb")
    for target in (
        replace(TARGET, columns=TARGET.columns[:1], strict_fields=False),
        replace(TARGET, columns=(TARGET.columns[0], document)),
        replace(TARGET, columns=(TARGET.columns[0], document), evolves=True),
    ):
        with pytest.raises(BadRecordError, match="recursion"):
            RowMapper(target)(record(b'{"id": 1, "note": %s}' % deep))
    with pytest.raises(BadRecordError, match="recursion"):
        RowMapper(TARGET)(record(None, key=b'{"x": %s}' % deep))


def test_a_backslash_before_u0000_is_no_nul() -> None:
    assert changed(TARGET, rb'{"id": 1, "note": "\\u0000"}')[1][1] == rb"\u0000"


def test_a_record_over_the_limit() -> None:
    with pytest.raises(BadRecordError, match="has 9 bytes, allowed are 8"):
        RowMapper(TARGET, record_bytes_max=8)(record(b'{"id": 1}'))


def test_values_from_beside_the_value() -> None:
    columns = [
        Column(name=name, type=type_name, path=path, source=source)
        for name, type_name, (source, path) in [
            ("id", "text", parse_path("@key")),
            ("part", "integer", parse_path("@partition")),
            ("off", "bigint", parse_path("@offset")),
            ("at", "bigint", parse_path("@timestamp")),
            ("who", "text", parse_path("@header.a.b")),
            ("deep", "text", parse_path("x.y")),
        ]
    ]
    target = replace(TARGET, columns=tuple(columns), strict_fields=False)
    key, row, _ = changed(target, b'{"x": {"y": "z"}}', key=b"k", headers=[("a.b", b"me"), ("a.b", b"later")])
    assert key == ("k",)
    assert [len(each or b"") for each in row] == [1, 4, 8, 8, 2, 1]
    assert row[4:] == [b"me", b"z"]


def test_a_time_beside_the_value_may_be_any() -> None:
    at = Column(name="at", type="timestamp with time zone", path=(), source="timestamp")
    target = replace(TARGET, columns=(*TARGET.columns, at))
    for timestamp_ms, expected in ((1_700_000_000_123, 753_315_200_123_000), (-1, -946_684_800_001_000)):
        change = RowMapper(target)(record(b'{"id": 1}')._replace(timestamp_ms=timestamp_ms))
        assert change is not None
        assert fields(change[1])[2] == struct.pack("!q", expected)
    with pytest.raises(BadRecordError, match="out of range"):
        RowMapper(target)(record(b'{"id": 1}')._replace(timestamp_ms=1 << 60))
    assert time_of(None) is time_of(-1) is None
    assert (time_of(1_700_000_000_123) or EPOCH).timestamp() == 1_700_000_000.123
    assert (time_of((1 << 63) - 1) or EPOCH).year == 9999


@pytest.mark.parametrize("value", [b'{"id": "NaN"}', b'{"id": "sNaN"}', b'{"id": "-nan"}'])
def test_what_is_not_equal_to_itself_is_no_key(value: bytes) -> None:
    number = Column(name="id", type="numeric(10,2)", path=("id",))
    with pytest.raises(BadRecordError, match="NaN is no key"):
        RowMapper(replace(TARGET, columns=(number,)))(record(value))
    with pytest.raises(BadRecordError, match="tells no rows apart"):
        RowMapper(replace(TARGET, columns=(replace(number, type="jsonb"),)))


@pytest.mark.parametrize("path", ["@nothing", "@header"])
def test_paths_that_mean_nothing(path: str) -> None:
    with pytest.raises(BadRecordError):
        parse_path(path)


def test_type_names_are_names() -> None:
    assert canonical(" INT8 ") == "bigint"
    assert canonical("varchar(20)") == "character varying(20)"
    assert canonical("timestamptz") == "timestamp with time zone"
    assert canonical("text[]") == "text[]"
    assert canonical("numeric(10, 2)") == "numeric(10, 2)"
    assert canonical("varchar(20)[]") == "character varying(20)[]"
    assert canonical("timestamptz(3)") == "timestamp(3) with time zone"
    assert canonical("timestamp(3)[]") == "timestamp(3) without time zone[]"
    assert canonical("timestamp(0) with time zone") == "timestamp(0) with time zone"
    assert canonical("time (3)") == "time(3) without time zone"
    for hostile in ("text; DROP TABLE x", "text)", 'a"b', "", "int -- x"):
        with pytest.raises(UnfitError):
            canonical(hostile)


def test_a_field_that_cannot_be_read_is_excluded() -> None:
    for name in ('a"b', "c\\d", "e\nf"):
        more = replace(TARGET, columns=(*TARGET.columns, Column(name=name, type="text", path=(name,))))
        with pytest.raises(BadRecordError, match="exclude it"):
            RowMapper(more)
        assert (
            RowMapper(replace(TARGET, exclude=frozenset({name, "other"})))(record(b'{"id": 1, "other": 2}')) is not None
        )


def test_what_a_table_has_to_grow_by() -> None:
    target = replace(TARGET, evolves=True)
    for value, column, type_name, before in [
        (b'{"id": 1, "more": [1]}', "more", "jsonb", None),
        (b'{"id": 3000000000}', "id", "bigint", "integer"),
        (b'{"id": 1.5}', "id", "numeric", "integer"),
    ]:
        with pytest.raises(SchemaChangeError) as asked:
            RowMapper(target)(record(value))
        assert (asked.value.column, asked.value.type, asked.value.before) == (column, type_name, before)
    for name in (b"x" * 64, b"", rb"a\"b", rb"a\\b", rb"a\u0000", rb"\n"):
        with pytest.raises(BadRecordError, match="1 to 63 bytes"):
            RowMapper(target)(record(b'{"id": 1, "%s": 1}' % name))
    with pytest.raises(BadRecordError, match="Expected `int"):
        RowMapper(target)(record(b'{"id": "text"}'))
    samples: list[Any] = [True, 1, 1 << 64, 1.5, "a", {}, None]
    assert [type_for(each) for each in samples] == [
        "boolean",
        "bigint",
        "numeric",
        "double precision",
        "text",
        "jsonb",
        "jsonb",
    ]
    assert wider_type("smallint", 40_000) == "bigint"
    assert wider_type("integer", 40_000) is None
    assert wider_type("text", 1) is None


def test_a_column_that_would_not_be_filled_is_not_asked_for() -> None:
    reserved = replace(TARGET, evolves=True, reserved=frozenset({"made", "oncebox_source", "xmin"}))
    for name in reserved.reserved:
        with pytest.raises(BadRecordError, match=f"unknown field `{name}`"):
            RowMapper(reserved)(record(b'{"id": 1, "%s": 1}' % name.encode()))
    included = replace(TARGET, evolves=True, strict_fields=False, include=frozenset({"id", "note"}))
    with pytest.raises(BadRecordError, match="Expected `int"):
        RowMapper(included)(record(b'{"more": 1, "id": "x"}'))


def test_columns_that_contradict_each_other() -> None:
    number, text = (Column(name=name, type=name, path=("a",)) for name in ("integer", "text"))
    inside = Column(name="b", type="text", path=("a", "b"))
    for columns in ((number, text), (number, inside), (inside, number)):
        with pytest.raises(BadRecordError):
            RowMapper(replace(TARGET, columns=columns, key=(columns[0].name,)))
    with pytest.raises(BadRecordError, match="cannot be read"):
        RowMapper(replace(TARGET, columns=(replace(number, path=('a"b',)),), key=("integer",)))
    twice = (number, replace(number, name="again"))
    assert len(changed(replace(TARGET, columns=twice, key=("again",)), b'{"a": 1}')[1]) == 2


WIDE = replace(
    TARGET,
    columns=(
        Column(name="note", type="text", path=("in", "note")),
        Column(name="id", type="integer", path=("in", "id")),
        Column(name="yes", type="boolean", path=("in", "yes")),
        Column(name="amount", type="numeric", path=("in", "amount")),
        Column(name="at", type="timestamp with time zone", path=("in", "at"), unit="ms"),
    ),
    strict_fields=False,
)


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize(
    ("value", "is_quick"),
    [
        (rb'{"x": 1, "in": {"id": -7, "note": "\u00fc \\ \"", "yes": true, "amount": 1e-30, "at": 5}}', True),
        (rb'{"in": {"id": 1, "note": "\\u0000", "yes": false, "amount": 2, "at": 0}}', False),
        (rb'{"in": {"id": 1, "yes": false, "amount": 2, "at": 0}}', False),
        (rb'{"in": {"id": 1, "note": "a\u0000", "yes": false, "amount": 2, "at": 0}}', False),
        (rb'{"in": {"id": 2147483648, "note": "", "yes": false, "amount": 2, "at": 0}}', False),
        (rb'{"in": {"id": "1", "note": "", "yes": false, "amount": 2, "at": 0}}', False),
        (rb'{"in": null}', False),
        (rb"{", False),
        (rb'{"in": {"id": 1, "note": "%s", "yes": true, "amount": 1, "at": 5}}' % (b"x" * 200), False),
    ],
)
def test_the_quick_way_makes_the_row_of_the_long_way_or_none(value: bytes, *, is_quick: bool, guard: bool) -> None:
    mapper = RowMapper(replace(WIDE, guard=guard), record_bytes_max=200)
    assert mapper.quick is not None
    made = mapper.quick(value, 3, 1 << 40)
    assert (made is not None) == is_quick
    if is_quick:
        change = mapper(record(value))
        assert change is not None
        key, row, _ = change
        assert made == (key, row + (struct.pack("!iiiq", 4, 3, 8, 1 << 40) if guard else b""))


@pytest.mark.parametrize(
    "target",
    [
        replace(TARGET, format="debezium"),
        replace(TARGET, exclude=frozenset({"other"})),
        replace(TARGET, columns=(*TARGET.columns, Column(name="doc", type="jsonb", path=("doc",)))),
        replace(TARGET, columns=(*TARGET.columns, Column(name="at", type="bigint", path=(), source="offset"))),
        replace(TARGET, columns=(Column(name="id", type="double precision", path=("id",)),)),
    ],
)
def test_only_plain_fields_go_the_quick_way(target: Target) -> None:
    assert RowMapper(target).quick is None
