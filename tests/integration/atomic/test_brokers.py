"""The crash matrix's last column: the broker that leads the partition is killed, at every step."""

import asyncio
from pathlib import Path

import psycopg
import pytest
from confluent_kafka.admin import AdminClient

from oncebox.local import LocalKafka
from tests.integration.atomic.conftest import Bank, make_bank, transfer
from tests.integration.atomic.killed import POINTS, at
from tests.support.coordinator import Coordinators


@pytest.mark.parametrize(
    "point",
    [pytest.param(point, marks=[] if point == "before Kafka's commit" else pytest.mark.long) for point in POINTS],
)
async def test_the_leading_broker_is_killed_at_every_step(
    kafka_cluster: LocalKafka, database: str, tmp_path: Path, monkeypatch, point: str
):
    with Coordinators(kafka_cluster.bootstrap_servers, tmp_path) as one:
        await asyncio.to_thread(one.start)
        bank = make_bank(database, one)
        killed: list[int] = []

        async def broken() -> None:
            killed.append(leader_of(bank))
            await asyncio.to_thread(kafka_cluster.brokers[killed[0]].kill)

        async with bank.producer() as producer, await psycopg.AsyncConnection.connect(bank.dsn) as connection:
            await transfer(bank, producer, connection, "before")
            monkeypatch.setattr(*at(point, broken))
            await transfer(bank, producer, connection, "during")
            monkeypatch.undo()
            assert killed
            await transfer(bank, producer, connection, "after")
        await asyncio.to_thread(kafka_cluster.brokers[killed[0]].start)
        await asyncio.to_thread(bank.check_agree, {"before", "during", "after"})


def leader_of(bank: Bank) -> int:
    """Its place among the brokers, which are numbered from 1."""
    admin = AdminClient({"bootstrap.servers": bank.one.bootstrap_servers})
    leader = admin.list_topics(bank.topic, timeout=30).topics[bank.topic].partitions[0].leader
    return int(leader) - 1
