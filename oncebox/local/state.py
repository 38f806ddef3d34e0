"""What `oncebox local up` leaves for status, env and down: a lock that is held as long as it runs, and a state file.
A process is named by pid and start time together, so that a pid used again by a stranger is never taken for ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oncebox.local.errors import LocalError

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCK = "oncebox-local.lock"  # also the mark of a folder that `local up` has made
STATE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    address: str
    pid: int | None  # None: the user's own, not started by us
    started: str | None  # when that process started, see start_time()
    log: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    pid: int
    started: str
    ready: bool
    parts: tuple[Part, ...]
    environment: dict[str, str]


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Makes the folder ours for as long as the body runs."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / LOCK).exists() and any(folder.iterdir()):
        raise LocalError(f"{folder} is not empty and was not made by `oncebox local up`: take another --dir")
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LocalError(f"{folder} is in use by another `oncebox local up`; end it with `local down`") from None
        try:
            yield
        finally:
            (folder / STATE).unlink(missing_ok=True)


def is_held(folder: Path) -> bool:
    """Makes no lock: it would mark a folder as ours that is not."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False


def write_state(folder: Path, state: State) -> None:
    partial = folder / f"{STATE}.partial"
    partial.touch(mode=0o600)  # it holds passwords
    partial.write_text(json.dumps(asdict(state), indent=1))
    partial.rename(folder / STATE)


def read_state(folder: Path) -> State | None:
    """What runs in the folder; None when nothing does."""
    try:
        content = json.loads((folder / STATE).read_text())
    except FileNotFoundError:
        return None
    state = State(**{**content, "parts": tuple(Part(**part) for part in content["parts"])})
    return state if is_alive(state.pid, state.started) else None


def is_alive(pid: int | None, started: str | None) -> bool:
    return pid is not None and start_time(pid) == started


def start_time(pid: int) -> str | None:
    """When the process started, in the system's own words; None when there is none, or it is a zombie."""
    try:
        # The name in field 2 may hold anything; after it the state is the first field, the start time the 20th.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    except (FileNotFoundError, ProcessLookupError):
        if os.path.exists("/proc/self/stat"):
            return None
    done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
