"""Whole transactions read from a real broker, beside plain and native producers, with stops and restarts."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Collection
from typing import Any

import pytest
from confluent_kafka import Producer as StockProducer
from confluent_kafka import TopicPartition as Native
from confluent_kafka.admin import AdminClient

import oncebox
from oncebox.errors import TransactionAbortableError, UsageError
from oncebox.reader import (
    CommittedTransaction,
    FeedTooShortError,
    Position,
    ReadError,
    TransactionReader,
)
from oncebox.wire import TopicPartition
from tests.integration.client.conftest import NewProducer, fresh
from tests.support.coordinator import Coordinators, wait_for_markers
from tests.support.kafka import TopicFactory, await_partitions


def reader(one: Coordinators, topics: Collection[str], **options: Any) -> TransactionReader:
    return oncebox.read_transactions(topics, one.bootstrap_servers, feed_topic=one.feed_topic, **options)


async def all_of(reading: TransactionReader) -> list[CommittedTransaction]:
    async with asyncio.timeout(120), reading:
        return [transaction async for transaction in reading]


async def marked(one: Coordinators, *topics: str) -> None:
    """Only then what comes next stands behind it, and all of it is before the end."""
    for topic in topics:
        await asyncio.to_thread(wait_for_markers, one.bootstrap_servers, topic)


def told(transaction: CommittedTransaction) -> tuple[Any, ...]:
    """Whose, and the values in each place."""
    values = {(w.topic, w.partition): [r.value for r in records] for w, records in transaction.records.items()}
    return transaction.transactional_id, values


def send_plainly(one: Coordinators, topic: str, value: bytes, partition: int = 0, **config: Any) -> None:
    producer = StockProducer({"bootstrap.servers": one.bootstrap_servers, **config})
    if config:
        producer.init_transactions(30)
        producer.begin_transaction()
    producer.produce(topic, value, partition=partition)
    if config:
        producer.commit_transaction(30)
        # It is answered before its marker is written; a successor is not let in before that.
        StockProducer({"bootstrap.servers": one.bootstrap_servers, **config}).init_transactions(60)
    producer.flush(30)


async def test_transactions_come_whole_and_what_belongs_to_none_by_itself(
    one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory
):
    orders, payments, unread = new_topic(partitions=2), new_topic(), new_topic()
    name = fresh("shop")
    async with new_producer(name) as mine:
        async with mine.transaction(metadata=b"first") as transaction:
            await transaction.send(orders, b"o1", partition=0, key=b"k", headers=[("h", b"v")], timestamp_ms=123)
            await transaction.send(orders, b"o2", partition=1)
            await transaction.send(payments, b"p1")
            await transaction.send(unread, b"not read")
        await marked(one, orders, payments)
        await asyncio.to_thread(send_plainly, one, payments, b"plain")
        aborted = await mine.begin()
        await aborted.send(orders, b"never", partition=0)
        await aborted.flush()
        await aborted.abort()
        await asyncio.to_thread(send_plainly, one, payments, b"native", 0, **{"transactional.id": fresh("native")})
        async with mine.transaction() as transaction:
            await transaction.send(unread, b"nothing to read of this one")
        async with mine.transaction() as transaction:
            await transaction.send(payments, b"p2")
    await marked(one, orders, payments)
    read = await all_of(reader(one, [orders, payments], until_end=True))
    assert [told(transaction) for transaction in read] == [
        (name, {(orders, 0): [b"o1"], (orders, 1): [b"o2"], (payments, 0): [b"p1"]}),
        (None, {(payments, 0): [b"plain"]}),
        (None, {(payments, 0): [b"native"]}),
        (name, {(payments, 0): [b"p2"]}),
    ]
    first, last = read[0], read[-1]
    assert (first.number, first.metadata, last.metadata) == (1, b"first", b"")
    assert first.started_at_ms <= first.decided_at_ms <= last.decided_at_ms
    record = first.records[TopicPartition(orders, 0)][0]
    assert (record.key, record.headers, record.timestamp_ms, record.offset) == (b"k", [("h", b"v")], 123, 0)


async def test_a_reader_that_stops_after_each_transaction_goes_on_where_it_was(
    one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory
):
    """Several writers interleave over three partitions; each stop goes through the stored text of the position."""
    topic = new_topic(partitions=3)

    async def write(number: int) -> None:
        async with new_producer(fresh(f"writer{number}")) as mine:
            for turn in range(8):
                transaction = await mine.begin()
                for partition in {turn % 3, number % 3, (turn * number) % 3}:
                    await transaction.send(topic, b"%d/%d" % (number, turn), partition=partition)
                    await asyncio.sleep(0.001)
                await (transaction.abort() if (turn + number) % 5 == 0 else transaction.commit(wait="decided"))

    await asyncio.gather(*(write(number) for number in range(4)))
    await asyncio.to_thread(send_plainly, one, topic, b"plain", 1)
    async with asyncio.timeout(120):
        while len(whole := await all_of(reader(one, [topic], until_end=True))) < 27:
            pass
    position: Position | None = None
    pieces: list[CommittedTransaction] = []
    for _ in range(len(whole)):
        start = "earliest" if position is None else Position.from_json(position.to_json())
        async with reader(one, [topic], start=start) as reading:
            pieces.append(await anext(reading))
            position = reading.position()
    assert sorted(map(str, map(told, pieces))) == sorted(map(str, map(told, whole)))
    assert position is not None
    assert await all_of(reader(one, [topic], start=position, until_end=True)) == []
    assert sum(len(records) for t in whole for records in t.records.values()) == sum(
        len(records) for t in pieces for records in t.records.values()
    )


async def test_reading_beside_writers_sees_all_once_and_each_ids_transactions_in_order(
    one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory
):
    topics = [new_topic(partitions=2), new_topic()]
    names = [fresh("live") for _ in range(3)]
    expected: set[tuple[str, int]] = set()

    async def write(name: str) -> None:
        async with new_producer(name) as mine:
            for turn in range(40):
                async with mine.transaction(wait="decided") as transaction:
                    for topic in topics:
                        await transaction.send(topic, b"%d" % turn)
                expected.add((name, transaction.number))

    async with asyncio.timeout(120), reader(one, topics, start="latest", buffer_bytes=2_000) as reading:
        writing = asyncio.gather(*(write(name) for name in names))
        read = []
        async for transaction in reading:
            read.append(transaction)
            assert {where.topic for where in transaction.records} == set(topics)
            if len(read) == 120:
                break
        await writing
    assert {(t.transactional_id, t.number) for t in read} == expected
    for name in names:
        numbers = [t.number for t in read if t.transactional_id == name]
        assert numbers == sorted(numbers)


async def test_a_partition_that_is_added_is_read(one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory):
    from confluent_kafka.admin import NewPartitions  # type: ignore[attr-defined]

    topic = new_topic(partitions=1)
    async with new_producer() as mine, asyncio.timeout(120), reader(one, [topic]) as reading:
        admin = AdminClient({"bootstrap.servers": one.bootstrap_servers})
        await asyncio.to_thread(admin.create_partitions([NewPartitions(topic, 2)])[topic].result, 30)
        while not mine._placement._places:
            try:
                async with mine.transaction() as transaction:
                    await transaction.send(topic, b"new", partition=1)
            except UsageError:
                mine._placement._places.clear()
        assert told(await anext(reading))[1] == {(topic, 1): [b"new"]}


async def test_records_deleted_before_they_were_read_stop_the_reader(
    one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory
):
    topic = new_topic()
    async with new_producer() as mine:
        for number in range(3):
            async with mine.transaction() as transaction:
                await transaction.send(topic, b"%d" % number)
            await marked(one, topic)
        async with reader(one, [topic]) as reading:
            await anext(reading)
            position = reading.position()
        admin = AdminClient({"bootstrap.servers": one.bootstrap_servers})
        await asyncio.to_thread(lambda: [f.result(30) for f in admin.delete_records([Native(topic, 0, 4)]).values()])
        with pytest.raises(ReadError, match="records below 4 have been deleted"):
            await reader(one, [topic], start=position).open()
        # From the begin of what is left, commits below it do not count.
        assert [told(t)[1] for t in await all_of(reader(one, [topic], until_end=True))] == [{(topic, 0): [b"2"]}]


async def test_a_topic_made_again_is_another(one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory):
    topic = new_topic()
    async with new_producer() as mine:
        async with mine.transaction() as transaction:
            await transaction.send(topic, b"old")
        async with reader(one, [topic]) as reading:
            await anext(reading)
            position = reading.position()
        admin = AdminClient({"bootstrap.servers": one.bootstrap_servers})
        await asyncio.to_thread(lambda: admin.delete_topics([topic], operation_timeout=30)[topic].result(30))
        await asyncio.to_thread(await_partitions, one.bootstrap_servers, topic, 0)
        await asyncio.to_thread(new_topic, topic)
        with pytest.raises(ReadError, match="deleted and made again"):
            await reader(one, [topic], start=position).open()
    async with new_producer() as again:
        while True:
            try:
                async with again.transaction() as transaction:
                    await transaction.send(topic, b"new")
                break
            except TransactionAbortableError:
                pass  # registered while the coordinator knew the old one
        await marked(one, topic)
        read = await all_of(reader(one, [topic], until_end=True))
    assert [told(t)[1] for t in read] == [{(topic, 0): [b"new"]}]


async def test_a_feed_that_has_forgotten_is_told(coordinators: Coordinators, new_topic: TopicFactory):
    await asyncio.to_thread(coordinators.start)
    topic = new_topic()
    async with oncebox.Producer(
        coordinators.bootstrap_servers, coordinators.addresses, transactional_id=uuid.uuid4().hex
    ) as mine:
        for number in range(3):
            async with mine.transaction() as transaction:
                await transaction.send(topic, b"%d" % number)
        async with reader(coordinators, [topic]) as reading:
            await anext(reading)
            position = reading.position()
        admin = AdminClient({"bootstrap.servers": coordinators.bootstrap_servers})
        parts = [Native(coordinators.feed_topic, index, -1) for index in range(4)]
        await asyncio.to_thread(lambda: [f.result(30) for f in admin.delete_records(parts).values()])
        with pytest.raises(FeedTooShortError, match="commits below"):
            await reader(coordinators, [topic], start=position).open()
        with pytest.raises(FeedTooShortError, match=f"{topic}:0 offset 0 may belong"):
            await all_of(reader(coordinators, [topic], until_end=True))
        async with reader(coordinators, [topic], start="latest") as reading:
            async with mine.transaction() as transaction:
                await transaction.send(topic, b"after")
            assert told(await anext(reading))[1] == {(topic, 0): [b"after"]}


async def test_what_compaction_removed_is_not_waited_for(
    one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory
):
    topic = new_topic(
        config={
            "cleanup.policy": "compact",
            "segment.ms": "200",
            "min.cleanable.dirty.ratio": "0.001",
            "max.compaction.lag.ms": "200",
        }
    )
    other = new_topic()
    async with new_producer(fresh("compacted")) as mine:
        for number in range(6):
            async with mine.transaction() as transaction:
                await transaction.send(topic, b"%d" % number, key=b"same")
                await transaction.send(topic, b"%d." % number, key=b"same")
                if number % 2:
                    await transaction.send(other, b"%d" % number)
        survivors: list[bytes | None] = []
        async with asyncio.timeout(120):
            while len(survivors := [v async for v in values_of(one, topic)]) > 4:
                await asyncio.sleep(1)
                async with mine.transaction() as transaction:  # rolls the segment
                    await transaction.send(topic, b"roll", key=b"roll")
        await marked(one, topic, other)
        read = await all_of(reader(one, [topic, other], until_end=True))
    told_all = [told(t)[1] for t in read]
    assert [t[other, 0] for t in told_all if (other, 0) in t] == [[b"1"], [b"3"], [b"5"]]
    assert sum(len(t.get((topic, 0), [])) for t in told_all) <= len(survivors) + 1


async def values_of(one: Coordinators, topic: str) -> AsyncIterator[bytes | None]:
    from tests.support.coordinator import read_committed

    for message in await asyncio.to_thread(read_committed, one.bootstrap_servers, topic):
        yield message.value()


async def test_bad_input(one: Coordinators, new_topic: TopicFactory):
    with pytest.raises(UsageError, match="name the topics"):
        reader(one, [])
    with pytest.raises(UsageError, match="the feed is not one of them"):
        reader(one, [one.feed_topic])
    with pytest.raises(UsageError, match="'no-such-topic' cannot be read"):
        await reader(one, ["no-such-topic"]).open()
    with pytest.raises(UsageError, match="'no-such-feed' cannot be read"):
        await oncebox.read_transactions([new_topic()], one.bootstrap_servers, feed_topic="no-such-feed").open()
    closed = reader(one, [new_topic()])
    async with closed:
        pass
    with pytest.raises(UsageError, match="closed"):
        await anext(closed)
