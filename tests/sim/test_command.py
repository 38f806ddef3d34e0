"""`oncebox sim` as it is typed."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from oncebox.cli.sim import app
from proof.checker.checks import CHECKS
from proof.sim import steps
from proof.sim.plan import Fault
from proof.sim.planted import BUGS


def sim(*args: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", "import oncebox.cli; oncebox.cli.main()", "sim", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_seeds_without_findings() -> None:
    done = sim("--seeds", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("3 runs in ")
    assert done.stdout.endswith(" s, 0 failed\n")


def test_one_seed_and_its_history(tmp_path: Path) -> None:
    history = tmp_path / "history"
    done = sim("--seed", "5", "--history", str(history))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("1 runs in ")
    assert history.read_text().splitlines()[-1] == "Finished()"


def test_every_step_of_as_many_seeds_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader makes hundreds of steps: here three in each run, of which no more is asked than their seeds."""

    def three_steps(seed: int) -> list[Any]:
        asked.append(seed)
        return [SimpleNamespace(findings=(), history=[])] * 3

    asked: list[int] = []
    monkeypatch.setattr(steps, "crash_at_every_step", three_steps)
    typed = CliRunner()
    done = typed.invoke(app, ["--every-step", "--seed", "7", "--seeds", "2"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("6 runs in ")
    assert typed.invoke(app, ["--every-step"]).output.startswith("3 runs in ")
    assert asked == [7, 8, 0]


def test_a_planted_bug_is_told_with_its_seed_and_faults() -> None:
    done = sim("--planted", "always-commit")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed " in done.stdout
    assert "\n  aborted read: " in done.stdout
    assert done.stdout.splitlines()[-1].endswith("caught by: aborted read, decision divergence")


def test_only_the_checks_that_caught_it_are_told() -> None:
    """R1 may be caught by three checks, and makes others find something as well. Which do depends on the seed."""
    *told, last = sim("--planted", "R1").stdout.splitlines()
    found = {line.strip().partition(": ")[0] for line in told if line.startswith("  ")}
    caught = found & BUGS["R1"].caught_by
    assert caught
    assert found - caught
    assert last.endswith(f"; caught by: {', '.join(sorted(caught))}")


def test_the_guide_lists_all_faults_checks_and_bugs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sim.md").read_text()
    for fault in Fault:
        assert fault.value in page
    for name, bug in BUGS.items():
        assert f"| `{name}` | {bug.what} | {', '.join(sorted(bug.caught_by))} |" in page
    for check in CHECKS:
        assert check in page


def test_an_unknown_bug_lists_the_known_ones() -> None:
    done = sim("--planted", "R0")
    assert done.returncode == 2
    assert "R13: a sequence is used again after an unknown append" in done.stderr
