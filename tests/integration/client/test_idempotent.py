"""The producer without a transactional id: each record stored once and in order, whatever is lost on the way."""

import asyncio

import pytest
import pytest_asyncio

from oncebox.claim import ProducerSettings
from oncebox.errors import BrokersUnavailableError, ClosedError, DeliveryError, UsageError
from oncebox.local import LocalKafka
from oncebox.local.kafka import QUICK_START
from oncebox.producer import Producer
from oncebox.writer_settings import WriterSettings
from proof.faults.proxy import Proxy
from tests.support.coordinator import values
from tests.support.kafka import create_topic

PRODUCE = 0

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
        await asyncio.to_thread(kafka.kill)


@pytest_asyncio.fixture(loop_scope="module")
async def proxy(broker):
    yield broker[1]
    await broker[1].heal()


@pytest_asyncio.fixture(loop_scope="module")
async def topic(broker) -> str:
    return await asyncio.to_thread(create_topic, broker[0].internal_servers)


def producer(bootstrap_servers: str, **fields) -> Producer:
    return Producer(bootstrap_servers, settings=ProducerSettings(writer=WriterSettings(**fields)))


async def stored(broker, topic: str) -> list[bytes]:
    return await asyncio.to_thread(values, broker[0].bootstrap_servers, topic)


async def test_records_arrive_in_order_with_their_offsets(broker, proxy, topic):
    async with producer(proxy.address, batch_bytes=2_000) as mine:
        assert (await mine.send_and_wait(topic, b"first")).offset == 0
        for number in range(1_000):
            await mine.send(topic, b"%d" % number)
        await mine.flush()
        assert (await mine.send_and_wait(topic, b"last")).offset == 1_001
        with pytest.raises(UsageError, match="without a transactional_id"):
            await mine.begin()
        await mine.send(topic, b"on stop")
    with pytest.raises(ClosedError):
        await mine.send(topic, b"x")
    expected = [b"first", *(b"%d" % number for number in range(1_000)), b"last", b"on stop"]
    assert await stored(broker, topic) == expected


async def test_lost_answers_and_broken_connections_double_nothing(broker, proxy, topic):
    async with producer(proxy.address, batch_bytes=500, request_timeout_ms=1_000) as mine:
        for number in range(600):
            if number in {100, 300}:
                await mine.flush()
                proxy.swallow_reply(PRODUCE, close=number == 100)
            if number == 500:
                await proxy.cut()
                await mine.send(topic, b"%d" % number)
                await proxy.heal()
                continue
            await mine.send(topic, b"%d" % number)
            await asyncio.sleep(0)
        await mine.flush()
    assert await stored(broker, topic) == [b"%d" % number for number in range(600)]


async def test_a_delivery_timeout_is_told_once_and_the_producer_goes_on(broker, proxy, topic):
    async with producer(proxy.address, request_timeout_ms=1_000, delivery_timeout_ms=10_000) as mine:
        await mine.send_and_wait(topic, b"before")
        await proxy.cut()
        await mine.send(topic, b"lost")
        with pytest.raises(DeliveryError, match="delivery timeout of 10000 ms"):
            await mine.flush()
        await proxy.heal()
        assert (await mine.send_and_wait(topic, b"after")).offset == 1
    assert await stored(broker, topic) == [b"before", b"after"]


async def test_memory_is_bounded_behind_a_paused_broker(broker, proxy, topic):
    buffer_bytes = 2 * 1024 * 1024
    async with producer(proxy.address, buffer_bytes=buffer_bytes, batch_bytes=100_000) as mine:
        await mine.send_and_wait(topic, b"before")
        broker[0].brokers[0].pause()

        async def fill() -> None:
            for _ in range(10_000):
                await mine.send(topic, bytes(1_000))

        filling = asyncio.create_task(fill())
        try:
            writer = mine._writers.current  # type: ignore[union-attr]
            assert writer is not None
            async with asyncio.timeout(60):
                while writer._buffered <= buffer_bytes:  # noqa: ASYNC110 - the other task fills it
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            assert not filling.done()
            assert buffer_bytes < writer._buffered < buffer_bytes + 2_000
        finally:
            broker[0].brokers[0].resume()
        await filling
    assert len(await stored(broker, topic)) == 10_001


async def test_a_start_that_failed_may_be_made_again(broker, proxy, topic):
    mine = producer(proxy.address, delivery_timeout_ms=20_000, request_timeout_ms=5_000)
    await proxy.cut()
    with pytest.raises(BrokersUnavailableError):
        await mine.start()
    await proxy.heal()
    await mine.start()
    assert (await mine.send_and_wait(topic, b"x")).offset == 0
    await mine.stop()
    with pytest.raises(ClosedError, match="make a new one"):
        await mine.start()


async def test_no_broker_is_told_as_such():
    reserved = Proxy(("127.0.0.1", 0))
    with pytest.raises(BrokersUnavailableError):
        await producer(reserved.address).start()
    reserved._reserved.close()
