"""Looking commits up in the feed, for questions that the log has no answer to any more.

The feed can be long: few look at a time, and by a reader that nobody else waits for.
"""

import asyncio
from collections.abc import Sequence

from coordinator.core.records import Cause, Grant, Outcome, Result
from coordinator.log import codec
from coordinator.log.port import Kind, Reader
from oncebox.v1 import manifest_pb2

LOOKUPS_MAX = 4


class Lookups:
    def __init__(self, reader: Reader, partition_count: int) -> None:
        self._reader = reader
        self._partition_count = partition_count
        self._turn = asyncio.Semaphore(LOOKUPS_MAX)

    async def find_outcome(self, partition: int, transactional_id: str, number: int) -> Outcome | None:
        """The commit with this name, if the feed still holds it. Rarely asked: reads from the feed's start."""
        key = transactional_id.encode()
        async with self._turn:
            async for chunk in self._reader.read(Kind.FEED, partition, 0, None):
                for entry in chunk:
                    if entry.key != key:
                        continue
                    manifest = codec.parse_feed(entry.value).manifest
                    if manifest.number == number:
                        return _outcome(manifest)
                    # An id's commits stand there in the order of their numbers.
                    if manifest.number > number:
                        return None
        return None

    async def find_manifests(self, producers: frozenset[tuple[int, int]]) -> Sequence[manifest_pb2.Manifest]:
        """The manifests in the whole feed of these (producer id, epoch)."""
        found = []
        async with self._turn:
            for partition in range(self._partition_count):
                async for chunk in self._reader.read(Kind.FEED, partition, 0, None):
                    for entry in chunk:
                        record = codec.parse_feed(entry.value)
                        manifest = record.manifest
                        known = (manifest.producer_id, manifest.epoch) in producers
                        if known and record.WhichOneof("record") == "manifest":
                            found.append(manifest)
        return found


def _outcome(manifest: manifest_pb2.Manifest) -> Outcome:
    return Outcome(
        grant=Grant(number=manifest.number, producer_id=manifest.producer_id, epoch=manifest.epoch),
        result=Result.COMMITTED,
        cause=Cause.OWNER,
        decided_at_ms=manifest.decided_at_ms,
    )
