"""A record into what it does to a table. Pure: the same record gives the same bytes on any machine at any time."""

from __future__ import annotations

import struct
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import msgspec

from relay.compiled import Quick, compile_quick, compile_row
from relay.decoding import decoder, key_decoder, scalar, value_fields
from relay.encoding import NULL, UNFIT, Codec, codec, storable
from relay.inference import checked_name, fields_of, type_for, wider_type
from relay.ordering import Ordering
from relay.types import BadRecordError, Column, From, SchemaChangeError, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from oncebox.reader import Record
    from relay.types import Change, Key

FROMS: dict[str, From] = {
    "@key": "key",
    "@topic": "topic",
    "@partition": "partition",
    "@offset": "offset",
    "@timestamp": "timestamp",
    "@header": "header",
}
_TWO = struct.Struct("!h")
NUL = b"\\u0000"


def parse_path(text: str) -> tuple[From, tuple[str, ...]]:
    """`a.b`, `@key`, `@key.a`, `@header.name`, `@offset` …: where a column's value comes from."""
    first, *rest = text.split(".")
    if not first.startswith("@"):
        return "value", (first, *rest)
    if first not in FROMS:
        raise BadRecordError(f"{text!r}: known are a path in the value and {', '.join(FROMS)}")
    if first == "@header" and not rest:
        raise BadRecordError("@header needs the header's name: @header.name")
    return FROMS[first], (".".join(rest),) if first == "@header" else tuple(rest)


