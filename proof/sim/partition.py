"""One partition of a Kafka topic as its leader keeps it: who may append, what is open, what readers may see. Pure.

Producer ids are fenced by epoch, sequences deduplicated over the last five batches (whatever the bytes), gaps refused.
A marker ends all that its producer id has open. What is above the high watermark may still be lost.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from oncebox.wire import ErrorCode

REMEMBERED_BATCHES = 5
NO_SEQUENCE = -1


@dataclass(slots=True, kw_only=True, eq=False)
class Batch:
    offset: int
    producer_id: int
    epoch: int
    # Of its first record.
    sequence: int
    # None where compaction has removed a record.
    records: list[Any]
    transactional: bool
    # Of a marker; None: data.
    commit: bool | None = None
    coordinator_epoch: int = -1
    # Of transactional data, once a marker has ended it.
    ended_at: int | None = None
    committed: bool = False
    # It was meant for another topic of the same name.
    stray: bool = False

    @property
    def offset_next(self) -> int:
        return self.offset + len(self.records)


@dataclass(slots=True)
class Producer:
    epoch: int
    sequence_next: int = 0
    coordinator_epoch: int = -1
    recent: deque[Batch] = field(default_factory=lambda: deque(maxlen=REMEMBERED_BATCHES))
    open: list[Batch] = field(default_factory=list)


class Partition:
    def __init__(self, name: str) -> None:
        self.name = name
        self.batches: list[Batch] = []
        self.producers: dict[int, Producer] = {}
        self.offset_next = 0
        self.high_watermark = 0

    # --- writing ------------------------------------------------------------------------------------------------

    def append(
        self, *, producer_id: int, epoch: int, sequence: int, records: list[Any], transactional: bool
    ) -> tuple[ErrorCode, Batch | None]:
        """The batch that stands there now, be it an earlier one with the same sequence."""
        producer = self.producers.get(producer_id)
        if producer is not None:
            if epoch < producer.epoch:
                return ErrorCode.INVALID_PRODUCER_EPOCH, None
            if sequence != NO_SEQUENCE:
                if epoch == producer.epoch:
                    for batch in producer.recent:
                        if batch.sequence == sequence and len(batch.records) == len(records):
                            return ErrorCode.NONE, batch
                if sequence != (producer.sequence_next if epoch == producer.epoch else 0):
                    return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, None
        batch = Batch(
            offset=self.offset_next,
            producer_id=producer_id,
            epoch=epoch,
            sequence=sequence,
            records=records,
            transactional=transactional,
        )
        self._add(batch)
        return ErrorCode.NONE, batch

    def mark(
        self, *, producer_id: int, epoch: int, commit: bool, coordinator_epoch: int, transaction_version: int
    ) -> tuple[ErrorCode, Batch | None]:
        producer = self.producers.get(producer_id)
        if producer is not None:
            # Of an equal epoch it may be a repeat, but not where it would end an open transaction (KAFKA-19999).
            ends_another = transaction_version >= 2 and epoch == producer.epoch and bool(producer.open)
            if epoch < producer.epoch or ends_another:
                return ErrorCode.INVALID_PRODUCER_EPOCH, None
            if coordinator_epoch < producer.coordinator_epoch:
                return ErrorCode.TRANSACTION_COORDINATOR_FENCED, None
        batch = Batch(
            offset=self.offset_next,
            producer_id=producer_id,
            epoch=epoch,
            sequence=NO_SEQUENCE,
            records=[None],
            transactional=True,
            commit=commit,
            coordinator_epoch=coordinator_epoch,
        )
        self._add(batch)
        return ErrorCode.NONE, batch

    def _add(self, batch: Batch) -> None:
        self.batches.append(batch)
        self.offset_next = batch.offset_next
        self._account(batch)

    def _account(self, batch: Batch) -> None:
        producer = self.producers.get(batch.producer_id)
        if producer is None:
            producer = self.producers[batch.producer_id] = Producer(epoch=batch.epoch)
        elif batch.epoch > producer.epoch:
            producer.epoch, producer.sequence_next = batch.epoch, 0
            producer.recent.clear()
        if batch.commit is not None:
            producer.coordinator_epoch = batch.coordinator_epoch
            for data in producer.open:
                data.ended_at, data.committed = batch.offset, batch.commit
            producer.open.clear()
            return
        if batch.sequence != NO_SEQUENCE:
            producer.sequence_next = batch.sequence + len(batch.records)
            producer.recent.append(batch)
        if batch.transactional:
            batch.ended_at = None
            producer.open.append(batch)

    # --- replicas -----------------------------------------------------------------------------------------------

    def replicate(self) -> list[Batch]:
        """All that is stored is durable now; returns what was not before."""
        fresh = []
        for batch in reversed(self.batches):
            if batch.offset < self.high_watermark:
                break
            fresh.append(batch)
        self.high_watermark = self.offset_next
        return fresh[::-1]

    def lose_suffix(self) -> bool:
        """A replica that had only what is durable leads now. Whether anything was lost."""
        if self.offset_next == self.high_watermark:
            return False
        self.batches = [batch for batch in self.batches if batch.offset < self.high_watermark]
        self.offset_next = self.high_watermark
        self.producers.clear()
        for batch in self.batches:
            self._account(batch)
        return True

    def compact(self, offset_next: int) -> None:
        """Of records (key, value) of one key below the offset the last one is kept."""
        seen = set()
        for batch in reversed(self.batches):
            if batch.offset_next > min(offset_next, self.high_watermark):
                continue
            for index in range(len(batch.records) - 1, -1, -1):
                record = batch.records[index]
                if record is not None:
                    if record[0] in seen:
                        batch.records[index] = None
                    seen.add(record[0])

    # --- reading ------------------------------------------------------------------------------------------------

    @property
    def last_stable_offset(self) -> int:
        """Below it every transaction has ended, durably."""
        stable = self.high_watermark
        for producer in self.producers.values():
            if producer.open:
                stable = min(stable, producer.open[0].offset)
        for batch in self.batches:
            if batch.offset >= stable:
                break
            if batch.ended_at is not None and batch.ended_at >= self.high_watermark:
                return batch.offset
        return stable

    def read(self, offset_first: int, offset_next: int) -> Iterator[tuple[int, Any]]:
        """Read uncommitted: each durable record that compaction has left."""
        for batch in self.batches:
            if batch.offset >= min(offset_next, self.high_watermark):
                break
            if batch.offset_next > offset_first and batch.commit is None:
                for offset, record in enumerate(batch.records, batch.offset):
                    if record is not None and offset_first <= offset < offset_next:
                        yield offset, record

    def read_committed(self, offset_first: int) -> Iterator[tuple[int, Any]]:
        """Up to the last stable offset."""
        stable = self.last_stable_offset
        for batch in self.batches:
            if batch.offset >= stable:
                break
            if batch.offset >= offset_first and batch.commit is None and (batch.committed or not batch.transactional):
                yield from enumerate(batch.records, batch.offset)

    def open_batches(self) -> list[Batch]:
        return [producer.open[0] for producer in self.producers.values() if producer.open]
