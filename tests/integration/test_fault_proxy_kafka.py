"""The proxy between real clients and a real broker: what it does to a request shows in the partition."""

import asyncio

import pytest
import pytest_asyncio
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from confluent_kafka import Producer

from oncebox.local import LocalKafka
from oncebox.local.kafka import QUICK_START
from oncebox.wire import LATEST, KafkaSettings, OutcomeUnknownError, TopicPartition, Wire
from proof.faults.proxy import Proxy
from tests.support.kafka import create_topic

PRODUCE = 0


def plain_batch() -> bytes:
    """One record without a producer id: only the proxy decides how often it is stored."""
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 1024)
    builder.append(0, 0, None, b"x", [])
    return bytes(builder.build())


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.kafka]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def broker(tmp_path_factory):
    """Kafka, and the proxy on the port that it advertises."""
    proxy = Proxy(("127.0.0.1", 0), kafka=True)
    kafka = LocalKafka(tmp_path_factory.mktemp("proxied"), advertised_ports=[proxy.port], jvm_options=[QUICK_START])
    await asyncio.to_thread(kafka.start)
    try:
        proxy.target = ("127.0.0.1", kafka.brokers[0].port)
        async with proxy:
            yield kafka, proxy
    finally:
        await asyncio.to_thread(kafka.stop)


@pytest_asyncio.fixture(loop_scope="module")
async def proxy(broker):
    yield broker[1]
    await broker[1].heal()


@pytest_asyncio.fixture(loop_scope="module")
async def partition(broker):
    return TopicPartition(await asyncio.to_thread(create_topic, broker[0].internal_servers), 0)


@pytest_asyncio.fixture(loop_scope="module")
async def wire(broker, partition):
    async with Wire(KafkaSettings(bootstrap_servers=broker[1].address)) as wire:
        await wire.metadata([partition.topic])
        yield wire


@pytest_asyncio.fixture(loop_scope="module")
async def producer(broker):
    return Producer({"bootstrap.servers": broker[1].address, "enable.idempotence": True, "linger.ms": 0})


async def produce(wire: Wire, partition: TopicPartition, *, timeout_ms: int = 30_000) -> int:
    """The offset of one record, or OutcomeUnknownError."""
    answer = await wire.produce(1, {partition: plain_batch()}, timeout_ms=timeout_ms)
    assert not answer[partition].error
    return answer[partition].base_offset


async def stored(wire: Wire, partition: TopicPartition) -> int:
    return (await wire.list_offsets(1, {partition: LATEST}))[partition].offset


async def test_clients_come_through_the_proxy_only(proxy, wire, partition):
    assert await produce(wire, partition) == 0
    assert {broker.port for broker in wire.brokers.values()} == {proxy.port}


async def test_a_late_request_is_executed_after_its_retry(proxy, wire, partition):
    assert await stored(wire, partition) == 0  # by now it is connected
    held = proxy.hold(PRODUCE)
    with pytest.raises(OutcomeUnknownError):
        await produce(wire, partition, timeout_ms=500)
    assert await stored(wire, partition) == 0
    assert await produce(wire, partition) == 0
    await held.release()
    assert await stored(wire, partition) == 2


async def test_a_request_can_be_executed_though_its_client_timed_out(proxy, wire, partition):
    assert await stored(wire, partition) == 0  # by now it is connected
    swallowed = proxy.swallow_reply(PRODUCE)
    with pytest.raises(OutcomeUnknownError):
        await produce(wire, partition, timeout_ms=2000)
    await swallowed.reply()
    assert await stored(wire, partition) == 1


async def test_a_doubled_request_is_stored_twice_without_idempotence(proxy, wire, partition):
    doubled = proxy.double(PRODUCE)
    assert await produce(wire, partition) == 0
    await doubled.reply()
    assert await stored(wire, partition) == 2
    assert await produce(wire, partition) == 2


async def test_an_idempotent_request_is_stored_once_however_often_it_comes(proxy, wire, partition, producer):
    doubled, copied = proxy.double(PRODUCE), proxy.copy(PRODUCE)
    for _ in range(2):
        producer.produce(partition.topic, b"once", partition=0)
        assert await asyncio.to_thread(producer.flush, 60) == 0
    await doubled.reply()
    await copied.release()
    await copied.release()
    assert await stored(wire, partition) == 2


async def test_a_producer_outlasts_a_cut(proxy, wire, partition, producer):
    await proxy.cut()
    acknowledged = []
    producer.produce(partition.topic, b"x", partition=0, on_delivery=lambda error, message: acknowledged.append(error))
    await asyncio.to_thread(producer.poll, 0.5)
    assert acknowledged == []
    await proxy.heal()
    assert await asyncio.to_thread(producer.flush, 60) == 0
    assert acknowledged == [None]
    await wire.metadata([partition.topic])
    assert await stored(wire, partition) == 1
