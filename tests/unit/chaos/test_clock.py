"""A process's wall clock is set from outside, while it runs."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from proof.chaos.hurting import JUMPS_S
from proof.faults.clock import WallClock

TELLER = """\
import logging, sys, time
from coordinator.steady_clock import SteadyClock
if __name__ == "__main__":
    logging.basicConfig(format="%(created)f", stream=sys.stdout)
    steady = SteadyClock()
    print(sys.argv[1], flush=True)
    for _ in sys.stdin:
        print(time.time(), time.time_ns() / 1e9, steady.now_ms() / 1e3, time.monotonic(), flush=True)
        logging.warning("")
        sys.stdout.flush()
"""


def test_the_clock_of_a_process_jumps_there_and_back(tmp_path: Path) -> None:
    (tmp_path / "teller.py").write_text(TELLER)
    clock = WallClock(tmp_path / "clocks" / "teller")
    root = Path(__file__).parents[3]
    child = subprocess.Popen(
        [sys.executable, *clock.command("teller", "an argument")],
        env={"PYTHONPATH": f"{root}:{tmp_path}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        assert child.stdout.readline() == "an argument\n"
        for offset_s in (0, *JUMPS_S, 0):
            clock.jump(offset_s)
            child.stdin.write("\n")
            child.stdin.flush()
            told, told_ns, steady, monotonic = map(float, child.stdout.readline().split())
            assert told == pytest.approx(time.time() + offset_s, abs=20)
            assert told_ns == pytest.approx(told, abs=20)
            assert steady == pytest.approx(time.time(), abs=20)
            assert monotonic == pytest.approx(time.monotonic(), abs=20)
            assert float(child.stdout.readline()) == pytest.approx(time.time(), abs=20)
        child.stdin.close()
    assert child.returncode == 0


def test_the_time_is_still_wrong_after_a_restart(tmp_path: Path) -> None:
    WallClock(tmp_path / "one").jump(300)
    again = WallClock(tmp_path / "one")
    assert again.path.read_bytes() != WallClock(tmp_path / "other").path.read_bytes()
