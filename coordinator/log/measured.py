"""A store that counts: how long appends and replays take, and how many fail. Changes nothing of what the store does."""

from collections.abc import AsyncIterator, Sequence
from time import perf_counter

from coordinator.log.port import Kind, Store, Stored, Writer
from coordinator.log.replay import Replay
from coordinator.telemetry import Telemetry


class MeasuredStore:
    """Implements coordinator.log.port.Store around another."""

    def __init__(self, store: Store, telemetry: Telemetry) -> None:
        self._store = store
        self._telemetry = telemetry

    async def append(
        self, kind: Kind, partition: int, writer: Writer, sequence: int, records: Sequence[tuple[bytes, bytes | None]]
    ) -> int:
        began_s = perf_counter()
        try:
            offset = await self._store.append(kind, partition, writer, sequence, records)
        except Exception as error:
            self._telemetry.append_failures[kind.value, type(error).__name__.removesuffix("Error")] += 1
            raise
        self._telemetry.appends[kind.value].observe(perf_counter() - began_s)
        self._telemetry.appended[kind.value] += len(records)
        return offset

    def read(
        self, kind: Kind, partition: int, offset_first: int, offset_next: int | None
    ) -> AsyncIterator[Sequence[Stored]]:
        return self._store.read(kind, partition, offset_first, offset_next)

    async def replay(self, partition: int, offset_first: int, offset_next: int, replay: Replay) -> None:
        began_s = perf_counter()
        await self._store.replay(partition, offset_first, offset_next, replay)
        self._telemetry.replays.observe(perf_counter() - began_s)

    async def log_topic_id(self) -> bytes:
        return await self._store.log_topic_id()

    async def end_offset(self, kind: Kind, partition: int) -> int:
        return await self._store.end_offset(kind, partition)
