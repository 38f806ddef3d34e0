"""CommitBatch: one call, one transaction, and once per request id, whatever is repeated and whoever is killed."""

import asyncio
from collections import Counter
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
import pytest

from oncebox.local import LocalKafka
from oncebox.producer import Producer
from oncebox.reader import read_transactions
from oncebox.v1 import coordinator_pb2, transaction_pb2
from oncebox.v1 import gateway_pb2 as pb
from oncebox.v1.coordinator_pb2_grpc import CoordinatorStub
from oncebox.v1.gateway_pb2_grpc import GatewayStub
from proof.bench.instances import wait_until_shared
from tests.integration.gateway.conftest import detail_of, fresh
from tests.support.coordinator import LOG_PARTITIONS, Coordinators, values, wait_for_markers
from tests.support.kafka import TopicFactory, create_topic


def batch(name: str, request_id: str, topic: str, *sent: bytes, **fields: Any) -> pb.CommitBatchRequest:
    records = [pb.Record(topic=topic, value=value) for value in sent]
    return pb.CommitBatchRequest(transactional_id=name, request_id=request_id, records=records, **fields)


# Told where partitions are on their way from one instance to another, and nothing was done.
MOMENTARY = ("NOT_COORDINATOR", "COORDINATOR_LOAD_IN_PROGRESS", "nobody leads log partition")


async def commit(address: str, request: pb.CommitBatchRequest) -> pb.CommitBatchResponse:
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(120):
        while True:
            try:
                response: pb.CommitBatchResponse = await GatewayStub(channel).CommitBatch(request, timeout=60)
            except grpc.aio.AioRpcError as error:
                if not any(told in (error.details() or "") for told in MOMENTARY):
                    raise
            else:
                return response
            await asyncio.sleep(0.05)


async def refused(address: str, request: pb.CommitBatchRequest) -> transaction_pb2.Error:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await commit(address, request)
    return detail_of(caught.value)


async def seen(one: Coordinators, topic: str) -> list[bytes]:
    return await asyncio.to_thread(values, one.bootstrap_servers, topic)


async def test_a_repeat_is_answered_as_the_first(one: Coordinators, new_topic: TopicFactory):
    topic, name, address = new_topic(partitions=3), fresh("batch"), one.addresses[0]
    request = batch(name, "r1", topic, *(b"%d" % number for number in range(10)), metadata=b"m1")
    first = await commit(address, request)
    assert first.outcome.result == transaction_pb2.COMMITTED
    assert not first.repeated
    again = await commit(address, request)
    assert again.repeated
    assert again.records == first.records
    assert again.outcome.number == first.outcome.number
    together = await asyncio.gather(*(commit(address, batch(name, "r2", topic, b"x")) for _ in range(5)))
    assert len({answer.outcome.number for answer in together}) == 1
    assert sum(not answer.repeated for answer in together) == 1
    other = await refused(address, batch(name, "r1", topic, b"something else"))
    assert other.code == transaction_pb2.INVALID_REQUEST
    assert "other records" in other.message
    assert sorted(await seen(one, topic)) == sorted([*(b"%d" % number for number in range(10)), b"x"])


async def test_offsets_and_metadata_are_told_to_others(one: Coordinators, new_topic: TopicFactory):
    topic, name, address = new_topic(partitions=2), fresh("told"), one.addresses[0]
    first = await commit(address, batch(name, "r1", topic, b"a", b"b", metadata=b"mine"))
    await commit(address, batch(name, "r2", topic, b"c"))
    await asyncio.to_thread(wait_for_markers, one.bootstrap_servers, topic)
    read = {}
    async with read_transactions(topic, one.bootstrap_servers, feed_topic=one.feed_topic, until_end=True) as reader:
        async for transaction in reader:
            read[transaction.number] = transaction
    told = {
        (r.topic, r.partition, r.offset) for records in read[first.outcome.number].records.values() for r in records
    }
    assert {(r.topic, r.partition, r.offset) for r in first.records} == told
    assert [transaction.metadata for transaction in read.values()] == [b"mine", b""]
    async with Producer(one.bootstrap_servers, one.addresses, transactional_id=name) as mine:
        assert mine.resume_token == b"mine"
    # The producer has fenced the gateway, which takes the id back with the next batch.
    for request_id, repeated in (("r1", True), ("r3", False)):
        request = batch(name, request_id, topic, b"a", b"b", metadata=b"mine")
        try:
            answer = await commit(address, request)
        except grpc.aio.AioRpcError as error:
            if not detail_of(error).retriable:
                raise
            answer = await commit(address, request)
        assert answer.repeated is repeated


