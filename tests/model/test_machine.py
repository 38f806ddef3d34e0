"""The core against a naive model, with faults: see world.py for what is checked, moves.py for what can happen."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.machine import Machine, walks

BLOCK = 250


def test_core_agrees_with_the_naive_model() -> None:
    """Found faults are shrunk to the shortest way there."""
    run_state_machine_as_test(Machine)


@pytest.mark.parametrize("first", range(0, 6 * BLOCK, BLOCK))
def test_seeded_walks(first: int) -> None:
    walks(range(first, first + BLOCK))


@pytest.mark.long
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("turn", range(10))
def test_core_agrees_with_the_naive_model_for_long(turn: int) -> None:
    """In turns: what Hypothesis remembers of one run, to avoid repeating itself, fills the memory."""
    run_state_machine_as_test(Machine, settings=settings.get_profile("long"))


@pytest.mark.long
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("first", range(6 * BLOCK, 100_000, 20 * BLOCK))
def test_seeded_walks_for_long(first: int) -> None:
    walks(range(first, first + 20 * BLOCK))
