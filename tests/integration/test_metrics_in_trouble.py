"""What the metrics of a coordinator say while it cannot do what it owes; tests/integration/test_operating.py has the
same page in good times.
"""

from __future__ import annotations

import asyncio
import time
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.telemetry import PREFIX
from oncebox import Producer
from oncebox.local import LocalKafka
from oncebox.local.kafka import QUICK_START
from oncebox.v1 import admin_pb2
from oncebox.v1.admin_pb2_grpc import AdminStub
from oncebox.wire import KafkaSettings, Record, TopicPartition, Wire, encode_batch
from proof.faults.proxy import Proxy
from tests.support.coordinator import Coordinators, values
from tests.support.kafka import create_topic

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WRITE_TXN_MARKERS = 27
TWO_HOURS_MS = 2 * 3_600_000
NOBODYS = 1 << 40  # a producer id far above Kafka's own range


def metrics(port: int) -> dict[str, float]:
    """By name, or name and state, summed over all other labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    found: dict[str, float] = {}
    for sample in [sample for family in families for sample in family.samples if sample.name.startswith(PREFIX)]:
        name = " ".join([sample.name.removeprefix(PREFIX), *filter(None, [sample.labels.get("state")])])
        found[name] = found.get(name, 0.0) + sample.value
    return found


async def until(port: int, holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    deadline_s = time.monotonic() + 90
    while not holds(found := await asyncio.to_thread(metrics, port)):
        assert time.monotonic() < deadline_s, found
        await asyncio.sleep(0.2)
    return found


async def hang(bootstrap_servers: str, topic: str) -> None:
    """A transaction that nobody knows, and nobody has written to for hours."""
    partition = TopicPartition(topic, 0)
    record = Record(key=None, value=b"open", timestamp_ms=time.time_ns() // 1_000_000 - TWO_HOURS_MS)
    batch = encode_batch([record], producer_id=NOBODYS, producer_epoch=0, base_sequence=0, transactional=True)
    async with Wire(KafkaSettings(bootstrap_servers=bootstrap_servers)) as wire:
        leader = (await wire.metadata([topic])).topics[topic].partitions[0].leader_id
        assert leader is not None
        answer = await wire.produce(leader, {partition: batch}, transactional_id="any")
        assert not answer[partition].error


@pytest.mark.kafka
@pytest.mark.timeout(600)
async def test_what_is_owed_and_what_fails_is_counted(tmp_path: Path):
    async with Proxy(("127.0.0.1", 0), kafka=True) as proxy:
        with (
            LocalKafka(tmp_path / "kafka", advertised_ports=[proxy.port], jvm_options=[QUICK_START]) as kafka,
            Coordinators(proxy.address, tmp_path) as one,
        ):
            broker = kafka.brokers[0]
            proxy.target = ("127.0.0.1", broker.port)
            topic = await asyncio.to_thread(create_topic, kafka.internal_servers)
            await asyncio.to_thread(lambda: one.start(module="tests.support.quick_sweeps"))
            port = one.http_port
            await hang(proxy.address, await asyncio.to_thread(create_topic, kafka.internal_servers))
            assert (await until(port, lambda now: now["hanging_transactions"] > 0))["hanging_transactions"] == 1

            producer = Producer(proxy.address, one.addresses, transactional_id="orders")
            await producer.start()
            transaction = await producer.begin()
            await transaction.send(topic, b"1")
            held = proxy.hold(WRITE_TXN_MARKERS)
            await transaction.commit(wait="decided")
            await held.caught()
            decided = await asyncio.to_thread(metrics, port)
            assert (decided["debts"], decided["markers in_flight"], decided["markers retrying"]) == (1, 1, 0)

            await asyncio.to_thread(broker.kill)
            async with grpc.aio.insecure_channel(one.addresses[0]) as channel:
                request = admin_pb2.ForceFenceRequest(transactional_id="orders")
                fencing = asyncio.ensure_future(AdminStub(channel).ForceFence(request, timeout=200))
                broken = await until(port, lambda now: now.get("append_failures_total", 0) > 0)
                assert broken["debts"] == 1
                retried = await until(port, lambda now: now["markers retrying"] > 0)
                assert retried["marker_oldest_retry_seconds"] > 0
                assert (retried["debts"], retried["markers retrying"]) == (1, 1)

                await asyncio.to_thread(broker.start)
                mended = await until(port, lambda now: now["partitions serving"] == 4 and not now["debts"])
                assert (mended["markers retrying"], mended["marker_oldest_retry_seconds"]) == (0, 0)
                with suppress(grpc.aio.AioRpcError):  # the partition may have been lost for a while
                    await fencing
            await producer.stop()
            assert await asyncio.to_thread(values, kafka.internal_servers, topic) == [b"1"]
