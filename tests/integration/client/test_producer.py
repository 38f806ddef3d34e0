"""The transactional producer on a real broker and a real coordinator: what goes in, and what a stock consumer sees."""

import asyncio
import gc
from collections import Counter
from typing import Any

import pytest

from oncebox.errors import (
    AbortedError,
    ClosedError,
    DeliveryError,
    InvalidTxnStateError,
    ProducerFencedError,
    RecordTooLargeError,
    TransactionTimedOutError,
    UsageError,
)
from oncebox.partitioner import by_key, round_robin
from oncebox.producer import Producer
from oncebox.transaction import State
from oncebox.v1 import transaction_pb2
from oncebox.wire import Compression
from tests.integration.client.conftest import NewProducer, fresh
from tests.support.coordinator import Coordinators, manifests, read_committed, values
from tests.support.kafka import TopicFactory


async def seen(one: Coordinators, topic: str) -> list[bytes]:
    return await asyncio.to_thread(values, one.bootstrap_servers, topic)


@pytest.mark.parametrize("compression", list(Compression))
async def test_every_compression_is_read_by_a_stock_consumer(
    one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory, compression: Compression
):
    topic = new_topic()
    sent = [b"%d " % number * 50 for number in range(2_000)]
    async with new_producer(compression=compression, batch_bytes=20_000) as mine, mine.transaction() as transaction:
        for value in sent:
            await transaction.send(topic, value)
    assert await seen(one, topic) == sent


async def test_ended_transactions_are_forgotten_without_a_search_for_garbage(
    new_producer: NewProducer, new_topic: TopicFactory
):
    topic, transactions, found = new_topic(), 50, list[int]()
    async with new_producer() as mine:
        async with mine.transaction() as transaction:
            await transaction.send(topic, b"the first one opens connections")
        for _ in range(3):  # what else goes on leaves garbage, too, now and then: the quietest turn counts
            gc.collect()
            gc.disable()
            try:
                for number in range(transactions):
                    transaction = await mine.begin()
                    await transaction.send(topic, b"%d" % number)
                    await (transaction.commit() if number % 2 else transaction.abort())
                found.append(gc.collect())
            finally:
                gc.enable()
    assert min(found) < transactions


async def test_all_that_a_record_has_arrives(one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory):
    topic = new_topic(partitions=3)
    headers = [("a", b"1"), ("a", b"2"), ("null", None), ("empty", b"")]
    async with new_producer() as mine, mine.transaction() as transaction:
        where = await transaction.send_and_wait(
            topic, b"value", key=b"key", headers=headers, partition=2, timestamp_ms=1_700_000_000_123
        )
        await transaction.send(topic, None, key=b"tombstone", partition=2)
        assert where == (topic, 2, 0)
    first, tombstone = await asyncio.to_thread(read_committed, one.bootstrap_servers, topic)
    assert (first.key(), first.value(), first.partition(), first.offset()) == (b"key", b"value", 2, 0)
    assert first.timestamp()[1] == 1_700_000_000_123
    assert first.headers() == headers
    assert (tombstone.key(), tombstone.value()) == (b"tombstone", None)


async def test_partitioners_place_records(one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory):
    topic = new_topic(partitions=4)
    async with new_producer() as mine, mine.transaction() as transaction:
        for number in range(20):
            key = b"key-%d" % number
            assert await transaction.send(topic, b"", key=key) == (topic, by_key(key, 4))
    async with new_producer(partitioner=round_robin()) as mine, mine.transaction() as transaction:
        places = Counter([(await transaction.send(topic, b"")).partition for _ in range(8)])
        assert places == {0: 2, 1: 2, 2: 2, 3: 2}
    async with new_producer(partitioner=lambda topic, key, count: count - 1) as mine, mine.transaction() as transaction:
        assert (await transaction.send(topic, b"", key=b"any")).partition == 3
        assert (await transaction.send(topic, b"", partition=1)).partition == 1


