"""Commit rate and latency of our coordinator against Kafka's own, on the same broker."""

from collections.abc import Iterator
from dataclasses import asdict, replace

from proof.bench import peer_confluent
from proof.bench.context import Context
from proof.bench.jobs import JobProcess
from proof.bench.measure import Metric, Side, interleave
from proof.bench.our_producers import Job
from proof.bench.peer_confluent import Workload
from proof.bench.result import Result

# How many producers, and what each commit waits for.
QUICK = ((1, "decided"), (32, "decided"), (1, "complete"), (32, "complete"))
ALL = (*((producers, "decided") for producers in (1, 4, 16, 32, 64)), (1, "complete"), (32, "complete"))
FEW = Workload(records_per_unit=10)
RECORDS_MANY = 10_000
# Longer than it takes to write so many.
PACE_S = 0.05


def bench(context: Context) -> Iterator[Result]:
    """Transactions of 10 records of 100 bytes on 2 partitions: ours (one Python process with N producers) against
    confluent-kafka with Kafka's own coordinator (linger 0, a thread per producer). A commit is answered when it is
    decided, as Kafka's own coordinator answers it; in the rows named `visible` ours also waits for all markers.
    `flat`: what commit() takes after 10,000 records against after 10, both begun 50 ms before.
    """
    context.progress("starting a coordinator")
    address = context.coordinator_address
    servers, topic = context.bootstrap_servers, context.new_topic(partitions=2)
    with JobProcess("proof.bench.our_producers") as ours:
        for producers, wait in QUICK if context.quick else ALL:
            workload = Workload(producers=producers, duration_s=context.duration_s)
            what = f"{producers}-producer{'s' if producers > 1 else ''}{'-visible' if wait == 'complete' else ''}"
            rate_target, latency_target = (1.5, 1.0) if wait == "decided" else (None, None)
            metrics = [
                Metric(
                    key="units_per_s",
                    name=f"coordinator/{what}",
                    unit="commits/s",
                    better="higher",
                    target=rate_target,
                ),
                Metric(key="p99_ms", name=f"coordinator/p99-{what}", unit="ms", better="lower", target=latency_target),
            ]
            job = Job(bootstrap_servers=servers, coordinator=address, topic=topic, workload=workload, wait=wait)
            yield from interleave(
                metrics,
                ours=Side(name="Oncebox", run=lambda job=job: ours.run(job)),  # type: ignore[misc]
                peer=Side(
                    name="Kafka",
                    run=lambda workload=workload: asdict(peer_confluent.transactions(servers, topic, workload)),  # type: ignore[misc]
                ),
                rounds=context.rounds,
                progress=context.progress,
            )
        yield from _flat(context, ours, Job(bootstrap_servers=servers, coordinator=address, topic=topic, workload=FEW))


def _flat(context: Context, ours: JobProcess, few: Job) -> Iterator[Result]:
    """What a commit costs must not depend on how much was written: the peer is our own commit of ten records.

    Both at the same pace: who has slept while many records were written wakes up slowly, however many they were.
    """
    few = replace(few, flushes=True, pace_s=PACE_S, workload=replace(FEW, duration_s=context.duration_s))
    many = replace(few, workload=replace(few.workload, records_per_unit=RECORDS_MANY))
    yield from interleave(
        [Metric(key="commit_p50_ms", name="coordinator/flat", unit="ms", better="lower", target=0.8)],
        ours=Side(name=f"{RECORDS_MANY:,} records", run=lambda: ours.run(many)),
        peer=Side(name=f"{FEW.records_per_unit} records", run=lambda: ours.run(few)),
        rounds=context.rounds,
        progress=context.progress,
    )
