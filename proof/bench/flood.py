"""One producer of ours that sends as fast as it can, with and without transactions, in a process of its own.

`python -m proof.bench.flood` reads one JSON job per line and answers each with one line of figures.
"""

import time
from dataclasses import dataclass
from typing import Literal

from oncebox.producer import Producer, ProducerSettings
from oncebox.writer_settings import WriterSettings
from proof.bench.jobs import serve

PARTITIONS = 4
# transactions; without them: acks=all and one request in flight, or acks=1 and five.
Mode = Literal["transactions", "ordered", "unordered"]
WRITERS: dict[str, WriterSettings] = {
    "transactions": WriterSettings(),
    "ordered": WriterSettings(in_flight_max=1),
    "unordered": WriterSettings(acks=1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    bootstrap_servers: str
    coordinator: str
    topic: str
    mode: Mode
    partitions: int = PARTITIONS
    record_bytes: int = 1_024
    transaction_ms: int = 100
    duration_s: float = 10.0


async def measure(job: Job) -> dict[str, float]:
    value = b"x" * job.record_bytes
    transactional_id = f"{job.topic}-flood" if job.mode == "transactions" else None
    async with Producer(
        job.bootstrap_servers,
        job.coordinator if transactional_id else (),
        transactional_id=transactional_id,
        settings=ProducerSettings(writer=WRITERS[job.mode]),
    ) as producer:
        send = _transactions if transactional_id else _flushes
        await send(producer, job, value, 0.3)  # connections, registration, caches
        begun_s = time.perf_counter()
        sent = await send(producer, job, value, job.duration_s)
        return {"records_per_s": sent / (time.perf_counter() - begun_s)}


async def _transactions(producer: Producer, job: Job, value: bytes, duration_s: float) -> int:
    """Each is committed when it is due, and the next one filled while that goes on."""
    sent, committing = 0, None
    clock, until_s = time.perf_counter, time.perf_counter() + duration_s
    while clock() < until_s:
        transaction = await producer.begin()
        due_s = clock() + job.transaction_ms / 1000
        while clock() < due_s:
            for partition in range(job.partitions):
                for _ in range(25):
                    await transaction.send(job.topic, value, partition=partition)
            sent += 25 * job.partitions
        if committing is not None:
            await committing
        committing = transaction.commit_soon()
    if committing is not None:
        await committing
    return sent


async def _flushes(producer: Producer, job: Job, value: bytes, duration_s: float) -> int:
    sent = 0
    clock, until_s = time.perf_counter, time.perf_counter() + duration_s
    while clock() < until_s:
        for partition in range(job.partitions):
            for _ in range(25):
                await producer.send(job.topic, value, partition=partition)
        sent += 25 * job.partitions
    await producer.flush()
    return sent


if __name__ == "__main__":
    serve(measure, Job)