async def test_bad_input_raises_at_once_and_the_transaction_goes_on(
    one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory
):
    topic = new_topic(partitions=2)
    not_bytes: object = {"a": 1}
    async with new_producer() as mine:
        transaction = await mine.begin()
        with pytest.raises(TypeError):
            await transaction.send(topic, not_bytes)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            await transaction.send(topic, b"x", key="text")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="'no-such-topic' cannot be written: UNKNOWN_TOPIC_OR_PARTITION"):
            await transaction.send("no-such-topic", b"x")
        with pytest.raises(UsageError, match="INVALID_TOPIC"):
            await transaction.send("no such topic", b"x")
        for partition in (2, -1):
            with pytest.raises(UsageError, match=f"no partition {partition} in .*: it has 2"):
                await transaction.send(topic, b"x", partition=partition)
        with pytest.raises(RecordTooLargeError):
            await transaction.send(topic, bytes(1024 * 1024))
        with pytest.raises(UsageError, match="timestamp"):
            await transaction.send(topic, b"x", timestamp_ms=-5)
        assert not transaction.is_registered
        await transaction.send(topic, b"good", partition=0)
        await transaction.commit()
    assert await seen(one, topic) == [b"good"]


async def test_a_record_that_only_the_topic_finds_too_large_is_abortable(
    one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory
):
    topic = new_topic(config={"max.message.bytes": "10000"})
    async with new_producer() as mine:
        transaction = await mine.begin()
        await transaction.send(topic, b"small")
        await transaction.flush()
        with pytest.raises(DeliveryError, match=r"MESSAGE_TOO_LARGE.*lower batch_bytes"):
            await transaction.send_and_wait(topic, bytes(20_000))
        with pytest.raises(DeliveryError):
            await transaction.send(topic, b"after")
        with pytest.raises(DeliveryError):
            await transaction.commit()
        await transaction.abort()
        async with mine.transaction() as transaction:
            await transaction.send(topic, b"next")
    assert await seen(one, topic) == [b"next"]


async def test_partitions_that_were_added_are_found(new_producer: NewProducer, one: Coordinators, new_topic):
    from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]

    topic = new_topic(partitions=1)
    async with new_producer() as mine, mine.transaction() as transaction:
        await transaction.send(topic, b"0", partition=0)
        admin = AdminClient({"bootstrap.servers": one.bootstrap_servers})
        await asyncio.to_thread(admin.create_partitions([NewPartitions(topic, 2)])[topic].result, 30)
        async with asyncio.timeout(60):
            while True:
                try:
                    await transaction.send(topic, b"1", partition=1)
                    break
                except UsageError:
                    await asyncio.sleep(0.05)
    assert sorted(await seen(one, topic)) == [b"0", b"1"]


async def test_calls_out_of_place(one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory):
    topic = new_topic()
    mine = new_producer()
    with pytest.raises(ClosedError):
        await mine.begin()
    with pytest.raises(ClosedError):
        await mine.send(topic, b"x")
    await mine.start()
    with pytest.raises(UsageError, match="started already"):
        await mine.start()
    with pytest.raises(UsageError, match="send within a transaction"):
        await mine.send(topic, b"x")
    transaction = await mine.begin()
    with pytest.raises(UsageError, match="still open"):
        await mine.begin()
    await transaction.send(topic, b"left open")
    await mine.stop()
    await mine.stop()
    for call in (transaction.send(topic, b"x"), transaction.commit(), transaction.abort(), transaction.flush()):
        with pytest.raises(UsageError, match="has ended"):
            await call
    with pytest.raises(ClosedError):
        await mine.begin()
    with pytest.raises(UsageError, match="coordinator"):
        Producer(one.bootstrap_servers, transactional_id="x")
    assert await seen(one, topic) == []


