"""The local Kafka is a real one, and its brokers can be killed, paused and restarted one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import Consumer, Producer

from tests.support.kafka import TopicFactory, create_topic

if TYPE_CHECKING:
    from oncebox.local import LocalKafka


def write(bootstrap_servers: str, topic: str, *values: bytes) -> None:
    producer = Producer({"bootstrap.servers": bootstrap_servers, "acks": "all", "message.timeout.ms": 60_000})
    errors = []
    for value in values:
        producer.produce(topic, value, on_delivery=lambda error, _message: errors.append(error))
    assert producer.flush(60) == 0
    assert errors == [None] * len(values)


def read(bootstrap_servers: str, topic: str, count: int) -> list[bytes | None]:
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    try:
        return [message.value() for message in consumer.consume(count, timeout=60)]
    finally:
        consumer.close()


def test_what_is_written_is_read(kafka: LocalKafka, new_topic: TopicFactory):
    topic = new_topic()
    write(kafka.bootstrap_servers, topic, b"one", b"two")
    assert read(kafka.bootstrap_servers, topic, 2) == [b"one", b"two"]


def test_three_brokers_outlive_a_killed_one_and_take_it_back(kafka_cluster: LocalKafka):
    topic = create_topic(kafka_cluster.bootstrap_servers, partitions=3)
    victim = kafka_cluster.brokers[1]
    pid, port = victim.pid, victim.port
    write(kafka_cluster.bootstrap_servers, topic, b"before")

    victim.kill()
    write(kafka_cluster.bootstrap_servers, topic, b"meanwhile")
    victim.restart()
    kafka_cluster.await_in_sync()

    assert victim.pid != pid
    assert victim.port == port
    assert set(read(kafka_cluster.bootstrap_servers, topic, 2)) == {b"before", b"meanwhile"}


def test_a_paused_broker_answers_nothing_until_it_is_resumed(kafka_cluster: LocalKafka):
    paused = kafka_cluster.brokers[2]
    paused.pause()
    assert paused.members() == set()
    paused.resume()
    kafka_cluster.await_in_sync()
    assert paused.members() == {1, 2, 3}
