"""Kafka's administrative requests through librdkafka's client: read a configuration, create a topic.

Each call has its own client in a thread of its own, so the event loop never waits for it. A refusal by the broker
is raised as librdkafka's KafkaException.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    RESOURCE_BROKER,
    RESOURCE_TOPIC,
    AdminClient,
    ConfigResource,
    ConfigSource,
    NewTopic,
)

from oncebox.wire import KafkaSettings, librdkafka_config

# The client gives up by itself; this only bounds a wait that it should have ended.
GRACE_S: Final = 5.0
# Of the time there is. What is asked of any broker goes to the one that is named as the controller: under KRaft that is
# a member picked at random, which may stand still. The next client is told of another.
TRIES: Final = (0.125, 0.125, 0.25, 0.5)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A configuration value in force."""

    value: str
    # Set for this one broker by a command: that wins over what is set for all brokers.
    of_one_broker: bool = False


Configs = Mapping[str, Setting]


async def broker_configs(kafka: KafkaSettings, node_id: int, *, timeout_s: float) -> Configs:
    return await asyncio.to_thread(_describe, kafka, ConfigResource(RESOURCE_BROKER, str(node_id)), timeout_s)


async def topic_configs(kafka: KafkaSettings, topic: str, *, timeout_s: float) -> Configs:
    resource = ConfigResource(RESOURCE_TOPIC, topic)
    return await asyncio.to_thread(_of_any, lambda share_s: _describe(kafka, resource, share_s), timeout_s)


async def create_topic(
    kafka: KafkaSettings,
    topic: str,
    *,
    partitions: int,
    replication_factor: int,
    config: Mapping[str, str],
    timeout_s: float,
) -> None:
    new = NewTopic(topic, partitions, replication_factor, config=dict(config))
    await asyncio.to_thread(_of_any, lambda share_s: _create(kafka, new, share_s), timeout_s)


def _of_any(ask: Callable[[float], T], timeout_s: float) -> T:
    for share in TRIES[:-1]:
        try:
            return ask(share * timeout_s)
        except KafkaException as error:
            if error.args[0].code() != KafkaError._TIMED_OUT:  # noqa: SLF001 - librdkafka's name
                raise
    return ask(TRIES[-1] * timeout_s)


def _describe(kafka: KafkaSettings, resource: ConfigResource, timeout_s: float) -> Configs:
    client = _client(kafka)
    future = client.describe_configs([resource], request_timeout=timeout_s)[resource]
    return {
        name: Setting(value=entry.value, of_one_broker=ConfigSource(entry.source) is ConfigSource.DYNAMIC_BROKER_CONFIG)
        for name, entry in future.result(timeout_s + GRACE_S).items()
        if entry.value is not None  # a secret
    }


def _create(kafka: KafkaSettings, new: Any, timeout_s: float) -> None:
    client = _client(kafka)
    futures = client.create_topics([new], operation_timeout=timeout_s, request_timeout=timeout_s)
    futures[new.topic].result(timeout_s + GRACE_S)


def _client(kafka: KafkaSettings) -> AdminClient:
    # Its own log would go to standard error; what matters comes back as an exception.
    return AdminClient({**librdkafka_config(kafka), "log_level": 0}, error_cb=lambda _error: None)
