"""Baseline: what Kafka's own transactions cost on these brokers, before anything of ours is measured."""

import dataclasses
from collections.abc import Iterator

from proof.bench import peer_confluent
from proof.bench.context import Context
from proof.bench.measure import Metric, Side, interleave
from proof.bench.result import Result


def bench(context: Context) -> Iterator[Result]:
    """A baseline, no part of Oncebox: one confluent-kafka producer that commits transactions of 10 records of 100 bytes
    on 2 partitions through Kafka's own coordinator, against the same producer and records without transactions
    (idempotent, one flush for each 10 records). The ratio says how much of the speed transactions leave.
    """
    workload = peer_confluent.Workload(duration_s=context.duration_s)
    servers, topic = context.bootstrap_servers, context.new_topic(partitions=workload.partitions)
    yield from interleave(
        [
            Metric(key="units_per_s", name="kafka/1-producer", unit="commits/s", better="higher"),
            Metric(key="p50_ms", name="kafka/1-producer-p50", unit="ms", better="lower"),
            Metric(key="p99_ms", name="kafka/1-producer-p99", unit="ms", better="lower"),
        ],
        ours=Side(
            name="transactions",
            run=lambda: dataclasses.asdict(peer_confluent.transactions(servers, topic, workload)),
        ),
        peer=Side(
            name="no transactions",
            run=lambda: dataclasses.asdict(peer_confluent.flushes(servers, topic, workload)),
        ),
        rounds=context.rounds,
        progress=context.progress,
    )
