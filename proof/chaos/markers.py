"""The markers in the topics, and what each of them ended: no stock consumer shows them, so the batches are read as they
stand, committed or not.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaError, LeaderNotAvailableError, for_code
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.record.memory_records import MemoryRecords

from proof.chaos.history import Ending

FETCH_BYTES = 4_000_000
FETCH_WAIT_MS = 500
RETRY_S = 0.5
ALL = 0  # the isolation level: read uncommitted
COMMIT = b"\x00\x00\x00\x01"  # the key of a marker: version 0, type 1; an abort has type 0


def endings(bootstrap_servers: str, partitions: list[tuple[str, int]], *, limit_s: float) -> list[Ending]:
    """Of these partitions, from their first record to their last. Raises TimeoutError or KafkaError."""
    return asyncio.run(_endings(bootstrap_servers, partitions, limit_s))


async def _endings(bootstrap_servers: str, partitions: list[tuple[str, int]], limit_s: float) -> list[Ending]:
    client = AIOKafkaClient(bootstrap_servers=bootstrap_servers)
    try:
        async with asyncio.timeout(limit_s):
            await client.bootstrap()
            await client.set_topics({topic for topic, _ in partitions})
            return [each for where in partitions async for each in _of_partition(client, TopicPartition(*where))]
    finally:
        await client.close()


async def _of_partition(client: AIOKafkaClient, where: TopicPartition) -> AsyncIterator[Ending]:
    walk = Walk(f"{where.topic}-{where.partition}")
    while True:
        wanted = [(where.topic, [(where.partition, walk.offset_next, FETCH_BYTES)])]
        try:
            answer = await client.send(_leader(client, where), FetchRequest(FETCH_WAIT_MS, 1, FETCH_BYTES, ALL, wanted))
            _, code, end, *_, batches = answer.topics[0][1][0]
            if code:
                raise for_code(code)
        except KafkaError:  # no leader, not the leader any more, or gone: who is it?
            await client.force_metadata_update()
            await asyncio.sleep(RETRY_S)
            continue
        for ending in walk.pass_over(batches):
            yield ending
        if walk.offset_next >= end:
            return


def _leader(client: AIOKafkaClient, where: TopicPartition) -> int:
    node_id = client.cluster.leader_for_partition(where)
    if node_id is None or node_id < 0:
        raise LeaderNotAvailableError
    return int(node_id)


class Walk:
    """Along the batches of one partition: what each producer has open there."""

    def __init__(self, partition: str) -> None:
        self.offset_next = 0
        self._partition = partition
        # By producer id: epochs of its batches, and items, since its last marker.
        self._open: dict[int, tuple[set[int], list[str]]] = {}

    def pass_over(self, batches: bytes) -> Iterator[Ending]:
        records = MemoryRecords(batches)
        while (batch := records.next_batch()) is not None:
            self.offset_next = batch.next_offset
            if batch.is_control_batch:
                marker = next(iter(batch))
                epochs, items = self._open.pop(batch.producer_id, (set(), []))
                yield Ending(
                    self._partition,
                    marker.offset,
                    batch.producer_id,
                    marker.key == COMMIT,
                    sorted(epochs),
                    items,
                    batch.producer_epoch,
                )
                continue
            epochs, items = self._open.setdefault(batch.producer_id, (set(), []))
            epochs.add(batch.producer_epoch)
            items += [json.loads(record.value)["item"] for record in batch]
