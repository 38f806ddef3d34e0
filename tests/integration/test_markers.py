"""Markers on real brokers: a stock read_committed consumer finds exactly what was committed, whatever befell."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError
from confluent_kafka import TopicPartition as Assigned
from confluent_kafka.admin import AdminClient

from coordinator.core.records import TopicPartition as CorePartition
from coordinator.markers import plan
from coordinator.markers.writer import MarkerWriter
from oncebox.local import LocalKafka
from oncebox.local.kafka import QUICK_START
from oncebox.wire import (
    LATEST,
    OFFSETS_TOPIC,
    CommittedOffset,
    ErrorCode,
    KafkaSettings,
    Record,
    TopicPartition,
    Wire,
    encode_batch,
    offsets_partition,
)
from proof.faults.proxy import Proxy
from tests.support.kafka import TopicFactory, create_topic
from tests.unit.markers.brokers import debt

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence
    from pathlib import Path

    from coordinator.core.owed import Debt
    from coordinator.markers.port import Payment

WRITE_TXN_MARKERS = 27


class Bench:
    """A wire, a marker writer on it, and producers that write transactions without any coordinator."""

    def __init__(self, wire: Wire, *, timeout_ms: int = 5_000) -> None:
        self.wire = wire
        self.writer = MarkerWriter(wire, timeout_ms=timeout_ms)

    async def producer_id(self) -> int:
        while (answer := await self.wire.init_producer_id()).error:
            assert answer.error.retriable
            await asyncio.sleep(0.1)
        return answer.producer_id

    async def write(self, partition: TopicPartition, producer_id: int, epoch: int, values: Iterable[bytes]) -> None:
        batch = encode_batch(
            [Record(key=None, value=value) for value in values],
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=0,
            transactional=True,
        )
        while True:
            leader = self.wire.leader_id(partition)
            if leader is not None:
                error = (await self.wire.produce(leader, {partition: batch}, transactional_id="test"))[partition].error
                if not error:
                    return
                assert error.retriable  # a topic made just now
                await asyncio.sleep(0.1)
            await self.wire.metadata([partition.topic])

    def pay(self, owed: Debt, *, coordinator_epoch: int = 1) -> tuple[Payment, dict[TopicPartition, Future[None]]]:
        loop = asyncio.get_running_loop()
        paid: dict[TopicPartition, Future[None]] = {
            TopicPartition(*partition): loop.create_future() for partition in owed.partitions
        }
        payment = self.writer.pay(
            owed,
            coordinator_epoch=coordinator_epoch,
            paid=lambda partition: paid[TopicPartition(*partition)].set_result(None),
        )
        return payment, paid

    async def settle(self, owed: Debt, *, coordinator_epoch: int = 1, within_s: float = 60) -> None:
        _, paid = self.pay(owed, coordinator_epoch=coordinator_epoch)
        await asyncio.wait_for(asyncio.gather(*paid.values()), within_s)

    async def last_stable_offset(self, partition: TopicPartition) -> int:
        leader = self.wire.leader_id(partition)
        assert leader is not None
        answer = await self.wire.list_offsets(leader, {partition: LATEST}, read_committed=True)
        assert answer[partition].error is ErrorCode.NONE
        return answer[partition].offset


@asynccontextmanager
async def bench(bootstrap_servers: str, *, timeout_ms: int = 5_000) -> AsyncIterator[Bench]:
    async with Wire(KafkaSettings(bootstrap_servers=bootstrap_servers)) as wire:
        made = Bench(wire, timeout_ms=timeout_ms)
        try:
            yield made
        finally:
            await made.writer.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - a status has no event
            await asyncio.sleep(0.05)


async def committed(
    bootstrap_servers: str, partitions: Sequence[TopicPartition]
) -> Counter[tuple[TopicPartition, bytes]]:
    """What a stock consumer with read_committed finds up to the last stable offsets."""
    return await asyncio.to_thread(_committed, bootstrap_servers, partitions)


def _committed(bootstrap_servers: str, partitions: Sequence[TopicPartition]) -> Counter[tuple[TopicPartition, bytes]]:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "unused",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    found: Counter[tuple[TopicPartition, bytes]] = Counter()
    open_partitions = set(partitions)
    deadline = time.monotonic() + 60
    try:
        consumer.assign([Assigned(*partition, OFFSET_BEGINNING) for partition in partitions])
        while open_partitions:
            assert time.monotonic() < deadline, f"not at the end of {open_partitions} within a minute"
            for message in consumer.consume(1000, timeout=1):
                partition = TopicPartition(message.topic() or "", message.partition() or 0)
                error = message.error()
                if error is None:
                    found[partition, message.value() or b""] += 1
                elif error.code() == KafkaError._PARTITION_EOF:
                    open_partitions.discard(partition)
    finally:
        consumer.close()
    return found


async def test_thousands_of_transactions_end_as_decided(kafka: LocalKafka, new_topic: TopicFactory):
    topic = new_topic(partitions=6)
    partitions = [TopicPartition(topic, index) for index in range(6)]
    expected: Counter[tuple[TopicPartition, bytes]] = Counter()
    randomness = random.Random(4)
    async with bench(kafka.bootstrap_servers) as made:

        async def produce() -> None:
            producer_id = await made.producer_id()
            for number in range(70):
                chosen = randomness.sample(partitions, 2)
                commit = randomness.random() < 0.7
                value = f"{producer_id}-{number}".encode()
                for partition in chosen:
                    await made.write(partition, producer_id, 2 * number, [value])
                    if commit:
                        expected[partition, value] += 1
                await made.settle(debt(producer_id, chosen, marker_epoch=2 * number + 1, commit=commit))

        await asyncio.gather(*(produce() for _ in range(32)))
        status = made.writer.status()
        assert (status.waiting, status.in_flight, status.retrying) == (0, 0, 0)
    assert sum(expected.values()) > 2500
    assert await committed(kafka.bootstrap_servers, partitions) == expected


async def test_group_offsets_count_once_their_marker_is_written(
    kafka: LocalKafka, topic_name: str, new_topic: TopicFactory
):
    read = TopicPartition(new_topic(), 0)
    group_id = topic_name
    async with bench(kafka.bootstrap_servers) as made:
        producer_id = await made.producer_id()
        while (group_node := (await made.wire.find_group_coordinator(group_id)).node_id) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        count = len((await made.wire.metadata([OFFSETS_TOPIC])).topics[OFFSETS_TOPIC].partitions)
        offsets = TopicPartition(OFFSETS_TOPIC, offsets_partition(group_id, count))

        async def add_offsets(epoch: int, offset: int) -> None:
            while True:
                answer = await made.wire.txn_offset_commit(
                    group_node,
                    {read: CommittedOffset(offset=offset)},
                    group_id=group_id,
                    transactional_id="test",
                    producer_id=producer_id,
                    producer_epoch=epoch,
                )
                if not answer[read].retriable:
                    assert answer[read] is ErrorCode.NONE
                    return
                await asyncio.sleep(0.1)

        await add_offsets(0, 5)
        await made.settle(debt(producer_id, [offsets]))
        await add_offsets(2, 9)
        await made.settle(debt(producer_id, [offsets], marker_epoch=3, commit=False))
        # Paid again, as after a crash: neither is harmed.
        await made.settle(debt(producer_id, [offsets]), coordinator_epoch=2)
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": group_id})
    try:
        found = await asyncio.to_thread(consumer.committed, [Assigned(*read)], 30)
    finally:
        consumer.close()
    assert [partition.offset for partition in found] == [5]


async def test_r15_a_debt_paid_again_after_a_crash_spares_the_next_transaction(
    kafka: LocalKafka, new_topic: TopicFactory
):
    partition = TopicPartition(new_topic(), 0)
    async with bench(kafka.bootstrap_servers) as made, bench(kafka.bootstrap_servers) as successor:
        producer_id = await made.producer_id()
        await made.write(partition, producer_id, 0, [b"first"])
        await made.settle(debt(producer_id, [partition]))
        # The next leader knows nothing of that, and pays it twice over, before and while the next one is open.
        await successor.settle(debt(producer_id, [partition]), coordinator_epoch=2)
        await made.write(partition, producer_id, 2, [b"second"])
        stable = await made.last_stable_offset(partition)
        await successor.settle(debt(producer_id, [partition]), coordinator_epoch=2)
        assert await made.last_stable_offset(partition) == stable
        assert await committed(kafka.bootstrap_servers, [partition]) == {(partition, b"first"): 1}
        await successor.settle(debt(producer_id, [partition], marker_epoch=3, commit=False), coordinator_epoch=2)
        assert await made.last_stable_offset(partition) > stable
    assert await committed(kafka.bootstrap_servers, [partition]) == {(partition, b"first"): 1}


async def test_a_deposed_coordinator_is_not_told_that_it_has_paid(kafka: LocalKafka, new_topic: TopicFactory):
    partition = TopicPartition(new_topic(), 0)
    async with bench(kafka.bootstrap_servers) as made:
        producer_id = await made.producer_id()
        await made.settle(debt(producer_id, [partition]), coordinator_epoch=9)
        await made.write(partition, producer_id, 2, [b"open"])
        payment, paid = made.pay(debt(producer_id, [partition], marker_epoch=3), coordinator_epoch=8)
        await until(lambda: "deposed" in made.writer.status().problems.get(partition, ""))
        assert not any(future.done() for future in paid.values())
        payment.cancel()
        await made.settle(debt(producer_id, [partition], marker_epoch=3), coordinator_epoch=9)
    assert await committed(kafka.bootstrap_servers, [partition]) == {(partition, b"open"): 1}


async def test_a_deleted_topic_holds_nobody_up_and_is_dropped_in_the_end(
    kafka: LocalKafka, new_topic: TopicFactory, monkeypatch: pytest.MonkeyPatch
):
    """R20 as it really happens: the broker never answers the request that the deleted topic's marker is in."""
    monkeypatch.setattr(plan, "GONE_AFTER_S", 6.0)
    deleted, kept = TopicPartition(new_topic(), 0), TopicPartition(new_topic(), 0)
    async with bench(kafka.bootstrap_servers, timeout_ms=8_000) as made:
        first, second = [await made.producer_id() for _ in range(2)]
        await made.write(deleted, first, 0, [b"lost"])
        await made.write(kept, second, 0, [b"kept"])
        await _delete(kafka, deleted.topic)
        _, done = made.pay(debt(second, [kept]))
        payment, gone = made.pay(debt(first, [deleted]))
        await asyncio.wait_for(asyncio.gather(*done.values()), 60)
        assert not any(future.done() for future in gone.values())
        # Now that it is known to be sick, it spoils no further request.
        for epoch in range(2, 40, 2):
            began_s = time.monotonic()
            await made.settle(debt(second, [kept], marker_epoch=epoch + 1))
            assert time.monotonic() - began_s < 7, "it waited for an answer that never comes"
        await asyncio.wait_for(asyncio.gather(*gone.values()), 60)
        assert payment.dropped == {CorePartition(*deleted)}
    assert await committed(kafka.bootstrap_servers, [kept]) == {(kept, b"kept"): 1}


