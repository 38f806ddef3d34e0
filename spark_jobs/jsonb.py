"""JSON documents as PostgreSQL's jsonb writes them: keys by length and bytes, the last of equal keys, plain numbers.
And parts of them as they were written, which is how its json keeps them.
"""

from __future__ import annotations

import json
import re
import sys
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
SPACE = 0x20
BLANKS = re.compile(r"[ \t\n\r]*")
DIGITS_MAX = 131_072  # before the point; jsonb has even fewer behind it
FRAMES = 4_000  # enough for each document that the relay takes: of a thousand levels


def jsonb_at(document: str | None, path: list[str]) -> str | None:
    """What stands at the path; None where there is nothing or null, and where the document is no JSON. (Without a path
    null is a document, too.)
    """
    if document is None:
        return None
    sys.setrecursionlimit(max(sys.getrecursionlimit(), FRAMES))
    try:
        value = json.loads(document, parse_float=_number, parse_int=_number, parse_constant=_refuse)
        for name in path:
            if not isinstance(value, dict):
                return None
            value = value.get(name)
        return None if value is None and path else jsonb_text(value)
    except (ValueError, RecursionError):
        return None


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


def _number(text: str) -> Decimal | str:
    """One that jsonb refuses stays a text: it may stand where nobody asks for it, or in a record that no row is of. Its
    exponent alone may be past what Decimal has, or its digits a gigabyte.
    """
    try:
        number = Decimal(text)
    except ArithmeticError:
        return text
    # Zero's digits are those behind its point.
    digits = min(number.adjusted(), 0) if number.is_zero() else number.adjusted()
    return number if abs(digits) <= DIGITS_MAX else text


def _quoted(text: str) -> str:
    escaped = "".join(
        ESCAPES.get(letter) or (f"\\u{ord(letter):04x}" if ord(letter) < SPACE else letter) for letter in text
    )
    return f'"{escaped}"'


def raw_at(document: str | None, path: Sequence[str]) -> str | None:
    """As jsonb_at(), but as it was written: character by character, without the space around it."""
    if document is None:
        return None
    try:
        first = _after_blanks(document, 0)
        last = _value_end(document, first)
        if _after_blanks(document, last) != len(document):
            return None
        for name in path:
            found = _member(document, first, name)
            if found is None:
                return None
            first, last = found
    except (ValueError, RecursionError):
        return None
    raw = document[first:last]
    return None if raw == "null" else raw


def _member(text: str, at: int, name: str) -> tuple[int, int] | None:
    """From where to where the value of this name stands in the document that begins there; the last of equal names."""
    if text[at] != "{":
        return None
    found = None
    at = _after_blanks(text, at + 1)
    while text[at] != "}":
        each, at = DECODER.raw_decode(text, at)
        first = _after_blanks(text, _after_blanks(text, at) + 1)  # past the colon
        last = _value_end(text, first)
        if each == name:
            found = first, last
        at = _after_blanks(text, last)
        if text[at] == ",":
            at = _after_blanks(text, at + 1)
    return found


def _after_blanks(text: str, at: int) -> int:
    found = BLANKS.match(text, at)
    return found.end() if found else at


def _value_end(text: str, first: int) -> int:
    return DECODER.raw_decode(text, first)[1]


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


DECODER = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=_refuse)
