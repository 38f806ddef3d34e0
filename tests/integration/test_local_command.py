"""`oncebox local` from the outside: what it prints, how it ends, and that nothing stays when it has ended."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psycopg
import pytest

from oncebox.local.kafka import metadata_of
from oncebox.local.state import read_state, start_time
from tests.support.kafka import await_partitions
from tests.unit.test_local_process import await_gone

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from oncebox.local import LocalPostgres
    from oncebox.local.state import State

pytestmark = pytest.mark.kafka
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("ONCEBOX_")}
COMMAND = [sys.executable, "-c", "from oncebox.cli import main; main()", "local"]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)


@contextlib.contextmanager
def running(folder: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A run in the foreground, ready."""
    command = [*COMMAND, "up", "--dir", str(folder), *args]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            await_ready(folder, process)
            yield process
        finally:
            process.kill()


def await_ready(folder: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while (state := read_state(folder)) is None or not state.ready:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes(state: State) -> list[tuple[int, str | None]]:
    return [(part.pid, part.started) for part in state.parts if part.pid is not None]


def test_a_detached_run_from_up_to_down(tmp_path: Path):
    folder = ["--dir", str(tmp_path / "it's here")]
    up = run("up", "--detach", *folder)
    assert up.returncode == 0, up.stderr
    assert "Ready:\n  kafka broker 1" in up.stdout

    status = json.loads(run("status", "--json", *folder).stdout)
    assert [(part["name"], part["running"]) for part in status["parts"]] == [
        ("kafka broker 1", True),
        ("postgres", True),
    ]
    exports = dict(shlex.split(line)[1].split("=", 1) for line in run("env", *folder).stdout.splitlines())
    assert set(metadata_of(exports["ONCEBOX_BOOTSTRAP_SERVERS"]).brokers) == {1}
    psycopg.connect(exports["ONCEBOX_DSN"]).close()
    assert run("topic", "orders", "--partitions", "3", *folder).stdout == "Created orders\n"
    assert run("topic", "orders", "payments", *folder).stdout == "orders exists already\nCreated payments\n"
    for name, partitions in {"orders": 3, "payments": 1}.items():
        await_partitions(exports["ONCEBOX_BOOTSTRAP_SERVERS"], name, partitions)
    refused = run("topic", "no/such/name", *folder)
    assert (refused.returncode, "'no/such/name' cannot be created" in refused.stderr) == (1, True)
    again = run("up", *folder)
    assert (again.returncode, "is in use by another" in again.stderr) == (1, True)

    state = read_state(tmp_path / "it's here")
    assert state is not None
    assert run("down", *folder).returncode == 0
    assert [start_time(pid) for pid, _started in processes(state)] == [None, None]
    assert run("down", *folder).stdout.startswith("Nothing runs")
    assert run("status", *folder).returncode == 1
    assert run("env", *folder).stderr.startswith("oncebox: nothing is up")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_in_order(tmp_path: Path, number: signal.Signals):
    with running(tmp_path, "--no-kafka") as process:
        state = read_state(tmp_path)
        process.send_signal(number)
        assert process.wait(60) == 0
    assert state is not None
    assert [start_time(pid) for pid, _started in processes(state)] == [None]
    assert "database system is shut down" in (tmp_path / "postgres" / "postgres.log").read_text()


def test_when_it_is_killed_everything_else_ends_too(tmp_path: Path):
    with running(tmp_path) as process:
        state = read_state(tmp_path)
        process.kill()
    assert state is not None
    for pid, started in processes(state):
        await_gone(pid, started)
    assert run("status", "--dir", str(tmp_path)).stdout.startswith("Nothing runs")
    assert run("down", "--dir", str(tmp_path)).stdout.startswith("Nothing runs")


def test_when_a_part_dies_the_rest_is_stopped_and_its_log_shown(tmp_path: Path):
    with running(tmp_path) as process:
        state = read_state(tmp_path)
        assert state is not None
        (broker, _), (server, _) = processes(state)
        os.kill(broker, signal.SIGKILL)
        _out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.startswith("oncebox: Kafka broker 1 has ended (exit code -9); the end of")
    assert start_time(server) is None


def test_down_ends_a_run_that_is_still_starting(tmp_path: Path):
    command = [*COMMAND, "up", "--dir", str(tmp_path)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line.startswith("Starting Kafka") for line in process.stdout)
        process.send_signal(signal.SIGSTOP)  # else it may be ready before anybody has looked
        assert run("status", "--dir", str(tmp_path)).stdout.startswith("Starting")
        process.send_signal(signal.SIGCONT)
        assert run("down", "--dir", str(tmp_path)).returncode == 0
        assert process.wait(60) == 0


def test_data_stays_unless_a_fresh_start_is_asked_for(tmp_path: Path):
    rows = []
    for options in ([], [], ["--fresh"]):
        with running(tmp_path, "--no-kafka", *options) as process:
            state = read_state(tmp_path)
            assert state is not None
            with psycopg.connect(state.environment["ONCEBOX_DSN"]) as connection:
                connection.execute("CREATE TABLE IF NOT EXISTS runs (a int)")
                connection.execute("INSERT INTO runs VALUES (1)")
                rows.append(connection.execute("SELECT count(*) FROM runs").fetchone())
            process.terminate()
            process.wait(60)
    assert rows == [(1,), (2,), (1,)]


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path: Path):
    (tmp_path / "kafka").mkdir()
    for command in ("status", "env", "down"):
        run(command, "--dir", str(tmp_path))
        assert os.listdir(tmp_path) == ["kafka"], command
    done = run("up", "--fresh", "--dir", str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "is not empty and was not made by `oncebox local up`" in done.stderr
    assert (tmp_path / "kafka").is_dir()


def test_the_users_own_postgres_is_used_and_not_touched(tmp_path: Path, postgres: LocalPostgres):
    done = run("up", "--no-kafka", "--dsn", postgres.dsn, "--dir", str(tmp_path))
    assert done.returncode == 2
    up = run("up", "--detach", "--dsn", postgres.dsn, "--dir", str(tmp_path))
    try:
        assert "postgres        the DSN given          your own" in up.stdout
        assert f"export ONCEBOX_DSN={postgres.dsn}" in run("env", "--dir", str(tmp_path)).stdout
    finally:
        run("down", "--dir", str(tmp_path))
    psycopg.connect(postgres.dsn).close()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--dsn", "postgresql://nobody@127.0.0.1:1/x"], "oncebox: no PostgreSQL at the DSN given"),
        (["--bootstrap-servers", "127.0.0.1:1"], "oncebox: no Kafka answers at 127.0.0.1:1"),
    ],
)
@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_an_own_part_that_does_not_answer_is_told(tmp_path: Path, args: list[str], message: str, detach: list[str]):
    done = run("up", *detach, *args, "--dir", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith(message)
    assert "Traceback" not in done.stderr
