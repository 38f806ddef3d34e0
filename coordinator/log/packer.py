"""Replays long stretches of the log in a process of its own: the event loop of this one is left to others.

`python -m coordinator.log.packer` takes jobs on its standard input, answers each on its standard output, and ends with
its input. One job at a time: until it is packed, a log takes much memory. It runs only while there are jobs.
"""

import asyncio
import os
import pickle
import signal
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from subprocess import PIPE, Popen
from time import process_time, sleep
from typing import BinaryIO

from coordinator.log.consumer import ReadError, open_consumer, read_chunk
from coordinator.log.replay import Replay

# Of a process that must not be in the way of others: they go first, and it rests for a multiple of the time it works.
# Cores that are two threads of one slow each other down, whoever goes first.
NICENESS = 10
REST = 2.0
GENTLY = "gently"
SIZE_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    config: Mapping[str, str | int]  # how to reach the brokers
    topic: str
    partition: int
    offset_first: int
    offset_next: int

    def __repr__(self) -> str:
        # The configuration holds passwords.
        return f"Job({self.topic}:{self.partition} from {self.offset_first} to {self.offset_next})"


class Packer:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="packer")
        self._process: Popen[bytes] | None = None
        self._jobs = 0

    async def replay(self, job: Job, *, gently: bool) -> Replay:
        """`gently`: others are served meanwhile, and go first. Counts when a process is started."""
        self._jobs += 1
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, job, gently)
        finally:
            self._jobs -= 1
            if not self._jobs:
                self._end()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self._end()
        self._thread.shutdown(wait=False)

    def _end(self) -> None:
        process = self._process
        if process is not None:
            # It may be at work for somebody who does not wait for it any more.
            process.kill()
        self._thread.submit(self._bury)

    # In the thread:

    def _ask(self, job: Job, gently: bool) -> Replay | Exception:
        if self._process is None:
            command = [sys.executable, "-m", __name__, *([GENTLY] if gently else [])]
            self._process = Popen(command, stdin=PIPE, stdout=PIPE, start_new_session=True)
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the process has no pipes")
        try:
            process.stdin.write(_framed(job))
            process.stdin.flush()
            size = process.stdout.read(SIZE_BYTES)
            answer: Replay | Exception = pickle.loads(process.stdout.read(int.from_bytes(size)))  # noqa: S301 - our own
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            self._bury()
            raise ReadError(f"the process that read {job} has ended with code {process.returncode}") from error
        return answer

    def _bury(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with suppress(BrokenPipeError), process:
                pass


def _framed(message: object) -> bytes:
    pickled = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(pickled).to_bytes(SIZE_BYTES) + pickled


# --- the process ----------------------------------------------------------------------------------------------------


def replay(job: Job, rest: float, parent: int) -> Replay:
    replayed = Replay()
    consumer = open_consumer(job.config, job.topic, job.partition, job.offset_first)
    try:
        position = job.offset_first
        while position < job.offset_next:
            begun_s = process_time()
            position, chunk = read_chunk(consumer, position, job.offset_next)
            replayed.fold(chunk)
            sleep(rest * (process_time() - begun_s))
            if os.getppid() != parent:
                raise BrokenPipeError("nobody waits for the answer any more")
    finally:
        consumer.close()
    has_more = True
    while has_more:
        begun_s = process_time()
        has_more = replayed.press()
        sleep(rest * (process_time() - begun_s))
    return replayed


def serve(jobs: BinaryIO, answers: BinaryIO, rest: float) -> None:
    """Until there are no more jobs."""
    parent = os.getppid()
    while size := jobs.read(SIZE_BYTES):
        job: Job = pickle.loads(jobs.read(int.from_bytes(size)))  # noqa: S301 - from our parent
        try:
            answer: Replay | Exception = replay(job, rest, parent)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            answer = error
        answers.write(_framed(answer))
        answers.flush()


def main() -> None:
    # Told to stop is the parent, which stops us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gently = GENTLY in sys.argv
    if gently:
        os.nice(NICENESS)
        # Where Linux shares its time out among sessions first, niceness counts within each: this one is ours alone.
        with suppress(OSError), open("/proc/self/autogroup", "w") as autogroup:
            autogroup.write(str(NICENESS))
    # Nobody reads the answer of one whose parent is gone.
    with suppress(BrokenPipeError):
        serve(sys.stdin.buffer, sys.stdout.buffer, REST if gently else 0.0)


if __name__ == "__main__":
    main()
