"""Runs one command to its end, and says how long it took and the most memory it had. What it prints goes nowhere.

`python -m proof.bench.started COMMAND…`, a small process of its own: Linux counts what the process that starts a
command has resident as the command's own memory, so that whoever has much must not start it.
"""

import json
import os
import subprocess
import sys
import time
from typing import NamedTuple


class Ended(NamedTuple):
    seconds: float
    memory_mb: float  # the most that it had resident


def run(*command: str) -> Ended:
    """RuntimeError: it ended with another exit code than 0."""
    small = [sys.executable, "-m", "proof.bench.started", *command]
    told = subprocess.run(small, stdout=subprocess.PIPE, check=True).stdout
    code, seconds, memory_mb = json.loads(told)
    if code:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {code}; what went wrong is told above")
    return Ended(seconds, memory_mb)


def _main(command: list[str]) -> None:
    begun_s = time.monotonic()
    nowhere = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)
    pid = os.posix_spawn(command[0], command, os.environ, file_actions=[nowhere])
    # Not subprocess: only wait4 tells the memory of this one child.
    _, status, used = os.wait4(pid, 0)
    print(json.dumps([os.waitstatus_to_exitcode(status), time.monotonic() - begun_s, used.ru_maxrss / 1024]))


if __name__ == "__main__":
    _main(sys.argv[1:])
