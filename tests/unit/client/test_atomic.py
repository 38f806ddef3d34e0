"""A commit over Kafka and a database when the coordinator does not answer, in memory."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

import oncebox
from oncebox import atomic_commit
from oncebox.claim import Claim, ProducerSettings
from oncebox.producer import Producer
from oncebox.v1 import transaction_pb2
from tests.unit.client.test_transaction import Coordinator, World


class Database:
    """Stands in for a connection and for every other one to the same database."""

    def __init__(self) -> None:
        self.is_in_transaction = False
        self.steps: list[str] = []
        self.decided: dict[object, str] = {}

    def in_transaction(self) -> bool:
        return self.is_in_transaction

    async def begin(self) -> None:
        self.is_in_transaction = True

    def flush(self) -> None:
        pass

    async def execute(self, name: str, values: Mapping[str, object]) -> list[tuple[str]]:
        if name == "abort_token":
            return [(self.decided.setdefault(values["number"], "aborted"),)]
        return [("this database",)]

    async def commit(self) -> None:
        self.steps.append("commit")
        self.is_in_transaction = False

    async def rollback(self) -> None:
        self.steps.append("rollback")
        self.is_in_transaction = False

    def another(self) -> "Database":
        made = Database()
        made.decided = self.decided
        return made

    async def close(self) -> None:
        pass

    def sleep(self, seconds: float) -> Any:
        return asyncio.sleep(seconds)


class Chaining(Coordinator):
    """Registers ahead what it is asked to."""

    async def call(self, transactional_id: str, name: str, request: Any, *, timeout_s: float) -> Any:
        response = await super().call(transactional_id, name, request, timeout_s=timeout_s)
        if name == "end":
            response.next_registered = bool(request.next_partitions)
        return response


class Service:
    """A producer that has its transactional id, and the database that it works with."""

    def __init__(self, coordinator: Coordinator) -> None:
        settings = ProducerSettings(keep_prepared=True)
        self.coordinator = coordinator
        self.producer = Producer("127.0.0.1:1", "127.0.0.1:1", transactional_id="teller", settings=settings)
        self.claim = Claim(coordinator, "teller", settings)  # type: ignore[arg-type]
        self.world = World()
        self.tools = replace(self.world.tools, claim=self.claim, on_state=self.producer._changed)
        self.producer._tools, self.producer._is_running = self.tools, True
        self.database = Database()

    async def transfer(self, *records: bytes) -> None:
        async with oncebox.atomic(self.producer, self.database) as (transaction, _):
            for record in records:
                await transaction.send("t", record)


@pytest.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setattr(atomic_commit, "database_of", lambda connection, **_: connection)
    coordinator = Chaining()
    coordinator.outcomes[0] = transaction_pb2.Outcome()
    made = Service(coordinator)
    await made.claim.take()
    return made


@pytest.mark.parametrize("lost", ["request", "answer"])
async def test_the_database_alone_has_committed_whatever_the_coordinator_says(service: Service, lost: str) -> None:
    """Told of a failure, the caller would do its work in the database again."""
    await service.transfer(b"first")
    assert service.claim.has_registered_ahead
    service.coordinator.lost = [lost]
    await service.transfer()
    assert service.coordinator.lost == []
    assert service.database.steps == ["commit", "commit"]
    await service.transfer(b"third")
    assert service.world.written == [b"first", b"third"]
    results = [outcome.result for outcome in service.coordinator.outcomes.values()]
    assert results.count(transaction_pb2.COMMITTED) == 2
