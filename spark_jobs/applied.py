"""What the relay had applied when a plan was made, and what it has by now. Arithmetic only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_jobs.cut import merge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spark_jobs.cut import Range

Applied = dict[int, list["Range"]]  # source → what of it is applied


def overtaken(found: Sequence[int | None] | None, seen: Applied, now: Applied) -> bool:
    """Whether the relay has meanwhile come to a row that was ahead of it. `found`: the record that the row names. The
    guard changes nothing in a row that names this record or a later one: its digest does not tell that it is right now,
    or that a record was passed over for it.
    """
    source, offset = found or (None, None)
    if source is None or offset is None:
        return False  # the guard lets every record over such a row
    before = seen.get(source, [])
    if has(seen, source, offset):
        return False
    return _up_to(offset, before) != _up_to(offset, now.get(source, []))


def is_new(source: int, offset: int, *, seen: Applied, now: Applied) -> bool:
    """Whether the relay has come to this record since the plan."""
    return source in now and not has(seen, source, offset)


def has(applied: Applied, source: int, offset: int) -> bool:
    return any(first <= offset < last for first, last in applied.get(source, []))


def _up_to(offset: int, ranges: Sequence[Range]) -> tuple[Range, ...]:
    clamped = [(first, min(last, offset + 1)) for first, last in ranges]
    return merge([each for each in clamped if each[0] < each[1]])