async def test_metadata_may_be_as_long_as_documented(one: Coordinators, new_topic: TopicFactory):
    topic, name, address = new_topic(partitions=2), fresh("long"), one.addresses[0]
    metadata = bytes(range(256)) * 240  # 60 KB
    values = [b"%d" % number for number in range(1_000)]
    await commit(address, batch(name, "r1", topic, *values, metadata=metadata))
    before = await commit(address, batch(name, "r2", topic, b"kept"))
    too_much = await refused(address, batch(name, "r3", topic, b"never", metadata=bytes(65_500)))
    assert (too_much.code, too_much.retriable) == (transaction_pb2.MESSAGE_TOO_LARGE, False)
    after = await commit(address, batch(name, "r3", topic, b"shorter"))
    # No transaction was even begun for it.
    assert after.outcome.number == before.outcome.number + 1
    assert sorted(await seen(one, topic)) == sorted([*values, b"kept", b"shorter"])
    async with Producer(one.bootstrap_servers, one.addresses, transactional_id=name) as mine:
        assert mine.resume_token == metadata


async def test_what_is_out_of_place_is_refused(one: Coordinators, new_topic: TopicFactory):
    topic, name, address = new_topic(config={"max.message.bytes": "10000"}), fresh("bad"), one.addresses[0]
    codes = {
        transaction_pb2.INVALID_REQUEST: [
            batch("", "r", topic, b"x"),
            batch(name, "", topic, b"x"),
            batch(name, "r", topic),
        ],
        transaction_pb2.UNKNOWN_TOPIC_OR_PARTITION: [batch(name, "r", "no-such-topic", b"x")],
        transaction_pb2.MESSAGE_TOO_LARGE: [
            batch(name, "r", topic, *[b"x"] * 1_001),
            batch(name, "r", topic, bytes(20_000)),
            batch(name, "r", topic, bytes(1024 * 1024)),
        ],
    }
    for code, requests in codes.items():
        for request in requests:
            assert (await refused(address, request)).code == code
    # What was refused is not remembered.
    assert not (await commit(address, batch(name, "r", topic, b"good"))).repeated
    assert await seen(one, topic) == [b"good"]


async def test_a_killed_gateway_has_forgotten_nothing(coordinators: Coordinators, new_topic: TopicFactory):
    topic, name = new_topic(partitions=2), fresh("amnesia")
    process = await asyncio.to_thread(coordinators.start)
    requests = [batch(name, f"r{number}", topic, b"%d" % number, b"%d." % number) for number in range(20)]
    first = [await commit(coordinators.addresses[-1], request) for request in requests]
    await asyncio.to_thread(process.kill)
    await asyncio.to_thread(coordinators.start)
    again = [await commit(coordinators.addresses[-1], request) for request in requests]
    assert all(answer.repeated for answer in again)
    assert [answer.records for answer in again] == [answer.records for answer in first]
    assert [answer.outcome.number for answer in again] == [answer.outcome.number for answer in first]
    assert len(await seen(coordinators, topic)) == 40


