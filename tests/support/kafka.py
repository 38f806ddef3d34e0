"""Real Kafka: `kafka` (one broker) and `kafka_cluster` (three), each started once per run; fresh topics per test."""

from __future__ import annotations

import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec  # type: ignore[attr-defined]

from oncebox.local import LocalKafka
from oncebox.local.kafka import QUICK_START

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

KNOWN_S = 60.0


class TopicFactory(Protocol):
    def __call__(
        self, name: str | None = None, *, partitions: int = 1, config: Mapping[str, str] | None = None
    ) -> str: ...


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalKafka]:
    """One broker, shared by the whole run: tests neither kill nor pause it."""
    yield from _running(LocalKafka(tmp_path_factory.mktemp("kafka"), jvm_options=[QUICK_START]))


@pytest.fixture(scope="session")
def shared_kafka_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalKafka]:
    yield from _running(LocalKafka(tmp_path_factory.mktemp("kafka-cluster"), brokers=3, jvm_options=[QUICK_START]))


@pytest.fixture
def kafka_cluster(shared_kafka_cluster: LocalKafka) -> Iterator[LocalKafka]:
    """Three brokers (replication factor 3, min ISR 2). A test may kill or pause them; all are brought back."""
    yield shared_kafka_cluster
    for broker in shared_kafka_cluster.brokers:
        if broker.running:
            broker.resume()
        else:
            broker.start()
    shared_kafka_cluster.await_in_sync()


@pytest.fixture
def topic_name() -> str:
    """A name that no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def new_topic(kafka: LocalKafka) -> TopicFactory:
    """Makes a topic on `kafka` and returns its name."""

    def make(name: str | None = None, *, partitions: int = 1, config: Mapping[str, str] | None = None) -> str:
        return create_topic(kafka.bootstrap_servers, name, partitions=partitions, config=config)

    return make


def create_topic(
    bootstrap_servers: str,
    name: str | None = None,
    *,
    partitions: int = 1,
    replication_factor: int = -1,
    config: Mapping[str, str] | None = None,
) -> str:
    """A new topic (the broker's replication factor unless given), ready to be written to; returns its name."""
    name = name or f"test-{uuid.uuid4().hex[:12]}"
    topic = NewTopic(name, partitions, replication_factor, config=dict(config or {}))
    try:
        _create(bootstrap_servers, topic)
    except KafkaException as error:
        if error.args[0].code() != KafkaError._TIMED_OUT:
            raise
        # A broker that its cluster has put out for a moment knows of no controller, and librdkafka asks only once.
        _create(bootstrap_servers, topic)
    await_partitions(bootstrap_servers, name, partitions)
    _await_leaders(bootstrap_servers, name, partitions)
    return name


def _create(bootstrap_servers: str, topic: NewTopic) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    admin.create_topics([topic], operation_timeout=30, request_timeout=35)[topic.topic].result(60)


def await_partitions(bootstrap_servers: str, topic: str, count: int) -> None:
    """Until every broker says that it has so many (0: that it is gone), a moment after the controller has said so."""
    for server in bootstrap_servers.split(","):
        admin = AdminClient({"bootstrap.servers": server})
        deadline_s = time.monotonic() + KNOWN_S
        while True:
            found = admin.list_topics(timeout=30).topics.get(topic)
            if (0 if found is None else len(found.partitions)) == count:
                break
            assert time.monotonic() < deadline_s, f"{server} does not know of {count} partitions of {topic}"
            time.sleep(0.01)


def _await_leaders(bootstrap_servers: str, topic: str, partitions: int) -> None:
    """Until they answer: a broker may be known as the leader before it knows itself."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    wanted = {TopicPartition(topic, number): latest for number in range(partitions)}
    deadline_s = time.monotonic() + KNOWN_S
    while True:
        try:
            for answer in admin.list_offsets(wanted, request_timeout=30).values():
                answer.result(60)
        except KafkaException:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)
        else:
            return


@contextmanager
def paused(kafka: LocalKafka) -> Iterator[None]:
    """All of its brokers hang: with one alone, another would lead its partitions after a while."""
    try:
        for broker in kafka.brokers:
            broker.pause()
        yield
    finally:
        for broker in kafka.brokers:
            broker.resume()


def _running(kafka: LocalKafka) -> Iterator[LocalKafka]:
    try:
        yield kafka.start()
    finally:
        kafka.kill()  # the data is thrown away: no need for an orderly end
