"""What was committed under a request id is found also where a broker does not know of it, and does not know that."""

import asyncio
from types import SimpleNamespace
from typing import Any

from confluent_kafka import Producer

from coordinator.config import CoordinatorSettings
from coordinator.gateway.service import Gateway
from coordinator.log.port import Kind
from coordinator.log.reading import KafkaReader
from oncebox.local import LocalKafka
from oncebox.session import open_plain_channel
from oncebox.settings import KafkaSection
from oncebox.v1 import manifest_pb2
from oncebox.wire import KafkaSettings, TopicPartition, Wire
from tests.support.kafka import create_topic

NAME = "batches"


async def leader_of(wire: Wire, where: TopicPartition) -> int | None:
    return (await wire.metadata([where.topic])).topics[where.topic].partitions[where.partition].leader_id


def gateway(kafka: KafkaSettings, wire: Wire, feed_topic: str, feed: KafkaReader) -> Gateway:
    front: Any = SimpleNamespace(calls=SimpleNamespace(partition_of=lambda _: 0))
    section = KafkaSection(bootstrap_servers=kafka.bootstrap_servers)
    settings = CoordinatorSettings(kafka=section, feed_topic=feed_topic)
    return Gateway(
        front,
        settings,
        address="127.0.0.1:1",
        kafka=kafka,
        wire=wire,
        feed=feed,
        open_channel=open_plain_channel,
        now_ms=lambda: 0,
    )


async def test_a_leader_that_stood_still_and_was_replaced_hides_no_commit(kafka_cluster: LocalKafka):
    """Asked while it stands still, it answers when it goes on, before it has heard of its successor: a request that was
    committed would be committed again.
    """
    topic = await asyncio.to_thread(create_topic, kafka_cluster.bootstrap_servers)
    where = TopicPartition(topic, 0)
    kafka = KafkaSettings(bootstrap_servers=kafka_cluster.bootstrap_servers)
    feed_record = manifest_pb2.FeedRecord(manifest=manifest_pb2.Manifest(transactional_id=NAME, number=7, part_count=1))
    async with Wire(kafka) as wire, Wire(kafka) as other, asyncio.timeout(120):
        former = await leader_of(wire, where)
        feed = KafkaReader(wire, kafka, {Kind.LOG: topic, Kind.FEED: topic}, threads=1)
        mine = gateway(kafka, wire, topic, feed)

        async def numbers() -> list[int]:
            return [manifest.number async for manifest in mine._read_feed(NAME, 1)]

        assert await numbers() == []
        broker = next(each for each in kafka_cluster.brokers if each.node_id == former)
        broker.pause()
        while await leader_of(other, where) in {former, None}:  # noqa: ASYNC110 - far away
            await asyncio.sleep(0.1)
        producer = Producer({"bootstrap.servers": kafka_cluster.bootstrap_servers, "acks": "all"})
        producer.produce(topic, feed_record.SerializeToString(), key=NAME)
        assert await asyncio.to_thread(producer.flush, 60) == 0
        asked = asyncio.create_task(numbers())
        await asyncio.sleep(0.5)  # so that what is asked of it has arrived there
        broker.resume()
        assert await asked == [7]
        feed.close()
