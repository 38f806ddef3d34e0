"""`oncebox chaos` as it is typed: real parts are hurt and healed, nothing is found, nothing is left running."""

import json
import re
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from proof.chaos.nemesis import FAULTS, rounds
from proof.chaos.planted import BUGS

ONCEBOX = str(Path(sys.executable).with_name("oncebox"))


# Its first two rounds, four faults, kill the relay that works, PostgreSQL and a coordinator.
SHORT_SEED = 16933


def by_schedule(seed: int, faults: list[str], count: int) -> Counter[str]:
    """The first faults. How many come in the time is up to the machine; which ones is up to the seed."""
    return Counter(islice((step.fault for each in rounds(seed, faults) for step in each.steps), count))


def chaos(folder: Path, *arguments: str, timeout_s: float) -> "subprocess.CompletedProcess[str]":
    command = [ONCEBOX, "chaos", "--keep", str(folder / "kept"), "--json", str(folder / "found.json"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)


def left_running(folder: Path) -> list[str]:
    """Processes that were given a path in this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it has ended meanwhile
        if str(folder) in command:
            found.append(command)
    return found


@pytest.mark.kafka
@pytest.mark.postgres
@pytest.mark.timeout(900)
def test_a_short_run_finds_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    killed = {"kill-coordinator", "kill-relay", "kill-postgres"}
    # A machine that is too busy for the two rounds gets more time.
    if not killed <= short_run(tmp_path / "short", seconds=30):
        assert killed <= short_run(tmp_path / "longer", seconds=150)


def short_run(tmp_path: Path, *, seconds: int) -> set[str]:
    """The faults that there was time for."""
    tmp_path.mkdir()
    faults = ["kill-coordinator", "kill-relay", "kill-client", "zombie-client", "kill-postgres"]
    given = ["--seconds", str(seconds), "--seed", str(SHORT_SEED), "--faults", ",".join(faults)]
    done = chaos(tmp_path, *given, timeout_s=430)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("anomalies         0\n")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["finished"]
    assert found["unknown"] == 0
    assert found["committed"] > 10
    assert found["markers"]["commit"] > found["committed"], "most of them on several partitions"
    assert found["markers"]["abort"] > 0
    assert found["log"]["left"] < found["log"]["written"], "compacted"
    assert found["faults"] == by_schedule(SHORT_SEED, faults, sum(found["faults"].values()))
    for fault in found["faults"]:
        assert re.search(rf"^ *[0-9.]+ s  {fault}: \S.* \([0-9.]+ s\)$", done.stdout, re.MULTILINE)
    assert left_running(tmp_path) == []
    again = subprocess.run([ONCEBOX, "check", "kept/history.jsonl"], cwd=tmp_path, capture_output=True, check=False)
    assert again.returncode == 0, again.stdout
    return set(found["faults"])


@pytest.mark.long  # each starts three brokers and all services of its own
@pytest.mark.kafka
@pytest.mark.postgres
@pytest.mark.timeout(400)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(tmp_path: Path, bug: str) -> None:
    done = chaos(tmp_path, "--seconds", "40", "--seed", "3", "--planted", bug, timeout_s=380)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{bug}: caught by " in done.stdout.splitlines()[-1]
    found = json.loads((tmp_path / "found.json").read_text())
    assert {each["check"] for each in found["anomalies"]} & BUGS[bug].caught_by


@pytest.mark.long
@pytest.mark.kafka
@pytest.mark.postgres
@pytest.mark.timeout(900)
def test_two_minutes_of_all_faults_by_the_schedule(tmp_path: Path) -> None:
    done = chaos(tmp_path, "--seconds", "120", "--seed", "7", timeout_s=800)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "found.json").read_text())
    found = Counter(told["faults"]) + Counter(told["faults_without_effect"])
    assert found == by_schedule(7, list(FAULTS), found.total())
    assert told["faults"]
    # Only a request can fail to come.
    assert {FAULTS[fault].noun for fault in told["faults_without_effect"]} <= {"request"}


def test_a_wrong_fault_lists_the_right_ones(tmp_path: Path) -> None:
    done = chaos(tmp_path, "--faults", "fire", timeout_s=60)
    assert done.returncode == 2
    assert "there are kill-coordinator" in done.stderr.replace("\n", " ")


def test_a_folder_with_something_in_it_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "mine").touch()
    done = chaos(tmp_path, timeout_s=60)
    assert done.returncode == 1
    assert done.stderr == f"oncebox: {tmp_path}/kept is not empty: name a new folder\n"
