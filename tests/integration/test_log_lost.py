"""A log that was deleted, restored or cut is noticed, refused, and begun anew only when told so."""

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack

import grpc
import pytest
from confluent_kafka import KafkaError, KafkaException, Message
from confluent_kafka import Producer as StockProducer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from coordinator.cluster.topics import OwnTopics, plans
from coordinator.log import codec
from coordinator.log.kafka import KafkaStore
from coordinator.log.lead import Appender, LogLostError, take_over, writer_of
from coordinator.log.port import Kind
from coordinator.log.replay import Replay
from oncebox.producer import Producer, ProducerSettings
from oncebox.v1 import coordinator_pb2, coordinator_pb2_grpc, manifest_pb2, transaction_pb2
from oncebox.wire import KafkaSettings, Wire
from proof.faults.process import ChildProcess
from tests.support.coordinator import Coordinators, manifests, read_committed, values
from tests.support.kafka import await_partitions

LOST = "The log was deleted"


async def commit(coordinators: Coordinators, topic: str, value: bytes) -> int:
    async with Producer(coordinators.bootstrap_servers, coordinators.addresses[-1:], transactional_id="id") as producer:
        async with producer.transaction() as transaction:
            await transaction.send(topic, value)
        return transaction.number


def delete(coordinators: Coordinators, topic: str = "") -> None:
    """Until it is gone: a broker may take appends to it for a moment after the controller has said so."""
    admin = AdminClient({"bootstrap.servers": coordinators.bootstrap_servers})
    name = topic or coordinators.log_topic
    admin.delete_topics([name])[name].result()
    await_partitions(coordinators.bootstrap_servers, name, 0)


def create(coordinators: Coordinators) -> None:
    """As the coordinator would. The deletion may still be under way."""
    own = OwnTopics(log=coordinators.log_topic, feed=coordinators.feed_topic, partitions=4)
    topic = NewTopic(own.log, own.partitions, 1, config=plans(own)[0].config)
    admin = AdminClient({"bootstrap.servers": coordinators.bootstrap_servers})
    while True:
        try:
            admin.create_topics([topic])[own.log].result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
        else:
            break
    await_partitions(coordinators.bootstrap_servers, own.log, own.partitions)


def write(coordinators: Coordinators, topic: str, records: Sequence[tuple[int, bytes | None, bytes | None]]) -> None:
    """As whoever restores a backup would."""
    producer = StockProducer({"bootstrap.servers": coordinators.bootstrap_servers})
    for partition, key, value in records:
        producer.produce(topic, partition=partition, key=key, value=value)
    assert producer.flush(30) == 0


def content(message: Message) -> tuple[int, bytes | None, bytes | None]:
    return message.partition() or 0, message.key(), message.value()


async def refused(coordinators: Coordinators, process: ChildProcess, evidence: str) -> None:
    """The id's partition is not served, and the process says why."""
    await asyncio.to_thread(process.wait_ready, lambda: process.log_contains(evidence), timeout_s=60)
    async with grpc.aio.insecure_channel(coordinators.addresses[-1]) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        request = coordinator_pb2.InitProducerRequest(transactional_id="id", transaction_timeout_ms=1_000, instance="i")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.InitProducer(request)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_deleted_log_is_refused_and_begun_anew_only_when_told_so(coordinators: Coordinators, new_topic):
    topic = new_topic()
    process = await asyncio.to_thread(coordinators.start)
    before = await commit(coordinators, topic, b"before")
    await asyncio.to_thread(process.stop)
    await asyncio.to_thread(delete, coordinators)

    process = await asyncio.to_thread(lambda: coordinators.start(wait_ready=False))
    await refused(coordinators, process, "the feed remembers leader")
    await asyncio.to_thread(process.stop)

    await asyncio.to_thread(lambda: coordinators.start(accept_lost_log="true"))
    after = await commit(coordinators, topic, b"after")
    assert after > before + 100_000
    assert await asyncio.to_thread(values, coordinators.bootstrap_servers, topic) == [b"before", b"after"]
    told = await asyncio.to_thread(manifests, coordinators)
    assert [manifest.number for manifest in told] == [before, after]


async def test_a_log_that_was_restored_from_a_backup_is_refused(coordinators: Coordinators, new_topic):
    topic = new_topic()
    process = await asyncio.to_thread(coordinators.start)
    await commit(coordinators, topic, b"before")
    saved = await asyncio.to_thread(read_committed, coordinators.bootstrap_servers, coordinators.log_topic)
    await commit(coordinators, topic, b"after")
    await asyncio.to_thread(process.stop)
    await asyncio.to_thread(delete, coordinators)
    await asyncio.to_thread(create, coordinators)
    await asyncio.to_thread(write, coordinators, coordinators.log_topic, [content(message) for message in saved])

    process = await asyncio.to_thread(lambda: coordinators.start(wait_ready=False))
    await refused(coordinators, process, "the feed remembers commit")
    # Also what no commit tells of: the other partitions' records are all there, in another topic.
    await asyncio.to_thread(process.wait_ready, lambda: process.log_contains("wrote to a topic with id"), timeout_s=60)
    await asyncio.to_thread(process.stop)
    told = await asyncio.to_thread(manifests, coordinators)
    assert len(told) == 2


