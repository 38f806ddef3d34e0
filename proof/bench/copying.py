"""Copies a topic, with oncebox.transform and by the same loop without transactions, in a process of its own.

`python -m proof.bench.copying` reads one JSON job per line and answers each with one line of figures.
"""

import asyncio
import time
import uuid
from dataclasses import dataclass

import oncebox
from oncebox import Transaction, TransformSettings
from oncebox.group_consumer import GroupConsumer
from oncebox.producer import Producer
from oncebox.reader import Record
from oncebox.wire import KafkaSettings, TopicPartition
from proof.bench.jobs import serve

GATHER_MAX = 1_000
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    bootstrap_servers: str
    coordinator: str
    source: str
    target: str
    # What the source holds; all of it is copied, or what fits into so many seconds.
    record_count: int
    transaction_ms: int
    seconds: float | None = None
    transactions: bool = True


class _Progress:
    """Counts records, from the first one on."""

    def __init__(self, job: Job) -> None:
        self.left = job.record_count
        self.begun_s = 0.0
        self.stop = asyncio.Event()
        self._seconds = job.seconds

    def handled(self) -> None:
        if not self.begun_s:
            self.begun_s = time.perf_counter()
            if self._seconds is not None:
                asyncio.get_running_loop().call_later(self._seconds, self.stop.set)
        self.left -= 1
        if not self.left:
            self.stop.set()


async def measure(job: Job) -> dict[str, float]:
    progress = _Progress(job)
    await (_with_transactions if job.transactions else _without)(job, progress)
    if job.seconds is not None and not progress.left:
        raise RuntimeError(f"the source of {job.record_count} records did not last for {job.seconds} s")
    # From the first record until all are committed and the group is left: both sides do the same there.
    return {"records_per_s": (job.record_count - progress.left) / (time.perf_counter() - progress.begun_s)}


async def _with_transactions(job: Job, progress: _Progress) -> None:
    target = job.target

    async def copy(record: Record, transaction: Transaction) -> None:
        await transaction.send(target, record.value, key=record.key, partition=record.partition)
        progress.handled()

    await oncebox.transform(
        job.source,
        f"bench-{uuid.uuid4().hex[:8]}",
        copy,
        kafka=job.bootstrap_servers,
        coordinators=job.coordinator,
        stop=progress.stop,
        settings=TransformSettings(transaction_ms=job.transaction_ms, transaction_records=10_000_000),
    )


class _CommittingConsumer(GroupConsumer):
    async def commit(self, nexts: dict[TopicPartition, int]) -> None:
        from confluent_kafka import TopicPartition as Native

        offsets = [Native(*where, offset) for where, offset in nexts.items()]
        await self._call(lambda: self._consumer.commit(offsets=offsets, asynchronous=False))


async def _without(job: Job, progress: _Progress) -> None:
    """At least once: an idempotent producer, and offsets committed when all before them is written."""
    target = job.target

    async def copy(record: Record, producer: Producer) -> None:
        await producer.send(target, record.value, key=record.key, partition=record.partition)
        progress.handled()

    kafka = KafkaSettings(bootstrap_servers=job.bootstrap_servers)
    group = f"bench-{uuid.uuid4().hex[:8]}"
    consumer = _CommittingConsumer(kafka, [job.source], group, config={}, revoked=lambda *_: None)
    async with Producer(kafka) as producer:
        await consumer.open()
        try:
            nexts: dict[TopicPartition, int] = {}
            due_s = time.perf_counter() + job.transaction_ms / 1000
            while not progress.stop.is_set():
                records, _ = await consumer.gather(GATHER_MAX, POLL_S)
                for record in records:
                    if progress.stop.is_set():
                        break
                    await copy(record, producer)
                    nexts[TopicPartition(record.topic, record.partition)] = record.offset + 1
                if nexts and (time.perf_counter() >= due_s or progress.stop.is_set()):
                    await producer.flush()
                    await consumer.commit(nexts)
                    nexts = {}
                    due_s = time.perf_counter() + job.transaction_ms / 1000
        finally:
            await consumer.close()


if __name__ == "__main__":
    serve(measure, Job)