async def test_any_instance_takes_a_batch(coordinators: Coordinators, new_topic: TopicFactory):
    topic = new_topic()
    for _ in range(2):
        await asyncio.to_thread(coordinators.start)
    await asyncio.to_thread(wait_until_shared, coordinators.addresses, LOG_PARTITIONS)
    names = [fresh("any") for _ in range(8)]
    for name in names:
        for address in coordinators.addresses:
            await commit(address, batch(name, "r", topic, name.encode()))
    assert sorted(await seen(coordinators, topic)) == sorted(name.encode() for name in names)


async def test_each_request_once_while_instances_are_killed(coordinators: Coordinators, new_topic: TopicFactory):
    """Clients repeat a request until it is answered, at either instance; meanwhile each instance is killed in turn."""
    topic = new_topic(partitions=3)
    for _ in range(2):
        await asyncio.to_thread(coordinators.start)
    answered: dict[str, tuple[int, list[tuple[int, int]]]] = {}
    repeats: Counter[str] = Counter()
    stop = asyncio.Event()

    async def work(name: str) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            request = batch(
                name, f"{name}/{number}", topic, *(b"%s/%d/%d" % (name.encode(), number, i) for i in (1, 2))
            )
            async with asyncio.timeout(90):
                while True:
                    # Alternately, and never patient: most kills are met half-way.
                    address = coordinators.addresses[-1 - repeats[name] % 2]
                    try:
                        async with grpc.aio.insecure_channel(address) as channel:
                            answer = await GatewayStub(channel).CommitBatch(request, timeout=3)
                        break
                    except grpc.aio.AioRpcError:
                        repeats[name] += 1
                        await asyncio.sleep(0.05)
            answered[request.request_id] = (answer.outcome.number, [(r.partition, r.offset) for r in answer.records])

    workers = [asyncio.create_task(work(fresh("w"))) for _ in range(4)]
    try:
        for kill in range(3):
            goal = len(answered) + 40
            async with asyncio.timeout(120):
                while len(answered) < goal:
                    await asyncio.sleep(0.02)
                    for worker in workers:
                        assert not worker.done(), worker.result()
            await asyncio.to_thread(coordinators.processes[kill].kill)
            await asyncio.to_thread(coordinators.start)
    finally:
        stop.set()
        await asyncio.wait(workers)
    for worker in workers:
        worker.result()
    assert repeats.total(), "nothing was met half-way"
    expected = sorted(f"{request_id}/{i}".encode() for request_id in answered for i in (1, 2))
    assert sorted(await seen(coordinators, topic)) == expected
    places = [place for _, records in answered.values() for place in records]
    assert len(set(places)) == len(places) == len(expected)


@pytest.mark.timeout(300)
async def test_a_stop_is_bounded_while_no_broker_answers(kafka_cluster: LocalKafka, tmp_path: Path):
    topic, name = create_topic(kafka_cluster.bootstrap_servers, partitions=1), fresh("stop")
    with Coordinators(kafka_cluster.bootstrap_servers, tmp_path, drain_ms="4000") as alone:
        process = await asyncio.to_thread(alone.start)
        await commit(alone.addresses[0], batch(name, "first", topic, b"x"))
        for broker in kafka_cluster.brokers:
            broker.pause()
        async with grpc.aio.insecure_channel(alone.addresses[0]) as channel:
            waiting = [
                asyncio.ensure_future(GatewayStub(channel).CommitBatch(batch(name, f"r{number}", topic, b"x")))
                for number in range(5)
            ]
            # Behind them on the same connection: once it is answered, they are under way.
            request = coordinator_pb2.FindCoordinatorRequest(transactional_id=name)
            await CoordinatorStub(channel).FindCoordinator(request, timeout=30)
            began_s = monotonic()
            assert await asyncio.to_thread(process.stop) == 0
            # Each of the five would have waited for longer.
            assert monotonic() - began_s < 20
            for told in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(told, grpc.aio.AioRpcError)
                error = detail_of(told)
                assert (error.code, error.retriable) == (transaction_pb2.COORDINATOR_NOT_AVAILABLE, True)
