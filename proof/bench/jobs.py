"""A process that takes JSON jobs on its standard input, one at a time, and answers each with a line of figures."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, Self

# As docs/client.md advises whoever makes many small transactions.
POLLED_GRPC = {"GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener,-event_engine_callback_cq"}


class JobProcess:
    def __init__(self, module: str) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            env=POLLED_GRPC | os.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(30)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def run(self, job: Any) -> dict[str, float]:
        """`job` is a dataclass of the module's own."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the process has no pipes")
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self._module} ended; what went wrong is told above")
        figures: dict[str, float] = json.loads(answer)
        return figures


def serve(measure: Callable[[Any], Awaitable[dict[str, float]]], make_job: Callable[..., Any]) -> None:
    """The process's own side. One event loop for all jobs: gRPC does not bear that it is closed between them."""
    import uvloop

    async def work() -> None:
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await measure(make_job(**json.loads(line)))), flush=True)

    uvloop.run(work())
