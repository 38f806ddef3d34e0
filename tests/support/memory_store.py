"""A log partition and its feed in memory, and markers without a broker: what a shard needs, without Kafka."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from coordinator.core.owed import Debt
from coordinator.core.records import TopicPartition
from coordinator.log.port import Kind, Stored, Writer
from coordinator.log.replay import Replay


class MemoryStore:
    """One partition of log and feed, kept in lists; retention has removed what is below `kept_from`."""

    def __init__(self) -> None:
        self.records: dict[Kind, list[tuple[bytes, bytes | None]]] = {Kind.LOG: [], Kind.FEED: []}
        self.topic_id = b"first"
        self.kept_from = 0
        self.read_from: list[tuple[Kind, int]] = []
        # While one is not set, no append is acknowledged there.
        self.takes_appends = {kind: asyncio.Event() for kind in Kind}
        for event in self.takes_appends.values():
            event.set()

    async def append(
        self, kind: Kind, partition: int, writer: Writer, sequence: int, records: Sequence[tuple[bytes, bytes | None]]
    ) -> int:
        del partition, writer, sequence
        await self.takes_appends[kind].wait()
        self.records[kind].extend(records)
        return len(self.records[kind]) - len(records)

    async def read(
        self, kind: Kind, partition: int, offset_first: int, offset_next: int | None
    ) -> AsyncIterator[Sequence[Stored]]:
        del partition
        self.read_from.append((kind, offset_first))
        first = max(offset_first, self.kept_from if kind is Kind.FEED else 0)
        yield [Stored(first + n, *record) for n, record in enumerate(self.records[kind][first:offset_next])]

    async def replay(self, partition: int, offset_first: int, offset_next: int, replay: Replay) -> None:
        async for chunk in self.read(Kind.LOG, partition, offset_first, offset_next):
            replay.fold(chunk)

    async def log_topic_id(self) -> bytes:
        return self.topic_id

    async def end_offset(self, kind: Kind, partition: int) -> int:
        del partition
        return len(self.records[kind])


class NoMarkers:
    """Nothing is acknowledged until `acknowledge` is called."""

    def __init__(self) -> None:
        self.paying: list[int] = []
        self._unpaid: list[Callable[[], None]] = []

    def pay(self, debt: Debt, *, coordinator_epoch: int, paid: Callable[[TopicPartition], None]) -> "NoMarkers":
        del coordinator_epoch
        self.paying.append(debt.number)
        self._unpaid.extend(partial(paid, partition) for partition in debt.partitions)
        return self

    def acknowledge(self) -> None:
        unpaid, self._unpaid = self._unpaid, []
        for paid in unpaid:
            paid()

    @property
    def dropped(self) -> frozenset[TopicPartition]:
        return frozenset()

    def cancel(self) -> None:
        """Nothing is under way."""
