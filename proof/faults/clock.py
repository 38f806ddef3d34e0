"""A wall clock that can be set while its process runs: `time.time()` and `time.time_ns()` are off by what a file says.
Only of that process: brokers, PostgreSQL, and whatever counts monotonic time, keep theirs.

`python -m proof.faults.clock FILE MODULE …` is `python -m MODULE …` with such a clock.
"""

import logging
import mmap
import runpy
import struct
import sys
import time
from pathlib import Path
from types import SimpleNamespace

OFFSET_NS = struct.Struct("=q")
NS_PER_S = 1_000_000_000


class WallClock:
    """The file, for whoever sets the clock. It outlives the process: one that is started again has the wrong time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(OFFSET_NS.pack(0))

    def command(self, module: str, *arguments: str) -> list[str]:
        """Behind the interpreter."""
        return ["-m", "proof.faults.clock", str(self.path), module, *arguments]

    def jump(self, offset_s: int) -> None:
        """Away from the machine's time; 0 is back to it."""
        # In place: its process has this very file in its memory.
        with self.path.open("r+b") as file:
            file.write(OFFSET_NS.pack(offset_s * NS_PER_S))


def install(path: Path) -> None:
    """To be called before anything takes `time.time` for itself."""
    with path.open("rb") as file:
        offset = mmap.mmap(file.fileno(), OFFSET_NS.size, access=mmap.ACCESS_READ)
    # Log lines keep the machine's time: those of all parts are read side by side.
    logging.time = SimpleNamespace(**vars(time))  # type: ignore[attr-defined]
    real_ns = time.time_ns

    def time_ns() -> int:
        shifted_ns: int = real_ns() + OFFSET_NS.unpack_from(offset)[0]
        return shifted_ns

    time.time_ns = time_ns
    time.time = lambda: time_ns() / NS_PER_S


def main() -> None:
    _, path, *sys.argv = sys.argv
    install(Path(path))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
