"""A writer's requests that are not answered yet, and what no answer, or a bad one, tells of who leads.

A broker may stand still, or be cut off from the others and replaced: then it is doubted, and the others are asked. A
request whose answer is overdue is given up where somebody else leads by now, who gets the same batches.
"""

import asyncio
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from oncebox.partition_queue import Batch, PartitionQueue
from oncebox.wire import Appended, ErrorCode, TopicPartition, Wire

# Much longer than an answer takes where all is well; and how often that is looked at.
OVERDUE_S = 3.0
LOOK_S = 1.0
_CUT_OFF = frozenset(
    {
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    }
)

Answer = asyncio.Future[dict[TopicPartition, Appended]]


class Sent(NamedTuple):
    node_id: int
    batches: dict[PartitionQueue, Batch]
    sent_at: float


class UnderWay:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._sent: dict[Answer, Sent] = {}
        self._counts: dict[int, int] = {}

    def __iter__(self) -> Iterator[Answer]:
        return iter(self._sent)

    def count(self, node_id: int) -> int:
        """How many requests to this broker there are."""
        return self._counts.get(node_id, 0)

    def add(self, answer: Answer, node_id: int, batches: dict[PartitionQueue, Batch], now: float) -> None:
        self._counts[node_id] = self._counts.get(node_id, 0) + 1
        self._sent[answer] = Sent(node_id, batches, now)

    def take(self, answer: Answer) -> Sent | None:
        """It has come. None: the request had been given up."""
        sent = self._sent.pop(answer, None)
        if sent is not None:
            self._counts[sent.node_id] -= 1
        return sent

    def learn(self, sent: Sent, told: Mapping[TopicPartition, Appended]) -> None:
        """What its answer tells of who leads; {}: there was none."""
        for partition in sent.batches:
            appended = told.get(partition.where)
            if appended is None or appended.error in _CUT_OFF:
                self._wire.doubt(sent.node_id)
            elif appended.error is ErrorCode.NOT_LEADER_OR_FOLLOWER:
                self._wire.doubt()  # whoever named it

    def doubt_overdue(self, now: float) -> list[PartitionQueue]:
        """Those whose leader has not answered for long."""
        overdue = [sent for sent in self._sent.values() if now - sent.sent_at >= OVERDUE_S]
        for sent in overdue:
            self._wire.doubt(sent.node_id)
        return [partition for sent in overdue for partition in sent.batches]

    def give_up_moved(self, now: float) -> list[Sent]:
        """Requests whose answer is overdue, and where somebody else leads by now; theirs may still come to nothing."""
        moved = [
            (answer, sent)
            for answer, sent in self._sent.items()
            if now - sent.sent_at >= OVERDUE_S
            and {self._wire.leader_id(partition.where) for partition in sent.batches} - {sent.node_id, None}
        ]
        for answer, _ in moved:
            self.take(answer)
            answer.cancel()
        return [sent for _, sent in moved]