async def test_a_send_that_waits_is_told_of_the_abort(one: Coordinators, new_producer: NewProducer, new_topic):
    topic = new_topic()
    async with new_producer(linger_ms=60_000) as mine:
        transaction = await mine.begin()
        waiting = asyncio.create_task(transaction.send_and_wait(topic, b"x"))
        while not transaction.buffered_bytes:  # noqa: ASYNC110 - the other task fills it
            await asyncio.sleep(0.01)
        await transaction.abort()
        with pytest.raises(Exception, match="the transaction was aborted"):
            await waiting
    assert await seen(one, topic) == []


async def test_use_after_fencing_says_by_whom(new_producer: NewProducer, one: Coordinators, new_topic: TopicFactory):
    topic, name = new_topic(), fresh("fenced")
    async with new_producer(name) as old:
        transaction = await old.begin()
        await transaction.send_and_wait(topic, b"old")
        async with new_producer(name) as new:

            async def go_on() -> None:
                while True:  # until it has heard of it, by push or by a broker's refusal
                    await transaction.send_and_wait(topic, b"old")

            with pytest.raises(ProducerFencedError, match="newer instance") as caught:
                await asyncio.wait_for(go_on(), 60)
            assert caught.value.owner.instance == new.instance
            assert caught.value.owner.since_ms > 0
            for call in (lambda: transaction.send(topic, b"x"), transaction.flush, transaction.commit, old.begin):
                with pytest.raises(ProducerFencedError, match="newer instance"):
                    await call()
            await transaction.abort()  # as it is already
            assert (await transaction.outcome()).cause == transaction_pb2.NEWER_INSTANCE
    assert await seen(one, topic) == []


async def test_a_broker_that_refuses_our_epoch_is_explained_without_a_push(
    new_producer: NewProducer, one: Coordinators, new_topic: TopicFactory
):
    topic, name = new_topic(), fresh("deaf")
    async with new_producer(name) as old:
        transaction = await old.begin()
        await transaction.send_and_wait(topic, b"old")
        old._tools.claim._session._listeners.clear()  # type: ignore[union-attr] # it hears no push
        async with new_producer(name) as new:
            with pytest.raises(ProducerFencedError) as caught:
                await transaction.send_and_wait(topic, b"old")
            assert caught.value.owner.instance == new.instance
    assert await seen(one, topic) == []


async def test_prepare_then_commit_or_abort(one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory):
    topic, name = new_topic(), fresh("prepared")
    async with new_producer(name, transaction_timeout_ms=9_000) as mine:
        empty = await mine.begin()
        with pytest.raises(UsageError, match="nothing to prepare"):
            await empty.prepare()
        await empty.abort()
        for number, decision in enumerate(["commit", "abort", "commit"]):
            transaction = await mine.begin()
            await transaction.send(topic, b"%d" % number)
            named = await transaction.prepare(metadata=b"m%d" % number)
            assert (named.transactional_id, named.number) == (name, transaction.number)
            assert await transaction.prepare() == named
            with pytest.raises(UsageError, match="prepared") as caught:
                await transaction.send(topic, b"too late")
            assert (caught.value.transactional_id, caught.value.number) == (name, transaction.number)
            with pytest.raises(UsageError, match="still open"):
                await mine.begin()
            if number == 0:
                await asyncio.sleep(10)  # longer than the transaction's timeout
            assert (await transaction.outcome()).state == transaction_pb2.PREPARED
            await (transaction.commit() if decision == "commit" else transaction.abort())
        assert mine.resume_token == b"m2"
    assert await seen(one, topic) == [b"0", b"2"]


@pytest.mark.parametrize("extended", [True, False])
async def test_a_transaction_may_be_given_more_time_while_its_process_lives(
    one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory, extended: bool
):
    topic = new_topic()
    async with new_producer(transaction_timeout_ms=9_000, extend_transactions=extended) as mine:
        transaction = await mine.begin()
        await transaction.send_and_wait(topic, b"long")
        if extended:
            await asyncio.sleep(11)  # longer than the transaction's timeout
            await transaction.commit()
        else:
            async with asyncio.timeout(60):
                while (await transaction.outcome()).result == transaction_pb2.UNDECIDED:  # noqa: ASYNC110 - far away
                    await asyncio.sleep(0.1)
            with pytest.raises(TransactionTimedOutError):
                await transaction.commit()
    assert await seen(one, topic) == ([b"long"] if extended else [])


