"""Each planted bug is caught by the check that is there for it, with the seeds that every run of the tests makes."""

from collections.abc import Iterator
from itertools import islice

import pytest

from proof.checker.checks import CHECKS
from proof.sim.planted import BUGS, planted
from proof.sim.run import run
from tests.sim.test_seeds import SEEDS

# That we know from other systems.
REGRESSIONS = {f"R{number}" for number in range(1, 25)}


def caught(name: str) -> Iterator[int]:
    """Seeds that catch it."""
    with planted(name):
        for seed in range(SEEDS):
            if any(finding.check in BUGS[name].caught_by for finding in run(seed).findings):
                yield seed


@pytest.mark.parametrize("name", BUGS)
def test_it_is_caught(name: str) -> None:
    assert list(islice(caught(name), 1)), f"{name}, {BUGS[name].what}, is not caught by {set(BUGS[name].caught_by)}"


def test_every_regression_is_planted() -> None:
    assert set(BUGS) >= REGRESSIONS


def test_they_are_to_be_caught_by_checks_that_exist() -> None:
    assert {check for bug in BUGS.values() for check in bug.caught_by} <= set(CHECKS)


def test_nothing_stays_planted() -> None:
    for name in BUGS:
        with planted(name):
            pass
    assert not run(0).findings
