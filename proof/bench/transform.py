"""What exactly-once costs a consume-transform-produce loop: oncebox.transform against the same loop without."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from oncebox.wire import Compression, ErrorCode, KafkaSettings, TopicPartition, Wire, batch_builder
from proof.bench.context import Context
from proof.bench.copying import Job
from proof.bench.jobs import JobProcess
from proof.bench.measure import Metric, Side, interleave
from proof.bench.result import Result

PARTITIONS = 4
# A transaction of 30 s, and the beginning of the next. The rows before have warmed everything up.
LONG_S = 31.0
LONG_RECORDS = 20_000_000
LONG_ROUNDS, LONG_ROUNDS_QUICK = 2, 1
BATCH_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    record_bytes: int
    # Enough for some seconds: what a copy has once, its beginning and its end, must not be what is measured.
    record_count: int
    transaction_ms: int
    target: float  # the ratio to reach
    is_long: bool = False


ROWS = (
    Row(name="100ms-1KB", record_bytes=1_024, record_count=400_000, transaction_ms=100, target=0.85),
    Row(name="100ms-100B", record_bytes=100, record_count=800_000, transaction_ms=100, target=0.70),
    Row(
        name="30s-1KB",
        record_bytes=1_024,
        record_count=LONG_RECORDS,
        transaction_ms=30_000,
        target=0.98,
        is_long=True,
    ),
)


def bench(context: Context) -> Iterator[Result]:
    """One process copies a topic of 4 partitions record by record (oncebox.transform), in transactions of 100 ms or
    30 s, against the same loop without transactions: an idempotent producer with acks=all that is flushed, and offsets
    that are committed, as often. With 100 ms the whole topic is copied, with 30 s what 31 s allow, twice (quick: once)
    whatever number of rounds is asked for.
    """
    context.progress("starting a coordinator")
    address, servers = context.coordinator_address, context.bootstrap_servers
    long_rounds = LONG_ROUNDS_QUICK if context.quick else LONG_ROUNDS
    with JobProcess("proof.bench.copying") as copying:
        for row in ROWS:
            source = context.new_topic(partitions=PARTITIONS)
            # Many records that are all the same: compressed they need no room to speak of.
            compression = Compression.ZSTD if row.is_long else Compression.NONE
            asyncio.run(_fill(servers, source, row.record_count, row.record_bytes, compression))
            job = Job(
                bootstrap_servers=servers,
                coordinator=address,
                source=source,
                target=context.new_topic(partitions=PARTITIONS),
                record_count=row.record_count,
                transaction_ms=row.transaction_ms,
                seconds=LONG_S if row.is_long else None,
            )
            yield from interleave(
                [
                    Metric(
                        key="records_per_s",
                        name=f"transform/{row.name}",
                        unit="records/s",
                        better="higher",
                        target=row.target,
                    )
                ],
                ours=Side(name="exactly once", run=partial(copying.run, job)),
                peer=Side(name="at least once", run=partial(copying.run, replace(job, transactions=False))),
                rounds=long_rounds if row.is_long else context.rounds,
                progress=context.progress,
                warm_up_turns=0 if row.is_long else 2,
            )


async def _fill(servers: str, topic: str, count: int, record_bytes: int, compression: Compression) -> None:
    """The same batch again and again."""
    wire = Wire(KafkaSettings(bootstrap_servers=servers))
    try:
        await wire.metadata([topic])
        left = dict.fromkeys((TopicPartition(topic, partition) for partition in range(PARTITIONS)), count // PARTITIONS)
        full_count = max(BATCH_BYTES // record_bytes, 1)
        full = _batch(full_count, record_bytes, compression)
        while waiting := [where for where, still in left.items() if still]:
            for where in waiting:
                count = min(left[where], full_count)
                data = full if count == full_count else _batch(count, record_bytes, compression)
                node_id = wire.leader_id(where)
                error = ErrorCode.LEADER_NOT_AVAILABLE
                if node_id is not None:
                    error = (await wire.produce(node_id, {where: data}, acks=1))[where].error
                if error is ErrorCode.NONE:
                    left[where] -= count
                elif error.retriable:
                    # The topic is new, and its leader may not know yet.
                    await wire.metadata([topic])
                else:
                    raise RuntimeError(f"{topic} cannot be filled: {error.name}")
    finally:
        await wire.close()


def _batch(count: int, record_bytes: int, compression: Compression) -> bytes:
    builder = batch_builder(transactional=False, compression=compression)
    for number in range(count):
        builder.append(number, None, None, b"x" * record_bytes, [])
    return bytes(builder.build())
