"""A coordinator of one log partition in memory: the real leadership, shard and router, without Kafka and gRPC."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from coordinator.calls import Answer
from coordinator.core.commands import InitProducer, Refused
from coordinator.leadership import Leadership
from coordinator.producer_ids import ProducerIdPool
from coordinator.router import Router
from coordinator.serving import ShardSettings
from coordinator.shard import Shard, ShardState
from tests.support.memory_store import MemoryStore, NoMarkers

NOW_MS = 1_700_000_000_000
TIMEOUT_MS = 60_000


@dataclass(slots=True)
class NoPeers:
    leading: dict[str, Any] = field(default_factory=dict)


class MemoryInstance:
    def __init__(self, settings: ShardSettings) -> None:
        self.settings = settings
        self.now_ms = NOW_MS
        self.store = MemoryStore()
        self.markers = NoMarkers()
        producer_ids = itertools.count(1)

        async def fetch() -> int:
            return next(producer_ids)

        self.producer_ids = ProducerIdPool(fetch)
        nonces = (str(number).encode() for number in itertools.count())
        self._next_nonce = nonces.__next__
        self._changed = asyncio.Event()
        self.leadership = Leadership("i", make_shard=self._make_shard, changed=lambda: None)
        peers: Any = NoPeers()
        self.router = Router(instance="i", address="i:1", partition_count=1, leadership=self.leadership, peers=peers)

    def _make_shard(self, partition: int) -> Shard:
        return Shard(
            partition=partition,
            store=self.store,
            markers=self.markers,
            producer_ids=self.producer_ids,
            instance="i",
            address="i:1",
            now_ms=lambda: self.now_ms,
            nonce=self._next_nonce,
            settings=self.settings,
            watchers=self.router.watchers,
            listeners=self.router.listeners,
            state_changed=self._changed.set,
        )

    async def lead(self) -> None:
        self.leadership.assign({0})
        async with asyncio.timeout(30):
            while 0 not in self.leadership.shards or self.leadership.shards[0].state is not ShardState.SERVING:
                self._changed.clear()
                await self._changed.wait()

    async def init(self, name: str, owner: str = "owner") -> Answer | Refused:
        command = InitProducer(transactional_id=name, instance=owner, address="a", transaction_timeout_ms=60_000)
        return await self.router.call(command, TIMEOUT_MS)


@asynccontextmanager
async def serving(settings: ShardSettings | None = None) -> AsyncIterator[MemoryInstance]:
    instance = MemoryInstance(settings or ShardSettings())
    await instance.lead()
    try:
        yield instance
    finally:
        await instance.leadership.close()
        await instance.producer_ids.close()
