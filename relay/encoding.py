"""Values into PostgreSQL's binary COPY format, by type. Pure.

A value that does not fit its type raises (NUL in text: see mapping.py); types that are not written here travel as text
(arrays as jsonb) and are cast by the database.
"""

from __future__ import annotations

import re
import struct
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from relay.types import TimeUnit

Encode = Callable[[Any], bytes]

NULL = b"\xff\xff\xff\xff"
COPY_HEADER = b"PGCOPY\n\xff\r\n\x00" + bytes(8)
COPY_TRAILER = b"\xff\xff"

_INT2, _INT4, _INT8 = struct.Struct("!ih"), struct.Struct("!ii"), struct.Struct("!iq")
_FLOAT4, _FLOAT8 = struct.Struct("!if"), struct.Struct("!id")
_LENGTH = struct.Struct("!i")
_pack_length = _LENGTH.pack
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_EPOCH_ORDINAL = date(2000, 1, 1).toordinal()
_UNIX_US = 946_684_800_000_000
_MICROSECOND = timedelta(microseconds=1)
_EXACTLY = Context(prec=MAX_PREC, Emin=MIN_EMIN, Emax=MAX_EMAX)
_PER_UNIT_US = {"s": 1_000_000, "ms": 1_000, "us": 1, "days": 86_400_000_000}

ALIASES = {
    "int": "integer",
    "int2": "smallint",
    "int4": "integer",
    "int8": "bigint",
    "bool": "boolean",
    "float4": "real",
    "float8": "double precision",
    "double": "double precision",
    "decimal": "numeric",
    "string": "text",
    "timestamptz": "timestamp with time zone",
    "timestamp": "timestamp without time zone",
    "time": "time without time zone",
    "varchar": "character varying",
    "char": "character",
}
# The last instant that a datetime holds in any time zone, about.
_LAST_MS = 253_370_764_800_000
TIMESTAMP = re.compile(r"timestamp(\(\d\))? with(out)? time zone")
# Types of which a cast to a given length cuts without a word: here with any length, so that the target's is enforced.
ANY_LENGTH = {
    "character varying": "character varying",
    "character": "bpchar",
    "bit varying": "bit varying",
    "bit": "bit varying",
}
TYPE_NAME = re.compile(r"[a-z][a-z0-9_ ]*(\(\d+(,\s*-?\d+)?\))?( with(out)? time zone)?(\[\])?", re.IGNORECASE)


class UnfitError(ValueError):
    """The value does not fit the column."""


# What a record may raise on its way to a row. It is to blame then, not the program or the database.
UNFIT = (msgspec.DecodeError, struct.error, ArithmeticError, ValueError, TypeError, RecursionError)


def storable(text: str) -> str:
    """For PostgreSQL's text and jsonb, which take all but NUL and halves of characters."""
    return text.replace("\x00", "\u2400").encode(errors="replace").decode()


