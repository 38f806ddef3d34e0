"""One partition's batches on their way to its broker: the one being filled, those that wait, those under way.

Bookkeeping only: no I/O, no tasks, no clock. Batches leave in the order in which they were filled, and one that has to
be sent again goes first and alone, so that nothing overtakes it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from oncebox.v1 import transaction_pb2
from oncebox.wire import TopicPartition, sequence_after

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator


class RecordMetadata(NamedTuple):
    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose records they are, for the brokers."""

    producer_id: int
    epoch: int
    transactional_id: str | None
    # Of the transaction, for who is told of an error.
    number: int = 0


class Batch:
    __slots__ = ("builder", "count", "data", "deadline", "ordinal", "position", "size", "waiting")

    def __init__(self, builder: Any, deadline: float) -> None:
        self.builder = builder
        self.count = 1
        # Before compression: what the buffer's limit counts. Known once it is closed.
        self.size = 0
        self.deadline = deadline
        # How many records of its producer id and epoch stand before it on the partition, once it has been built.
        self.position = -1
        self.data: bytes | None = None
        # Which of the partition's batches it is, once it has been sent.
        self.ordinal = -1
        self.waiting: list[tuple[int, asyncio.Future[RecordMetadata]]] = []

    def acknowledge(self, where: TopicPartition, base_offset: int) -> None:
        for index, future in self.waiting:
            if not future.done():
                future.set_result(RecordMetadata(*where, base_offset + index))

    def fail(self, error: BaseException) -> None:
        for _, future in self.waiting:
            if not future.done():
                future.set_exception(error)
                # Whoever has gone meanwhile need not hear of it: the writer tells the error to the next call.
                future.exception()


class PartitionQueue:
    __slots__ = (
        "acknowledged",
        "flying",
        "keeps_runs",
        "open",
        "opened_at",
        "pause_s",
        "position",
        "problem",
        "ready",
        "registered",
        "retry_at",
        "runs",
        "sent_count",
        "where",
    )

    def __init__(self, where: TopicPartition, *, registered: bool, keeps_runs: bool) -> None:
        self.where = where
        self.registered = registered
        self.keeps_runs = keeps_runs
        self.open: Batch | None = None
        self.opened_at = 0.0
        self.ready: deque[Batch] = deque()
        self.flying: list[Batch] = []
        # Until then, and after one came back, only one batch may be under way: an epoch begins with sequence 0.
        self.acknowledged = False
        self.position = 0
        self.sent_count = 0
        self.runs: list[tuple[int, int]] = []
        self.retry_at = 0.0
        self.pause_s = 0.0
        # Why the last attempt failed.
        self.problem = ""

    @property
    def is_waiting(self) -> bool:
        """Has batches that are not under way."""
        return self.open is not None or bool(self.ready)

    @property
    def is_idle(self) -> bool:
        return self.open is None and not self.ready and not self.flying

    def count(self) -> int:
        """How many records have been given to it."""
        unbuilt = sum(batch.count for batch in self.ready if batch.position < 0)
        unbuilt += sum(batch.count for batch in self.flying if batch.position < 0)
        return self.position + unbuilt + (self.open.count if self.open is not None else 0)

    def written_count(self) -> int:
        """How many records, from the first on, are acknowledged: a later batch may be so before an earlier one."""
        outstanding = [batch.position for batch in (*self.flying, *self.ready) if batch.position >= 0]
        return min(outstanding, default=self.position)

    def offsets(self, first: int) -> Iterator[int]:
        """Of its acknowledged records from the `first` on, counted from 0 in the order in which they were given."""
        for run_first, run_next in sorted(self.runs):
            length = run_next - run_first
            if first < length:
                yield from range(run_first + first, run_next)
            first = max(first - length, 0)

    def outstanding(self) -> Iterator[Batch]:
        yield from self.flying
        yield from self.ready
        if self.open is not None:
            yield self.open

    def may_fly(self, in_flight_max: int) -> bool:
        if not self.acknowledged or not self.flying:
            return not self.flying
        if len(self.flying) >= in_flight_max:
            return False
        # One that has not been sent yet must not push the oldest that is not acknowledged out of the broker's memory,
        # which tells repeats from new ones among the last few batches only.
        is_new = not self.ready or self.ready[0].ordinal < 0
        oldest = min(batch.ordinal for batch in self.flying)
        return not is_new or self.sent_count - oldest < in_flight_max

    def close_open(self) -> None:
        if self.open is not None:
            self.open.size = self.open.builder.size()
            self.ready.append(self.open)
            self.open = None

    def next_size(self) -> int:
        """How many bytes take() would send, at most."""
        if self.ready:
            return self.ready[0].size
        return self.open.builder.size() if self.open is not None else 0

    def take(self) -> Batch:
        """The next batch, which is under way from here on."""
        if not self.ready:
            self.close_open()
        batch = self.ready.popleft()
        if batch.ordinal < 0:
            batch.ordinal = self.sent_count
            self.sent_count += 1
        self.flying.append(batch)
        return batch

    def build(self, batch: Batch, identity: Identity) -> bytes:
        """The batch's bytes. Built once: what is sent again must be the same."""
        if batch.data is None:
            batch.position = self.position
            self.position += batch.count
            sequence = sequence_after(0, batch.position)
            batch.builder.set_producer_state(identity.producer_id, identity.epoch, sequence)
            batch.data = bytes(batch.builder.build())
            batch.builder = None
        return batch.data

    def landed(self, batch: Batch, base_offset: int) -> None:
        """Acknowledged: it stands in the log from `base_offset` on."""
        self.flying.remove(batch)
        if not self.is_behind_another(batch):
            self.acknowledged = True
            self.pause_s = 0.0
            self.problem = ""
        if self.keeps_runs:
            if self.runs and self.runs[-1][1] == base_offset:
                self.runs[-1] = (self.runs[-1][0], base_offset + batch.count)
            else:
                self.runs.append((base_offset, base_offset + batch.count))
        batch.acknowledge(self.where, base_offset)

    def is_behind_another(self, batch: Batch) -> bool:
        """Whether one before it is not acknowledged: then a broker that lacks that one calls it out of order."""
        # Those that came back stand first among the waiting, in their order.
        others = self.flying if not self.ready else [*self.flying, self.ready[0]]
        return any(0 <= other.ordinal < batch.ordinal for other in others)

    def came_back(self, batch: Batch) -> None:
        """To be sent again, after those before it."""
        self.flying.remove(batch)
        self.acknowledged = False
        sent = [other for other in self.ready if other.ordinal >= 0]
        sent = sorted([*sent, batch], key=lambda other: other.ordinal)
        self.ready = deque([*sent, *(other for other in self.ready if other.ordinal < 0)])

    def written(self) -> transaction_pb2.Written:
        """Which offsets are ours, exactly."""
        runs: list[tuple[int, int]] = []
        # Of two brokers that led the partition one after the other, the second may have answered first.
        for first, after in sorted(self.runs):
            if runs and runs[-1][1] == first:
                runs[-1] = (runs[-1][0], after)
            else:
                runs.append((first, after))
        return transaction_pb2.Written(
            topic=self.where.topic,
            partition=self.where.partition,
            record_count=sum(after - first for first, after in runs),
            runs=[transaction_pb2.Run(offset_first=first, offset_next=after) for first, after in runs],
        )
