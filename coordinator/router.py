"""Brings each call to the shard that leads its transactional id, or says where that is."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from heapq import merge
from itertools import islice, takewhile
from zlib import crc32

from coordinator.calls import Answer, Change, Fenced, Led, Told, WatchOverrunError
from coordinator.core.commands import Command, ErrorCode, Refused
from coordinator.core.records import IdState
from coordinator.leadership import Leadership
from coordinator.log.lead import coordinator_epoch
from coordinator.peers import Peers
from coordinator.shard import Shard, ShardState

WATCH_BACKLOG_MAX = 10_000


class Router:
    """Implements coordinator.calls.Calls."""

    def __init__(
        self, *, instance: str, address: str, partition_count: int, leadership: Leadership, peers: Peers
    ) -> None:
        self.instance = instance
        self.partition_count = partition_count
        self._address = address
        self._leadership = leadership
        self._peers = peers
        # Shared with every shard, so that they outlive a change of leadership.
        self.watchers: set[Callable[[Change], None]] = set()
        self.listeners: dict[str, set[Fenced]] = {}

    def partition_of(self, transactional_id: str) -> int:
        return crc32(transactional_id.encode()) % self.partition_count

    async def call(self, command: Command, timeout_ms: int) -> Answer | Refused:
        partition = self.partition_of(command.transactional_id)
        shard = self._leadership.shards.get(partition)
        if shard is None or shard.state is ShardState.RESIGNED:
            return self._elsewhere(partition)
        return await shard.call(command, timeout_ms)

    def ask(self, command: Command, timeout_ms: int, told: Told) -> None:
        partition = self.partition_of(command.transactional_id)
        shard = self._leadership.shards.get(partition)
        if shard is None or shard.state is ShardState.RESIGNED:
            told(self._elsewhere(partition))
        else:
            shard.ask(command, timeout_ms, told)

    def _elsewhere(self, partition: int) -> Refused:
        leader = self.leader_of(partition)
        where = f"at {leader.address}" if leader else "not known just now; send the call again"
        return Refused(
            code=ErrorCode.NOT_COORDINATOR,
            message=f"the leader of log partition {partition} is {where}",
            retriable=True,
            leader_address=leader.address if leader else "",
        )

    def leader_of(self, log_partition: int) -> Led | None:
        return next((led for led in self._leaders() if led.log_partition == log_partition), None)

    def leaders(self) -> list[Led]:
        newest: dict[int, Led] = {}
        for led in self._leaders():
            newest.setdefault(led.log_partition, led)
        return [newest[partition] for partition in sorted(newest)]

    def _leaders(self) -> list[Led]:
        """The newest leader of each partition first: two may claim one for a moment, the higher epoch is right."""
        known = [self._led(shard) for shard in self._leadership.shards.values() if shard.leader.nonce]
        for leading in self._peers.leading.values():
            known.extend(
                Led(
                    log_partition=led.log_partition,
                    instance=leading.instance,
                    address=leading.address,
                    coordinator_epoch=led.coordinator_epoch,
                    state="serving" if led.serving else "loading",
                )
                for led in leading.partitions
                if not leading.leaving
            )
        return sorted(known, key=lambda led: -led.coordinator_epoch)

    def _led(self, shard: Shard) -> Led:
        return Led(
            log_partition=shard.partition,
            instance=self.instance,
            address=self._address,
            coordinator_epoch=coordinator_epoch(shard.leader),
            state=shard.state.value,
            transactional_ids=len(shard.ids),
            debts=shard.debts,
        )

    def describe(self, transactional_id: str) -> IdState | Refused:
        partition = self.partition_of(transactional_id)
        shard = self._leadership.shards.get(partition)
        if shard is None:
            return self._elsewhere(partition)
        if shard.state is not ShardState.SERVING:
            return shard.refusal()
        state = shard.ids.get(transactional_id)
        if state is None:
            return Refused(
                code=ErrorCode.INVALID_PRODUCER_ID_MAPPING, message=f"the id {transactional_id!r} is unknown"
            )
        return state

    def page(self, prefix: str, after: str, limit: int) -> Iterable[IdState]:
        shards = [shard for shard in self._leadership.shards.values() if shard.state is ShardState.SERVING]
        names = merge(*(shard.ids.names_from(max(prefix, after)) for shard in shards))
        wanted = takewhile(lambda name: name.startswith(prefix), (name for name in names if name > after))
        for name in islice(wanted, limit):
            state = self.describe(name)
            if isinstance(state, IdState):
                yield state

    async def watch(self, prefix: str) -> AsyncIterator[Change]:
        # One more than may lie there: the last one says that the watch is over.
        queue: asyncio.Queue[Change | None] = asyncio.Queue(WATCH_BACKLOG_MAX + 1)

        def put(change: Change) -> None:
            if not change.transactional_id.startswith(prefix):
                return
            if queue.qsize() < WATCH_BACKLOG_MAX:
                queue.put_nowait(change)
            else:
                # A watcher that cannot keep up never slows commits down, and never misses news without being told.
                self.watchers.discard(put)
                queue.put_nowait(None)

        self.watchers.add(put)
        try:
            while (change := await queue.get()) is not None:
                yield change
        finally:
            self.watchers.discard(put)
        raise WatchOverrunError(f"{WATCH_BACKLOG_MAX} changes lay unread")

    def listen(self, transactional_id: str, fenced: Fenced) -> Callable[[], None]:
        self.listeners.setdefault(transactional_id, set()).add(fenced)

        def stop() -> None:
            listeners = self.listeners.get(transactional_id)
            if listeners is not None:
                listeners.discard(fenced)
                if not listeners:
                    del self.listeners[transactional_id]

        return stop
