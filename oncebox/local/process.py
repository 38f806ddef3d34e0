"""Child processes that never outlive us: each server joins a process group that a watchdog leads (see watchdog.py).
A `Server` is one program with one log file; signals go to its pid alone, and it is started again with the same command.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from oncebox.local.errors import LocalError, read_from, with_tail

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

POLL_S = 0.1
WATCHDOG = os.path.join(os.path.dirname(__file__), "watchdog.py")


class Guard:
    """A process group whose members end when this process does."""

    def __init__(self) -> None:
        self._watchdog: subprocess.Popen[bytes] | None = None

    def group(self) -> int:
        if self._watchdog is None or self._watchdog.poll() is not None:
            # -I -S: starts in 15 ms and imports nothing from the folder it is run in.
            self._watchdog = subprocess.Popen(
                [sys.executable, "-I", "-S", WATCHDOG, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # whoever reads our output must see its end when we end
                process_group=0,
            )
        return self._watchdog.pid

    def close(self) -> None:
        """Ends the watchdog and whatever is left in its group, such as a server whose start was interrupted."""
        if self._watchdog is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._watchdog.pid, signal.SIGKILL)
            self._watchdog.wait()
            self._watchdog = None


class Server:
    """One server program. Not thread-safe: one owner starts and stops it."""

    def __init__(
        self,
        *,
        name: str,
        command: Sequence[str],
        log_path: Path,
        guard: Guard,
        folder: Path | None = None,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._command = list(command)
        self._folder = folder
        self._guard = guard
        self._process: subprocess.Popen[bytes] | None = None
        self._log_offset = 0

    @property
    def pid(self) -> int:
        if self._process is None:
            raise LocalError(f"{self.name} was not started")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def spawn(self) -> None:
        """Starts the program and returns at once."""
        if self.running:
            raise LocalError(f"{self.name} runs already (pid {self.pid})")
        with self.log_path.open("ab") as log:
            self._log_offset = log.tell()
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                process_group=self._guard.group(),
            )

    def await_ready(self, ready: Callable[[], bool], *, timeout_s: float) -> None:
        """Waits until `ready()`; if the program ends or the time is up, the error holds the log's tail."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.check_running()
            if ready():
                return
            if time.monotonic() > deadline:
                self.fail(f"{self.name} was not ready after {timeout_s:.0f} s")
            time.sleep(POLL_S)

    def check_running(self) -> None:
        """Fails with the log's tail if the program has ended."""
        if not self.running:
            self.fail(f"{self.name} has ended (exit code {self.exit_code})")

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def output(self) -> str:
        """What the program has logged since it was last started."""
        return read_from(self.log_path, self._log_offset)

    def fail(self, message: str) -> NoReturn:
        raise LocalError(with_tail(message, self.log_path, offset=self._log_offset))

    def kill(self) -> None:
        """SIGKILL: the program has no time for anything."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """SIGSTOP: its connections stay open, it answers nothing; on return all its threads stand still."""
        os.kill(self.pid, signal.SIGSTOP)
        # The kernel stops thread by thread: one that is running could still answer what arrives right now.
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def ask_to_stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.send_signal(signal.SIGCONT)  # a paused program would never see it

    def await_stopped(self, *, timeout_s: float) -> None:
        """Waits for the end, and forces it when the time is up."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
            self.kill()
