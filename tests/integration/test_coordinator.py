"""One coordinator on one real broker: what a client and a stock read_committed consumer see."""

import asyncio
import uuid
from contextlib import suppress

import grpc
import pytest

from oncebox.errors import ProducerFencedError, TransactionTimedOutError, UsageError
from oncebox.producer import Producer, ProducerSettings
from oncebox.v1 import admin_pb2, admin_pb2_grpc, coordinator_pb2, coordinator_pb2_grpc, transaction_pb2
from oncebox.wire import TopicPartition
from tests.support.coordinator import Coordinators, manifests, read_committed, values
from tests.support.kafka import TopicFactory


@pytest.fixture
def one(shared_coordinator: Coordinators) -> Coordinators:
    return shared_coordinator


def producer(one: Coordinators, transactional_id: str | None = None, **settings) -> Producer:
    return Producer(
        one.bootstrap_servers,
        one.addresses,
        transactional_id=transactional_id or f"id-{uuid.uuid4().hex[:8]}",
        settings=ProducerSettings(**settings),
    )


async def test_a_committed_transaction_is_seen_whole_and_an_aborted_one_not_at_all(one, new_topic: TopicFactory):
    first, second = new_topic(partitions=3), new_topic()
    async with producer(one) as mine:
        async with mine.transaction() as transaction:
            for number in range(9):
                await transaction.send(first, b"yes-%d" % number, partition=number % 3)
            await transaction.send(second, b"yes", key=b"k", headers=[("h", b"v")])
        with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the block is what is tested
            async with mine.transaction() as transaction:
                await transaction.send(first, b"no", partition=0)
                await transaction.flush()
                raise ZeroDivisionError
        async with mine.transaction() as transaction:
            await transaction.send(first, b"yes-last", partition=0)
    seen = await asyncio.to_thread(values, one.bootstrap_servers, first)
    assert sorted(seen) == sorted([b"yes-%d" % number for number in range(9)] + [b"yes-last"])
    (message,) = await asyncio.to_thread(read_committed, one.bootstrap_servers, second)
    assert (message.key(), message.value(), message.headers()) == (b"k", b"yes", [("h", b"v")])


async def test_the_feed_tells_each_commit_once_with_its_own_offsets(one, new_topic: TopicFactory):
    topic = new_topic(partitions=2)
    name = f"feed-{uuid.uuid4().hex[:8]}"
    async with producer(one, name) as mine:
        for number in range(20):
            async with mine.transaction(metadata=b"m%d" % number) as transaction:
                for _ in range(3):
                    await transaction.send(topic, b"%d" % number, partition=number % 2)
    committed = await asyncio.to_thread(read_committed, one.bootstrap_servers, topic)
    told = [m for m in await asyncio.to_thread(manifests, one) if m.transactional_id == name]
    assert [m.metadata for m in told] == [b"m%d" % number for number in range(20)]
    assert len({m.number for m in told}) == 20
    by_place = {(m.partition(), m.offset()): m.value() for m in committed}
    for number, manifest in enumerate(told):
        (entry,) = manifest.written
        assert entry.record_count == 3
        assert len(entry.topic_id) == 16
        for run in entry.runs:
            for offset in range(run.offset_first, run.offset_next):
                assert by_place.pop((entry.partition, offset)) == b"%d" % number
    assert not by_place


async def test_a_resume_token_comes_back_from_the_next_start(one):
    name = f"resume-{uuid.uuid4().hex[:8]}"
    async with producer(one, name) as mine:
        assert mine.resume_token == b""
        async with mine.transaction(metadata=b"cursor 42"):
            pass
    async with producer(one, name) as mine:
        assert mine.resume_token == b"cursor 42"


async def test_a_newer_instance_fences_the_older_and_aborts_what_it_left_open(one, new_topic: TopicFactory):
    topic = new_topic()
    name = f"zombie-{uuid.uuid4().hex[:8]}"
    async with producer(one, name) as old:
        transaction = await old.begin()
        await transaction.send_and_wait(topic, b"zombie")
        async with producer(one, name) as new:
            async with new.transaction() as fresh:
                await fresh.send(topic, b"new")
            with pytest.raises(ProducerFencedError) as caught:  # noqa: PT012 - whichever notices first
                await transaction.send(topic, b"zombie again")
                await transaction.commit()
            assert caught.value.owner.instance == new.instance
            with pytest.raises(ProducerFencedError):
                await old.begin()
    assert await asyncio.to_thread(values, one.bootstrap_servers, topic) == [b"new"]


