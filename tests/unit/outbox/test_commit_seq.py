"""The rows of many transactions come slice by slice; each piece is of one transaction, and only its last has an end."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from relay.outbox.commit_seq import in_pieces
from relay.outbox.plan import Piece


def row(number: int, place: int) -> tuple[Any, ...]:
    return (b"%d" % number, b"t", b"k", None, None, None, place)


ROWS = [row(1, 2), row(2, 2), row(3, 2), row(4, 3), row(5, 5), row(6, 5)]


@pytest.mark.parametrize("size", range(1, 8))
async def test_however_they_are_sliced_the_transactions_are_the_same(size: int):
    """The first, the fourth and the last have no rows any more."""

    async def slices() -> AsyncIterator[list[Any]]:
        for first in range(0, len(ROWS), size):
            yield ROWS[first : first + size]

    wholes = [Piece(position=10 * place, commit_time_us=0, rows=[], is_published=False) for place in range(1, 7)]
    found: dict[int, list[bytes | None]] = {}
    ended: list[int] = []
    async for piece in in_pieces(wholes, slices()):
        assert piece.position not in ended
        assert len(piece.rows) <= size
        found.setdefault(piece.position, []).extend(each.id for each in piece.rows)
        if piece.end is not None:
            assert piece.end == piece.position
            ended.append(piece.position)
    assert ended == [10, 20, 30, 40, 50, 60]
    assert found == {10: [], 20: [b"1", b"2", b"3"], 30: [b"4"], 40: [], 50: [b"5", b"6"], 60: []}
