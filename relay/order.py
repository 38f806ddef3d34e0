"""Which transactions of a batch must not be committed yet. Pure."""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from oncebox.reader import PartitionPosition, Record
    from oncebox.wire import TopicPartition
    from relay.plan import Hold, Piece

_offset = itemgetter(2)


def overtaken(
    pieces: Iterable[Piece],
    positions: Mapping[TopicPartition, PartitionPosition],
    waiting: Callable[[TopicPartition, int], Iterable[Record]],
    first_unloaded: Callable[[TopicPartition, int], int | None],
    rows_of: Callable[[Record], Collection[Hold]],
) -> tuple[TopicPartition, int] | None:
    """A record that has been read and is not in the batch, because its transaction is not whole yet, while the batch
    has a later one of its rows: they have to become visible together. Of what was unloaded nobody knows which rows
    it is about: it may be any.
    """
    for where, at in positions.items():
        if not at.done:
            continue  # nothing of it was handed out ahead of something else
        first_unknown = first_unloaded(where, at.done[-1][1])
        firsts: dict[Hold, int] = {}
        for record in waiting(where, at.done[-1][1]):
            for row in rows_of(record):
                firsts[row] = min(record.offset, firsts.get(row, record.offset))
        lowest = min([*firsts.values(), *([] if first_unknown is None else [first_unknown])], default=None)
        if lowest is None:
            continue
        for piece in pieces:
            if piece.unloaded.get(where, lowest) > lowest:
                return where, lowest
            records = piece.records.get(where, ())
            # Few stand behind one that waits: only of those it has to be known which rows they are about.
            for record in islice(records, bisect_right(records, lowest, key=_offset), None):
                if first_unknown is not None and first_unknown < record.offset:
                    return where, first_unknown
                for row in rows_of(record):
                    if firsts.get(row, record.offset) < record.offset:
                        return where, firsts[row]
    return None


def is_done(at: PartitionPosition, offset: int) -> bool:
    """Whether the record at this offset has been handed out."""
    return offset < at.next_offset or any(first <= offset < after for first, after in at.done)
