"""How many records one producer of ours sends, against confluent-kafka and against itself without transactions."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from proof.bench.context import Context
from proof.bench.flood import PARTITIONS, Job
from proof.bench.jobs import JobProcess
from proof.bench.measure import Metric, Side, interleave
from proof.bench.result import Result

TIMEOUT_S = 60.0
UNIT = "records/s"


def bench(context: Context) -> Iterator[Result]:
    """One producer sends records of 1 KB to 4 partitions as fast as it can, in transactions of 100 ms, each record by a
    call of its own. vs-confluent: against confluent-kafka's transactional producer with its defaults (linger 5 ms).
    txn-vs-ordered: against ours without transactions, acks=all and one request in flight. txn-vs-unordered: against
    ours without transactions, acks=1 and five in flight.
    """
    context.progress("starting a coordinator")
    job = Job(
        coordinator=context.coordinator_address,
        bootstrap_servers=context.bootstrap_servers,
        topic=context.new_topic(partitions=PARTITIONS),
        mode="transactions",
        duration_s=context.duration_s,
    )
    with JobProcess("proof.bench.flood") as ours, JobProcess("proof.bench.producer") as confluent:
        sides = {
            "vs-confluent": (0.8, Side(name="confluent-kafka", run=partial(confluent.run, job))),
            "txn-vs-ordered": (0.97, _without(ours, job, "ordered")),
            "txn-vs-unordered": (0.80, _without(ours, job, "unordered")),
        }
        for name, (target, peer) in sides.items():
            yield from interleave(
                [Metric(key="records_per_s", name=f"producer/{name}", unit=UNIT, better="higher", target=target)],
                ours=Side(name="Oncebox", run=partial(ours.run, job)),
                peer=peer,
                rounds=context.rounds,
                progress=context.progress,
            )


def _without(ours: JobProcess, job: Job, mode: str) -> Side:
    return Side(name=f"Oncebox, {mode}", run=partial(ours.run, replace(job, mode=mode)))  # type: ignore[arg-type]


def confluent_floods(job: Job) -> dict[str, float]:
    """The same by confluent-kafka with Kafka's own coordinator."""
    from confluent_kafka import Producer

    value = b"x" * job.record_bytes
    config: dict[str, str | int] = {
        "bootstrap.servers": job.bootstrap_servers,
        "transactional.id": f"{job.topic}-confluent",
        "log_level": 3,
    }
    with Producer(config) as producer:
        producer.init_transactions(TIMEOUT_S)

        def flood(duration_s: float) -> int:
            sent = 0
            clock, until_s = time.perf_counter, time.perf_counter() + duration_s
            while clock() < until_s:
                producer.begin_transaction()
                due_s = clock() + job.transaction_ms / 1000
                while clock() < due_s:
                    for partition in range(job.partitions):
                        for _ in range(25):
                            try:
                                producer.produce(job.topic, value, partition=partition)
                            except BufferError:
                                producer.poll(0.005)
                                producer.produce(job.topic, value, partition=partition)
                    producer.poll(0)
                    sent += 25 * job.partitions
                producer.commit_transaction(TIMEOUT_S)
            return sent

        flood(0.3)
        begun_s = time.perf_counter()
        sent = flood(job.duration_s)
        return {"records_per_s": sent / (time.perf_counter() - begun_s)}


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(confluent_floods(Job(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