async def test_a_timeout_is_told_as_a_timeout_and_the_producer_goes_on(one, new_topic: TopicFactory):
    topic = new_topic()
    async with producer(one, transaction_timeout_ms=6_000) as mine:
        transaction = await mine.begin()
        await transaction.send_and_wait(topic, b"too slow")
        async with asyncio.timeout(30):
            while (await transaction.outcome()).result == transaction_pb2.UNDECIDED:  # noqa: ASYNC110 - it is far away
                await asyncio.sleep(0.1)
        outcome = await transaction.outcome()
        assert (outcome.result, outcome.cause) == (transaction_pb2.ABORTED, transaction_pb2.TIMEOUT)
        with pytest.raises(TransactionTimedOutError):
            await transaction.commit()
        async with mine.transaction() as transaction:
            await transaction.send(topic, b"in time")
    assert await asyncio.to_thread(values, one.bootstrap_servers, topic) == [b"in time"]


async def test_group_offsets_become_visible_with_the_commit_only(one, new_topic: TopicFactory):
    from confluent_kafka import Consumer
    from confluent_kafka import TopicPartition as Assigned

    topic = new_topic()
    group = f"group-{uuid.uuid4().hex[:8]}"
    consumer = Consumer({"bootstrap.servers": one.bootstrap_servers, "group.id": group})

    def committed() -> int:
        return consumer.committed([Assigned(topic, 0)], timeout=30)[0].offset

    try:
        async with producer(one) as mine:
            transaction = await mine.begin()
            await transaction.send_offsets({TopicPartition(topic, 0): 5}, group)
            await transaction.abort()
            assert await asyncio.to_thread(committed) == -1001
            async with mine.transaction() as transaction:
                await transaction.send_offsets({TopicPartition(topic, 0): 7}, group)
            assert await asyncio.to_thread(committed) == 7
    finally:
        consumer.close()


async def test_a_commit_outlives_its_number_in_the_feed(one, new_topic: TopicFactory):
    """The id's record remembers a few outcomes; the feed remembers commits as long as it keeps them."""
    topic = new_topic()
    async with producer(one) as mine:
        first = await mine.begin()
        await first.send(topic, b"x")
        await first.commit()
        for _ in range(12):
            async with mine.transaction() as transaction:
                await transaction.send(topic, b"y")
        outcome = await first.outcome()
    assert outcome.result == transaction_pb2.COMMITTED


async def test_every_call_works_as_a_unary_rpc_from_any_language(one, new_topic: TopicFactory):
    topic = new_topic()
    async with grpc.aio.insecure_channel(one.addresses[0]) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        name = f"unary-{uuid.uuid4().hex[:8]}"
        found = await stub.FindCoordinator(coordinator_pb2.FindCoordinatorRequest(transactional_id=name))
        assert found.address == one.addresses[0]
        granted = await stub.InitProducer(
            coordinator_pb2.InitProducerRequest(transactional_id=name, transaction_timeout_ms=60_000, instance="i")
        )
        partitions = [transaction_pb2.TopicPartitions(topic=topic, partitions=[0])]
        await stub.AddPartitions(
            coordinator_pb2.AddPartitionsRequest(transactional_id=name, grant=granted.grant, partitions=partitions)
        )
        abort = coordinator_pb2.EndRequest(transactional_id=name, grant=granted.grant, result=transaction_pb2.ABORTED)
        ended = again = await stub.End(abort)
        assert ended.next.number == granted.grant.number + 1
        async with asyncio.timeout(60):  # markers may take longer than it waits for them
            while again.outcome.state != transaction_pb2.COMPLETE_ABORT:
                again = await stub.End(abort)
        assert (await stub.End(abort)).next == again.next == ended.next
        grant = ended.next
        await stub.AddPartitions(
            coordinator_pb2.AddPartitionsRequest(transactional_id=name, grant=grant, partitions=partitions)
        )
        added = await stub.AddOffsets(
            coordinator_pb2.AddOffsetsRequest(transactional_id=name, grant=grant, group_ids=["group"])
        )
        assert added.grant == grant
        prepared = await stub.Prepare(
            coordinator_pb2.PrepareRequest(
                transactional_id=name, grant=grant, contents=coordinator_pb2.Contents(metadata=b"token")
            )
        )
        assert (prepared.outcome.number, prepared.outcome.state) == (grant.number, transaction_pb2.PREPARED)
        asked = coordinator_pb2.GetOutcomeRequest(transactional_id=name, number=grant.number)
        undecided = await stub.GetOutcome(asked)
        assert (undecided.outcome.result, undecided.outcome.state) == (
            transaction_pb2.UNDECIDED,
            transaction_pb2.PREPARED,
        )
        await stub.End(coordinator_pb2.EndRequest(transactional_id=name, grant=grant, result=transaction_pb2.COMMITTED))
        assert (await stub.GetOutcome(asked)).outcome.result == transaction_pb2.COMMITTED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.End(
                coordinator_pb2.EndRequest(transactional_id=name, grant=granted.grant, result=transaction_pb2.COMMITTED)
            )
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "INVALID_TXN_STATE" in (caught.value.details() or "")


