"""Which type a column needs for a JSON value. Pure. Only ever wider: nothing that was stored is lost."""

from __future__ import annotations

from typing import Any

import msgspec

from relay.encoding import UNFIT
from relay.types import BadRecordError, Format

BIGINT = range(-(1 << 63), 1 << 63)
INTEGERS = {"smallint": range(-(1 << 15), 1 << 15), "integer": range(-(1 << 31), 1 << 31), "bigint": BIGINT}


def fields_of(value: bytes, format_name: Format) -> dict[str, Any]:
    """The row's fields; empty where the record is not even that."""
    try:
        document = msgspec.json.decode(value)
    except UNFIT:
        return {}
    if format_name == "debezium" and isinstance(document, dict):
        document = document.get("payload") or document
        document = document.get("after") if isinstance(document, dict) else None
    return document if isinstance(document, dict) else {}


def type_for(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "bigint" if value in BIGINT else "numeric"
    if isinstance(value, float):
        return "double precision"
    # null says nothing about what comes later: jsonb takes anything.
    return "text" if isinstance(value, str) else "jsonb"


def wider_type(type_name: str, value: Any) -> str | None:
    """A type that takes the value and all that the column holds; None: this one does, or none would."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if type_name in INTEGERS:
        if isinstance(value, float):
            return "numeric"
        if value in INTEGERS[type_name]:
            return None
        return "bigint" if value in BIGINT else "numeric"
    if type_name == "real" and abs(value) > 3.4e38:
        return "double precision"
    return None


def checked_name(name: str) -> str:
    """A field's name as a column's: what PostgreSQL would cut or refuse, or we could not read, is an error instead."""
    if not is_readable(name) or not 1 <= len(name.encode(errors="replace")) <= 63:
        raise BadRecordError(
            f"the field {name[:80]!r} cannot be a column: 1 to 63 bytes, no quote, backslash or control character"
        )
    return name


def is_readable(name: str) -> bool:
    """The decoder knows no names that JSON has to escape."""
    return name.isprintable() and not set(name) & {'"', "\\"}