@pytest.mark.parametrize("decision", ["commit", "abort"])
async def test_what_is_prepared_outlives_its_process(
    one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory, decision: str
):
    topic, name = new_topic(), fresh("survivor")
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the block is what is tested
        async with new_producer(name) as mine, mine.transaction() as transaction:
            await transaction.send(topic, b"prepared")
            await transaction.prepare(metadata=b"cursor")
            raise ZeroDivisionError  # the other system may have committed: nothing is decided here
    assert transaction.state is State.PREPARED
    with pytest.raises(InvalidTxnStateError, match="PREPARED"):
        await new_producer(name).start()
    async with new_producer(name, keep_prepared=True) as mine:
        assert mine.prepared is not None
        assert mine.prepared.name == transaction.name
        with pytest.raises(UsageError, match="still open"):
            await mine.begin()
        await (mine.prepared.commit() if decision == "commit" else mine.prepared.abort())
        async with mine.transaction() as following:
            await following.send(topic, b"next")
        assert mine.resume_token == (b"cursor" if decision == "commit" else b"")
    assert await seen(one, topic) == ([b"prepared", b"next"] if decision == "commit" else [b"next"])


async def test_outcomes_and_the_resume_token(one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory):
    topic, name = new_topic(), fresh("outcome")
    async with new_producer(name) as mine:
        transaction = await mine.begin()
        assert (await transaction.outcome()).result == transaction_pb2.UNDECIDED
        await transaction.send(topic, b"x")
        outcome = await transaction.commit(metadata=b"token 1", wait="decided")
        assert outcome is not None
        assert outcome.result == transaction_pb2.COMMITTED
        assert (await transaction.outcome()).result == transaction_pb2.COMMITTED
        assert mine.resume_token == b"token 1"
        aborted = await mine.begin()
        await aborted.send(topic, b"y")
        await aborted.abort()
        told = await aborted.outcome()
        assert (told.result, told.cause) == (transaction_pb2.ABORTED, transaction_pb2.OWNER)
        async with mine.transaction() as transaction:
            await transaction.send(topic, b"z")
            transaction.metadata = b"token 2"
    async with new_producer(name) as again:
        assert again.resume_token == b"token 2"
    assert await seen(one, topic) == [b"x", b"z"]
    told_metadata = [m.metadata for m in await asyncio.to_thread(manifests, one) if m.transactional_id == name]
    assert told_metadata == [b"token 1", b"token 2"]


async def test_the_next_transaction_is_begun_while_the_last_one_ends(
    one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory
):
    """By another task: it waits for the grant, and never disturbs the commit under way."""
    topic = new_topic()
    async with new_producer() as mine:
        for number in range(20):
            transaction = await mine.begin()
            await transaction.send(topic, b"%d" % number)
            committing = asyncio.create_task(transaction.commit())
            while transaction.is_open:  # noqa: ASYNC110 - until its end has been asked for
                await asyncio.sleep(0)
            following = await mine.begin()
            assert (await committing).result == transaction_pb2.COMMITTED  # type: ignore[union-attr]
            await following.send(topic, b"%d." % number)
            await following.commit(wait="decided")
    found = await seen(one, topic)
    assert found == [b"%d%s" % (number, dot) for number in range(20) for dot in (b"", b".")]


