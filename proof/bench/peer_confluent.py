"""The peer of all transaction benches: confluent-kafka (librdkafka) with Kafka's own coordinator, and the same client
without transactions. N producers, each in a thread of its own (librdkafka works outside the GIL), begin together.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException, Message, Producer

TIMEOUT_S = 60.0
WARM_UP_UNITS = 3
# log_level: it tells of every retry otherwise; failures are raised. linger.ms: nobody waits for more records than a
# transaction has; with librdkafka's default of 5 ms it would be slower by just that.
QUIET: dict[str, str | int | bool] = {"log_level": 3, "linger.ms": 0}

Unit = Callable[[], None]  # what is made durable at once: a transaction, or a flush


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    producers: int = 1
    records_per_unit: int = 10
    record_bytes: int = 100
    partitions: int = 2
    duration_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    units_per_s: float
    p50_ms: float
    p99_ms: float


def transactions(bootstrap_servers: str, topic: str, workload: Workload) -> Measured:
    """Commits per second; the latency is that of begin, produce and commit."""

    @contextmanager
    def committer(number: int) -> Iterator[Unit]:
        config = QUIET | {"bootstrap.servers": bootstrap_servers, "transactional.id": f"{topic}-{number}"}
        with Producer(config) as producer:
            producer.init_transactions(TIMEOUT_S)
            send = _sender(producer, topic, workload)

            def unit() -> None:
                producer.begin_transaction()
                send()
                producer.commit_transaction(TIMEOUT_S)

            yield unit

    return measure(committer, producers=workload.producers, duration_s=workload.duration_s)


def flushes(bootstrap_servers: str, topic: str, workload: Workload) -> Measured:
    """The same records by an idempotent producer without transactions, acknowledged by all replicas."""

    @contextmanager
    def flusher(_number: int) -> Iterator[Unit]:
        config = QUIET | {"bootstrap.servers": bootstrap_servers, "enable.idempotence": True}
        with Producer(config) as producer:
            send = _sender(producer, topic, workload)

            def unit() -> None:
                send()
                if producer.flush(TIMEOUT_S):
                    raise TimeoutError(f"records not acknowledged within {TIMEOUT_S:g} s")

            yield unit

    return measure(flusher, producers=workload.producers, duration_s=workload.duration_s)


def measure(producer: Callable[[int], AbstractContextManager[Unit]], *, producers: int, duration_s: float) -> Measured:
    """Runs each producer's units back to back. Set-up, the first units and the end are not counted."""
    start = threading.Barrier(producers)

    def work(number: int) -> tuple[float, float, list[float]]:
        latencies_s: list[float] = []
        try:
            with producer(number) as unit:
                for _ in range(WARM_UP_UNITS):
                    unit()
                start.wait()
                begin_s = now_s = time.perf_counter()
                while now_s - begin_s < duration_s:
                    unit()
                    before_s, now_s = now_s, time.perf_counter()
                    latencies_s.append(now_s - before_s)
        except BaseException:
            start.abort()  # the others must not wait for this one
            raise
        return begin_s, now_s, latencies_s

    with ThreadPoolExecutor(producers) as pool:
        futures = [pool.submit(work, number) for number in range(producers)]
    # The cause first, not those whom it kept waiting.
    futures.sort(key=lambda future: isinstance(future.exception(), threading.BrokenBarrierError))
    runs = [future.result() for future in futures]
    latencies_ms = sorted(latency_s * 1000 for _, _, latencies_s in runs for latency_s in latencies_s)
    elapsed_s = max(end_s for _, end_s, _ in runs) - min(begin_s for begin_s, _, _ in runs)
    return Measured(
        units_per_s=len(latencies_ms) / elapsed_s,
        p50_ms=percentile(latencies_ms, 50),
        p99_ms=percentile(latencies_ms, 99),
    )


def percentile(ordered: list[float], percent: float) -> float:
    """The nearest rank: a value that was measured, not one between two."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def _sender(producer: Producer, topic: str, workload: Workload) -> Callable[[], None]:
    value = b"x" * workload.record_bytes

    def delivered(error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            raise KafkaException(error)  # out of the poll, flush or commit that serves this call

    def send() -> None:
        for number in range(workload.records_per_unit):
            producer.produce(topic, value, partition=number % workload.partitions, on_delivery=delivered)

    return send
