"""Without transactions: the writer of now and the next, between several tasks and while brokers are away."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from oncebox import idempotent
from oncebox.claim import ProducerSettings
from oncebox.errors import BrokersUnavailableError, ClosedError, RecordsRefusedError
from oncebox.idempotent import IdempotentWriters
from oncebox.producer import Producer
from oncebox.wire import AuthenticationError, ErrorCode, OutcomeUnknownError, TopicPartition, WireError
from oncebox.writer_settings import WriterSettings
from tests.unit.client.brokers import Brokers


class Cluster(Brokers):
    """With producer ids."""

    def __init__(self) -> None:
        super().__init__(1, trouble=0)
        self.problems: list[WireError | ErrorCode] = []
        self.asked = 0
        self.looked = 0

    async def init_producer_id(self, *, timeout_ms: int) -> SimpleNamespace:
        del timeout_ms
        self.asked += 1
        problem = self.problems.pop(0) if self.problems else ErrorCode.NONE
        if isinstance(problem, WireError):
            raise problem
        return SimpleNamespace(error=problem, producer_id=self.asked, producer_epoch=0)

    async def metadata(self, topics: frozenset[str], *, timeout_ms: int = 0) -> SimpleNamespace:
        self.looked += 1
        return await super().metadata(topics, timeout_ms=timeout_ms)


class Places:
    """Stands in for Placement: what is looked up is found once the gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    def place(self, topic: str, _key: bytes | None, _partition: int | None) -> TopicPartition | None:
        return TopicPartition(topic, 0) if topic == "t" else None

    async def find(self, topic: str, _key: bytes | None, _partition: int | None) -> TopicPartition:
        await self.gate.wait()
        return TopicPartition(topic, 0)


def running(cluster: Cluster, places: Places) -> Producer:
    producer: Any = Producer("127.0.0.1:1", settings=ProducerSettings(writer=WriterSettings()))
    producer._placement = places
    producer._writers = writers_on(cluster)
    producer._is_running = True
    started: Producer = producer
    return started


def writers_on(cluster: Cluster) -> IdempotentWriters:
    wire: Any = cluster
    return IdempotentWriters(wire, WriterSettings())


@pytest.mark.parametrize("send", ["send", "send_and_wait"])
async def test_a_record_whose_topic_is_looked_up_while_another_is_refused_is_told_of_it(send: str) -> None:
    cluster, places = Cluster(), Places()
    producer = running(cluster, places)
    await producer.send_and_wait("t", b"good")
    late = asyncio.create_task(getattr(producer, send)("elsewhere", b"late"))
    await asyncio.sleep(0)
    cluster.refuse[TopicPartition("t", 0)] = ErrorCode.INVALID_RECORD
    with pytest.raises(RecordsRefusedError):
        await producer.send_and_wait("t", b"bad")
    places.gate.set()
    async with asyncio.timeout(60):
        with pytest.raises(RecordsRefusedError):
            await late
        cluster.refuse.clear()
        await producer.send_and_wait("elsewhere", b"again")
    assert cluster.logs[TopicPartition("elsewhere", 0)].values == [b"again"]


async def test_a_producer_id_is_asked_for_again_with_a_look_at_the_cluster_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(idempotent, "RETRY_S", 0.001)
    cluster = Cluster()
    cluster.problems = [OutcomeUnknownError("lost"), ErrorCode.COORDINATOR_LOAD_IN_PROGRESS]
    assert (await writers_on(cluster).get()).identity.producer_id == 3
    assert cluster.looked == 2


@pytest.mark.parametrize("problem", [AuthenticationError("no"), ErrorCode.CLUSTER_AUTHORIZATION_FAILED])
async def test_who_is_not_let_in_is_told_at_once(problem: WireError | ErrorCode) -> None:
    cluster = Cluster()
    cluster.problems = [problem]
    with pytest.raises(BrokersUnavailableError, match="no producer id"):
        await writers_on(cluster).get()
    assert cluster.asked == 1


async def test_who_waits_for_a_producer_id_hears_of_the_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """And while it waits, others have their turns."""
    monkeypatch.setattr(idempotent, "RETRY_S", 0.001)
    cluster = Cluster()
    cluster.problems = [OutcomeUnknownError("the connections are closed")] * 100_000
    writers = writers_on(cluster)
    waiting = asyncio.create_task(writers.get())
    async with asyncio.timeout(60):
        while cluster.asked < 3:  # noqa: ASYNC110 - the other task asks
            await asyncio.sleep(0.001)
        await writers.close()
        with pytest.raises(ClosedError):
            await waiting
