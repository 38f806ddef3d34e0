"""The cluster's topics, as the checks of requests need them: asked for when named, and again after a while.

One request is under way at a time; those who come meanwhile share the next, however many they are.
"""

import asyncio
from collections.abc import Collection
from time import monotonic
from typing import NamedTuple

from coordinator.api.rules import TopicDeniedError, TopicsUnavailableError
from oncebox.wire import OFFSETS_TOPIC, ErrorCode, Wire, WireError, offsets_partition

REQUEST_TIMEOUT_MS = 5_000
# A topic deleted and created again has another id, and no commit must name the old one: what is in use is asked for
# again once it is older than this, in the background, so that the one after next knows.
REFRESH_AFTER_S = 1.0
# What is older than this is asked for again before it is used.
AGE_MAX_S = 5.0


class _Topic(NamedTuple):
    partition_count: int
    topic_id: bytes
    heard_at_s: float


class KafkaTopics:
    """Implements coordinator.api.rules.Topics."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._known: dict[str, _Topic] = {}
        self._wanted: set[str] = set()
        self._next: asyncio.Task[frozenset[str]] | None = None
        self._asking = asyncio.Lock()

    def partition_count(self, topic: str, *, however_old: bool = False) -> int | None:
        known = self._known.get(topic) if however_old else self._fresh(topic)
        return known.partition_count if known else None

    def topic_id(self, topic: str, *, however_old: bool = False) -> bytes | None:
        known = self._known.get(topic) if however_old else self._fresh(topic)
        return known.topic_id if known else None

    def offsets_partition(self, group_id: str) -> int | None:
        # Its partition count is fixed for ever: no need to ask again.
        known = self._known.get(OFFSETS_TOPIC)
        return offsets_partition(group_id, known.partition_count) if known else None

    async def refresh(self, topics: Collection[str]) -> None:
        asked_at_s = monotonic()
        denied = (await asyncio.shield(self._ask_soon(topics))).intersection(topics)
        if denied:
            raise TopicDeniedError(min(denied))
        # An answer that tells of no leader says nothing; it must not be taken for a deletion, nor for news.
        if any(topic in self._known and self._known[topic].heard_at_s < asked_at_s for topic in topics):
            raise TopicsUnavailableError

    def _ask_soon(self, topics: Collection[str]) -> asyncio.Task[frozenset[str]]:
        self._wanted.update(topics)
        if self._next is None:
            self._next = asyncio.create_task(self._ask())
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._next

    def _fresh(self, topic: str) -> _Topic | None:
        known = self._known.get(topic)
        if known is None:
            return None
        age_s = monotonic() - known.heard_at_s
        if age_s >= REFRESH_AFTER_S and not self._asking.locked():
            self._ask_soon((topic,))
        return known if age_s < AGE_MAX_S else None

    async def _ask(self) -> frozenset[str]:
        """Those that we may not see."""
        async with self._asking:
            topics, self._wanted, self._next = self._wanted, set(), None
            heard_at_s = monotonic()
            try:
                answer = await self._wire.metadata(topics, timeout_ms=REQUEST_TIMEOUT_MS)
                if OFFSETS_TOPIC in topics and not answer.topics[OFFSETS_TOPIC].partitions:
                    # Brokers create it when the first group is looked for.
                    await self._wire.find_group_coordinator("oncebox", timeout_ms=REQUEST_TIMEOUT_MS)
            except WireError as error:
                raise TopicsUnavailableError from error
        for name, topic in answer.topics.items():
            if topic.partitions and topic.topic_id is not None:
                self._known[name] = _Topic(len(topic.partitions), topic.topic_id.bytes, heard_at_s)
            elif topic.error is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                self._known.pop(name, None)
        return frozenset(n for n, topic in answer.topics.items() if topic.error is ErrorCode.TOPIC_AUTHORIZATION_FAILED)
