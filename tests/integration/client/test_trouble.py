"""Brokers killed under the producer, and a producer that sleeps while another takes its id."""

import asyncio
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pytest

from oncebox.errors import FatalError, OnceboxError, RetriableError
from oncebox.local import LocalKafka
from oncebox.producer import Producer, ProducerSettings, Transaction
from oncebox.v1 import transaction_pb2
from oncebox.wire import KafkaSettings, Wire
from oncebox.writer_settings import WriterSettings
from proof.faults.process import ChildProcess
from tests.integration.client.conftest import NewProducer, fresh
from tests.support.coordinator import Coordinators, read_committed, values
from tests.support.kafka import TopicFactory, create_topic, paused

PARTITIONS = 6


async def is_committed(transaction: Transaction) -> bool:
    """The definite outcome; what is undecided is aborted."""
    async with asyncio.timeout(90):
        while True:
            try:
                outcome = await transaction.outcome()
                if outcome.result != transaction_pb2.UNDECIDED:
                    return bool(outcome.result == transaction_pb2.COMMITTED)
                await transaction.abort()
            except RetriableError:
                continue


@pytest.mark.timeout(900)
async def test_brokers_are_killed_while_records_are_on_their_way(kafka_cluster: LocalKafka, tmp_path: Path):
    """Within a committed transaction nothing is lost, doubled or out of order, whoever led the partition meanwhile."""
    topic = create_topic(kafka_cluster.bootstrap_servers, partitions=PARTITIONS)
    committed: list[int] = []
    stop = asyncio.Event()

    async def work(producer: Producer) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            transaction = await producer.begin()
            try:
                for number in range(2_000):
                    await transaction.send(topic, b"%d/%d" % (turn, number), partition=number % PARTITIONS)
                await transaction.commit()
            except FatalError:
                raise
            except OnceboxError:
                if not await is_committed(transaction):
                    continue
            committed.append(turn)

    async def grow(by: int) -> None:
        goal = len(committed) + by
        async with asyncio.timeout(120):
            while len(committed) < goal:  # noqa: ASYNC110 - the worker makes it grow
                await asyncio.sleep(0.05)

    with Coordinators(kafka_cluster.bootstrap_servers, tmp_path) as coordinators:
        await asyncio.to_thread(coordinators.start)
        async with Producer(
            kafka_cluster.bootstrap_servers, coordinators.addresses, transactional_id=fresh("killed")
        ) as producer:
            working = asyncio.create_task(work(producer))
            await grow(3)
            for broker in kafka_cluster.brokers[:2]:
                await asyncio.to_thread(broker.kill)
                await grow(2)
                await asyncio.to_thread(broker.start)
                await asyncio.to_thread(kafka_cluster.await_in_sync)
                await grow(2)
            stop.set()
            await working
        messages = await asyncio.to_thread(read_committed, kafka_cluster.bootstrap_servers, topic)
    by_turn: dict[tuple[int, int], list[int]] = defaultdict(list)
    for message in messages:
        sent_in, number = (message.value() or b"").split(b"/")
        by_turn[int(sent_in), message.partition() or 0].append(int(number))
    assert {turn for turn, _ in by_turn} == set(committed)
    for turn in committed:
        for partition in range(PARTITIONS):
            assert by_turn[turn, partition] == list(range(partition, 2_000, PARTITIONS))


async def test_a_leader_that_stands_still_is_left_for_its_successor(kafka_cluster: LocalKafka):
    """Long before the request to it times out."""
    topic = await asyncio.to_thread(create_topic, kafka_cluster.bootstrap_servers)
    patient = WriterSettings(request_timeout_ms=100_000, delivery_timeout_ms=120_000)
    async with (
        Wire(KafkaSettings(bootstrap_servers=kafka_cluster.bootstrap_servers)) as wire,
        Producer(kafka_cluster.bootstrap_servers, settings=ProducerSettings(writer=patient)) as producer,
    ):
        await producer.send_and_wait(topic, b"before")
        leader_id = (await wire.metadata([topic])).topics[topic].partitions[0].leader_id
        leader = next(broker for broker in kafka_cluster.brokers if broker.node_id == leader_id)
        leader.pause()
        async with asyncio.timeout(90):
            await producer.send_and_wait(topic, b"meanwhile")
        leader.resume()
        await producer.send_and_wait(topic, b"after")
    assert await asyncio.to_thread(values, kafka_cluster.bootstrap_servers, topic) == [
        b"before",
        b"meanwhile",
        b"after",
    ]


