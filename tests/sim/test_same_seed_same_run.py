"""A seed is a run: today, tomorrow, and on another machine."""

import os
import subprocess
import sys

import pytest

from proof.sim.run import run

PROGRAM = "from proof.sim.run import run; print([run(seed).digest for seed in range(40, 60)])"


@pytest.mark.parametrize("seed", range(20, 40))
def test_the_same_seed_gives_the_same_history(seed: int) -> None:
    first, second = run(seed), run(seed)
    assert first.digest == second.digest
    assert first.virtual_s == second.virtual_s


def test_different_seeds_give_different_histories() -> None:
    assert len({run(seed).digest for seed in range(20)}) == 20


def test_the_order_of_sets_makes_no_difference() -> None:
    """Python's string hashes, and so the order of sets, differ from process to process."""
    digests = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1
