"""The other instances: what they lead, and the moment when one of them is gone.

Each instance follows every other one over a stream that says something at least every second. A broken or silent
stream means gone long before the group's session runs out.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress

import grpc

from coordinator.core.apply import PartitionState
from coordinator.core.state import TransactionState
from coordinator.log import codec
from coordinator.log.lead import coordinator_epoch
from coordinator.shard import Shard, ShardState
from oncebox.v1 import peer_pb2, peer_pb2_grpc

logger = logging.getLogger(__name__)

BEAT_S = 1.0
SILENT_S = 3.0
RECONNECT_S = 1.0
# A connection gets all of that time to come up: a busy instance is not taken for one that is gone.
CONNECT_TIMEOUT_MS = int(RECONNECT_S * 1_000)
RETRY_S = 1.0

OpenChannel = Callable[[str], grpc.aio.Channel]


class PeerServicer(peer_pb2_grpc.PeersServicer):
    """Tells the others what this instance leads."""

    def __init__(self, instance: str, address: str, shards: Callable[[], Iterable[Shard]]) -> None:
        self._instance = instance
        self._address = address
        self._shards = shards
        self._changed: set[asyncio.Event] = set()
        self._leaving = False

    def announce(self, *, leaving: bool = False) -> None:
        self._leaving = self._leaving or leaving
        for event in self._changed:
            event.set()

    async def Follow(  # type: ignore[override]  # noqa: N802 - gRPC also takes a coroutine that writes
        self, request: peer_pb2.FollowRequest, context: grpc.aio.ServicerContext
    ) -> None:
        del request
        event = asyncio.Event()
        self._changed.add(event)
        try:
            while True:
                event.clear()
                await context.write(self._leading())
                if self._leaving:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_S):
                        await event.wait()
        finally:
            self._changed.discard(event)

    def _leading(self) -> peer_pb2.Leading:
        partitions = [
            peer_pb2.LedPartition(
                log_partition=shard.partition,
                coordinator_epoch=coordinator_epoch(shard.leader),
                serving=shard.state is ShardState.SERVING,
            )
            for shard in self._shards()
        ]
        return peer_pb2.Leading(
            instance=self._instance, address=self._address, partitions=partitions, leaving=self._leaving
        )

    async def ListOpen(  # noqa: N802 - gRPC's name
        self, request: peer_pb2.ListOpenRequest, context: grpc.aio.ServicerContext
    ) -> peer_pb2.ListOpenResponse:
        del context
        response = peer_pb2.ListOpenResponse()
        wanted = frozenset(request.producer_ids)
        open_of = frozenset(request.open_of)
        for shard in list(self._shards()):
            # Asked of the log itself: a deposed leader must not speak for a partition it has lost.
            if shard.state is ShardState.SERVING and await shard.confirm():
                response.log_partitions.append(shard.partition)
                response.open.extend(open_producers(shard, open_of))
                response.held.extend(sorted(await held_producer_ids(shard.ids, wanted)))
        return response


async def held_producer_ids(ids: PartitionState, wanted: frozenset[int]) -> set[int]:
    """Those of them that some id has now, or had in one of its last transactions."""
    held: set[int] = set()
    if not wanted:
        return held

    def look_at_active() -> None:
        for state in ids.active.values():
            outcomes = (outcome.grant.producer_id for outcome in state.outcomes)
            held.update(wanted.intersection([*(slot.producer_id for slot in state.slots), *outcomes]))

    # Twice: while the packed ones are looked at, block by block, an id may leave them or come to them.
    look_at_active()
    for block in ids.packed.blocks_from():
        for value in block.values():
            held.update(wanted.intersection(codec.producer_ids(value)))
        await asyncio.sleep(0)
    look_at_active()
    return held


def open_producers(shard: Shard, producer_ids: frozenset[int] = frozenset()) -> list[peer_pb2.OpenProducer]:
    """Of these, or, where none are named, of all."""
    return [
        peer_pb2.OpenProducer(
            transactional_id=state.transactional_id,
            number=transaction.grant.number,
            producer_id=transaction.grant.producer_id,
            epoch=transaction.grant.epoch,
        )
        for state in shard.ids.active.values()
        for transaction in state.transactions
        if transaction.state is not TransactionState.DEAD
        and (not producer_ids or transaction.grant.producer_id in producer_ids)
    ]


class Peers:
    """Follows the other instances."""

    def __init__(
        self,
        instance: str,
        address: str,
        *,
        open_channel: OpenChannel,
        gone: Callable[[peer_pb2.Leading], None],
    ) -> None:
        self._instance = instance
        self._address = address
        self._open_channel = open_channel
        self._gone = gone
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        # The last word of each peer that is connected now.
        self.leading: dict[str, peer_pb2.Leading] = {}

    def follow(self, members: dict[str, str]) -> None:
        """From now on these are the instances (this one included)."""
        others = {(instance, address) for instance, address in members.items() if instance != self._instance}
        for peer in [peer for peer in self._tasks if peer not in others]:
            self._tasks.pop(peer).cancel()
            self.leading.pop(peer[0], None)
        for peer in others - self._tasks.keys():
            self._tasks[peer] = asyncio.get_running_loop().create_task(self._follow(*peer))

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _follow(self, instance: str, address: str) -> None:
        while True:
            try:
                # Its last word may be of an earlier stream: a new one may not even get to its first.
                heard = await self._listen(address, instance) or self.leading.get(instance)
                # One more try tells a lost connection from a lost instance.
                if heard is not None and not await self._answers(address, instance):
                    logger.warning("instance %s at %s is gone", instance, address)
                    self.leading.pop(instance, None)
                    self._gone(heard)
            except Exception:
                # Whatever it was: an instance that nobody follows would be missed only by the group.
                logger.exception("instance %s at %s cannot be followed; trying again", instance, address)
            await asyncio.sleep(RETRY_S)

    async def _listen(self, address: str, instance: str) -> peer_pb2.Leading | None:
        """The peer's last word, once its stream has broken or fallen silent."""
        heard: peer_pb2.Leading | None = None
        async with self._open_channel(address) as channel:
            stub = peer_pb2_grpc.PeersStub(channel)
            try:
                stream = stub.Follow(peer_pb2.FollowRequest(instance=self._instance, address=self._address))
                while True:
                    async with asyncio.timeout(SILENT_S):
                        leading = await stream.read()
                    if leading is grpc.aio.EOF:
                        return heard
                    if leading.instance != instance:
                        # Another process has taken the address: the one we followed is gone.
                        return heard
                    heard = self.leading[instance] = leading
                    if leading.leaving:
                        return heard
            except (grpc.aio.AioRpcError, TimeoutError):
                return heard
            except asyncio.CancelledError:
                if _is_cancelled():
                    raise
                return heard

    async def _answers(self, address: str, instance: str) -> bool:
        async with self._open_channel(address) as channel:
            try:
                stream = peer_pb2_grpc.PeersStub(channel).Follow(
                    peer_pb2.FollowRequest(instance=self._instance, address=self._address)
                )
                async with asyncio.timeout(RECONNECT_S):
                    leading = await stream.read()
            except (grpc.aio.AioRpcError, TimeoutError):
                return False
            except asyncio.CancelledError:
                if _is_cancelled():
                    raise
                return False
            return leading is not grpc.aio.EOF and leading.instance == instance and not leading.leaving


def _is_cancelled() -> bool:
    """Whether we are. A peer that goes down may end its streams as CANCELLED, which looks the same from here."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
