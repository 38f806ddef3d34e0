"""In which order items (transactions and single records) that span several partitions are released. Pure.

If all that an item has on some partition stands before all that another has there, it is released first. Where items
stand before each other in a circle, that is impossible: then they are released together, once all of them are complete.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Generic, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from oncebox.wire import TopicPartition

DROP_AT = 1_000
NEAR = 16
_NONE = (inf, None)


class Item:
    """What is released as a whole."""

    __slots__ = ("blocked", "follower", "is_complete", "is_joined", "is_released", "previous", "rank", "spans")

    def __init__(self, rank: int) -> None:
        # Among items that have to be released together, the lowest rank goes first.
        self.rank = rank
        # By partition: its first offset there, and its last.
        self.spans: Mapping[TopicPartition, tuple[int, int]] = {}
        # Released before it, whatever the partitions say; and the one that waits for it in this way.
        self.previous: Self | None = None
        self.follower: Self | None = None
        # On how many partitions something stands before it; and one more for `previous`.
        self.blocked = 0
        self.is_complete = False
        self.is_released = False
        # It and the one released before it stand in a circle: who applies them one by one shows a state that never was.
        self.is_joined = False

    def __lt__(self, other: Item) -> bool:
        return self.rank < other.rank


ItemT = TypeVar("ItemT", bound=Item)


class _Sorted(Generic[ItemT]):
    """Items by an offset. Those released are dropped from the front now and then."""

    __slots__ = ("entries", "gone")

    def __init__(self) -> None:
        self.entries: list[tuple[int, ItemT]] = []
        self.gone = 0

    def add(self, offset: int, item: ItemT) -> int:
        entries, entry = self.entries, (offset, item)
        index = len(entries)
        if not index or entries[-1] < entry:
            entries.append(entry)
            return index
        # Most come almost in order: their place is near the end.
        nearest = max(self.gone, index - NEAR)
        while index > nearest and entry < entries[index - 1]:
            index -= 1
        if index == nearest:
            index = bisect_right(entries, entry, lo=self.gone)
        entries.insert(index, entry)
        return index

    def lowest(self) -> tuple[float, ItemT | None]:
        entries, gone = self.entries, self.gone
        while gone < len(entries):
            entry = entries[gone]
            if not entry[1].is_released:
                self.gone = gone
                return entry
            gone += 1
        self.gone = gone
        return _NONE

    def drop(self) -> int:
        """How many entries have been dropped."""
        if self.gone < DROP_AT or self.gone * 2 < len(self.entries):
            return 0
        dropped, self.gone = self.gone, 0
        del self.entries[:dropped]
        return dropped


class Line(Generic[ItemT]):
    """One partition: what stands there and is not released. Nothing stands before what begins at or below its limit."""

    __slots__ = ("_by_first", "_by_last", "_open", "read_to", "undetermined_first")

    def __init__(self) -> None:
        # Everything below has been read.
        self.read_to = 0
        # The first record that may yet turn out to belong to an item that is not known.
        self.undetermined_first: float = inf
        self._by_first: _Sorted[ItemT] = _Sorted()
        self._by_last: _Sorted[ItemT] = _Sorted()
        # As many of those by first begin at or below the limit.
        self._open = 0

    def head(self) -> ItemT | None:
        """The first to be over, which sets the limit; None where an undetermined record does."""
        last, item = self._by_last.lowest()
        return item if last <= self.undetermined_first else None

    def limit(self) -> float:
        return min(self._by_last.lowest()[0], self.undetermined_first)

    def before(self, offset: int) -> Iterator[ItemT]:
        """Not released, and wholly below this offset."""
        for index in range(self._by_last.gone, len(self._by_last.entries)):
            last, item = self._by_last.entries[index]
            if last >= offset:
                return
            if not item.is_released:
                yield item

    def below(self, offset: int) -> Iterator[ItemT | None]:
        """Not released, and with something below this offset. None: more of that may yet come."""
        if min(self.read_to, self.undetermined_first) < offset:
            yield None
        for index in range(self._by_first.gone, len(self._by_first.entries)):
            first, item = self._by_first.entries[index]
            if first >= offset:
                return
            if not item.is_released:
                yield item

    def add(self, item: ItemT, first: int, last: int) -> bool:
        """Whether others may be affected: then refresh() is due."""
        self._by_last.add(last, item)
        at = self._by_first.add(first, item)
        # What begins behind all others ends there, too: most do, and change nothing for others.
        is_last = at == len(self._by_first.entries) - 1
        if at < self._open or (is_last and at == self._open and first <= self.limit()):
            self._open += 1
        else:
            item.blocked += 1
        return not is_last

    def refresh(self) -> list[ItemT]:
        """After any change: who is no longer blocked on any partition."""
        limit = self.limit()
        entries, now_open = self._by_first.entries, self._open
        free = []
        while now_open < len(entries) and entries[now_open][0] <= limit:
            item = entries[now_open][1]
            now_open += 1
            item.blocked -= 1
            if not item.blocked:
                free.append(item)
        while now_open and entries[now_open - 1][0] > limit:
            now_open -= 1
            entries[now_open][1].blocked += 1
        self._open = now_open
        if self._by_last.gone >= DROP_AT:
            self._by_last.drop()
            self._by_first.lowest()
            self._open -= self._by_first.drop()
        return free


class Order(Generic[ItemT]):
    def __init__(self, lines: Mapping[TopicPartition, Line[ItemT]]) -> None:
        self._lines = lines
        self._free: deque[ItemT] = deque()
        # By partition: what it has to wait for, and what stands there.
        self._gates: dict[TopicPartition, tuple[Mapping[TopicPartition, int], set[ItemT]]] = {}

    def hold_back(self, where: TopicPartition, ends: Mapping[TopicPartition, int]) -> None:
        """Releases what stands on this partition after all that others have below these offsets."""
        self._gates[where] = (ends, set())

    @property
    def has_gates(self) -> bool:
        return bool(self._gates)

    def held_back_by(self) -> Iterator[TopicPartition]:
        """The partitions that have to be read on before others are released."""
        for ends, _ in self._gates.values():
            yield from (where for where, end in ends.items() if self._lines[where].read_to < end)

    def add(self, item: ItemT, spans: Mapping[TopicPartition, tuple[int, int]], previous: ItemT | None = None) -> None:
        """Once all its spans are known."""
        item.spans = spans
        if previous is not None and not previous.is_released:
            item.previous, previous.follower = previous, item
            item.blocked += 1
        if self._gates:
            for where in self._gates.keys() & spans.keys():
                self._gates[where][1].add(item)
                item.blocked += 1

    def begin(self, item: ItemT, where: TopicPartition) -> None:
        """To be told before anything of it on this partition is said to be read. What stands behind everything that
        has been read is in nobody's way yet, and has no place in the line: there may be very many.
        """
        line = self._lines[where]
        if line.add(item, *item.spans[where]):
            self._free += line.refresh()

    def complete(self, item: ItemT) -> None:
        item.is_complete = True
        self._free.append(item)

    def determined(self, where: TopicPartition, first: int | None) -> None:
        """The partition's first undetermined record has changed."""
        line = self._lines[where]
        line.undetermined_first = inf if first is None else first
        self._free += line.refresh()

    def release(self) -> Iterator[ItemT]:
        """What can be released now."""
        while True:
            while self._free:
                item = self._free.popleft()
                if item.is_complete and not item.blocked and not item.is_released:
                    self._release(item)
                    yield item
            if self._gates and self._open_gates():
                continue
            circle = self._circle()
            if not circle:
                return
            for place, item in enumerate(circle):
                item.is_joined = place > 0
                self._release(item)
                yield item

    def _release(self, item: ItemT) -> None:
        item.is_released = True
        if item.follower is not None:
            item.follower.previous = None
            item.follower.blocked -= 1
            self._free.append(item.follower)
            item.follower = None
        for where in item.spans:
            if free := self._lines[where].refresh():
                self._free += free

    def _open_gates(self) -> bool:
        """Whether something has no longer to wait: nothing comes before it, or nothing but itself."""
        free: list[ItemT] = []
        for where, (ends, items) in list(self._gates.items()):
            # Two of each are enough to know.
            below = {other for old, end in ends.items() for other in islice(self._lines[old].below(end), 2)}
            if not below:
                del self._gates[where]
                free += sorted(items)
            elif len(below) == 1 and below <= items:
                free += items & below
                items.difference_update(below)
        for item in free:
            item.blocked -= 1
        self._free += free
        return bool(free)

    # --- circles ----------------------------------------------------------------------------------------------------

    def _circle(self) -> list[ItemT]:
        """Complete items that only wait for each other, in the order to release them."""
        tried: set[ItemT] = set()
        for line in self._lines.values():
            item = line.head()
            path: set[ItemT] = set()
            # From each to one that it waits for: only where that never ends there is a circle.
            while item is not None and item.is_complete and item not in tried and item not in path:
                path.add(item)
                item = next(self.blockers(item, heads=True), None)
            if item is not None and item in path:
                closure = self._closure(item)
                if closure:
                    return self._sorted(closure)
            tried |= path
        return []

    def blockers(self, item: ItemT, *, heads: bool = False) -> Iterator[ItemT | None]:
        """What goes before it: all of that, or one for each reason. None: a record that is not determined."""
        if item.previous is not None:
            yield item.previous
        for where, (first, _) in item.spans.items():
            line = self._lines[where]
            for old, end in self._gates[where][0].items() if where in self._gates else ():
                held = (other for other in self._lines[old].below(end) if other is not item)
                yield from islice(held, 1) if heads else held
            if line.limit() >= first:
                continue
            if heads:
                yield line.head()
            else:
                if line.undetermined_first < first:
                    yield None
                yield from line.before(first)

    def _closure(self, item: ItemT) -> set[ItemT]:
        """It and all that goes before it; empty while something of that is not complete."""
        found = {item}
        stack = [self.blockers(item)]
        while stack:
            for blocker in stack[-1]:
                if blocker is None or not blocker.is_complete:
                    return set()
                if blocker not in found:
                    found.add(blocker)
                    # The first of those before it is the one that others wait for as well: look there next.
                    stack.append(self.blockers(blocker))
                    break
            else:
                stack.pop()
        return found

    def _sorted(self, together: set[ItemT]) -> list[ItemT]:
        """Each after those that go before it, as far as there are no circles."""
        before = {item: {other for other in self.blockers(item) if other is not None} for item in together}
        left = set(together)
        found: list[ItemT] = []
        while left:
            free = sorted(item for item in left if not before[item] & left)
            if not free:
                # Of all circles, one that nothing outside of it goes before: it has the smallest closure.
                free = [min(left, key=lambda item: (len(_reached(item, before, left)), item.rank))]
            found += free
            left.difference_update(free)
        return found


def _reached(item: ItemT, before: Mapping[ItemT, set[ItemT]], among: set[ItemT]) -> set[ItemT]:
    found = {item}
    stack = [item]
    while stack:
        for other in before[stack.pop()]:
            if other in among and other not in found:
                found.add(other)
                stack.append(other)
    return found
