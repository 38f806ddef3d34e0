"""Ends the servers of a process that is gone, however it went (SIGKILL too). Run as a script, it leads the process
group that the servers join, and waits for its parent's end. Standard library only; it reads and writes no files.
"""

import contextlib
import os
import signal
import sys
import time

POLL_S = 0.25
GRACE_S = 8.0


def main() -> None:
    parent_pid = int(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Polled, not a pipe: a forked child of the parent would hold the pipe's other end open.
    while os.getppid() == parent_pid:
        time.sleep(POLL_S)
    _end_group(os.getpid())


def _end_group(group: int) -> None:
    if os.fork():
        os._exit(0)
    os.setpgid(0, 0)  # the leader cannot leave its group; its child can, and so sees when the others are gone
    with contextlib.suppress(ProcessLookupError):
        # SIGINT: PostgreSQL shuts down fast and clean, a JVM runs its hooks. SIGCONT wakes the paused.
        os.killpg(group, signal.SIGINT)
        os.killpg(group, signal.SIGCONT)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            time.sleep(POLL_S)
            os.killpg(group, 0)
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
