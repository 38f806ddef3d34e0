"""What the API knows of a real cluster's topics."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import AdminClient

from coordinator.api import topics as topics_module
from coordinator.api.rules import TopicsUnavailableError
from coordinator.api.topics import KafkaTopics
from oncebox.wire import OFFSETS_TOPIC, KafkaSettings, Wire, offsets_partition

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from oncebox.local import LocalKafka
    from tests.support.kafka import TopicFactory


@pytest.fixture
async def wire(kafka: LocalKafka) -> AsyncIterator[Wire]:
    async with Wire(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as wire:
        yield wire


async def test_topics_are_learnt_by_asking(wire: Wire, new_topic: TopicFactory):
    name = new_topic(partitions=3)
    topics = KafkaTopics(wire)
    assert topics.partition_count(name) is None
    assert topics.topic_id(name) is None
    await topics.refresh([name, "nowhere"])
    assert topics.partition_count(name) == 3
    assert len(topics.topic_id(name) or b"") == 16
    assert topics.partition_count("nowhere") is None


async def test_a_topic_deleted_and_created_again_is_another(
    kafka: LocalKafka, wire: Wire, new_topic: TopicFactory, monkeypatch: pytest.MonkeyPatch
):
    name = new_topic()
    topics = KafkaTopics(wire)
    await topics.refresh([name])
    old = topics.topic_id(name)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.delete_topics([name], operation_timeout=30)[name].result(60)
    async with asyncio.timeout(60):
        while topics.partition_count(name) is not None:
            await topics.refresh([name])
    new_topic(name, partitions=2)
    async with asyncio.timeout(60):
        while topics.partition_count(name) != 2:
            await topics.refresh([name])
    assert topics.topic_id(name) not in {old, None}
    # What was heard long ago is not believed any more.
    monkeypatch.setattr(topics_module, "AGE_MAX_S", 0.0)
    assert topics.partition_count(name) is None
    assert topics.topic_id(name) is None


async def test_groups_have_a_home_as_soon_as_it_is_asked_for(wire: Wire):
    topics = KafkaTopics(wire)
    async with asyncio.timeout(60):
        while topics.offsets_partition("g") is None:
            await topics.refresh([OFFSETS_TOPIC])
    count = topics.partition_count(OFFSETS_TOPIC)
    assert count
    assert topics.offsets_partition("g") == offsets_partition("g", count)


async def test_many_askers_share_a_request(wire: Wire, new_topic: TopicFactory, monkeypatch: pytest.MonkeyPatch):
    names = [new_topic() for _ in range(3)]
    topics = KafkaTopics(wire)
    asked = []
    metadata = wire.metadata

    async def counted(wanted, **options):
        asked.append(set(wanted))
        return await metadata(wanted, **options)

    monkeypatch.setattr(wire, "metadata", counted)
    first = asyncio.create_task(topics.refresh(names[:1]))
    while not asked:  # noqa: ASYNC110 - the first request is under way
        await asyncio.sleep(0)
    await asyncio.gather(first, *(topics.refresh([name]) for name in names), topics.refresh(names))
    assert asked == [{names[0]}, set(names)]
    assert all(topics.partition_count(name) == 1 for name in names)


async def test_what_is_in_use_is_asked_for_again_without_anybody_waiting(
    wire: Wire, new_topic: TopicFactory, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(topics_module, "REFRESH_AFTER_S", 60.0)
    used, unused = new_topic(), new_topic()
    topics = KafkaTopics(wire)
    await topics.refresh([used, unused])
    asked = []
    metadata = wire.metadata

    async def counted(wanted, **options):
        asked.append(set(wanted))
        return await metadata(wanted, **options)

    monkeypatch.setattr(wire, "metadata", counted)
    assert topics.topic_id(used) is not None
    await asyncio.sleep(0)
    assert asked == []
    monkeypatch.setattr(topics_module, "REFRESH_AFTER_S", 0.0)
    for _ in range(100):
        assert topics.topic_id(used) is not None
    async with asyncio.timeout(10):
        while not asked:  # noqa: ASYNC110 - the request is on its way
            await asyncio.sleep(0.01)
    assert asked == [{used}]


async def test_an_asker_who_gives_up_disturbs_no_other(wire: Wire, new_topic: TopicFactory):
    name = new_topic()
    topics = KafkaTopics(wire)
    impatient = asyncio.create_task(topics.refresh([name]))
    patient = asyncio.create_task(topics.refresh([name]))
    await asyncio.sleep(0)
    impatient.cancel()
    await patient
    assert topics.partition_count(name) == 1


async def test_nobody_answers():
    topics = KafkaTopics(Wire(KafkaSettings(bootstrap_servers="127.0.0.1:1")))
    with pytest.raises(TopicsUnavailableError):
        await topics.refresh(["orders"])
