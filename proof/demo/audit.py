"""Counts the bank's money again, with a stock consumer that reads committed data only."""

import json
from collections import Counter
from dataclasses import dataclass

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from oncebox.v1 import manifest_pb2
from proof.demo.bank import TOPICS


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    debits: Counter[str]
    credits: Counter[str]
    journal: Counter[str]
    debited: int
    credited: int
    manifests: int


def audit(bootstrap_servers: str, feed_topic: str) -> Audit:
    seen: dict[str, Counter[str]] = {topic: Counter() for topic in TOPICS}
    amounts = dict.fromkeys(TOPICS, 0)
    for topic in TOPICS:
        for value in read_all(bootstrap_servers, topic):
            record = json.loads(value)
            seen[topic][record["transfer"]] += 1
            amounts[topic] += record["amount"]
    manifests = sum(
        manifest_pb2.FeedRecord.FromString(value).WhichOneof("record") == "manifest"
        for value in read_all(bootstrap_servers, feed_topic)
    )
    return Audit(
        debits=seen["debits"],
        credits=seen["credits"],
        journal=seen["journal"],
        debited=amounts["debits"],
        credited=amounts["credits"],
        manifests=manifests,
    )


def read_all(bootstrap_servers: str, topic: str) -> list[bytes]:
    """Every committed record of a topic up to its end."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "audit",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    values: list[bytes] = []
    try:
        partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
        consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in partitions])
        ended: set[int] = set()
        while len(ended) < len(partitions):
            message = consumer.poll(10)
            if message is None:
                raise TimeoutError(f"{topic} was not read to its end: a transaction still holds it back")
            error = message.error()
            if error is None:
                values.append(message.value() or b"")
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - librdkafka's name
                ended.add(message.partition() or 0)
    finally:
        consumer.close()
    return values
