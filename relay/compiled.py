"""Functions that make one row, written for the columns of one table.

The code holds numbers and our own names only, never a name of the user's. What neighbours of fixed size need is packed
by one call; the others are encoded one by one. A row with a null is not for it; a value that does not fit raises.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relay.encoding import Codec

FIXED = {
    "smallint": ("h", 2),
    "integer": ("i", 4),
    "bigint": ("q", 8),
    "real": ("f", 4),
    "double precision": ("d", 8),
    "boolean": ("?", 1),
}

Row = Callable[[Sequence[Any]], bytes]
# From a record's value, source and offset: the row's key, and its bytes with the guard's columns. None: this value has
# to go the long way, where everything is looked at and every fault is told.
Quick = Callable[[bytes, int, int], "tuple[tuple[Any, ...], bytes] | None"]


def compile_row(codecs: Sequence[Codec], field_count: int) -> Row:
    """`field_count` is what the row's header says: fields may be added behind."""
    scope: dict[str, Any] = {}
    lines, row = _pack(codecs, field_count, scope)
    made: Row = _compiled("values", [f"{_names(codecs)}, = values", *lines, f"return {row}"], scope)
    return made


def compile_quick(
    codecs: Sequence[Codec], *, key_at: Sequence[int], depth: int, guard: bool, given: Mapping[str, Any]
) -> Quick:
    """For documents whose fields are the columns, `depth` documents deep. `given` are decode, astuple, UNFIT, NUL and
    record_bytes_max.
    """
    scope = dict(given)
    lines, row = _pack(codecs, len(codecs) + (2 if guard else 0), scope, guard=guard)
    inner = [
        # (To look for a single byte first takes half the time.)
        r"if len(value) > record_bytes_max or b'\\' in value and NUL in value: return None",
        "document = decode(value)",
        *(["document = document.f0", "if document is None: return None"] * depth),
        f"{_names(codecs)}, = values = astuple(document)",
        "if None in values: return None",
        *lines,
        f"return ({''.join(f'v{at}, ' for at in key_at)}), {row}",
    ]
    made: Quick = _compiled(
        "value, source, offset", ["try:", *(f"    {line}" for line in inner), "except UNFIT: return None"], scope
    )
    return made


def _names(codecs: Sequence[Codec]) -> str:
    return ", ".join(f"v{at}" for at in range(len(codecs)))


def _compiled(arguments: str, lines: Sequence[str], scope: dict[str, Any]) -> Any:
    body = "\n".join(f"    {line}" for line in lines)
    exec(f"def made({arguments}):\n{body}", scope)  # noqa: S102 - see above
    return scope["made"]


def _pack(
    codecs: Sequence[Codec], field_count: int, scope: dict[str, Any], *, guard: bool = False
) -> tuple[list[str], str]:
    """The statements that come first, and the expression for the row of v0, v1, … (and source and offset)."""
    scope |= {f"e{at}": each.encode for at, each in enumerate(codecs)}
    lines: list[str] = []
    pieces: list[str] = []
    layout, given = "!h", [str(field_count)]

    def close() -> None:
        nonlocal layout, given
        if given:
            scope[f"p{len(pieces)}"] = struct.Struct(layout).pack
            pieces.append(f"p{len(pieces)}({', '.join(given)})")
        layout, given = "!", []

    for at, each in enumerate(codecs):
        if each.is_text:
            lines.append(f"b{at} = v{at}.encode()")
            layout += "i"
            given.append(f"len(b{at})")
            close()
            pieces.append(f"b{at}")
        elif each.staged in FIXED and each.cast is None:
            letter, size = FIXED[each.staged]
            layout += f"i{letter}"
            given += [str(size), f"v{at}"]
        else:
            close()
            pieces.append(f"e{at}(v{at})")
    if guard:
        layout += "iiiq"
        given += ["4", "source", "8", "offset"]
    close()
    return lines, " + ".join(pieces)
