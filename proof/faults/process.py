"""Control of a child process: start, wait until ready, kill, stop, pause, resume, restart, read its log.
The child leads a process group of its own and dies with us, whatever kills us; signals go to that group only.
It has the environment around us less what is set there for Oncebox: of that, only what is named for it.
All calls block; beside a running event loop use asyncio.to_thread.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

TAIL_LINES = 20
POLL_S = 0.05
PROBE_TIMEOUT_S = 1.0
SETTINGS = "ONCEBOX_"  # begins the name of every variable that Oncebox reads

# Runs in the child before the command: a launcher, because preexec_fn may deadlock beside threads. If the
# parent died before prctl there will be no signal, hence the comparison.
LAUNCHER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("parent is gone")
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"cannot run {sys.argv[2]}: {error.strerror}")
"""

# The death signal comes when the starting *thread* ends (prctl(2)): that thread must live as long as we do.
_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="process-starter")


class ProcessError(Exception):
    """A child did not do what was asked; the text ends with the tail of its log."""


class ChildProcess:
    """`with ChildProcess(argv, log=path) as child: child.wait_ready(…)`; leaving the block kills it."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        self.argv = list(argv)
        self.log = log
        self._environment = dict(environment or {})  # added to what is around us
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0  # where this run begins: the log is kept across restarts

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._started().pid

    @property
    def running(self) -> bool:
        if self._process is None or self._process.returncode is not None:
            return False
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def start(self) -> None:
        if self.running:
            raise ProcessError(f"{self.argv[0]} runs already as process {self.pid}")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as output:
            self._log_start = output.tell()
            self._process = _starter.submit(
                subprocess.Popen,
                [sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid()), *self.argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_surroundings() | self._environment,
                cwd=self._directory,
                start_new_session=True,
            ).result()

    def wait_ready(self, ready: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
        """Polls `ready` (port_open, http_ok, or a lambda on log_contains) until it is true."""
        deadline_s = time.monotonic() + timeout_s
        while not ready():
            if not self.running:
                raise self._error(f"ended with code {self.wait()} before it was ready")
            if time.monotonic() > deadline_s:
                raise self._error(f"not ready after {timeout_s:g} s")
            time.sleep(POLL_S)

    def wait(self, *, timeout_s: float = 60.0) -> int:
        """Waits for its own end; the exit code (negative: the signal that ended it)."""
        process = self._started()
        deadline_s = time.monotonic() + timeout_s
        while self.running:
            if time.monotonic() > deadline_s:
                raise self._error(f"still running after {timeout_s:g} s")
            time.sleep(POLL_S)
        self.kill()
        return process.returncode

    def kill(self) -> None:
        """SIGKILL to the whole group, also to what a leader that has ended left behind."""
        # Nobody else can get this number until wait() has reaped the leader; then it is not ours to signal.
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def stop(self, *, timeout_s: float = 60.0) -> int:
        """SIGTERM, and its exit code. One that does not end is killed, and that is an error."""
        self._signal(signal.SIGTERM)
        os.killpg(self.pid, signal.SIGCONT)  # a paused process would not see it
        try:
            return self.wait(timeout_s=timeout_s)
        finally:
            self.kill()

    def pause(self) -> None:
        """SIGSTOP to the group; on return it stands still."""
        self._signal(signal.SIGSTOP, group=True)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        self._signal(signal.SIGCONT, group=True)

    def restart(self, *, graceful: bool = False) -> None:
        """Kills (or stops) and starts anew; the log goes on in the same file."""
        if graceful and self.running:
            self.stop()
        self.kill()
        self.start()

    def log_contains(self, pattern: str) -> bool:
        """Whether the log of this run (not of those before a restart) has a match."""
        with open(self.log, "rb") as log:
            log.seek(self._log_start)
            return re.search(pattern, log.read().decode(errors="replace")) is not None

    def log_tail(self, lines: int = TAIL_LINES) -> str:
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _signal(self, number: signal.Signals, *, group: bool = False) -> None:
        if not self.running:
            raise self._error(f"has ended with code {self.wait()}: no {number.name}")
        (os.killpg if group else os.kill)(self.pid, number)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ProcessError(f"{self.argv[0]} has not been started")
        return self._process

    def _error(self, text: str) -> ProcessError:
        return ProcessError(f"{self.argv[0]}: {text}; the end of {self.log}:\n{self.log_tail()}")


def _surroundings() -> dict[str, str]:
    """A service prefers variables to its file: those of the shell we run in would lead it to the parts of another."""
    return {name: value for name, value in os.environ.items() if not name.upper().startswith(SETTINGS)}


def port_open(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=PROBE_TIMEOUT_S):
            return True
    except OSError:
        return False


def http_ok(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S) as response:  # noqa: S310 - our own child's URL
            return bool(response.status == 200)
    except OSError:  # URLError is one
        return False
