"""JSON documents as PostgreSQL's jsonb writes them: keys by length and bytes, the last of equal keys, plain numbers."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
SPACE = 0x20


def jsonb_at(document: str | None, path: list[str]) -> str | None:
    """What stands at the path; None where there is nothing or null, and where the document is no JSON."""
    if document is None:
        return None
    try:
        value = json.loads(document, parse_float=Decimal, parse_int=Decimal, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    for name in path:
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return None if value is None else jsonb_text(value)


def jsonb_text(value: Any) -> str:
    """`value` as json.loads() makes it, with numbers as Decimal."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, Decimal):
        text = format(value, "f")
        return text.removeprefix("-") if value.is_zero() else text
    if isinstance(value, list):
        return "[" + ", ".join(jsonb_text(each) for each in value) + "]"
    ordered = sorted(value.items(), key=lambda item: (len(item[0].encode()), item[0].encode()))
    return "{" + ", ".join(f"{_quoted(name)}: {jsonb_text(each)}" for name, each in ordered) + "}"


def _quoted(text: str) -> str:
    escaped = "".join(
        ESCAPES.get(letter) or (f"\\u{ord(letter):04x}" if ord(letter) < SPACE else letter) for letter in text
    )
    return f'"{escaped}"'


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
