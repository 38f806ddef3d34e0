"""Which log partitions this instance leads, and when it takes one over or gives it up.

Assigned by the group: led until revoked, taken over again if lost. Adopted: led at once because its leader is gone and
we are next in line, given up to whoever takes it. Two instances may want the same partition for a moment; the log lets
only one of them write.
"""

import asyncio
import logging
from collections.abc import Callable
from hashlib import blake2b
from math import inf

from coordinator.log.codec import CorruptLogError
from coordinator.log.lead import LogLostError, LostError
from coordinator.shard import Shard, ShardState

logger = logging.getLogger(__name__)

RETRY_FIRST_S = 0.1
RETRY_MAX_S = 5.0
# What is being appended is still answered, unless the log takes no appends.
RESIGN_TIMEOUT_S = 3.0


def next_in_line(partition: int, instances: set[str]) -> str:
    """The same answer on every instance that sees the same ones alive (rendezvous hashing)."""
    return max(instances, key=lambda instance: blake2b(f"{partition}/{instance}".encode(), digest_size=8).digest())


class Leadership:
    def __init__(self, instance: str, *, make_shard: Callable[[int], Shard], changed: Callable[[], None]) -> None:
        self._instance = instance
        self._make_shard = make_shard
        self._changed = changed
        self._assigned: set[int] = set()
        self._adopted: set[int] = set()
        self._given_up: set[int] = set()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._closed = False
        self.shards: dict[int, Shard] = {}

    @property
    def serves_all(self) -> bool:
        """Whether whatever is this instance's is served, also where that is nothing."""
        wanted = self._assigned | self._adopted
        served = {partition for partition, shard in self.shards.items() if shard.state is ShardState.SERVING}
        return not self._closed and wanted <= served

    def assign(self, partitions: set[int]) -> None:
        self._assigned |= partitions
        self._adopted -= partitions
        for partition in partitions:
            self._start(partition)

    async def revoke(self, partitions: set[int], within_s: float = inf) -> None:
        """Returns once they are resigned, or given up where that takes too long: the log fences what is left."""
        self._assigned -= partitions
        self._adopted -= partitions
        tasks = []
        for partition in partitions:
            task, shard = self._tasks.get(partition), self.shards.get(partition)
            if task is None:
                continue
            tasks.append(task)
            if shard is not None and shard.state is ShardState.SERVING:
                shard.resign()
            else:
                # It is being loaded, or waits for another try: nobody is served yet, so nothing has to be finished.
                self._give_up(partition, task)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=min(within_s, RESIGN_TIMEOUT_S))
            for partition in partitions:
                if self._tasks.get(partition) in late:
                    self._give_up(partition, self._tasks[partition])
            if late:
                await asyncio.wait(late)

    def _give_up(self, partition: int, task: asyncio.Task[None]) -> None:
        self._given_up.add(partition)
        task.cancel()

    def adopt(self, partitions: set[int], alive: set[str]) -> None:
        """Takes over those of a gone instance for which we are next in line among the living."""
        for partition in partitions - self._assigned:
            if next_in_line(partition, alive | {self._instance}) == self._instance:
                self._adopted.add(partition)
                self._start(partition)

    async def close(self, within_s: float = inf) -> None:
        self._closed = True
        await self.revoke(self._assigned | self._adopted, within_s)

    def _start(self, partition: int) -> None:
        task = self._tasks.get(partition)
        if (task is None or task.done()) and not self._closed:
            self._tasks[partition] = task = asyncio.get_running_loop().create_task(self._lead(partition))
            task.add_done_callback(lambda _: self._ended(partition))

    def _ended(self, partition: int) -> None:
        self.shards.pop(partition, None)
        self._changed()
        if partition in self._given_up:
            self._given_up.discard(partition)
            # It may be ours again meanwhile.
            if self._is_wanted(partition):
                self._start(partition)

    async def _lead(self, partition: int) -> None:
        pause_s = RETRY_FIRST_S
        while self._is_wanted(partition):
            shard = self.shards[partition] = self._make_shard(partition)
            started = asyncio.get_running_loop().time()
            try:
                await shard.lead()
            except LostError as error:
                logger.info("log partition %d: %s", partition, error)
                self._adopted.discard(partition)
            except (CorruptLogError, LogLostError) as error:
                # For people, and again with every attempt: it says all there is to know.
                logger.error("log partition %d is not served: %s", partition, error)  # noqa: TRY400
            except Exception:
                logger.exception("log partition %d is not served", partition)
            self._changed()
            if asyncio.get_running_loop().time() - started > RETRY_MAX_S:
                pause_s = RETRY_FIRST_S
            if self._is_wanted(partition):
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, RETRY_MAX_S)

    def _is_wanted(self, partition: int) -> bool:
        return partition in self._assigned or partition in self._adopted
