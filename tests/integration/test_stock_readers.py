"""Stock readers of two makes see exactly the committed records, also after a coordinator was killed half-way."""

import asyncio
import uuid
from typing import Any

import grpc

from oncebox.producer import Producer
from oncebox.v1 import gateway_pb2
from oncebox.v1.gateway_pb2_grpc import GatewayStub
from tests.integration.test_failover import Ledger, run_through
from tests.support.console_consumer import java_console_consumer
from tests.support.coordinator import Coordinators, values, wait_for_markers
from tests.support.kafka import TopicFactory


async def test_librdkafka_and_java_agree_after_a_kill(coordinators: Coordinators, new_topic):
    topic = new_topic(partitions=2)
    coordinators.start()
    coordinators.start()

    async def kill(ledger: Ledger) -> None:
        # What is open at this moment is aborted later, by the successor or by its own producer's next start.
        async with Producer(
            coordinators.bootstrap_servers, coordinators.addresses, transactional_id=f"open-{uuid.uuid4().hex[:6]}"
        ) as producer:
            transaction = await producer.begin()
            await transaction.send_and_wait(topic, b"never committed", partition=0)
            await asyncio.to_thread(coordinators.processes[0].kill)
            await transaction.abort()

    ledger = await run_through(coordinators, topic, kill)
    committed = sorted([*ledger.committed, *ledger.committed])
    assert sorted(await asyncio.to_thread(values, coordinators.bootstrap_servers, topic)) == committed
    seen = await asyncio.to_thread(java_console_consumer, coordinators.bootstrap_servers, topic)
    assert sorted(seen) == committed


async def test_spark_reads_what_was_committed_through_the_client_and_the_gateway(
    spark: Any, shared_coordinator: Coordinators, new_topic: TopicFactory
):
    one, topic = shared_coordinator, new_topic(partitions=2)
    name = uuid.uuid4().hex[:8]
    async with Producer(one.bootstrap_servers, one.addresses, transactional_id=f"spark-{name}") as producer:
        for number in range(20):
            transaction = await producer.begin()
            await transaction.send_and_wait(topic, b"%d" % number, partition=number % 2)
            await (transaction.abort() if number % 5 == 0 else transaction.commit())
    request = gateway_pb2.CommitBatchRequest(
        transactional_id=f"batch-{name}", request_id="1", records=[gateway_pb2.Record(topic=topic, value=b"batch")]
    )
    async with grpc.aio.insecure_channel(one.addresses[0]) as channel:
        await GatewayStub(channel).CommitBatch(request)
    await asyncio.to_thread(wait_for_markers, one.bootstrap_servers, topic)
    records = (
        spark.read.format("kafka")
        .option("kafka.bootstrap.servers", one.bootstrap_servers)
        .option("kafka.isolation.level", "read_committed")
        .option("subscribe", topic)
        .load()
    )
    seen = await asyncio.to_thread(lambda: sorted(bytes(row.value) for row in records.select("value").collect()))
    assert seen == sorted([*(b"%d" % number for number in range(20) if number % 5), b"batch"])
