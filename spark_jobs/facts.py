"""What Kafka says of partitions, without reading a record: topic ids, ends, open transactions."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError

from oncebox.wire import EARLIEST, LATEST, ErrorCode, TopicPartition, Wire, WireError, aiokafka_options
from spark_jobs.cut import OpenTransaction, PartitionFacts
from spark_jobs.errors import CannotCheckError

if TYPE_CHECKING:
    from collections.abc import Collection

    from oncebox.wire import KafkaSettings
    from oncebox.wire.types import TopicMetadata

Facts = dict[str, dict[int, PartitionFacts]]
POLICY = "cleanup.policy"


def read_facts(settings: KafkaSettings, topics: Collection[str]) -> Facts:
    """In the order of `topics`: what one shows of another has been there when the other is asked. Topics that do not
    exist are left out.
    """
    try:
        return asyncio.run(_read(settings, topics))
    except WireError as error:
        raise CannotCheckError(f"Kafka does not answer: {error}") from error


def read_offsets_at(settings: KafkaSettings, topic: str, at_ms: int) -> dict[int, int]:
    """The first offset of each partition whose record is of that time or later; -1: there is none."""
    try:
        return asyncio.run(_read_offsets_at(settings, topic, at_ms))
    except WireError as error:
        raise CannotCheckError(f"Kafka does not answer: {error}") from error


def read_compacted(settings: KafkaSettings, topics: Collection[str]) -> tuple[frozenset[str], list[str]]:
    """Topics whose cleanup.policy lets single records vanish, and those that do not say (no right to ask)."""
    try:
        return asyncio.run(_read_compacted(settings, topics))
    except (KafkaError, OSError) as error:
        raise CannotCheckError(f"Kafka does not answer: {error}") from error


async def _read_compacted(settings: KafkaSettings, topics: Collection[str]) -> tuple[frozenset[str], list[str]]:
    compacted, silent = set(), []
    client = AIOKafkaAdminClient(bootstrap_servers=settings.bootstrap_servers, **aiokafka_options(settings))
    try:
        await client.start()
        wanted = [ConfigResource(ConfigResourceType.TOPIC, topic, configs={POLICY: ""}) for topic in topics]
        answers = await client.describe_configs(wanted) if wanted else []
    finally:
        await client.close()
    for answer in answers:
        for error, _, _, topic, entries in answer.resources:
            if error:
                silent.append(topic)
            elif any(name == POLICY and "compact" in (value or "") for name, value, *_ in entries):
                compacted.add(topic)
    return frozenset(compacted), sorted(silent)


async def _read(settings: KafkaSettings, topics: Collection[str]) -> Facts:
    async with Wire(settings) as wire:
        cluster = await wire.metadata(list(topics))
        found: Facts = {}
        for name in dict.fromkeys(topics):
            topic = cluster.topics[name]
            if topic.error is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                continue
            if topic.error or topic.topic_id is None:
                raise CannotCheckError(f"Kafka answers {topic.error.name} for the topic {name}: try again later")
            found[name] = {}
            for leader, partitions in _by_leader(name, topic).items():
                facts = await _of_leader(wire, leader, partitions, topic.topic_id.hex)
                found[name] |= facts
        return found


def _by_leader(name: str, topic: TopicMetadata) -> dict[int, list[TopicPartition]]:
    by_leader: dict[int, list[TopicPartition]] = defaultdict(list)
    for index, partition in topic.partitions.items():
        if partition.leader_id is None:
            raise CannotCheckError(f"{name}:{index} has no leader: try again when its broker is back")
        by_leader[partition.leader_id].append(TopicPartition(name, index))
    return by_leader


async def _read_offsets_at(settings: KafkaSettings, name: str, at_ms: int) -> dict[int, int]:
    found = {}
    async with Wire(settings) as wire:
        topic = (await wire.metadata([name])).topics[name]
        for leader, partitions in _by_leader(name, topic).items():
            for where, listed in (await wire.list_offsets(leader, dict.fromkeys(partitions, at_ms))).items():
                if listed.error:
                    raise CannotCheckError(f"Kafka answers {listed.error.name} for {where.topic}:{where.partition}")
                found[where.partition] = listed.offset
    return found


async def _of_leader(
    wire: Wire, leader: int, partitions: list[TopicPartition], topic_id: str
) -> dict[int, PartitionFacts]:
    # The stable offset before the high watermark: what is open then is seen by describe_producers.
    stable = await wire.list_offsets(leader, dict.fromkeys(partitions, LATEST), read_committed=True)
    high = await wire.list_offsets(leader, dict.fromkeys(partitions, LATEST))
    start = await wire.list_offsets(leader, dict.fromkeys(partitions, EARLIEST))
    producers = await wire.describe_producers(leader, partitions)
    now_ms = time.time_ns() // 1_000_000
    facts = {}
    for where in partitions:
        for listed in (stable[where], high[where], start[where]):
            if listed.error:
                raise CannotCheckError(f"Kafka answers {listed.error.name} for {where.topic}:{where.partition}")
        open_there = tuple(
            OpenTransaction(
                producer_id=producer.producer_id,
                epoch=producer.producer_epoch,
                offset_first=producer.txn_start_offset,
                age_ms=max(now_ms - producer.last_timestamp_ms, 0),
            )
            for producer in producers[where].producers
            if producer.txn_start_offset is not None
        )
        facts[where.partition] = PartitionFacts(
            topic_id=topic_id,
            log_start=start[where].offset,
            stable=stable[where].offset,
            high=high[where].offset,
            open=open_there,
        )
    return facts
