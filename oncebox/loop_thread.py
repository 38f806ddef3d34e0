"""One background thread with an event loop for all blocking producers and readers of a process."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from concurrent.futures import Future

Result = TypeVar("Result")


class LoopThread:
    """Runs while somebody has entered it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread

    def enter(self) -> None:
        with self._lock:
            if not self._users:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="oncebox-blocking", daemon=True)
                self._thread.start()
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # where it was this thread that was interrupted
            raise


THREAD = LoopThread()
