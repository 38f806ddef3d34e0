"""What a repair leaves alone because the relay has come to it since the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spark_jobs.applied import overtaken

if TYPE_CHECKING:
    from spark_jobs.cut import Range

SEEN = [(0, 100), (120, 130)]


@pytest.mark.parametrize(
    ("found", "now", "is_overtaken"),
    [
        ([1, 105], [(0, 110), (120, 130)], True),  # the very record
        ([1, 105], [(0, 100), (103, 106), (120, 130)], True),
        ([1, 105], [(0, 104), (120, 130)], True),  # an older one, for which the guard has kept the row
        ([1, 105], [(0, 100), (120, 140)], False),
        ([1, 105], [(0, 90), (120, 130)], True),  # rewound
        ([1, 105], SEEN, False),
        ([1, 99], [(0, 140)], False),  # was applied then: whatever came later would have changed the row
        ([1, 125], [(0, 140)], False),
        ([2, 5], SEEN, False),
        ([None, None], [(0, 140)], False),
        (None, [(0, 140)], False),
    ],
)
def test_a_row_that_was_ahead_of_the_relay(found: list[int | None] | None, now: list[Range], *, is_overtaken: bool):
    assert overtaken(found, {1: SEEN}, {1: now}) is is_overtaken


def test_a_source_that_is_new():
    assert overtaken([2, 5], {1: SEEN}, {1: SEEN, 2: [(0, 6)]})
    assert not overtaken([2, 5], {1: SEEN}, {1: SEEN, 2: [(0, 0)]})