async def test_a_client_that_slept_while_another_took_its_id_is_told_when_it_wakes(
    one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory, tmp_path: Path
):
    topic, name = new_topic(), fresh("zombie")
    argv = [sys.executable, "-m", "tests.integration.client.zombie"]
    arguments = [one.bootstrap_servers, one.addresses[0], name, topic]
    with ChildProcess([*argv, *arguments], log=tmp_path / "zombie.log") as zombie:
        await asyncio.to_thread(zombie.wait_ready, lambda: zombie.log_contains("sent"))
        zombie.pause()
        async with new_producer(name) as mine:
            async with mine.transaction() as transaction:
                await transaction.send(topic, b"mine")
            zombie.resume()
            await asyncio.to_thread(zombie.wait)
        assert f"ended by ProducerFencedError: PRODUCER_FENCED of {name!r}" in zombie.log.read_text()
        assert mine.instance in zombie.log.read_text()
    assert await asyncio.to_thread(values, one.bootstrap_servers, topic) == [b"mine"]


async def test_a_client_that_dies_leaves_nothing_visible(
    one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory, tmp_path: Path
):
    topic, name = new_topic(), fresh("dead")
    argv = [sys.executable, "-m", "tests.integration.client.zombie"]
    arguments = [one.bootstrap_servers, one.addresses[0], name, topic]
    with ChildProcess([*argv, *arguments], log=tmp_path / "dead.log") as dead:
        await asyncio.to_thread(dead.wait_ready, lambda: dead.log_contains("sent"))
        dead.kill()
    async with new_producer(name) as mine, mine.transaction() as transaction:
        await transaction.send(topic, b"mine")
    assert await asyncio.to_thread(values, one.bootstrap_servers, topic) == [b"mine"]


async def test_a_commit_that_was_not_answered_is_asked_for_again(coordinators: Coordinators, new_topic: TopicFactory):
    """The coordinator hangs, and carries out what it was asked when it goes on: asked again, it says so."""
    topic = new_topic()
    process = await asyncio.to_thread(coordinators.start)
    settings = ProducerSettings(call_timeout_ms=8_000)
    async with (
        asyncio.timeout(120),
        Producer(
            coordinators.bootstrap_servers, coordinators.addresses, transactional_id=fresh("doubt"), settings=settings
        ) as mine,
    ):
        transaction = await mine.begin()
        await transaction.send_and_wait(topic, b"once")
        process.pause()
        with pytest.raises(RetriableError):
            await transaction.commit()
        process.resume()
        outcome = None
        while outcome is None:
            with suppress(RetriableError):
                outcome = await transaction.commit()
        assert (outcome.number, outcome.result) == (transaction.number, transaction_pb2.COMMITTED)
        # The group may have taken it for dead, and it leads anew.
        await asyncio.to_thread(process.wait_ready, coordinators.is_ready, timeout_s=60)
        async with mine.transaction() as following:
            await following.send(topic, b"next")
    assert await asyncio.to_thread(values, coordinators.bootstrap_servers, topic) == [b"once", b"next"]


@pytest.mark.parametrize("waits", ["complete", "decided"])
async def test_a_long_row_of_small_transactions_on_four_slots(
    one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory, waits: str
):
    topic = new_topic(partitions=2)
    async with new_producer(slots=4) as mine:
        for number in range(200):
            transaction = await mine.begin()
            await transaction.send(topic, b"%d" % number, partition=number % 2)
            await transaction.commit(wait=waits)  # type: ignore[arg-type]
    seen = await asyncio.to_thread(values, one.bootstrap_servers, topic)
    assert len(seen) == 200
    for partition in (0, 1):
        mine_here = [int(value) for value in seen if int(value) % 2 == partition]
        assert mine_here == list(range(partition, 200, 2))


async def test_behind_brokers_that_do_not_answer_the_buffer_is_all_that_is_kept(
    kafka_cluster: LocalKafka, tmp_path: Path
):
    servers = kafka_cluster.bootstrap_servers
    topic, record_count, buffer_bytes = create_topic(servers), 12_000, 2 * 1024 * 1024
    settings = ProducerSettings(writer=WriterSettings(buffer_bytes=buffer_bytes))
    sent = 0

    async def fill(transaction: Transaction) -> None:
        nonlocal sent
        for number in range(record_count):
            await transaction.send(topic, b"%01024d" % number)
            sent += 1

    with Coordinators(servers, tmp_path) as coordinators:
        await asyncio.to_thread(coordinators.start)
        async with Producer(servers, coordinators.addresses, transactional_id=fresh("slow"), settings=settings) as mine:
            transaction = await mine.begin()
            await transaction.send_and_wait(topic, b"-1")
            with paused(kafka_cluster):
                filling = asyncio.create_task(fill(transaction))
                async with asyncio.timeout(60):
                    while transaction.buffered_bytes <= buffer_bytes:  # noqa: ASYNC110 - the other task fills it
                        await asyncio.sleep(0.01)
                held_at = sent
                await asyncio.sleep(0.5)
                assert sent == held_at
                assert not filling.done()
                assert transaction.buffered_bytes <= buffer_bytes + 2 * 1024
                assert sent * 1024 <= transaction.buffered_bytes
            await asyncio.wait_for(filling, 120)
            await transaction.commit()
        found = await asyncio.to_thread(values, servers, topic)
    assert [int(value) for value in found] == list(range(-1, record_count))