async def test_transactions_are_filled_while_those_before_them_end(
    one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory
):
    topic, name = new_topic(partitions=2), fresh("ahead")
    async with new_producer(name) as mine:
        committing = None
        for number in range(50):
            transaction = await mine.begin()
            await transaction.send(topic, b"%d" % number, partition=number % 2)
            if committing is not None:
                assert (await committing).result == transaction_pb2.COMMITTED  # type: ignore[union-attr]
            committing = transaction.commit_soon(metadata=b"%d" % number)
        # The last one, and one that is begun ahead and never filled.
        left = await mine.begin()
        with pytest.raises(UsageError, match="still open"):
            await mine.begin()
    assert left.state is State.ENDED
    assert (await committing).result == transaction_pb2.COMMITTED  # type: ignore[misc]
    found = await seen(one, topic)
    for partition in (0, 1):
        assert [int(value) for value in found if int(value) % 2 == partition] == list(range(partition, 50, 2))
    told = [m.metadata for m in await asyncio.to_thread(manifests, one) if m.transactional_id == name]
    assert told == [b"%d" % number for number in range(50)]


async def test_what_was_begun_ahead_of_a_commit_that_fails_fails_too(
    one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory
):
    small, topic = new_topic(config={"max.message.bytes": "10000"}), new_topic()
    async with new_producer() as mine:
        transaction = await mine.begin()
        await transaction.send(small, bytes(20_000))
        committing = transaction.commit_soon()
        with pytest.raises(UsageError, match="already"):
            await transaction.commit()
        ahead = await mine.begin()
        await ahead.send(topic, b"ahead")
        with pytest.raises(DeliveryError):
            await committing
        with pytest.raises(AbortedError, match="before it"):
            await ahead.commit()
        await ahead.abort()
        with pytest.raises(UsageError, match="still open"):
            await mine.begin()
        await transaction.abort()
        async with mine.transaction() as following:
            await following.send(topic, b"good")
    assert await seen(one, topic) == [b"good"]


async def test_a_cancelled_commit_leaves_a_producer_that_goes_on(
    one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory
):
    topic = new_topic()
    committed = []
    async with new_producer() as mine:
        for number in range(20):
            transaction = await mine.begin()
            await transaction.send(topic, b"%d" % number)
            committing = asyncio.create_task(transaction.commit())
            for _ in range(number):
                await asyncio.sleep(0.000_5)
            committing.cancel()
            await asyncio.gather(committing, return_exceptions=True)
            if transaction.state is State.OPEN:
                await transaction.abort()
            following = await mine.begin()  # settles what is in doubt
            if (await transaction.outcome()).result == transaction_pb2.COMMITTED:
                committed.append(b"%d" % number)
            await following.commit()
    assert await seen(one, topic) == committed


async def test_group_offsets_of_a_stale_member_are_refused_and_nothing_of_it_is_committed(
    one: Coordinators, new_producer: NewProducer, new_topic: TopicFactory
):
    from confluent_kafka import Consumer
    from confluent_kafka import TopicPartition as Assigned

    from oncebox.errors import GroupFencedError
    from oncebox.wire import TopicPartition

    source, target, group = new_topic(), new_topic(), fresh("group")
    config = {"bootstrap.servers": one.bootstrap_servers, "group.id": group, "enable.auto.commit": False}
    consumer = Consumer(config)
    assigned: list[object] = []
    consumer.subscribe([source], on_assign=lambda _, partitions: assigned.extend(partitions))

    def join() -> Any:
        while not assigned:
            consumer.poll(0.1)
        return consumer.consumer_group_metadata()

    try:
        member = await asyncio.to_thread(join)
        async with new_producer() as mine:
            async with mine.transaction() as transaction:
                await transaction.send(target, b"good")
                await transaction.send_offsets({TopicPartition(source, 0): 5}, member)
            await asyncio.to_thread(consumer.close)
            consumer = Consumer(config)
            transaction = await mine.begin()
            await transaction.send(target, b"stale")
            with pytest.raises(GroupFencedError):
                await transaction.send_offsets({TopicPartition(source, 0): 9}, member)
            with pytest.raises(GroupFencedError):
                await transaction.commit()
            await transaction.abort()
        committed = await asyncio.to_thread(lambda: consumer.committed([Assigned(source, 0)], timeout=30)[0].offset)
    finally:
        consumer.close()
    assert committed == 5
    assert await seen(one, target) == [b"good"]