def time_of(timestamp_ms: int | None) -> datetime | None:
    """A record's timestamp (a producer may write any number there), cut to what a datetime holds; None: it has none."""
    if timestamp_ms is None or timestamp_ms < 0:
        return None
    return datetime.fromtimestamp(min(timestamp_ms, _LAST_MS) / 1000, UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """How one type's values are read from JSON and written to the database."""

    # For msgspec; the field may be null or absent besides.
    annotation: Any
    encode: Encode
    # The staging table's column, and what its value becomes on the way into the target.
    staged: str
    cast: str | None = None
    # Raw JSON: null has to be looked for in the bytes.
    is_raw: bool = False
    # Just its bytes.
    is_text: bool = False
    # Of values that are the same key to PostgreSQL the same.
    name: Callable[[Any], str] = str


def canonical(type_name: str) -> str:
    """As format_type() writes it; only names, never SQL."""
    if not TYPE_NAME.fullmatch(type_name.strip()):
        raise UnfitError(f"{type_name!r} is not the name of a type")
    name = " ".join(type_name.lower().split())
    base, bracket, rest = name.partition("(")
    suffix = "[]" if name.endswith("[]") else ""
    base = base.strip().removesuffix("[]")
    found = ALIASES.get(base, base)
    if not bracket:
        return found + suffix
    if "time zone" in rest:
        return name
    kind, zone, which = found.partition(" with")
    # A time's precision stands inside its name.
    return f"{kind}({rest.removesuffix('[]')}{zone}{which}{suffix}"


def _text(value: str) -> bytes:
    raw = value.encode()
    return _pack_length(len(raw)) + raw


def _any_text(value: object) -> bytes:
    if isinstance(value, bool):
        return _text("true" if value else "false")
    return _text(value if isinstance(value, str) else str(value))


def _bool(value: bool) -> bytes:
    return b"\x00\x00\x00\x01\x01" if value else b"\x00\x00\x00\x01\x00"


def _bytea(value: bytes) -> bytes:
    return _LENGTH.pack(len(value)) + value


def _uuid(value: uuid.UUID) -> bytes:
    return b"\x00\x00\x00\x10" + value.bytes


def _jsonb(value: msgspec.Raw) -> bytes:
    raw = bytes(value)
    return _LENGTH.pack(len(raw) + 1) + b"\x01" + raw


def _json(value: msgspec.Raw) -> bytes:
    raw = bytes(value)
    return _LENGTH.pack(len(raw)) + raw


def microseconds(value: datetime | int, unit: TimeUnit | None) -> int:
    """Since 2000, as PostgreSQL counts; a time without a zone is UTC."""
    if isinstance(value, datetime):
        return ((value if value.tzinfo else value.replace(tzinfo=UTC)) - _EPOCH) // _MICROSECOND
    if unit is None:
        raise UnfitError("a number is no time unless the column says its `unit`")
    return (value // 1_000 if unit == "ns" else value * _PER_UNIT_US[unit]) - _UNIX_US


def _timestamp(unit: TimeUnit | None) -> Encode:
    def encode(value: datetime | int) -> bytes:
        return _INT8.pack(8, microseconds(value, unit))

    return encode


def _date(unit: TimeUnit | None) -> Encode:
    def encode(value: date | int) -> bytes:
        if isinstance(value, date):
            return _INT4.pack(4, value.toordinal() - _EPOCH_ORDINAL)
        if unit == "days":
            return _INT4.pack(4, value - 10_957)  # 1970 to 2000
        return _INT4.pack(4, microseconds(value, unit) // _PER_UNIT_US["days"])

    return encode


def _numeric(value: Decimal) -> bytes:
    # As text: PostgreSQL reads it faster than Python can take its digits apart.
    return _text(str(value))


def _numeric_name(value: Decimal) -> str:
    return str(value.normalize(_EXACTLY)) if value else "0"


def _time_name(encode: Encode) -> Callable[[Any], str]:
    """However it is written: the number that PostgreSQL stores."""
    return lambda value: str(int.from_bytes(encode(value)[4:], "big", signed=True))


_PLAIN: dict[str, Codec] = {
    "smallint": Codec(annotation=int, encode=partial(_INT2.pack, 2), staged="smallint"),
    "integer": Codec(annotation=int, encode=partial(_INT4.pack, 4), staged="integer"),
    "bigint": Codec(annotation=int, encode=partial(_INT8.pack, 8), staged="bigint"),
    "real": Codec(annotation=float, encode=partial(_FLOAT4.pack, 4), staged="real"),
    "double precision": Codec(annotation=float, encode=partial(_FLOAT8.pack, 8), staged="double precision"),
    "boolean": Codec(annotation=bool, encode=_bool, staged="boolean"),
    "text": Codec(annotation=str, encode=_text, staged="text", is_text=True),
    "numeric": Codec(annotation=Decimal, encode=_numeric, staged="text", cast="{0}::numeric", name=_numeric_name),
    "uuid": Codec(annotation=uuid.UUID, encode=_uuid, staged="uuid"),
    "bytea": Codec(annotation=bytes, encode=_bytea, staged="bytea"),
    "jsonb": Codec(annotation=msgspec.Raw, encode=_jsonb, staged="jsonb", is_raw=True),
    "json": Codec(annotation=msgspec.Raw, encode=_json, staged="json", is_raw=True),
}


def is_timestamp(type_name: str) -> bool:
    return TIMESTAMP.fullmatch(type_name) is not None


def codec(type_name: str, unit: TimeUnit | None = None, base_of_domain: str | None = None) -> Codec:
    """`type_name` as format_type() gives it."""
    base = type_name.partition("(")[0]
    if type_name in _PLAIN:
        return _PLAIN[type_name]
    if is_timestamp(type_name):
        to_time = _timestamp(unit)
        return Codec(annotation=datetime | int, encode=to_time, staged=type_name, name=_time_name(to_time))
    if type_name == "date":
        to_date = _date(unit)
        return Codec(annotation=date | int, encode=to_date, staged="date", name=_time_name(to_date))
    if type_name.endswith("[]"):
        to = f"{_cast_to(type_name.removesuffix('[]'))}[]"
        cast = f"CASE WHEN {{0}} IS NULL THEN NULL ELSE ARRAY(SELECT jsonb_array_elements_text({{0}}))::{to} END"
        return Codec(annotation=msgspec.Raw, encode=_jsonb, staged="jsonb", cast=cast, is_raw=True)
    if base == "character":
        # Its blanks at the end say nothing, also where a key is compared: as text they would.
        return Codec(annotation=str, encode=_text, staged="bpchar", is_text=True, name=lambda value: value.rstrip(" "))
    if base in {"numeric", "character varying"}:
        # The length or precision is the target's to enforce.
        return _PLAIN["numeric" if base == "numeric" else "text"]
    return Codec(
        annotation=str | int | float | bool,
        encode=_any_text,
        staged="text",
        cast=f"{{0}}::{_cast_to(type_name, base_of_domain)}",
    )


def _cast_to(type_name: str, base_of_domain: str | None = None) -> str:
    """For a template: somebody's own type may have any name."""
    name = ANY_LENGTH.get(base_of_domain or type_name.partition("(")[0], type_name)
    return name.replace("{", "{{").replace("}", "}}")
