"""A server never outlives the process that started it, however that process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oncebox.local import LocalError
from oncebox.local.process import Guard, Server
from oncebox.local.state import is_alive, start_time

PARENT = """
import os, sys, time
from pathlib import Path
from oncebox.local.process import Guard, Server
server = Server(name="sleep", command=["sleep", "1000"], log_path=Path(sys.argv[1]), guard=Guard())
server.spawn()
if sys.argv[2] == "paused":
    server.pause()
if sys.argv[2] == "forked" and os.fork() == 0:
    time.sleep(1000)  # holds every file of its parent open
print(server.pid, flush=True)
if sys.argv[2] != "exits":
    time.sleep(1000)
"""


def await_gone(pid: int, started: str | None) -> None:
    deadline = time.monotonic() + 60
    while is_alive(pid, started):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("manner", "number"),
    [
        ("plain", signal.SIGKILL),
        ("plain", signal.SIGTERM),
        ("plain", signal.SIGINT),
        ("paused", signal.SIGKILL),
        ("forked", signal.SIGKILL),
        ("exits", None),
    ],
)
def test_the_server_ends_with_its_parent(tmp_path: Path, manner: str, number: signal.Signals | None):
    command = [sys.executable, "-c", PARENT, str(tmp_path / "log"), manner]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        started = start_time(pid)
        if number is not None:
            assert started is not None
            parent.send_signal(number)
            parent.wait(60)
        await_gone(pid, started)
        if manner == "forked":
            os.killpg(parent.pid, signal.SIGKILL)


@pytest.fixture
def guard():
    guard = Guard()
    yield guard
    guard.close()


def make_server(guard: Guard, folder: Path, script: str) -> Server:
    return Server(name="thing", command=["sh", "-c", script], log_path=folder / "log", guard=guard)


def test_closing_the_guard_ends_what_is_left_in_its_group(guard: Guard, tmp_path: Path):
    server = make_server(guard, tmp_path, "exec sleep 1000")
    server.spawn()
    guard.close()
    server.await_stopped(timeout_s=60)
    assert server.exit_code == -signal.SIGKILL


def test_a_server_that_ends_while_it_starts_is_told_with_this_runs_log(guard: Guard, tmp_path: Path):
    (tmp_path / "log").write_text("of an earlier run\n")
    server = make_server(guard, tmp_path, "echo the reason; exit 3")
    server.spawn()
    with pytest.raises(LocalError, match=r"(?s)thing has ended \(exit code 3\).*\| the reason") as caught:
        server.await_ready(lambda: False, timeout_s=60)
    assert "earlier" not in str(caught.value)


def test_a_server_that_never_gets_ready_is_told(guard: Guard, tmp_path: Path):
    server = make_server(guard, tmp_path, "exec sleep 1000")
    server.spawn()
    with pytest.raises(LocalError, match=r"thing was not ready after 0 s \(its log .* is empty\)"):
        server.await_ready(lambda: False, timeout_s=0.1)
    with pytest.raises(LocalError, match="runs already"):
        server.spawn()
    server.pause()
    server.ask_to_stop()
    server.await_stopped(timeout_s=60)
    assert server.exit_code == -signal.SIGTERM


def test_a_pid_used_again_is_not_taken_for_the_same_process():
    mine = start_time(os.getpid())
    assert is_alive(os.getpid(), mine)
    assert not is_alive(os.getpid(), "another time")
    assert not is_alive(None, None)
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    assert start_time(ended.pid) is None


# Threads of one interpreter take turns; these run all the time, as a broker's do.
BUSY = """
import hashlib, threading
def run():
    while True:
        hashlib.sha256(bytes(1 << 24))
for _ in range(4):
    threading.Thread(target=run).start()
print("busy", flush=True)
"""


def test_a_paused_server_stands_still_in_all_its_threads(guard: Guard, tmp_path: Path):
    server = Server(name="busy", command=[sys.executable, "-c", BUSY], log_path=tmp_path / "log", guard=guard)
    server.spawn()
    server.await_ready(lambda: "busy" in server.output(), timeout_s=60)
    for _ in range(20):
        server.pause()
        threads = [path.read_text() for path in Path(f"/proc/{server.pid}/task").glob("*/stat")]
        assert {text.rpartition(")")[2].split()[0] for text in threads} == {"T"}
        server.resume()
    server.kill()
