"""Members of a group that have names: every partition is somebody's, whoever dies when."""

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from oncebox import TransformSettings
from oncebox.errors import UsageError
from oncebox.group_consumer import GroupConsumer
from oncebox.producer import Producer
from oncebox.wire import KafkaSettings
from proof.faults.process import ChildProcess
from tests.integration.client.conftest import fresh
from tests.support.coordinator import Coordinators
from tests.support.kafka import TopicFactory

PARTITIONS = 4


async def test_one_that_dies_as_it_gives_partitions_up_leaves_none_to_nobody(
    one: Coordinators, new_topic: TopicFactory, tmp_path: Path
):
    """When it is back under its name the group gives it what it had left, without another look at the rest."""
    servers = one.bootstrap_servers
    topic, group = new_topic(partitions=PARTITIONS), fresh("named")
    async with Producer(servers) as producer:
        for partition in range(PARTITIONS):
            await producer.send(topic, b"", partition=partition)
    command = [sys.executable, "-m", "tests.integration.client.dying_member", servers, group, topic, "b"]
    async with AsyncExitStack() as stack:
        with ChildProcess([*command, str(PARTITIONS)], log=tmp_path / "b.log") as dying:
            await asyncio.to_thread(dying.wait_ready, lambda: dying.log_contains("has them all"))
            members = [await joined(stack, servers, topic, group, "a")]
            async with asyncio.timeout(60):
                while dying.running:  # it dies when it hears of the other one
                    await members[0].gather(100, 0.1)
        members.append(await joined(stack, servers, topic, group, "b"))
        seen: set[int] = set()
        async with asyncio.timeout(60):
            while len(seen) < PARTITIONS:
                for member in members:
                    records, _ = await member.gather(100, 0.1)
                    seen |= {record.partition for record in records}


async def joined(stack: AsyncExitStack, servers: str, topic: str, group: str, name: str) -> GroupConsumer:
    member = GroupConsumer(
        KafkaSettings(bootstrap_servers=servers),
        [topic],
        group,
        config={"group.instance.id": name},
        revoked=lambda *_: None,
    )
    stack.push_async_callback(member.close)
    await member.open()
    return member


def test_names_and_a_strategy_that_takes_two_rounds():
    with pytest.raises(UsageError, match="cooperative-sticky loses partitions"):
        TransformSettings(consumer={"group.instance.id": "a", "partition.assignment.strategy": "cooperative-sticky"})
    TransformSettings(consumer={"group.instance.id": "a", "partition.assignment.strategy": "range"})
