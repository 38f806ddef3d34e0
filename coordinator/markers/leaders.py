"""Asks for leaders anew, once for all who want to know at the same time. Knows nothing of markers."""

import asyncio
import logging
import math

from coordinator.markers.port import Brokers
from oncebox.wire import WireError

log = logging.getLogger(__name__)


class Leaders:
    def __init__(self, brokers: Brokers, *, timeout_ms: int) -> None:
        self._brokers = brokers
        self._timeout_ms = timeout_ms
        # As last heard of: a topic deleted and created again has another.
        self.topic_ids: dict[str, bytes] = {}
        self._heard_at_s: dict[str, float] = {}
        self._clock = asyncio.get_running_loop().time
        self._wanted: set[str] = set()
        self._next: asyncio.Task[None] | None = None
        self._asking = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def refresh(self, topic: str) -> None:
        """Returns after the answer to a question asked from now on, or when that failed: what was known then stays."""
        self._wanted.add(topic)
        if self._next is None:
            self._next = asyncio.create_task(self._ask())
            self._tasks.add(self._next)
            self._next.add_done_callback(self._tasks.discard)
        await asyncio.wait((self._next,))

    def has_heard(self, topic: str, since_s: float) -> bool:
        """Whether it was asked for since then, and the answer told which topic it is."""
        return self._heard_at_s.get(topic, -math.inf) >= since_s

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask(self) -> None:
        async with self._asking:
            topics, self._wanted, self._next = self._wanted, set(), None
            asked_at_s = self._clock()
            try:
                answer = await self._brokers.metadata(sorted(topics), timeout_ms=self._timeout_ms)
            except WireError as error:
                log.info("no metadata for %d topics: %s", len(topics), error)
                return
            for name, topic in answer.topics.items():
                # A broker that does not know it says nothing of which one it is.
                if topic.topic_id is not None:
                    self._heard_at_s[name] = asked_at_s
                    self.topic_ids[name] = topic.topic_id.bytes
