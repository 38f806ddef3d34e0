"""Transact: a producer for any language, on a real broker and a real coordinator, by the generated stubs alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc

from oncebox.local import LocalKafka
from oncebox.producer import Producer
from oncebox.reader.source import list_offsets
from oncebox.v1 import coordinator_pb2, transaction_pb2
from oncebox.v1 import gateway_pb2 as pb
from oncebox.v1.coordinator_pb2_grpc import CoordinatorStub
from oncebox.wire import LATEST, KafkaSettings, TopicPartition, Wire
from proof.faults.proxy import Proxy
from tests.integration.gateway.conftest import Client, client, fresh
from tests.support.coordinator import Coordinators, read_committed, values
from tests.support.kafka import TopicFactory, create_topic, paused

COMMITTED, ABORTED = transaction_pb2.COMMITTED, transaction_pb2.ABORTED


async def seen(one: Coordinators, topic: str) -> list[bytes]:
    return await asyncio.to_thread(values, one.bootstrap_servers, topic)


async def outcome_of(one: Coordinators, name: str, number: int) -> transaction_pb2.Outcome:
    async with grpc.aio.insecure_channel(one.addresses[0]) as channel:
        request = coordinator_pb2.GetOutcomeRequest(transactional_id=name, number=number)
        outcome: transaction_pb2.Outcome = (await CoordinatorStub(channel).GetOutcome(request)).outcome
        return outcome


async def until_ended(one: Coordinators, name: str, number: int) -> transaction_pb2.Outcome:
    async with asyncio.timeout(60):
        while True:
            outcome = await outcome_of(one, name, number)
            if outcome.result != transaction_pb2.UNDECIDED:
                return outcome
            await asyncio.sleep(0.05)


@asynccontextmanager
async def proxied(one: Coordinators) -> AsyncIterator[tuple[Proxy, Client]]:
    """A stream whose answers can be dropped; in the end its connection is reset."""
    host, port = one.addresses[0].rsplit(":", 1)
    async with Proxy((host, int(port))) as proxy:
        mine = Client(proxy.address)
        try:
            yield proxy, mine
            await proxy.cut()
        finally:
            await mine.channel.close()


async def test_many_transactions_on_one_stream(one: Coordinators, new_topic: TopicFactory):
    topic, name = new_topic(partitions=2), fresh("stream")
    async with client(one) as mine:
        opened = await mine.open(name)
        assert opened.window_bytes >= 1024 * 1024
        assert not opened.resumed
        done = await mine.ask(begin=pb.Begin())
        assert done.number == opened.number
        record = pb.Record(
            topic=topic,
            partition=1,
            key=b"key",
            value=b"value",
            headers=[pb.Header(key="a", value=b"1"), pb.Header(key="null")],
            timestamp_ms=1_700_000_000_123,
        )
        sent = await mine.ask(
            send=pb.Send(records=[record, pb.Record(topic=topic, partition=1, key=b"gone")], acknowledge=True)
        )
        assert [(where.topic, where.partition, where.offset) for where in sent.records] == [
            (topic, 1, 0),
            (topic, 1, 1),
        ]
        outcome = await mine.ask(commit=pb.Commit(metadata=b"cursor"))
        assert (outcome.result, outcome.number, outcome.transactional_id) == (COMMITTED, done.number, name)
        assert (await mine.transact(topic, b"never", end="abort")).result == ABORTED
        assert (await mine.transact(topic, b"second")).result == COMMITTED
        await mine.ask(begin=pb.Begin())
        nothing = await mine.ask(commit=pb.Commit())
        assert (nothing.result, nothing.number) == (COMMITTED, 0)
    first, tombstone, second = await asyncio.to_thread(read_committed, one.bootstrap_servers, topic)
    if first.value() == b"second":
        first, tombstone, second = tombstone, second, first
    assert (first.key(), first.value(), first.timestamp()[1]) == (b"key", b"value", 1_700_000_000_123)
    assert first.headers() == [("a", b"1"), ("null", None)]
    assert (tombstone.key(), tombstone.value()) == (b"gone", None)
    assert second.value() == b"second"
    async with client(one) as again:
        assert (await again.open(name)).resume_token == b"cursor"


async def test_offsets_are_committed_with_the_records(one: Coordinators, new_topic: TopicFactory):
    from aiokafka.admin import AIOKafkaAdminClient

    source, target, group = new_topic(), new_topic(), fresh("group")
    offsets = transaction_pb2.GroupOffsets(
        group_id=group, offsets=[transaction_pb2.GroupOffset(topic=source, partition=0, offset_next=7, metadata="note")]
    )
    async with client(one, fresh("offsets")) as mine:
        await mine.ask(begin=pb.Begin())
        await mine.ask(send=pb.Send(records=[pb.Record(topic=target, value=b"x")]))
        await mine.ask(send_offsets=pb.SendOffsets(offsets=offsets))
        await mine.ask(commit=pb.Commit())
        await mine.ask(begin=pb.Begin())
        refused = await mine.ask(send_offsets=pb.SendOffsets(offsets=offsets, member_id="nobody", generation=3))
        assert "UNKNOWN_MEMBER_ID" in refused.message
        assert (await mine.ask(commit=pb.Commit())).code == transaction_pb2.INVALID_TXN_STATE
        assert (await mine.ask(abort=pb.AbortTransaction())).result == ABORTED
    admin = AIOKafkaAdminClient(bootstrap_servers=one.bootstrap_servers)
    await admin.start()
    try:
        async with asyncio.timeout(60):  # their marker may take longer than the commit waits for it
            while not (found := await admin.list_consumer_group_offsets(group)):  # noqa: ASYNC110 - asks a broker
                await asyncio.sleep(0.05)
    finally:
        await admin.close()
    assert {where: tuple(committed) for where, committed in found.items()} == {(source, 0): (7, "note")}


async def test_what_is_out_of_place_is_refused_and_the_stream_goes_on(one: Coordinators, new_topic: TopicFactory):
    topic = new_topic(partitions=2)
    record = pb.Record(topic=topic, value=b"x")
    async with client(one) as mine:
        assert "Open first" in (await mine.ask(begin=pb.Begin())).message
        assert "no request" in (await mine.ask()).message
        assert "empty" in (await mine.ask(open=pb.Open())).message
        assert "grace_ms" in (await mine.ask(open=pb.Open(transactional_id="x", grace_ms=10**9))).message
        too_long = await mine.ask(open=pb.Open(transactional_id=fresh("x"), transaction_timeout_ms=10**9))
        assert too_long.code == transaction_pb2.INVALID_TRANSACTION_TIMEOUT
        await mine.open(fresh("places"))
        assert "open for" in (await mine.ask(open=pb.Open(transactional_id="y"))).message
        assert "Begin first" in (await mine.ask(send=pb.Send(records=[record]))).message
        await mine.ask(begin=pb.Begin())
        assert "still open" in (await mine.ask(begin=pb.Begin())).message
        good_and_bad = [record, pb.Record(topic="no-such-topic", value=b"x")]
        refused = await mine.ask(send=pb.Send(records=good_and_bad))
        assert refused.code == transaction_pb2.UNKNOWN_TOPIC_OR_PARTITION
        for bad in (pb.Record(topic=topic, partition=2), pb.Record(topic=topic, timestamp_ms=-1)):
            assert (await mine.ask(send=pb.Send(records=[record, bad]))).code
        large = await mine.ask(send=pb.Send(records=[record, pb.Record(topic=topic, value=bytes(1024 * 1024))]))
        assert large.code == transaction_pb2.MESSAGE_TOO_LARGE
        await mine.ask(send=pb.Send(records=[pb.Record(topic=topic, value=b"good")]))
        assert (await mine.ask(commit=pb.Commit())).result == COMMITTED
    assert await seen(one, topic) == [b"good"]


async def test_a_lost_stream_aborts_at_once_and_a_closed_one_too(one: Coordinators, new_topic: TopicFactory):
    topic = new_topic()
    for how in ("lose", "close"):
        name = fresh(how)
        mine = Client(one.addresses[0])
        number = (await mine.open(name, grace_ms=60_000 if how == "close" else 0)).number
        await mine.ask(begin=pb.Begin())
        await mine.ask(send=pb.Send(records=[pb.Record(topic=topic, value=b"x")], acknowledge=True))
        if how == "lose":
            await mine.lose()
        else:
            await mine.stream.done_writing()
            assert await mine.stream.read() is grpc.aio.EOF
            await mine.channel.close()
        outcome = await until_ended(one, name, number)
        assert (outcome.result, outcome.cause) == (ABORTED, transaction_pb2.OWNER)
    assert await seen(one, topic) == []


async def test_a_lost_stream_is_resumed_within_its_grace(one: Coordinators, new_topic: TopicFactory):
    topic, name = new_topic(), fresh("resumed")
    mine = Client(one.addresses[0])
    await mine.open(name, grace_ms=60_000)
    number = (await mine.ask(begin=pb.Begin())).number
    await mine.ask(send=pb.Send(records=[pb.Record(topic=topic, value=b"1")]))
    last = await mine.put(send=pb.Send(records=[pb.Record(topic=topic, value=b"2")]))
    assert (await mine.get()).request_id == last  # carried out
    await mine.lose()
    async with client(one) as again:
        opened = await again.open(name, resume_number=number, grace_ms=60_000)
        assert (opened.resumed, opened.number, opened.last_request_id) == (True, number, last)
        await again.ask(send=pb.Send(records=[pb.Record(topic=topic, value=b"3")]))
        # A stream that is still there loses its transaction to the one that resumes it.
        async with client(one) as third:
            opened = await third.open(name, resume_number=number)
            assert (opened.resumed, opened.last_request_id) == (True, 2)
            assert await again.stream.read() is grpc.aio.EOF
            assert (await third.ask(commit=pb.Commit())).result == COMMITTED
            assert (await third.transact(topic, b"4")).result == COMMITTED
    assert await seen(one, topic) == [b"1", b"2", b"3", b"4"]


async def test_after_the_grace_the_outcome_is_told(one: Coordinators, new_topic: TopicFactory):
    topic, name = new_topic(), fresh("late")
    mine = Client(one.addresses[0])
    await mine.open(name, grace_ms=200)
    number = (await mine.ask(begin=pb.Begin())).number
    await mine.ask(send=pb.Send(records=[pb.Record(topic=topic, value=b"1")], acknowledge=True))
    await mine.lose()
    await until_ended(one, name, number)
    async with client(one) as again:
        opened = await again.open(name, resume_number=number)
        assert not opened.resumed
        assert opened.number > number
        assert (opened.outcome.number, opened.outcome.result) == (number, ABORTED)
    assert await seen(one, topic) == []


async def test_a_commit_that_was_received_is_carried_out_though_the_stream_is_lost(
    one: Coordinators, new_topic: TopicFactory
):
    topic, name = new_topic(), fresh("impatient")
    async with proxied(one) as (proxy, mine):
        await mine.open(name)
        number = (await mine.ask(begin=pb.Begin())).number
        await mine.ask(send=pb.Send(records=[pb.Record(topic=topic, value=b"x")], acknowledge=True))
        proxy.drop(to_client=True)
        await mine.put(commit=pb.Commit())
        assert (await until_ended(one, name, number)).result == COMMITTED
    async with client(one) as again:
        told = (await again.open(name, resume_number=number)).outcome
        assert (told.result, told.number) == (COMMITTED, number)
    assert await seen(one, topic) == [b"x"]


async def test_what_was_refused_before_the_stream_was_lost_is_told_to_who_resumes(
    one: Coordinators, new_topic: TopicFactory
):
    """The answers to both are lost: only the second was carried out, and the first must not be taken for that."""
    topic, name = new_topic(), fresh("deaf")
    async with proxied(one) as (proxy, mine):
        await mine.open(name, grace_ms=60_000)
        number = (await mine.ask(begin=pb.Begin())).number
        proxy.drop(to_client=True)
        refused = await mine.put(send=pb.Send(records=[pb.Record(topic="no-such-topic", value=b"1")]))
        last = await mine.put(send=pb.Send(records=[pb.Record(topic=topic, value=b"2")]))
        async with Wire(KafkaSettings(bootstrap_servers=one.bootstrap_servers)) as wire, asyncio.timeout(60):
            where = TopicPartition(topic, 0)
            while not (await list_offsets(wire, [where], LATEST))[where]:  # noqa: ASYNC110 - the brokers say
                await asyncio.sleep(0.05)
    async with client(one) as again:
        opened = await again.open(name, resume_number=number)
        assert (opened.resumed, opened.last_request_id) == (True, last)
        assert [(found.request_id, found.error.code) for found in opened.refused] == [
            (refused, transaction_pb2.UNKNOWN_TOPIC_OR_PARTITION)
        ]
        await again.ask(send=pb.Send(records=[pb.Record(topic=topic, value=b"1")]))
        assert (await again.ask(commit=pb.Commit())).result == COMMITTED
    assert await seen(one, topic) == [b"2", b"1"]


async def test_what_is_prepared_waits_for_whoever_names_it(one: Coordinators, new_topic: TopicFactory):
    topic, name = new_topic(), fresh("prepared")
    async with client(one, name) as mine:
        number = (await mine.ask(begin=pb.Begin())).number
        await mine.ask(send=pb.Send(records=[pb.Record(topic=topic, value=b"x")]))
        assert (await mine.ask(prepare=pb.PrepareTransaction(metadata=b"m"))).number == number
    async with client(one) as other:
        refused = await other.ask(open=pb.Open(transactional_id=name))
        assert "PREPARED" in refused.message
        opened = await other.open(name, resume_number=number)
        assert opened.resumed
        assert opened.outcome.state == transaction_pb2.PREPARED
        assert (await other.ask(commit=pb.Commit())).result == COMMITTED
        assert (await other.transact(topic, b"y")).result == COMMITTED
    assert await seen(one, topic) == [b"x", b"y"]


async def test_the_newer_of_two_streams_fences_the_other(one: Coordinators, new_topic: TopicFactory):
    topic, name = new_topic(), fresh("fenced")
    async with client(one, name) as old:
        await old.ask(begin=pb.Begin())
        await old.ask(send=pb.Send(records=[pb.Record(topic=topic, value=b"old")], acknowledge=True))
        async with client(one, name, instance="the-new-one") as new:
            assert (await new.transact(topic, b"new")).result == COMMITTED
            refused = await old.ask(commit=pb.Commit())
            assert refused.code == transaction_pb2.PRODUCER_FENCED
            assert refused.owner.instance == "the-new-one"
    # And so does a producer of the library.
    async with client(one, name) as old:
        library = Producer(one.bootstrap_servers, one.addresses, transactional_id=name)
        async with library as mine, mine.transaction() as transaction:
            await transaction.send(topic, b"library")
        refused = await old.ask(begin=pb.Begin())
        assert refused.code == transaction_pb2.PRODUCER_FENCED
    assert await seen(one, topic) == [b"new", b"library"]


async def test_a_client_that_sends_faster_than_brokers_write_is_held_back(one: Coordinators, new_topic: TopicFactory):
    """32 MB through a window of 4: every record arrives, in order, and many requests are under way at once."""
    topic = new_topic()
    record_count, per_send = 32_000, 500
    async with client(one, fresh("flood")) as mine:
        await mine.ask(begin=pb.Begin())

        async def send() -> None:
            for first in range(0, record_count, per_send):
                numbers = range(first, first + per_send)
                records = [pb.Record(topic=topic, value=b"%01024d" % number) for number in numbers]
                await mine.put(send=pb.Send(records=records))

        sending = asyncio.create_task(send())
        for _ in range(record_count // per_send):
            assert (await mine.get()).HasField("sent")
        await sending
        assert (await mine.ask(commit=pb.Commit())).result == COMMITTED
    assert [int(value) for value in await seen(one, topic)] == list(range(record_count))


async def test_behind_brokers_that_do_not_answer_the_window_is_all_that_is_kept(
    kafka_cluster: LocalKafka, tmp_path: Path
):
    """What is answered is in the gateway's memory, and nothing beyond it has been read."""
    servers = kafka_cluster.bootstrap_servers
    topic, per_send, send_count = create_topic(servers), 256, 64
    send_bytes = per_send * 1024
    with Coordinators(servers, tmp_path) as coordinators:
        await asyncio.to_thread(coordinators.start)
        async with client(coordinators) as mine:
            window_bytes = (await mine.open(fresh("slow"))).window_bytes
            assert window_bytes < send_count * send_bytes // 2
            await mine.ask(begin=pb.Begin())
            first = pb.Send(records=[pb.Record(topic=topic, value=b"first")], acknowledge=True)
            assert len((await mine.ask(send=first)).records) == 1
            answered: list[int] = []

            async def send() -> None:
                for _ in range(send_count):
                    await mine.put(send=pb.Send(records=[pb.Record(topic=topic, value=bytes(1024))] * per_send))

            async def listen() -> None:
                while len(answered) < send_count:
                    answered.append((await mine.get()).sent.window_bytes)

            with paused(kafka_cluster):
                working = [asyncio.create_task(send()), asyncio.create_task(listen())]
                async with asyncio.timeout(30):
                    while not answered or answered[-1]:  # noqa: ASYNC110 - the gateway fills its window
                        await asyncio.sleep(0.01)
                held_at = len(answered)
                await asyncio.sleep(0.5)
                assert len(answered) == held_at
                assert (held_at - 1) * send_bytes <= window_bytes
            await asyncio.wait_for(asyncio.gather(*working), 120)
            assert (await mine.ask(commit=pb.Commit())).result == COMMITTED
        assert len(await seen(coordinators, topic)) == 1 + send_count * per_send


async def test_too_many_streams_are_refused(coordinators: Coordinators, tmp_path: Path):
    await asyncio.to_thread(coordinators.start, gateway__sessions="1")
    async with client(coordinators, fresh("only")), client(coordinators) as other:
        refused = await other.ask(open=pb.Open(transactional_id=fresh("other")))
        assert refused.code == transaction_pb2.THROTTLING_QUOTA_EXCEEDED
        assert refused.retriable


async def test_a_coordinator_that_stops_aborts_what_is_open(coordinators: Coordinators, new_topic: TopicFactory):
    topic, name = new_topic(), fresh("stopped")
    process = await asyncio.to_thread(coordinators.start)
    async with client(coordinators, name, grace_ms=60_000) as mine:
        await mine.ask(begin=pb.Begin())
        await mine.ask(send=pb.Send(records=[pb.Record(topic=topic, value=b"x")], acknowledge=True))
        await asyncio.to_thread(process.stop)
        with suppress(grpc.aio.AioRpcError):
            assert await mine.stream.read() is grpc.aio.EOF
        assert await mine.stream.code() is grpc.StatusCode.UNAVAILABLE
    assert await seen(coordinators, topic) == []