async def begin_until_told(mine: Producer) -> None:
    """Fencing is pushed to the client's stream, which may hear of it a little later than we do on ours."""
    async with asyncio.timeout(30):
        while True:
            with suppress(UsageError):
                await mine.begin()
            await asyncio.sleep(0.01)


async def test_an_operator_finds_who_blocks_a_partition_and_ends_it(one, new_topic: TopicFactory):
    topic = new_topic()
    name = f"blocker-{uuid.uuid4().hex[:8]}"
    async with producer(one, name) as mine, grpc.aio.insecure_channel(one.addresses[0]) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        transaction = await mine.begin()
        await transaction.send_and_wait(topic, b"open")
        told = await admin.DescribePartition(admin_pb2.DescribePartitionRequest(topic=topic, partition=0))
        (blocker,) = told.open
        assert (blocker.transactional_id, blocker.kind) == (name, admin_pb2.OpenTransaction.ONCEBOX)
        assert (told.offset_stable, told.offset_high_watermark) == (0, 1)
        listed = await admin.List(admin_pb2.ListRequest(prefix=name, states=[transaction_pb2.ONGOING]))
        assert [entry.transactional_id for entry in listed.transactions] == [name]
        await admin.Abort(admin_pb2.AbortRequest(transactional_id=name, number=transaction.number))
        described = await admin.Describe(admin_pb2.DescribeRequest(transactional_id=name))
        assert described.outcomes[-1].cause == transaction_pb2.ADMINISTRATOR
        await admin.ForceFence(admin_pb2.ForceFenceRequest(transactional_id=name))
        with pytest.raises(ProducerFencedError):
            await begin_until_told(mine)
    assert await asyncio.to_thread(values, one.bootstrap_servers, topic) == []


async def test_sends_out_of_place_are_refused_and_change_nothing(one, new_topic: TopicFactory):
    topic = new_topic()
    async with producer(one) as mine:
        transaction = await mine.begin()
        with pytest.raises(UsageError):
            await mine.begin()
        with pytest.raises(UsageError, match="create it first"):
            await transaction.send("no-such-topic", b"x")
        await transaction.send(topic, b"x")
        await transaction.commit()
        with pytest.raises(UsageError):
            await transaction.send(topic, b"y")
    assert await asyncio.to_thread(values, one.bootstrap_servers, topic) == [b"x"]


async def test_interleaved_producers_on_shared_partitions(one, new_topic: TopicFactory):
    """Many ids write the same partitions at once; each transaction is seen once and whole, or not at all."""
    topic = new_topic(partitions=2)
    committed: set[bytes] = set()

    async def work(number: int) -> None:
        async with producer(one, f"many-{number}-{uuid.uuid4().hex[:6]}") as mine:
            for turn in range(15):
                transaction = await mine.begin()
                name = b"%d/%d" % (number, turn)
                for partition in (0, 1):
                    await transaction.send(topic, name, partition=partition)
                if (number + turn) % 4 == 0:
                    await transaction.abort()
                else:
                    await transaction.commit(wait="decided" if turn % 2 else "complete")
                    committed.add(name)

    await asyncio.gather(*(work(number) for number in range(8)))
    seen = await asyncio.to_thread(values, one.bootstrap_servers, topic)
    assert sorted(seen) == sorted([*committed, *committed])
