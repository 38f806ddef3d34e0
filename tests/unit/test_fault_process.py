"""Process control on real child processes."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from proof.faults.process import ChildProcess, ProcessError, http_ok, port_open

SLEEP = "import time; print('ready', flush=True); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
POLITE = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); " + SLEEP
SERVER = (
    "import http.server; s = http.server.HTTPServer(('127.0.0.1', 0), http.server.SimpleHTTPRequestHandler); "
    "print('port', s.server_port, flush=True); s.serve_forever()"
)
# A leader that starts a grandchild, names it, and sleeps.
FAMILY = (
    "import subprocess, sys, time; "
    "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    "print('grandchild', c.pid, flush=True); "
)


@pytest.fixture
def child(tmp_path):
    made = []

    def make(code, **options):
        made.append(ChildProcess([sys.executable, "-c", code], log=tmp_path / "child.log", **options))
        made[-1].start()
        return made[-1]

    yield make
    for process in made:
        process.kill()


def started(process: ChildProcess) -> ChildProcess:
    process.wait_ready(lambda: process.log_contains("ready"))
    return process


def state(pid: int) -> str | None:
    """The letter of /proc/PID/stat (R, S, T, Z, …), or None where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return None


def gone(pid: int, timeout_s: float = 30.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while state(pid) not in {None, "Z"}:  # a zombie has ended, its new parent has yet to reap it
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_it_leads_its_own_process_group_and_logs(child):
    process = started(child(SLEEP))
    assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
    assert process.log_tail() == "ready"


def test_kill_is_sigkill(child):
    process = started(child(STUBBORN))
    process.kill()
    assert not process.running
    assert process.wait() == -signal.SIGKILL


def test_kill_ends_the_whole_group(child):
    process = child(FAMILY + "print('ready', flush=True); time.sleep(600)")
    started(process)
    grandchild = int(process.log_tail().split()[1])
    process.kill()
    assert gone(grandchild)


def test_what_a_leader_leaves_behind_ends_with_it(child):
    process = child(FAMILY)
    assert process.wait() == 0
    assert gone(int(process.log_tail().split()[1]))


def test_stop_lets_it_end_by_itself(child):
    assert started(child(POLITE)).stop() == 7


def test_stop_reaches_a_paused_process(child):
    process = started(child(POLITE))
    process.pause()
    assert process.stop() == 7


def test_stop_kills_what_does_not_listen_and_says_so(child):
    process = started(child(STUBBORN))
    with pytest.raises(ProcessError, match=r"still running after 0.2 s; the end of .*\nready"):
        process.stop(timeout_s=0.2)
    assert not process.running


def test_pause_and_resume(child):
    process = started(child(SLEEP))
    process.pause()
    assert state(process.pid) == "T"
    assert process.running
    process.resume()
    deadline = time.monotonic() + 30
    while state(process.pid) == "T":
        assert time.monotonic() < deadline


def test_restart_is_a_new_process_and_the_log_goes_on(child):
    process = started(child(SLEEP))
    first = process.pid
    process.restart()
    assert process.pid != first
    started(process)  # the line of the first run does not count
    assert process.log_tail() == "ready\nready"


def test_restart_gracefully(child):
    process = started(
        child("import sys, signal, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit('bye')); " + SLEEP)
    )
    process.restart(graceful=True)
    started(process)
    assert process.log_tail() == "ready\nbye\nready"


def test_ready_by_port_and_by_http(child):
    process = child(SERVER)
    process.wait_ready(lambda: process.log_contains("port"))
    port = int(process.log_tail().split()[1])
    process.wait_ready(lambda: port_open("127.0.0.1", port))
    process.wait_ready(lambda: http_ok(f"http://127.0.0.1:{port}/"))
    assert not http_ok(f"http://127.0.0.1:{port}/missing")


def test_a_closed_port_is_not_ready():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert not port_open("127.0.0.1", bound.getsockname()[1])
        assert not http_ok(f"http://127.0.0.1:{bound.getsockname()[1]}/")


def test_an_early_end_is_told_with_the_logs_tail(child):
    process = child("import sys; sys.exit('no disk')")
    with pytest.raises(ProcessError, match=r"ended with code 1 before it was ready; the end of .*\nno disk"):
        process.wait_ready(lambda: False)


def test_never_ready_is_told_with_the_logs_tail(child):
    process = started(child(SLEEP))
    with pytest.raises(ProcessError, match=r"not ready after 0.1 s; the end of .*\nready"):
        process.wait_ready(lambda: False, timeout_s=0.1)


def test_a_missing_command_is_told(tmp_path):
    with (
        ChildProcess([str(tmp_path / "no-such")], log=tmp_path / "log") as process,
        pytest.raises(ProcessError, match=r"cannot run .*no-such: No such file"),
    ):
        process.wait_ready(lambda: False)


def test_signals_to_an_ended_process_are_refused(child):
    process = child("pass")
    process.wait()
    for act in (process.pause, process.resume, process.stop):
        with pytest.raises(ProcessError, match="has ended with code 0"):
            act()
    process.kill()


def test_an_unstarted_process_has_no_pid(tmp_path):
    process = ChildProcess(["true"], log=tmp_path / "log")
    process.kill()
    with pytest.raises(ProcessError, match="true has not been started"):
        _ = process.pid


def test_starting_twice_is_refused(child):
    process = child(SLEEP)
    with pytest.raises(ProcessError, match="runs already"):
        process.start()


def test_environment_is_added_and_directory_kept(child, tmp_path):
    code = "import os; print(os.environ['COLOUR'], 'PATH' in os.environ, os.getcwd())"
    process = child(code, environment={"COLOUR": "blue"}, directory=tmp_path)
    process.wait()
    assert process.log_tail() == f"blue True {tmp_path}"


def test_settings_around_us_are_not_the_childs_unless_they_are_named(child, monkeypatch):
    monkeypatch.setenv("ONCEBOX_DSN", "postgresql://somebody-elses")
    monkeypatch.setenv("oncebox_relay_name", "somebody-elses")
    monkeypatch.setenv("ONCEBOX_BOOTSTRAP_SERVERS", "somebody-elses:9092")
    code = "import os; print(*(f'{name}={value}' for name, value in os.environ.items() if 'ONCEBOX' in name.upper()))"
    process = child(code, environment={"ONCEBOX_BOOTSTRAP_SERVERS": "ours:9092"})
    process.wait()
    assert process.log_tail() == "ONCEBOX_BOOTSTRAP_SERVERS=ours:9092"


def test_a_child_outlives_the_thread_that_asked_for_it(child):
    started_in_thread = []
    thread = threading.Thread(target=lambda: started_in_thread.append(started(child(SLEEP))))
    thread.start()
    thread.join()
    with pytest.raises(ProcessError, match="not ready after"):  # and not: ended with code -9
        started_in_thread[0].wait_ready(lambda: False, timeout_s=0.2)


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_it_dies_with_its_parent(tmp_path):
    code = f"""
import os, signal, sys
from pathlib import Path
from proof.faults.process import ChildProcess
child = ChildProcess([sys.executable, "-c", {SLEEP!r}], log=Path({str(tmp_path / "log")!r}))
child.start()
child.wait_ready(lambda: child.log_contains("ready"))
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    parent = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    assert gone(int(parent.stdout))
