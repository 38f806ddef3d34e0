"""How far the feed goes is never told by a broker that leads it no longer and does not know that yet."""

import asyncio
from typing import Any

from confluent_kafka import Producer

from coordinator.log.port import Kind
from coordinator.log.reading import KafkaReader
from oncebox.local import LocalKafka
from oncebox.reader.ends import ends_of, first_since
from oncebox.wire import KafkaSettings, TopicPartition, Wire
from tests.support.kafka import create_topic


async def leader_of(wire: Wire, where: TopicPartition) -> int | None:
    return (await wire.metadata([where.topic])).topics[where.topic].partitions[where.partition].leader_id


async def test_a_leader_that_stood_still_and_was_replaced_hides_nothing(kafka_cluster: LocalKafka):
    """Asked while it stands still, it answers when it goes on, before it has heard of its successor."""
    topic = await asyncio.to_thread(create_topic, kafka_cluster.bootstrap_servers)
    where = TopicPartition(topic, 0)
    kafka = KafkaSettings(bootstrap_servers=kafka_cluster.bootstrap_servers)
    async with Wire(kafka) as wire, Wire(kafka) as other, asyncio.timeout(120):
        former = await leader_of(wire, where)
        assert await ends_of(wire, topic, [0]) == {0: 0}
        broker = next(each for each in kafka_cluster.brokers if each.node_id == former)
        broker.pause()
        while await leader_of(other, where) in {former, None}:  # noqa: ASYNC110 - far away
            await asyncio.sleep(0.1)
        producer = Producer({"bootstrap.servers": kafka_cluster.bootstrap_servers, "acks": "all"})
        producer.produce(topic, b"acknowledged")
        assert await asyncio.to_thread(producer.flush, 60) == 0
        reader = KafkaReader(wire, kafka, {Kind.LOG: topic, Kind.FEED: topic}, threads=2)

        async def read() -> list[int]:
            return [entry.offset async for chunk in reader.read(Kind.FEED, 0, 0, None) for entry in chunk]

        # The client's readers, and the coordinator: which batches were committed, what became of a transaction.
        questions: list[Any] = [ends_of(wire, topic, [0]), first_since(wire, topic, 0, 1), read()]
        asked = asyncio.gather(*questions)
        await asyncio.sleep(0.5)  # so that what is asked of it has arrived there
        broker.resume()
        assert await asked == [{0: 1}, 0, [0]]
        assert await first_since(wire, topic, 0, 2**62) == -1
        reader.close()
