"""The coordinator under faults, seed by seed: safety while they last, then everything heals and comes to its end."""

import pytest

from proof.sim.run import Outcome, run
from proof.sim.steps import crash_at_every_step

SEEDS = 1_000
SEEDS_LONG = 10_000
BLOCK = 100


def told(outcome: Outcome) -> str:
    faults = ", ".join(sorted(fault.value for fault in outcome.plan.faults))
    findings = "".join(f"\n    {finding.check}: {finding.text[:500]}" for finding in outcome.findings)
    step = f", crash at step {outcome.plan.crash_at_step}" if outcome.plan.crash_at_step else ""
    return f"seed {outcome.plan.seed}{step} ({faults}):{findings}"


def failures(first: int, count: int) -> list[str]:
    return [told(outcome) for outcome in map(run, range(first, first + count)) if outcome.findings]


@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_nothing_is_found(first: int) -> None:
    found = failures(first, BLOCK)
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("first", range(SEEDS, SEEDS + SEEDS_LONG, 1_000))
def test_nothing_is_found_in_many_more(first: int) -> None:
    found = failures(first, 1_000)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("seed", range(3))
def test_a_crash_after_any_step_is_survived(seed: int) -> None:
    """Every fifth step, another fifth for each seed; `test_..._every_step` makes them all."""
    runs = list(crash_at_every_step(seed, first=1 + seed, stride=5))
    assert len(runs) > 20
    found = [told(outcome) for outcome in runs if outcome.findings]
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("seed", range(10))
def test_a_crash_after_every_step_is_survived(seed: int) -> None:
    found = [told(outcome) for outcome in crash_at_every_step(seed) if outcome.findings]
    assert not found, "\n".join(found)
