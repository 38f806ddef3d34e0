"""Brokers in memory with Kafka's rules for sequences, and trouble by seed: what the writer sees of a bad network.

Stands in for Wire: requests get lost before or after they are carried out, leaders move, answers come late.
"""

import asyncio
from collections import deque
from random import Random
from types import SimpleNamespace

from aiokafka.record.memory_records import MemoryRecords

from oncebox.wire import Appended, ErrorCode, OutcomeUnknownError, TopicPartition

SEQUENCE_MODULUS = 2**31


class Log:
    """One partition: what it holds, and the last five batches of each producer, as brokers remember them."""

    def __init__(self) -> None:
        self.values: list[bytes] = []
        self.recent: dict[tuple[int, int], deque[tuple[int, int, int]]] = {}

    def append(self, data: bytes) -> Appended:
        batch = MemoryRecords(data).next_batch()
        producer = (batch.producer_id, batch.producer_epoch)
        values = [record.value for record in batch]
        recent = self.recent.setdefault(producer, deque(maxlen=5))
        for sequence, count, offset in recent:
            if (sequence, count) == (batch.base_sequence, len(values)):
                return answer(offset)
        expected = (recent[-1][0] + recent[-1][1]) % SEQUENCE_MODULUS if recent else 0
        if batch.base_sequence != expected:
            return answer(-1, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER)
        recent.append((batch.base_sequence, len(values), len(self.values)))
        self.values += values
        return answer(len(self.values) - len(values))


def answer(offset: int, error: ErrorCode = ErrorCode.NONE) -> Appended:
    return Appended(error=error, base_offset=offset, log_append_time_ms=-1, log_start_offset=0, error_message=None)


class Brokers:
    def __init__(self, seed: int, *, nodes: int = 3, trouble: float = 0.3) -> None:
        self.logs: dict[TopicPartition, Log] = {}
        self.trouble = trouble
        self.in_flight: dict[TopicPartition, int] = {}
        self.in_flight_most = 0
        self.request_bytes_most = 0
        self.refuse: dict[TopicPartition, ErrorCode] = {}
        self.without_leader: set[TopicPartition] = set()
        self.hang: asyncio.Event | None = None
        self.hanging: set[int] = set()
        self.doubted: list[int | None] = []
        self.topics: frozenset[str] = frozenset()
        self.looked_for: list[frozenset[str]] = []
        self._random = Random(seed)
        self._nodes = nodes
        self.leaders: dict[TopicPartition, int | None] = {}
        self._known: dict[TopicPartition, int | None] = {}
        # Requests on one connection are carried out in their order.
        self._turns: dict[int, asyncio.Lock] = {}

    def leader_id(self, where: TopicPartition) -> int | None:
        return self._known.setdefault(where, self._leader(where))

    def _leader(self, where: TopicPartition) -> int | None:
        if where in self.without_leader:
            return self.leaders.setdefault(where, None)
        return self.leaders.setdefault(where, self._random.randrange(self._nodes))

    def lead(self, where: TopicPartition, node_id: int) -> None:
        """From now on; the client hears of it when it asks."""
        self.leaders[where] = node_id

    def doubt(self, node_id: int | None = None) -> None:
        self.doubted.append(node_id)

    async def metadata(self, topics: frozenset[str], *, timeout_ms: int = 0) -> SimpleNamespace:
        self.looked_for.append(topics)
        await asyncio.sleep(0)
        if self._random.random() < self.trouble / 2:
            raise OutcomeUnknownError("no broker answered")
        for where, leader in self.leaders.items():
            if leader is None and where not in self.without_leader and self._random.random() < 0.5:
                self.leaders[where] = self._random.randrange(self._nodes)
        self._known = dict(self.leaders)
        return SimpleNamespace(topics={})

    async def produce(
        self,
        node_id: int,
        batches: dict[TopicPartition, bytes],
        *,
        transactional_id: str | None,
        timeout_ms: int,
        acks: int,
    ) -> dict[TopicPartition, Appended]:
        self.request_bytes_most = max(self.request_bytes_most, sum(map(len, batches.values())))
        for where in batches:
            self.in_flight[where] = self.in_flight.get(where, 0) + 1
            self.in_flight_most = max(self.in_flight_most, self.in_flight[where])
        try:
            async with self._turns.setdefault(node_id, asyncio.Lock()):
                return await self._carry_out(node_id, batches)
        finally:
            for where in batches:
                self.in_flight[where] -= 1

    async def _carry_out(self, node_id: int, batches: dict[TopicPartition, bytes]) -> dict[TopicPartition, Appended]:
        if self.hang is not None:
            await self.hang.wait()
        if node_id in self.hanging:
            await asyncio.Event().wait()
        for _ in range(self._random.randrange(4)):
            await asyncio.sleep(0)
        fate = self._random.random()
        if fate < self.trouble / 3:
            raise OutcomeUnknownError("the request was lost")
        answers = {where: self._append(node_id, where, data) for where, data in batches.items()}
        if fate < self.trouble * 2 / 3:
            raise OutcomeUnknownError("the answer was lost")
        return answers

    def _append(self, node_id: int, where: TopicPartition, data: bytes) -> Appended:
        if where in self.refuse:
            return answer(-1, self.refuse[where])
        if self._random.random() < self.trouble / 3:
            choice = self._random.choice([None, *range(self._nodes)])
            self.leaders[where] = choice
        if self.leaders[where] != node_id:
            return answer(-1, ErrorCode.NOT_LEADER_OR_FOLLOWER)
        return self.logs.setdefault(where, Log()).append(data)