async def test_r12_a_topic_deleted_and_made_anew_gets_the_marker_by_its_name(
    kafka: LocalKafka, new_topic: TopicFactory
):
    partition = TopicPartition(new_topic(), 0)
    async with bench(kafka.bootstrap_servers) as made:
        producer_id = await made.producer_id()
        await made.write(partition, producer_id, 0, [b"lost"])
        await _delete(kafka, partition.topic)
        payment, paid = made.pay(debt(producer_id, [partition]))
        await until(lambda: partition in made.writer.status().problems)
        await asyncio.to_thread(create_topic, kafka.bootstrap_servers, partition.topic)
        await asyncio.wait_for(asyncio.gather(*paid.values()), 60)
        assert payment.dropped == frozenset()
        await made.write(partition, producer_id, 2, [b"new"])
        await made.settle(debt(producer_id, [partition], marker_epoch=3))
    assert await committed(kafka.bootstrap_servers, [partition]) == {(partition, b"new"): 1}


async def _delete(kafka: LocalKafka, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    await asyncio.to_thread(admin.delete_topics([topic], operation_timeout=30)[topic].result, 60)
    async with Wire(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as wire:
        while True:
            if (await wire.metadata([topic])).topics[topic].error is not ErrorCode.NONE:
                return
            await asyncio.sleep(0.1)


@pytest.mark.kafka
async def test_pending_markers_outlive_lost_answers_and_a_killed_broker(tmp_path: Path):
    async with Proxy(("127.0.0.1", 0), kafka=True) as proxy:
        with LocalKafka(tmp_path / "kafka", advertised_ports=[proxy.port], jvm_options=[QUICK_START]) as kafka:
            broker = kafka.brokers[0]
            proxy.target = ("127.0.0.1", broker.port)
            topic = await asyncio.to_thread(create_topic, kafka.internal_servers, partitions=3)
            partitions = [TopicPartition(topic, index) for index in range(3)]
            async with bench(proxy.address, timeout_ms=2_000) as made:
                producer_ids = [await made.producer_id() for _ in range(60)]
                values = {producer_id: b"%d" % producer_id for producer_id in producer_ids}
                for producer_id in producer_ids:
                    for partition in partitions:
                        await made.write(partition, producer_id, 0, [values[producer_id]])

                async def end(ended: Sequence[int]) -> None:
                    owed = [debt(producer_id, partitions, commit=producer_id % 2 == 0) for producer_id in ended]
                    await asyncio.gather(*(made.settle(each, within_s=120) for each in owed))

                swallowed = proxy.swallow_reply(WRITE_TXN_MARKERS)
                await end(producer_ids[:20])
                await asyncio.wait([swallowed.answer], timeout=60)
                assert swallowed.answer.done()

                held = proxy.hold(WRITE_TXN_MARKERS)
                killed = asyncio.create_task(end(producer_ids[20:40]))
                await held.caught()
                await asyncio.to_thread(broker.kill)
                unsent = asyncio.create_task(end(producer_ids[40:]))
                await until(lambda: made.writer.status().retrying == 120)
                assert not killed.done()
                await asyncio.to_thread(broker.start)
                await killed
                await unsent
                # What the network held comes late, when the producers have gone on: it must end nothing.
                for producer_id in producer_ids:
                    await made.write(partitions[0], producer_id, 2, [b"later"])
                stable = await made.last_stable_offset(partitions[0])
                await held.release()
                assert await made.last_stable_offset(partitions[0]) == stable
            found = await committed(kafka.internal_servers, partitions)
            kafka.kill()
    assert found == {
        (partition, value): 1
        for partition in partitions
        for producer_id, value in values.items()
        if producer_id % 2 == 0
    }


async def test_a_paused_broker_delays_only_what_needs_it(kafka_cluster: LocalKafka):
    servers = kafka_cluster.bootstrap_servers
    alone = await asyncio.to_thread(create_topic, servers, partitions=3, replication_factor=1)
    shared = await asyncio.to_thread(create_topic, servers, partitions=3)
    async with bench(servers, timeout_ms=10_000) as made:
        metadata = await made.wire.metadata([alone, shared])
        leaders = {index: each.leader_id for index, each in metadata.topics[alone].partitions.items()}
        paused = kafka_cluster.brokers[2]
        away = [TopicPartition(alone, index) for index, leader in leaders.items() if leader == paused.node_id]
        here = [TopicPartition(alone, index) for index, leader in leaders.items() if leader != paused.node_id]
        replicated = [TopicPartition(shared, index) for index in range(3)]
        assert len(away) == 1
        producer_ids = [await made.producer_id() for _ in range(40)]
        every = [*away, *here, *replicated]
        for producer_id in producer_ids:
            for partition in every:
                await made.write(partition, producer_id, 0, [b"%d" % producer_id])
        await asyncio.to_thread(paused.pause)
        try:
            payments = [made.pay(debt(producer_id, every)) for producer_id in producer_ids[:30]]
            quick = [paid[partition] for _, paid in payments for partition in paid if partition in here]
            await asyncio.wait_for(asyncio.gather(*quick), 60)
            # Once the cluster has given the paused broker up, its partitions with replicas go on without it.
            moved = [paid[partition] for _, paid in payments for partition in paid if partition in replicated]
            await asyncio.wait_for(asyncio.gather(*moved), 90)
            began_s = time.monotonic()
            later = [made.pay(debt(producer_id, [*here, *away])) for producer_id in producer_ids[30:]]
            await asyncio.gather(*(paid[partition] for _, paid in later for partition in paid if partition in here))
            assert time.monotonic() - began_s < 9, "it waited for the paused broker"
            waiting = [paid[partition] for _, paid in [*payments, *later] for partition in paid if partition in away]
            assert len(waiting) == 40
            assert not any(future.done() for future in waiting)
        finally:
            await asyncio.to_thread(paused.resume)
        await asyncio.wait_for(asyncio.gather(*waiting), 90)
        for producer_id in producer_ids[30:]:
            await made.settle(debt(producer_id, replicated))
    found = await committed(servers, every)
    assert found == {(partition, b"%d" % producer_id): 1 for partition in every for producer_id in producer_ids}
