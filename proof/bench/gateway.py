"""What the gateway carries: records per second of its own processor time, by a client with generated stubs alone."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from proof.bench.context import Context
from proof.bench.jobs import JobProcess, serve
from proof.bench.measure import Metric, Side, fixed, interleave
from proof.bench.result import Result
from proof.bench.usage import cpu_s

PARTITIONS = 4
TARGET_PER_CPU_S = 30_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    address: str
    topic: str
    duration_s: float
    record_bytes: int = 1_024
    records_per_send: int = 250
    transaction_ms: int = 100


def bench(context: Context) -> Iterator[Result]:
    """One client sends records of 1 KB through one Transact stream, 250 in a message, in transactions of 100 ms.
    Counted is the processor time of the whole coordinator process, which is the gateway too.
    """
    context.progress("starting a coordinator")
    coordinator = context.start_coordinator()
    topic = context.new_topic(partitions=PARTITIONS)
    job = Job(address=coordinator.address, topic=topic, duration_s=context.duration_s)
    pid = coordinator.process.pid
    with JobProcess("proof.bench.gateway") as client:

        def run() -> dict[str, float]:
            before_s = cpu_s(pid)
            figures = client.run(job)
            return {
                "per_cpu_s": figures["records"] / (cpu_s(pid) - before_s),
                "records_per_s": figures["records"] / figures["elapsed_s"],
            }

        yield from interleave(
            [
                Metric(key="per_cpu_s", name="gateway/throughput", unit="records/CPU-s", better="higher", target=1.0),
                Metric(key="records_per_s", name="gateway/wall", unit="records/s", better="higher"),
            ],
            ours=Side(name="Oncebox", run=run),
            peer=fixed({"per_cpu_s": TARGET_PER_CPU_S, "records_per_s": TARGET_PER_CPU_S}),
            rounds=context.rounds,
            progress=context.progress,
        )


async def measure(job: Job) -> dict[str, float]:
    from oncebox.v1 import gateway_pb2 as pb
    from oncebox.v1.gateway_pb2_grpc import GatewayStub

    value = b"x" * job.record_bytes
    sends = [
        pb.TransactRequest(
            request_id=1,
            send=pb.Send(records=[pb.Record(topic=job.topic, partition=partition, value=value)] * job.records_per_send),
        )
        for partition in range(PARTITIONS)
    ]
    async with grpc.aio.insecure_channel(job.address) as channel:
        stream = GatewayStub(channel).Transact()

        async def ask(**request: object) -> None:
            await stream.write(pb.TransactRequest(request_id=2, **request))  # type: ignore[arg-type]
            while (answer := await stream.read()).request_id != 2:
                _check(answer)
            _check(answer)

        await ask(open=pb.Open(transactional_id=f"{job.topic}-gateway"))
        records, begun_s = 0, time.perf_counter()
        while time.perf_counter() < begun_s + job.duration_s:
            await ask(begin=pb.Begin())
            due_s = time.perf_counter() + job.transaction_ms / 1000
            turn = 0
            while time.perf_counter() < due_s:
                await stream.write(sends[turn % PARTITIONS])
                turn += 1
            await ask(commit=pb.Commit(decided=True))
            records += turn * job.records_per_send
        elapsed_s = time.perf_counter() - begun_s
        await stream.done_writing()
    return {"records": records, "elapsed_s": elapsed_s}


def _check(answer: object) -> None:
    if answer is grpc.aio.EOF or answer.HasField("error"):  # type: ignore[attr-defined]
        raise RuntimeError(f"the gateway refuses: {answer}")


if __name__ == "__main__":
    serve(measure, Job)
