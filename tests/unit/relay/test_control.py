"""Where a position is after it was moved forward: nothing that is applied is applied again."""

from __future__ import annotations

import pytest

from relay.control import _forward


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (5, (5, "{[8,10),[10,12),[20,30)}")),
        (8, (12, "{[20,30)}")),
        (9, (12, "{[20,30)}")),
        (12, (12, "{[20,30)}")),
        (29, (30, "{}")),
        (30, (30, "{}")),
    ],
)
def test_forward(target: int, expected: tuple[int, str]):
    assert _forward(target, [[8, 10], [10, 12], [20, 30]]) == expected
