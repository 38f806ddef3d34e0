"""A record → the values that the relay makes of it, and each value as the text that PostgreSQL is given. Pure.

The second way from a record to its row, beside Spark's (spark_jobs.transforms.expected). Spark's workers use it too: it
imports nothing that they may lack.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from spark_jobs.columns import Kind
from spark_jobs.jsonb import raw_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spark_jobs.columns import Column
    from spark_jobs.targets import Target

TIMES = {Kind.TIMESTAMP, Kind.TIMESTAMPTZ}
FINER = re.compile(r"(.*:)(\d\d)\.(\d{6})(\d)\d*(\D.*)?", re.ASCII)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None


def to_json(record: Record) -> dict[str, Any]:
    """For a plan's file."""
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
        "key": _base64(record.key),
        "value": _base64(record.value),
    }


def from_json(document: Mapping[str, Any]) -> Record:
    key, value = (None if document[name] is None else base64.b64decode(document[name]) for name in ("key", "value"))
    return Record(
        topic=document["topic"],
        partition=document["partition"],
        offset=document["offset"],
        timestamp_ms=document["timestamp_ms"],
        key=key,
        value=value,
    )


def _base64(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


class Number(str):
    """A number as it was written; or a document, where the column keeps it so."""

    __slots__ = ()


def row_values(target: Target, record: Record) -> list[Any] | None:
    """The columns' values as JSON has them, numbers by their own text; None: the record deletes the row. ValueError:
    it says nothing about a row, or cannot be read.
    """
    document = None
    root: tuple[str, ...] = ()
    if record.value is not None:
        document = _loaded(record.value)
        if target.format == "debezium":
            is_wrapped = isinstance(document, dict) and bool(document.get("payload"))
            root = ("payload", "after") if is_wrapped else ("after",)
            envelope = document.get("payload") or document if isinstance(document, dict) else {}
            if not isinstance(envelope, dict):
                raise ValueError("the envelope is no object")
            operation, document = envelope.get("op"), envelope.get("after")
            if operation == "d":
                return None
            if operation not in {"c", "u", "r"}:
                raise ValueError(f"the operation {operation!r} says nothing about one row")
    elif target.delete_on_tombstone and target.is_keyed:
        return None
    else:
        raise ValueError("a record without a value says nothing about a row")
    return [
        _as_written(column, record.value, root)
        if column.type.kind in {Kind.JSON, Kind.JSONB} and column.origin == "value"
        else _value(column, record, document)
        for column in target.columns
    ]


def _loaded(text: bytes) -> Any:
    try:
        return json.loads(text, parse_float=Number, parse_int=Number)
    except RecursionError as error:
        raise ValueError("the document is too deep") from error


def _as_written(column: Column, value: bytes | None, root: tuple[str, ...]) -> Any:
    """A document: json keeps the very text, and jsonb reads it by itself."""
    raw = raw_at((value or b"").decode(), (*root, *column.path))
    return None if raw is None else Number(raw)


def _value(column: Column, record: Record, document: Any) -> Any:
    match column.origin:
        case "value":
            return _inside(document, column.path)
        case "key":
            return _of_key(column, record.key)
        case "topic":
            return record.topic
        case "partition":
            return Number(record.partition)
        case "offset":
            return Number(record.offset)
        case "timestamp" if column.type.kind in TIMES:
            return _moment(record.timestamp_ms)
        case "timestamp":
            return Number(record.timestamp_ms)
    raise ValueError(f"the column {column.name} comes from a {column.origin}")


def _moment(timestamp_ms: int) -> str:
    try:
        return (EPOCH + timedelta(milliseconds=timestamp_ms)).isoformat()
    except OverflowError as error:  # a producer may write any number there; PostgreSQL's years go on, Python's do not
        raise ValueError(f"the timestamp {timestamp_ms} is past the year 9999") from error


def _inside(document: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        document = document.get(name) if isinstance(document, dict) else None
    return document


def _of_key(column: Column, key: bytes | None) -> Any:
    """A field of the key's JSON object, or the whole key as the value itself."""
    if key is None:
        return None
    if column.path and key.startswith(b"{"):
        document = _loaded(key)
        return _inside(document.get("payload") or document, column.path)
    if column.type.kind is Kind.BYTEA:
        return _base64(key)  # as JSON would carry it
    if column.type.kind not in {Kind.JSON, Kind.JSONB}:
        return key.decode()
    _loaded(key)  # it is a document
    return Number(key.decode())  # and taken as it is, also null


def row_texts(
    targets: Mapping[str, Target],
    topic: str,
    partition: int,
    offset: int,
    timestamp_ms: int,
    key: bytearray | None,
    value: bytearray | None,
) -> list[str | None] | None:
    """A record's columns as texts, from what Spark has of it. `targets`: by topic. None: it makes no row."""
    target = targets[topic]
    record = Record(
        topic=topic,
        partition=partition,
        offset=offset,
        timestamp_ms=timestamp_ms,
        key=None if key is None else bytes(key),
        value=None if value is None else bytes(value),
    )
    try:
        values = row_values(target, record)
        if values is None:
            return None
        return [value_text(column, value) for column, value in zip(target.columns, values, strict=True)]
    except (ValueError, TypeError):
        return None  # whoever needs the row misses it


def value_text(column: Column, value: Any) -> str | None:
    """What spark_jobs.values.text_sql() makes the column's value of; None is NULL."""
    if value is None:
        return None
    if column.type.is_array:
        return "{" + ",".join("NULL" if each is None else _quoted(_text(each)) for each in value) + "}"
    if column.type.kind in {Kind.JSON, Kind.JSONB}:
        return _json(value)
    if column.type.kind is Kind.BYTEA:
        return "\\x" + base64.b64decode(str(value)).hex()
    if column.type.kind in TIMES and column.unit is None:
        return in_microseconds(_text(value))
    return str(value) if column.unit is not None else _text(value)


def in_microseconds(text: str) -> str:
    """A time as the relay reads it: half up, by the seventh digit alone. PostgreSQL has a rule of its own."""
    found = FINER.fullmatch(text)
    if found is None:
        return text
    before, seconds, microseconds, digit, after = found.groups(default="")
    micros = int(seconds + microseconds) + (digit >= "5")
    # It may be second 60 then, which PostgreSQL takes for the next minute.
    return f"{before}{micros // 1_000_000:02d}.{micros % 1_000_000:06d}{after}"


def _quoted(text: str) -> str:
    """An element of an array."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    if isinstance(value, Number):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)}: {_json(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_json(each) for each in value) + "]"
    return json.dumps(value)