class RowMapper:
    """What records of one topic do to one table."""

    def __init__(self, target: Target, *, record_bytes_max: int = 1 << 30) -> None:
        self.target = target
        self.has_guard = target.guard
        self.is_insert = target.insert_mode == "insert"
        self._record_bytes_max = record_bytes_max
        self._decode = decoder(target)
        self._codecs = [
            codec(column.type, "ms" if column.source == "timestamp" else column.unit) for column in target.columns
        ]
        self._encoders = [each.encode for each in self._codecs]
        names = [column.name for column in target.columns]
        self._key_at = [names.index(name) for name in target.key]
        self._key_columns = [target.columns[at] for at in self._key_at]
        for at in self._key_at:
            if self._codecs[at].is_raw:
                raise BadRecordError(
                    f"the key column {names[at]!r} is a document or an array, which tells no rows apart"
                )
        self._may_be_nan = any(self._codecs[at].annotation in {Decimal, float} for at in self._key_at)
        only = self._key_at[0] if len(self._key_at) == 1 else None
        self._key_of: Callable[[Sequence[Any]], Key] = (
            (lambda values: tuple([values[at] for at in self._key_at]))
            if only is None
            else (lambda values: (values[only],))
        )
        self.is_ordered = target.ordering is not None
        field_count = len(names) + (2 if target.guard else 0) + self.is_ordered
        self._prefix = _TWO.pack(field_count)
        self._pack = compile_row(self._codecs, field_count)
        self._key_prefix = _TWO.pack(len(self._key_at) + 3 + self.is_ordered)
        self._ordering_at = 0 if target.ordering is None else names.index(target.ordering)
        self._ordering = self._make_ordering() if self.is_ordered else None
        self._is_plain = all(column.source == "value" for column in target.columns)
        self._getters = [] if self._is_plain else self._make_getters()
        # Where the row is deleted, its key is told by the record's key (or by what the row was before).
        named = [
            replace(column, path=column.path[-1:] or (column.name,), source="value") for column in self._key_columns
        ]
        self._key_of_record = key_decoder(named) if named else None
        self.quick = self._make_quick()

    def _make_quick(self) -> Quick | None:
        """For most tables: all of the row is in the JSON value, under the columns' names."""
        fields = value_fields(self.target)
        if self.target.format != "json" or not self._is_plain or fields.depth is None or self._may_be_nan:
            return None
        if self._ordering is not None:
            return None
        given = {
            "decode": msgspec.json.Decoder(fields.type).decode,
            "astuple": msgspec.structs.astuple,
            "record_bytes_max": self._record_bytes_max,
            "UNFIT": UNFIT,
            "NUL": NUL,
        }
        return compile_quick(self._codecs, key_at=self._key_at, depth=fields.depth, guard=self.has_guard, given=given)

    def _make_ordering(self) -> Ordering:
        column, how = self.target.columns[self._ordering_at], self._codecs[self._ordering_at]
        at_value = [each.name for each in self.target.columns if each.source == "value"]
        place = at_value.index(column.name) if column.source == "value" else None
        return Ordering(column, how, place, _getter(column, how, 0))

    def __call__(self, record: Record) -> Change | None:
        value = record.value
        if value is not None and len(value) > self._record_bytes_max:
            raise BadRecordError(f"the value has {len(value)} bytes, allowed are {self._record_bytes_max}")
        try:
            if value is None:
                return self._deleted(record, None) if self.target.delete_on_tombstone else None
            values, before, is_void = self._decode(value)
            if is_void:
                return None
            if values is None:
                return self._deleted(record, before)
            if not self._is_plain:
                values = [get(record, values) for get in self._getters]
                _check_nul(self.target.columns, values)
            elif NUL in value:
                # JSON writes NUL in one way only, so that looking for it once is enough for most records.
                _check_nul(self.target.columns, values)
            if None not in values:
                row = self._pack(values)
            else:
                pairs = zip(self._encoders, values, strict=True)
                row = self._prefix + b"".join([NULL if each is None else encode(each) for encode, each in pairs])
            if self._ordering is not None:
                row += self._ordering.of_row(values[self._ordering_at])
        except UNFIT as error:
            if self.target.evolves:
                self._ask_for_change(record)
            raise BadRecordError(self._explain(record, error)) from error
        key = self._key_of(values)
        if None in key or self._may_be_nan:
            self._check_key(key)
        return key, row, False

    def _deleted(self, record: Record, before: Sequence[Any] | None) -> Change | None:
        if self.target.insert_mode == "insert" or self._key_of_record is None:
            raise BadRecordError(f"{self.target.table} takes inserts only, and this record deletes a row")
        if before is not None and all(column.source == "value" for column in self._key_columns):
            at_value = [column for column in self.target.columns if column.source == "value"]
            key = tuple(before[at_value.index(column)] for column in self._key_columns)
        elif record.key is None:
            raise BadRecordError("the record deletes a row and has no key to say which")
        else:
            key = tuple(self._key_of_record(record.key))
        self._check_key(key)
        _check_nul(self._key_columns, key)
        row = self.key_row(key)
        return key, row if self._ordering is None else row + self._ordering.of_delete(record, before), True

    def key_row(self, key: Key) -> bytes:
        """The key's columns in COPY's binary format, to be completed with source, offset and whether it is a delete."""
        encoders = [self._encoders[at] for at in self._key_at]
        return self._key_prefix + b"".join([encode(each) for encode, each in zip(encoders, key, strict=True)])

    def key_name(self, key: Key) -> list[str]:
        """The same for all that PostgreSQL takes for this key."""
        return [storable(self._codecs[at].name(each)) for at, each in zip(self._key_at, key, strict=True)]

    def _check_key(self, key: Key) -> None:
        if None in key:
            raise BadRecordError(f"the key column {self.target.key[list(key).index(None)]!r} has no value")
        if self._may_be_nan and any(map(_is_nan, key)):
            raise BadRecordError("NaN is no key: it is not even equal to itself")

    def _make_getters(self) -> list[Callable[[Record, Sequence[Any]], Any]]:
        at_value = 0
        getters = []
        for column, how in zip(self.target.columns, self._codecs, strict=True):
            getters.append(_getter(column, how, at_value))
            at_value += column.source == "value"
        return getters

    def _ask_for_change(self, record: Record) -> None:
        """Raises where another column, or a wider one, would take the record."""
        known = {column.path: column for column in self.target.columns}
        for name, value in fields_of(record.value or b"", self.target.format).items():
            column = known.get((name,))
            if column is None:
                if self._is_wanted(name):
                    raise SchemaChangeError(self.target.table, checked_name(name), type_for(value))
            elif wider := wider_type(column.type, value):
                raise SchemaChangeError(self.target.table, name, wider, before=column.type)

    def _is_wanted(self, name: str) -> bool:
        """Whether it would be filled if there was such a column: else it would be asked for over and over."""
        target = self.target
        return name not in target.exclude | target.reserved and (not target.include or name in target.include)

    def _explain(self, record: Record, error: Exception) -> str:
        """Names the column where it can be found."""
        if isinstance(error, msgspec.DecodeError):
            return str(error)
        try:
            values, _, _ = self._decode(record.value or b"")
            if values is not None and not self._is_plain:
                values = [get(record, values) for get in self._getters]
        except UNFIT:
            values = None
        for column, encode, value in zip(self.target.columns, self._encoders, values or (), strict=False):
            try:
                if value is not None:
                    encode(value)
            except UNFIT as wrong:
                told = "the number is out of range" if isinstance(wrong, struct.error | OverflowError) else str(wrong)
                return f"column {column.name!r} ({column.type}): {told}"
        return f"{type(error).__name__}: {error}"


def _is_nan(value: object) -> bool:
    return value.is_nan() if isinstance(value, Decimal) else value != value  # noqa: PLR0124 - only NaN is not


def _check_nul(columns: Sequence[Column], values: Sequence[Any]) -> None:
    for column, value in zip(columns, values, strict=True):
        if isinstance(value, str) and "\x00" in value:
            raise BadRecordError(f"column {column.name!r} ({column.type}): NUL cannot be stored in text")


def _getter(column: Column, how: Codec, at_value: int) -> Callable[[Record, Sequence[Any]], Any]:
    if column.source == "value":
        return lambda _record, values: values[at_value]
    if column.source == "key":
        if not column.path:
            return lambda record, _: None if record.key is None else scalar(record.key, how.annotation)
        decode = key_decoder([replace(column, source="value")])
        return lambda record, _: None if record.key is None else decode(record.key)[0]
    if column.source == "header":
        name = column.path[0]
        return lambda record, _: next(
            (None if raw is None else scalar(raw, how.annotation) for key, raw in record.headers if key == name), None
        )
    read = {
        "topic": lambda record, _: record.topic,
        "partition": lambda record, _: record.partition,
        "offset": lambda record, _: record.offset,
        "timestamp": lambda record, _: record.timestamp_ms,
    }
    return read[column.source]
