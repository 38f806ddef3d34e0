"""Tables with an `ordering` column: of two records of one row, from whatever topics, which one is the newer. Pure.

The value becomes a whole number, which goes with each row into `oncebox_ordering` and with each delete into the memory
of deletes. The highest (ordering, source, offset) wins, so that a row depends on which records there are, and not on
when they came. See docs/decisions/0026-the-order-is-in-the-records.md.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from relay.encoding import is_timestamp
from relay.types import BadRecordError, RelayError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from oncebox.reader import Record
    from relay.encoding import Codec
    from relay.types import Column, Target

_FIELD = struct.Struct("!iq")
WHOLE_NUMBERS = ("smallint", "integer", "bigint", "date")

# Ordering, source, offset: no two records have the same.
Version = tuple[int, int, int]


class Ordering:
    """Of one topic's way into one table."""

    def __init__(self, column: Column, codec: Codec, at_value: int | None, get: Callable[[Record, Any], Any]) -> None:
        """`at_value`: its place among what is read from the value; None: it comes from elsewhere in the record."""
        if not (column.type in WHOLE_NUMBERS or is_timestamp(column.type)):
            raise BadRecordError(
                f"the ordering column {column.name!r} is {column.type}: take a whole number, a date or a timestamp"
            )
        self._column = column
        self._encode = codec.encode
        self._at_value = at_value
        self._get = get

    def of_row(self, value: Any) -> bytes:
        """The field that a row ends with, in COPY's binary format."""
        if value is None:
            raise BadRecordError(f"the ordering column {self._column.name!r} has no value")
        if self._column.source == "timestamp" and value < 0:
            raise BadRecordError(f"the record has no timestamp for the ordering column {self._column.name!r}")
        # Two, four or eight bytes behind their length: the number that PostgreSQL stores, times included.
        return _FIELD.pack(8, int.from_bytes(self._encode(value)[4:], "big", signed=True))

    def of_delete(self, record: Record, before: Sequence[Any] | None) -> bytes:
        if self._at_value is None:
            return self.of_row(self._get(record, ()))
        value = None if before is None else before[self._at_value]
        if value is None:
            raise BadRecordError(
                f"the record deletes a row and does not say when: it lacks the ordering column {self._column.name!r} "
                "(take that from @timestamp or a header)"
            )
        return self.of_row(value)


def version(row: bytes, source: int, offset: int) -> Version:
    """Of a row, or of a delete's key, that ends with its ordering field."""
    return int.from_bytes(row[-8:], "big", signed=True), source, offset


def check_agreement(targets: Sequence[Target]) -> None:
    """All topics of a table with an ordering column fill the same columns: else a row would be made of two records, and
    depend on which of them came first.
    """
    firsts: dict[str, Target] = {}
    for target in targets:
        first = firsts.setdefault(str(target.table), target)
        names = [sorted(column.name for column in each.columns) for each in (first, target)]
        if target.ordering is not None and names[0] != names[1]:
            raise RelayError(
                f"{target.table} is fed by {first.topic} and {target.topic}, which fill different columns: "
                f"{', '.join(names[0])}; {', '.join(names[1])}"
            )
