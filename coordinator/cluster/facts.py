"""What a cluster is like: each broker's settings, requests and privileges, and the topics that matter to us.

Only reads: the one request that could write names a partition that does not exist. A broker that does not answer is
a fact as well, told with its reason.
"""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from aiokafka.conn import create_conn
from aiokafka.errors import KafkaError as AiokafkaError
from aiokafka.protocol.admin import ApiVersionRequest
from confluent_kafka import KafkaError, KafkaException

from coordinator.cluster.admin import Configs, broker_configs, topic_configs
from coordinator.cluster.findings import ClusterError
from oncebox.wire import (
    OFFSETS_TOPIC,
    ErrorCode,
    KafkaSettings,
    OutcomeUnknownError,
    TopicPartition,
    TxnMarker,
    UnsupportedRequestError,
    Wire,
    aiokafka_options,
)

Versions = Mapping[int, tuple[int, int]]  # API key → the oldest and the newest that the broker takes

# No topic has so many partitions. The producer id is none that Kafka or we hand out.
PROBE_PARTITION: Final = (1 << 31) - 1
PROBE_PRODUCER_ID: Final = (1 << 63) - 1
DENIED: Final = {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED}


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerFacts:
    versions: Versions
    configs: Configs | None  # None: we may not read them
    may_write_markers: bool | None  # None: the broker takes no such request
    may_see_transactions: bool | None  # of Kafka's own coordinator, all of them; None: as above


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicFacts:
    replicas: Mapping[int, tuple[int, ...]]  # of each partition: the ids of its brokers
    configs: Configs | None  # None: we may not read them


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    brokers: Mapping[int, BrokerFacts]
    unanswered: Mapping[int, str]  # brokers that are members of the cluster but gave no answer, and why
    topics: Mapping[str, TopicFacts]  # without those that do not exist
    may_use_group: bool = True


class _UnansweredError(Exception):
    pass


async def read_cluster(
    wire: Wire, kafka: KafkaSettings, topics: Collection[str], *, probe_topic: str, group: str, timeout_ms: int
) -> ClusterFacts:
    found = await read_topics(wire, kafka, topics, timeout_ms=timeout_ms)
    probe = TopicPartition(probe_topic, PROBE_PARTITION)
    node_ids = sorted(wire.brokers)
    asked = await asyncio.gather(*(_ask(wire, kafka, node_id, probe, timeout_ms) for node_id in node_ids))
    answers = dict(zip(node_ids, asked, strict=True))
    return ClusterFacts(
        brokers={node_id: answer for node_id, answer in answers.items() if isinstance(answer, BrokerFacts)},
        unanswered={node_id: answer for node_id, answer in answers.items() if isinstance(answer, str)},
        topics=found,
        # Where no group was ever used, to ask for one would create the topic of their offsets.
        may_use_group=OFFSETS_TOPIC not in found or await _may_use_group(wire, group, timeout_ms),
    )


async def read_topics(
    wire: Wire, kafka: KafkaSettings, topics: Collection[str], *, timeout_ms: int
) -> dict[str, TopicFacts]:
    """Without those that do not exist, or of which not all brokers know yet."""
    metadata = await wire.metadata(topics, timeout_ms=timeout_ms)
    found = {}
    for name, topic in metadata.topics.items():
        if topic.error is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            continue
        replicas = {index: partition.replica_ids for index, partition in topic.partitions.items()}
        try:
            configs: Configs | None = await topic_configs(kafka, name, timeout_s=timeout_ms / 1000)
        except KafkaException as error:
            code = error.args[0].code()
            if code == KafkaError.UNKNOWN_TOPIC_OR_PART:
                continue
            if code not in DENIED:
                raise ClusterError(f"the settings of topic {name} cannot be read: {error.args[0].str()}") from error
            configs = None
        found[name] = TopicFacts(replicas=replicas, configs=configs)
    return found


async def _ask(
    wire: Wire, kafka: KafkaSettings, node_id: int, probe: TopicPartition, timeout_ms: int
) -> BrokerFacts | str:
    """Or why there was no answer."""
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            return BrokerFacts(
                versions=await _versions(wire, kafka, node_id),
                configs=await _broker_configs(kafka, node_id, timeout_ms),
                may_write_markers=await _may_write_markers(wire, node_id, probe),
                may_see_transactions=await _may_see_transactions(wire, node_id),
            )
    except (OutcomeUnknownError, _UnansweredError) as error:
        return str(error)
    except TimeoutError:
        return f"no answer within {timeout_ms} ms"


async def _versions(wire: Wire, kafka: KafkaSettings, node_id: int) -> Versions:
    broker = wire.brokers[node_id]
    try:
        connection = await create_conn(broker.host, broker.port, **aiokafka_options(kafka))
        try:
            answer = await connection.send(ApiVersionRequest())
        finally:
            connection.close()
    except (OSError, AiokafkaError) as error:
        raise _UnansweredError(f"{broker.host}:{broker.port}: {error}") from error
    return {api_key: (oldest, newest) for api_key, oldest, newest in answer.api_versions}


async def _broker_configs(kafka: KafkaSettings, node_id: int, timeout_ms: int) -> Configs | None:
    try:
        return await broker_configs(kafka, node_id, timeout_s=timeout_ms / 1000)
    except KafkaException as error:
        if error.args[0].code() in DENIED:
            return None
        raise _UnansweredError(f"its settings cannot be read: {error.args[0].str()}") from error


async def _may_write_markers(wire: Wire, node_id: int, probe: TopicPartition) -> bool | None:
    """Not asked with an empty list: a refusal of that looks like a success."""
    marker = TxnMarker(
        producer_id=PROBE_PRODUCER_ID, producer_epoch=0, committed=False, partitions=(probe,), coordinator_epoch=0
    )
    try:
        answer = await wire.write_txn_markers(node_id, [marker], lane="checks")
    except UnsupportedRequestError:
        return None
    # Reached only with the privilege; without it the answer is CLUSTER_AUTHORIZATION_FAILED.
    return answer.get(PROBE_PRODUCER_ID, {}).get(probe) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def _may_use_group(wire: Wire, group: str, timeout_ms: int) -> bool:
    """Whether brokers tell who coordinates it: they do to whom may read or describe it."""
    try:
        coordinator = await wire.find_group_coordinator(group, timeout_ms=timeout_ms, lane="checks")
    except OutcomeUnknownError:
        # Brokers that give no answer are told of as such.
        return True
    return coordinator.error is not ErrorCode.GROUP_AUTHORIZATION_FAILED


async def _may_see_transactions(wire: Wire, node_id: int) -> bool | None:
    try:
        return await wire.may_describe_transactions(node_id, lane="checks")
    except UnsupportedRequestError:
        return None
