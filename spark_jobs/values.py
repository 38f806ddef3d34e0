"""A record → the values that the relay makes of it, as SQL that PostgreSQL converts by itself. Pure.

The second way from a record to its row, beside Spark's (spark_jobs.transforms.expected): what is alarmed or written was
seen by both.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from psycopg import sql

from spark_jobs.columns import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spark_jobs.columns import Column
    from spark_jobs.targets import Target

TIMES = {Kind.TIMESTAMP, Kind.TIMESTAMPTZ}
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
    """A number as it was written."""

    __slots__ = ()


def row_values(target: Target, record: Record) -> list[Any] | None:
    """The columns' values as JSON has them, numbers by their own text; None: the record deletes the row. ValueError:
    it says nothing about a row, or cannot be read.
    """
    document = None
    if record.value is not None:
        document = _loaded(record.value)
        if target.format == "debezium":
            envelope = document.get("payload") or document if isinstance(document, dict) else {}
            operation, document = envelope.get("op"), envelope.get("after")
            if operation == "d":
                return None
            if operation not in {"c", "u", "r"}:
                raise ValueError(f"the operation {operation!r} says nothing about one row")
    elif target.delete_on_tombstone and target.is_keyed:
        return None
    else:
        raise ValueError("a record without a value says nothing about a row")
    return [_value(column, record, document) for column in target.columns]


def _loaded(text: bytes) -> Any:
    return json.loads(text, parse_float=Number, parse_int=Number)


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
            return (EPOCH + timedelta(milliseconds=record.timestamp_ms)).isoformat()
        case "timestamp":
            return Number(record.timestamp_ms)
    raise ValueError(f"the column {column.name} comes from a {column.origin}")


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
    return _loaded(key) if column.type.kind is Kind.JSON else key.decode()


def value_sql(column: Column, value: Any) -> sql.Composable:
    """The value as the relay would write it, converted by PostgreSQL. The session's time zone has to be UTC."""
    kind = sql.SQL(column.type.name)  # as format_type() writes it
    if value is None:
        return sql.SQL("NULL::{}").format(kind)
    if column.type.is_array:
        items = [None if each is None else _text(each) for each in value]
        return sql.SQL("{}::text[]::{}").format(sql.Literal(items), kind)
    if column.type.kind is Kind.JSON:
        return sql.SQL("{}::{}").format(_json(value), kind)
    if column.type.kind is Kind.BYTEA:
        return sql.Literal(base64.b64decode(str(value)))
    if column.unit is not None:
        return _time_sql(column.type.kind, str(value), column.unit)
    if column.type.kind is Kind.TIMESTAMP:  # by itself it would ignore the zone that a text names
        return sql.SQL("({}::timestamptz AT TIME ZONE 'UTC')::{}").format(_text(value), kind)
    return sql.SQL("{}::{}").format(_text(value), kind)


def _time_sql(kind: Kind, value: str, unit: str) -> sql.Composable:
    step = {"s": "1000000", "ms": "1000", "us": "1", "ns": "0.001", "days": "86400000000"}[unit]
    micros = sql.SQL("floor({}::numeric * {}::numeric)").format(value, step)
    moment = sql.SQL("(TIMESTAMP '1970-01-01' + {} * INTERVAL '1 microsecond')").format(micros)
    if kind is Kind.DATE:
        return sql.SQL("{}::date").format(moment)
    return sql.SQL("({} AT TIME ZONE 'UTC')").format(moment) if kind is Kind.TIMESTAMPTZ else moment


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
