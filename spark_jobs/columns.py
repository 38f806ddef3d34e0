"""What a column is to the reconciliation: a kind that both sides can encode, from PostgreSQL's own name of the type.

A type that is not known here is never guessed: its column is left out of the comparison, and the verdict says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    INTEGER = "integer"
    NUMERIC = "numeric"
    FLOAT4 = "float4"
    FLOAT8 = "float8"
    BOOLEAN = "boolean"
    TEXT = "text"
    CHARACTER = "character"
    TIMESTAMP = "timestamp"
    TIMESTAMPTZ = "timestamptz"
    DATE = "date"
    UUID = "uuid"
    JSON = "json"  # keeps its text as it was written, also such as jsonb would refuse
    JSONB = "jsonb"
    BYTEA = "bytea"


NAMES = {
    "smallint": Kind.INTEGER,
    "integer": Kind.INTEGER,
    "bigint": Kind.INTEGER,
    "numeric": Kind.NUMERIC,
    "real": Kind.FLOAT4,
    "double precision": Kind.FLOAT8,
    "boolean": Kind.BOOLEAN,
    "text": Kind.TEXT,
    "character varying": Kind.TEXT,
    "character": Kind.CHARACTER,
    "timestamp without time zone": Kind.TIMESTAMP,
    "timestamp with time zone": Kind.TIMESTAMPTZ,
    "date": Kind.DATE,
    "uuid": Kind.UUID,
    "json": Kind.JSON,
    "jsonb": Kind.JSONB,
    "bytea": Kind.BYTEA,
}
# timestamp(3) with time zone, numeric(12,2), character varying(20): the numbers stand inside the name.
NUMBERS = re.compile(r"\((?P<precision>\d+)(?:,(?P<scale>-?\d+))?\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnType:
    name: str  # as format_type() writes it
    kind: Kind
    is_array: bool = False
    precision: int | None = None
    scale: int | None = None

    @property
    def is_bounded(self) -> bool:
        """A numeric that fits Spark's decimals."""
        return self.precision is not None and self.scale is not None and 0 <= self.scale <= self.precision <= 38


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """`origin`: value, key, topic, partition, offset, timestamp or header; `path` leads into what stands there."""

    name: str
    type: ColumnType
    path: tuple[str, ...] = ()
    origin: str = "value"
    unit: str | None = None


def parse_type(name: str) -> ColumnType | None:
    """None: a type that only PostgreSQL itself could compare."""
    is_array = name.endswith("[]")
    element = name.removesuffix("[]")
    numbers = NUMBERS.search(element)
    kind = NAMES.get(" ".join(NUMBERS.sub("", element).split()))
    if kind is None:
        return None
    precision = int(numbers["precision"]) if numbers else None
    scale = int(numbers["scale"] or 0) if numbers and kind is Kind.NUMERIC else None
    return ColumnType(name=name, kind=kind, is_array=is_array, precision=precision, scale=scale)
