"""Bars of long work, on a pseudo-terminal as a person has it, and none in a pipe."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

SIM = "from oncebox.cli import main; main(['sim', '--seeds', '3'])"
# Two benches that need no broker.
BENCH = """
from oncebox.cli import main
from proof.bench import registry
registry.BENCHES = dict.fromkeys(("first", "second"), "tests.unit.test_bench_command:steady")
main(["bench", "all", "--quick"])
"""
ROOT = Path(__file__).parents[2]
CASES = {
    # Drawn when it begins and ends, whatever comes between.
    "sim": (SIM, "simulating", ["0 of 3 seeds", "3 of 3 seeds"], "3 runs in"),
    "bench": (BENCH, "measuring", ["0 of 2 benches", "2 of 2 benches"], "steady/rate"),
}


def on_terminal(code: str, *, stdout: Path | None = None) -> tuple[str, int]:
    """What a terminal is sent, and the exit code."""
    ours, theirs = pty.openpty()
    with open(stdout or os.devnull, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=theirs,
            stdout=file if stdout else theirs,
            stderr=theirs,
            cwd=ROOT,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
        )
    os.close(theirs)
    seen = b""
    try:
        while piece := os.read(ours, 65536):
            seen += piece
    except OSError:
        pass  # Linux says so that nobody holds the other end any more
    os.close(ours)
    return seen.decode(), process.wait(60)


@pytest.mark.parametrize("name", CASES)
def test_a_terminal_shows_how_far_it_is(name: str):
    code, what, counts, last = CASES[name]
    shown, status = on_terminal(code)
    assert status == 0, shown
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert what in plain
    assert all(count in plain for count in counts)
    assert last in plain


def test_what_goes_to_a_file_stays_there(tmp_path: Path):
    file = tmp_path / "out"
    shown, status = on_terminal(SIM, stdout=file)
    assert status == 0
    assert "3 of 3 seeds" in shown
    assert re.fullmatch(r"3 runs in [\d.]+ s, 0 failed\n", file.read_text())


@pytest.mark.parametrize("name", CASES)
def test_a_pipe_gets_lines(name: str):
    code, what, _, last = CASES[name]
    environment = {**os.environ, "TERM": "xterm"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert last in done.stdout
    assert what not in done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr
