"""A small stock of producer ids that nobody has used, fetched ahead from the brokers.

Producer ids from InitProducerId without a transactional id are unique in the cluster, on any broker.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

STOCK = 64
LOW = 16
RETRY_MAX_S = 2.0


class UnavailableError(Exception):
    """No broker gives a producer id just now."""


class ProducerIdPool:
    def __init__(self, fetch: Callable[[], Awaitable[int]]) -> None:
        self._fetch = fetch
        self._ids: deque[int] = deque()
        # Each once, however often it asks.
        self._waiting: dict[tuple[Callable[[str], None], str], None] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def available(self) -> tuple[int, ...]:
        """As many as one decision can use."""
        return (self._ids[0], self._ids[1]) if len(self._ids) > 1 else tuple(self._ids)

    def take(self, count: int) -> None:
        for _ in range(count):
            self._ids.popleft()
        if len(self._ids) < LOW:
            self._start()

    def refill(self, then: Callable[[str], None], transactional_id: str) -> None:
        """Fetches more; `then` is called with the id once there are some."""
        self._waiting[then, transactional_id] = None
        self._start()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._fill())

    async def _fill(self) -> None:
        pause_s = 0.05
        while len(self._ids) < STOCK:
            try:
                self._ids.append(await self._fetch())
            except UnavailableError as error:
                # Brokers come back; calls that need a producer id wait until then or until their deadline.
                logger.info("no producer ids to be had just now: %s", error)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, RETRY_MAX_S)
                continue
            if len(self._ids) > 1:
                waiting, self._waiting = self._waiting, {}
                for then, transactional_id in waiting:
                    then(transactional_id)
