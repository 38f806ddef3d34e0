"""What each table should hold: the relay's resolved mappings, read from its own table. Pure.

A column that cannot be recomputed from its record (its type, or where it comes from) is listed as not checked.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_jobs.columns import Column, ColumnType, Kind, parse_type

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GUARD_COLUMNS = ("oncebox_source", "oncebox_offset")
ORIGINS = {"value", "key", "topic", "partition", "offset", "timestamp"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The records of one topic in one table."""

    topic: str
    schema: str
    table: str
    format: str
    insert_mode: str
    guard: bool
    ordering: str | None
    delete_on_tombstone: bool
    key: tuple[Column, ...]
    key_size: int  # columns of the key, also such as cannot be recomputed
    columns: tuple[Column, ...]  # those that are compared, in the order of their names
    unchecked: tuple[str, ...] = ()  # "name (why)"

    @property
    def name(self) -> str:
        return f"{self.schema}.{self.table}"

    @property
    def columns_named(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def is_keyed(self) -> bool:
        """Whether a record replaces the row of its key; otherwise each record is a row of its own."""
        return self.insert_mode == "upsert" and bool(self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table with all topics that feed it; they agree on everything but where values come from."""

    schema: str
    table: str
    targets: tuple[Target, ...]

    @property
    def name(self) -> str:
        return f"{self.schema}.{self.table}"

    @property
    def first(self) -> Target:
        return self.targets[0]

    @property
    def obstacle(self) -> str | None:
        """Why its rows cannot be compared at all."""
        first = self.first
        if any(target.ordering is not None for target in self.targets):
            return "with an ordering column the newest record is not the last one, which is what is compared here"
        if any(len(target.key) < target.key_size for target in self.targets):
            return "a key column cannot be recomputed from the record"
        if not first.is_keyed and not first.guard:
            return "without a key and without the guard's columns its rows cannot be told apart"
        shapes = {(target.guard, target.is_keyed, target.columns_named) for target in self.targets}
        return "its topics are mapped to different columns" if len(shapes) > 1 else None

    @property
    def topics(self) -> tuple[str, ...]:
        return tuple(target.topic for target in self.targets)


def read_target(topic: str, schema: str, table: str, mapping: Mapping[str, Any]) -> Target:
    checked: list[Column] = []
    unchecked: list[str] = []
    for entry in mapping["columns"]:
        column, why = _column(entry)
        if column is None:
            unchecked.append(f"{entry['name']} ({why})")
        else:
            checked.append(column)
    by_name = {column.name: column for column in checked}
    key = tuple(by_name[name] for name in mapping["key"] if name in by_name)
    return Target(
        topic=topic,
        schema=schema,
        table=table,
        format=mapping["format"],
        insert_mode=mapping["insert_mode"],
        guard=mapping["guard"],
        # (A relay of before wrote nothing about it.)
        ordering=mapping.get("ordering"),
        delete_on_tombstone=mapping["delete_on_tombstone"],
        key=key,
        key_size=len(mapping["key"]),
        columns=tuple(sorted(checked, key=lambda column: column.name)),
        unchecked=tuple(unchecked),
    )


def _column(entry: Mapping[str, Any]) -> tuple[Column | None, str]:
    column_type = parse_type(entry["type"])
    if column_type is None or (column_type.is_array and column_type.kind in {Kind.JSON, Kind.JSONB, Kind.BYTEA}):
        return None, f"type {entry['type']}"
    if column_type.is_array and column_type.kind is Kind.NUMERIC and not column_type.is_bounded:
        return None, f"type {entry['type']} without a precision"
    if entry["from"] not in ORIGINS:
        return None, f"from a {entry['from']}"
    if entry["from"] == "key" and not _is_plain_in_key(column_type, entry["path"]):
        return None, "from inside the key's document"
    # A record's own timestamp is a time already.
    is_time = entry["from"] == "timestamp" and column_type.kind in {Kind.TIMESTAMP, Kind.TIMESTAMPTZ}
    column = Column(
        name=entry["name"],
        type=column_type,
        path=tuple(entry["path"]),
        origin=entry["from"],
        unit=None if is_time else entry["unit"],
    )
    return column, ""


def _is_plain_in_key(column_type: ColumnType, path: Sequence[str]) -> bool:
    """The whole key, or a plain field of its document."""
    if column_type.is_array:
        return False
    return not path or (len(path) == 1 and column_type.kind not in {Kind.JSON, Kind.JSONB, Kind.BYTEA})


def by_table(targets: Sequence[Target]) -> list[Table]:
    names = dict.fromkeys((target.schema, target.table) for target in targets)
    return [
        Table(
            schema=schema,
            table=table,
            targets=tuple(each for each in targets if (each.schema, each.table) == (schema, table)),
        )
        for schema, table in names
    ]


def config_hash(rows: Sequence[tuple[str, str, str, Mapping[str, Any]]]) -> str:
    """Of the mappings: what was verified under one says nothing under another."""
    text = json.dumps(sorted([list(row) for row in rows], key=str), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
