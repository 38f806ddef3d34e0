"""What the parts of the relay hand to each other. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

From = Literal["value", "key", "topic", "partition", "offset", "timestamp", "header"]
Format = Literal["json", "debezium"]
InsertMode = Literal["upsert", "insert"]
TimeUnit = Literal["s", "ms", "us", "ns", "days"]
Key = tuple[object, ...]


class RelayError(Exception):
    """The relay stops; the text says what to do."""


class FencedError(RelayError):
    """Somebody else has taken over what this process was about to commit. Nothing was."""


class TableChangedError(RelayError):
    """A column has another type than when the session began. Nothing was written; the next one knows it."""


class BadRecordError(Exception):
    """A record that cannot become rows, whatever the database says."""


class SchemaChangeError(Exception):
    """A record needs a column that the table lacks, or a wider one, and the settings allow that."""

    def __init__(self, table: TableName, column: str, type_name: str, *, before: str | None = None) -> None:
        super().__init__(f"{table} needs the column {column!r} as {type_name}")
        self.table = table
        self.column = column
        self.type = type_name
        # The type that it had when the record was looked at; None: there was no such column.
        self.before = before


@dataclass(frozen=True, slots=True, kw_only=True)
class TableName:
    schema: str
    name: str

    def __str__(self) -> str:
        return ".".join('"{}"'.format(part.replace('"', '""')) for part in (self.schema, self.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    name: str
    # As PostgreSQL's format_type() names it.
    type: str
    # Names inside the JSON value or key; the header's name.
    path: tuple[str, ...]
    source: From = "value"
    # What a number means where the type is a time.
    unit: TimeUnit | None = None
    # Of a domain: the type that it is at last.
    base: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the records of one topic become in one table, resolved against the table as it is."""

    topic: str
    table: TableName
    format: Format
    insert_mode: InsertMode
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    guard: bool = True
    # The column that says which of two records of a row is newer; None: the order of the one topic does.
    ordering: str | None = None
    delete_on_tombstone: bool = True
    # Fields that have no column: an error, unless the mapping was written down (then they are meant to be left out).
    strict_fields: bool = False
    # A field without a column, or a number too large for its, asks for a change of the table.
    evolves: bool = False
    # Fields that are left out without an error.
    exclude: frozenset[str] = frozenset()
    # The only fields to take; empty: all.
    include: frozenset[str] = frozenset()
    # Columns that are not the relay's to fill, and names that no column can have: nothing is gained by adding them.
    reserved: frozenset[str] = frozenset()


# What a record does to one row: the row's key; its bytes in COPY's binary format without the guard's columns (of a
# delete: the key's columns), but with the ordering value where there is one; whether it is a delete. (A bare tuple: one
# is made for each record.)
Change = tuple[Key, bytes, bool]
