"""`oncebox sim`: the whole coordinator simulated, seed by seed. The simulator is in the package `proof`, which only a
checkout has.
"""

import sys
import time
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from oncebox.cli import new_app
from oncebox.cli.bar import Move, bar
from oncebox.cli.checkout import needs_checkout

if TYPE_CHECKING:
    from proof.sim.run import Outcome

app = new_app()

TELL_EVERY_S = 5.0


@app.command(
    epilog="Examples: oncebox sim --seeds 200 | oncebox sim --seed 17 --history run.txt | oncebox sim --every-step. "
    "Exit code 1: something was found, or a planted bug was not"
)
def sim(
    seeds: int | None = typer.Option(
        None, min=1, help="How many seeds: 1,000, or one with --seed or --every-step, which makes many runs of each."
    ),
    seed: int | None = typer.Option(None, min=0, help="The first seed."),
    every_step: bool = typer.Option(
        False, "--every-step", help="No fault but one: the leader crashes after its 1st step, its 2nd, and so on."
    ),
    planted: str = typer.Option("", help="Plant this bug first, and stop when it is caught; a wrong name lists them."),
    history: Path | None = typer.Option(None, help="Write the last run's events here, one per line.", dir_okay=False),
) -> None:
    """Run the real coordinator on simulated brokers and clients, with faults by seed, and judge what it did."""
    needs_checkout("sim")
    from proof.sim.planted import BUGS
    from proof.sim.planted import planted as plant
    from proof.sim.run import run
    from proof.sim.steps import crash_at_every_step

    if planted and planted not in BUGS:
        listed = "; ".join(f"{name}: {bug.what}" for name, bug in BUGS.items())
        raise typer.BadParameter(f"no bug {planted!r}; there are {listed}")
    first = seed or 0
    count = seeds or (1_000 if seed is None and not every_step else 1)
    chosen = range(first, first + count)
    outcomes = chain.from_iterable(map(crash_at_every_step, chosen)) if every_step else map(run, chosen)
    # How many steps a leader makes is known at the end.
    counting = nullcontext() if every_step else bar("simulating", count, "seeds")
    with plant(planted) if planted else nullcontext(), counting as move:
        failed = _judge(outcomes, BUGS[planted].caught_by if planted else frozenset(), history, move)
    if failed != bool(planted):
        raise typer.Exit(1)


def _judge(outcomes: "Iterable[Outcome]", expected: AbstractSet[str], history: Path | None, move: Move | None) -> bool:
    """Whether anything was found; with a planted bug: whether it was caught, and then no further."""
    start_s = told_s = time.monotonic()
    runs = failures = 0
    caught: set[str] = set()
    for outcome in outcomes:
        runs += 1
        if history:
            history.write_text("".join(f"{event}\n" for event in outcome.history))
        if outcome.findings:
            failures += 1
            _tell_failure(outcome)
            caught = {finding.check for finding in outcome.findings if finding.check in expected}
        if caught:
            break
        if move:
            move(runs)
        elif time.monotonic() - told_s > TELL_EVERY_S:
            told_s = time.monotonic()
            rate = runs / (told_s - start_s)
            print(f"{runs} runs, {failures} failed, {rate:.0f}/s", file=sys.stderr, flush=True)
    what = f"; caught by: {', '.join(sorted(caught))}" if caught else ""
    print(f"{runs} runs in {time.monotonic() - start_s:.1f} s, {failures} failed{what}")
    return bool(caught) if expected else bool(failures)


def _tell_failure(outcome: "Outcome") -> None:
    plan = outcome.plan
    step = f", crash at step {plan.crash_at_step}" if plan.crash_at_step else ""
    print(f"seed {plan.seed}{step}: {', '.join(sorted(fault.value for fault in plan.faults)) or 'no faults'}")
    for finding in outcome.findings:
        print(f"  {finding.check}: {finding.text}")