async def test_a_log_that_lacks_its_last_commit_is_refused(coordinators: Coordinators, new_topic):
    """Brokers cannot be made to cut a log off at will: what the feed has is made to go further instead."""
    process = await asyncio.to_thread(coordinators.start)
    number = await commit(coordinators, new_topic(), b"before")
    await asyncio.to_thread(process.stop)
    messages = await asyncio.to_thread(read_committed, coordinators.bootstrap_servers, coordinators.feed_topic)
    last = next(content(message) for message in messages if message.key() == b"id")
    record = manifest_pb2.FeedRecord.FromString(last[2] or b"")
    # Well above what the producer was granted when it stopped.
    record.manifest.number = number + 10
    cut = (last[0], b"id", record.SerializeToString())
    await asyncio.to_thread(write, coordinators, coordinators.feed_topic, [cut])

    process = await asyncio.to_thread(lambda: coordinators.start(wait_ready=False))
    await refused(coordinators, process, f"the feed remembers commit {number + 10} of 'id'")


async def test_a_log_that_is_deleted_and_created_again_under_a_running_coordinator(
    coordinators: Coordinators, new_topic
):
    topic = new_topic()
    process = await asyncio.to_thread(coordinators.start)
    await commit(coordinators, topic, b"before")
    await asyncio.to_thread(delete, coordinators)
    await asyncio.to_thread(create, coordinators)
    await refused(coordinators, process, LOST)
    assert await asyncio.to_thread(values, coordinators.bootstrap_servers, topic) == [b"before"]


async def test_commits_wait_for_a_feed_that_was_deleted_until_an_instance_is_restarted(
    coordinators: Coordinators, new_topic
):
    topic = new_topic()
    process = await asyncio.to_thread(coordinators.start)
    await commit(coordinators, topic, b"before")
    await asyncio.to_thread(delete, coordinators, coordinators.feed_topic)
    patient = ProducerSettings(call_timeout_ms=120_000)
    async with Producer(
        coordinators.bootstrap_servers, coordinators.addresses, transactional_id="id", settings=patient
    ) as producer:
        # Decided before anybody could know, and owed its marker.
        transaction = await producer.begin()
        await transaction.send(topic, b"decided")
        ended = await transaction.commit()
        assert ended is not None
        assert ended.state == transaction_pb2.PREPARE_COMMIT
        await asyncio.to_thread(process.wait_ready, lambda: process.log_contains("takes no appends"), timeout_s=60)
        transaction = await producer.begin()
        await transaction.send(topic, b"waits")
        waiting = asyncio.create_task(transaction.commit())
        # The one that is restarted, beside the one that goes on.
        await asyncio.to_thread(lambda: coordinators.start(wait_ready=False))
        outcome = await waiting
        assert outcome is not None
        assert outcome.result == transaction_pb2.COMMITTED
    whole = [b"before", b"decided", b"waits"]
    async with asyncio.timeout(60):
        while await asyncio.to_thread(values, coordinators.bootstrap_servers, topic) != whole:
            pass
    told = await asyncio.to_thread(manifests, coordinators)
    assert len(told) == 2


async def test_an_append_to_a_log_that_was_created_again_is_not_taken_for_one(coordinators: Coordinators, new_topic):
    """The broker accepts it: it has never heard of this writer. Only the offset tells."""
    await asyncio.to_thread(create, coordinators)
    settings = KafkaSettings(bootstrap_servers=coordinators.bootstrap_servers)
    async with AsyncExitStack() as stack:
        wire = await stack.enter_async_context(Wire(settings))
        store = KafkaStore(wire, settings, log_topic=coordinators.log_topic, feed_topic=new_topic())
        stack.push_async_callback(store.close)
        won = await take_over(
            store, 0, instance="i", address="a", nonce=lambda: secrets.token_bytes(16), replay=Replay()
        )
        writer = writer_of(0, won.leader.generation, won.leader.epoch)
        log = Appender(store, Kind.LOG, 0, writer, 1, won.log_offset_next)
        sign_of_life = [codec.encode_leader(won.leader)]
        await log.append(sign_of_life)
        await asyncio.to_thread(delete, coordinators)
        await asyncio.to_thread(create, coordinators)
        async with asyncio.timeout(60):
            with pytest.raises(LogLostError):
                await log.append(sign_of_life)
        assert await store.end_offset(Kind.LOG, 0) == 1
