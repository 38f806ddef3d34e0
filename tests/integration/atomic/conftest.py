"""What the tests of commits over Kafka and PostgreSQL share: a bank in a database, its journal in a topic."""

import asyncio
import uuid
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest

import oncebox
from oncebox import blocking
from oncebox.atomic_schema import ATOMIC_SCHEMA
from oncebox.producer import Producer, ProducerSettings
from tests.support.coordinator import Coordinators, values
from tests.support.kafka import create_topic


@dataclass(kw_only=True)
class Bank:
    dsn: str
    one: Coordinators
    transactional_id: str = field(default_factory=lambda: f"bank-{uuid.uuid4().hex[:8]}")
    topic: str = ""

    def producer(self, kind: Any = Producer, **given: Any) -> Any:
        return kind(
            self.one.bootstrap_servers,
            self.one.addresses,
            transactional_id=self.transactional_id,
            settings=ProducerSettings(keep_prepared=True, **given),
        )

    def blocking_producer(self) -> blocking.Producer:
        made: blocking.Producer = self.producer(blocking.Producer)
        return made

    def in_database(self) -> set[str]:
        with psycopg.connect(self.dsn) as connection:
            return {name for (name,) in connection.execute("SELECT name FROM transfer")}

    def in_kafka(self, *, has_open: bool = False) -> list[str]:
        found = values(self.one.bootstrap_servers, self.topic, has_open=has_open)
        return sorted(value.decode() for value in found)

    def check_agree(self, expected: set[str]) -> None:
        assert self.in_kafka() == sorted(expected)
        assert self.in_database() == expected


INSERT = "INSERT INTO transfer (name) VALUES (%s)"


async def connect(bank: Bank, **given: Any) -> psycopg.AsyncConnection[Any]:
    return await psycopg.AsyncConnection.connect(bank.dsn, **given)


async def transfer(bank: Bank, producer: Any, connection: Any, name: str, **given: Any) -> None:
    async with oncebox.atomic(producer, connection, **given) as (transaction, database):
        await transaction.send(bank.topic, name.encode())
        await database.execute(INSERT, [name])


def agree(bank: Bank, *expected: str) -> Any:
    return asyncio.to_thread(bank.check_agree, set(expected))


def make_bank(dsn: str, one: Coordinators) -> Bank:
    with psycopg.connect(dsn) as connection:
        connection.execute(ATOMIC_SCHEMA)
        connection.execute("CREATE TABLE transfer (name text PRIMARY KEY)")
    return Bank(dsn=dsn, one=one, topic=create_topic(one.bootstrap_servers))


@pytest.fixture
def bank(database: str, shared_coordinator: Coordinators) -> Bank:
    return make_bank(database, shared_coordinator)
