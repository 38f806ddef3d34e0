"""Crashes the leader after its first step, its second, its third: every place where a crash can be told apart."""

from collections.abc import Iterator
from dataclasses import replace

from proof.sim.plan import plan
from proof.sim.run import Outcome, run_plan


def crash_at_every_step(seed: int, *, stride: int = 1, first: int = 1) -> Iterator[Outcome]:
    """A small run without other faults, as often as its leader makes steps."""
    calm = replace(plan(seed), faults=frozenset(), log_partitions=1, ids=2, items_per_id=6, safety_s=4.0)
    step = first
    while True:
        outcome = run_plan(replace(calm, crash_at_step=step))
        if not outcome.crashed:
            return
        yield outcome
        step += stride
