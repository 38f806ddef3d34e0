"""Sets of offsets as ascending, disjoint (first, next) ranges; and ends of partitions."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Ranges:
    __slots__ = ("_firsts", "_nexts")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._nexts: list[int] = []
        for first, after in ranges:
            self.add(first, after)

    def __bool__(self) -> bool:
        return bool(self._firsts)

    def __contains__(self, offset: int) -> bool:
        index = bisect_right(self._firsts, offset) - 1
        return index >= 0 and offset < self._nexts[index]

    def add(self, first: int, after: int) -> None:
        low = bisect_left(self._nexts, first)
        high = bisect_right(self._firsts, after)
        if low < high:
            first = min(first, self._firsts[low])
            after = max(after, self._nexts[high - 1])
        self._firsts[low:high] = [first]
        self._nexts[low:high] = [after]

    def drop_below(self, offset: int) -> None:
        """Forgets what lies wholly below."""
        gone = bisect_right(self._nexts, offset)
        del self._firsts[:gone]
        del self._nexts[:gone]

    def above(self, offset: int) -> tuple[tuple[int, int], ...]:
        """What lies above, cut at the offset."""
        pairs = zip(self._firsts, self._nexts, strict=True)
        return tuple((max(first, offset), after) for first, after in pairs if after > offset)


def lower_ends(ends: Mapping[int, int] | None, again: Mapping[int, int]) -> Mapping[int, int]:
    """Of ends that were asked for again: what was acknowledged before the first time stands before both."""
    return again if ends is None else {index: min(end, again[index]) for index, end in ends.items()}
