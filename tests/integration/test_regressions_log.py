"""Regressions of the log and its leaders, each a real bug of some other system, on a real broker."""

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from coordinator.calls import Answer
from coordinator.core.commands import End, Ended, ErrorCode, GetOutcome, Granted, InitProducer, Refused, Register
from coordinator.core.records import Contents, Grant, Result, Run, TopicPartition, Written
from coordinator.log import codec
from coordinator.log.kafka import KafkaStore
from coordinator.log.lead import Appender, Leadership, LostError, take_over, writer_of
from coordinator.log.port import Kind
from coordinator.log.replay import Replay
from coordinator.markers.writer import MarkerWriter
from coordinator.producer_ids import ProducerIdPool
from coordinator.serving import ShardSettings
from coordinator.shard import Shard, ShardState
from oncebox.errors import RequestTimedOutError, error_from
from oncebox.producer import Producer
from oncebox.session import Session
from oncebox.v1 import log_pb2, transaction_pb2
from oncebox.wire import KafkaSettings, OutcomeUnknownError, Record, Wire, encode_batch
from oncebox.wire import TopicPartition as WirePartition
from tests.support.coordinator import Coordinators, manifests, values
from tests.support.kafka import TopicFactory


class Place:
    """A log and a feed of one partition, and instances that lead it one after the other, or at once."""

    def __init__(self, bootstrap_servers: str, log_topic: str, feed_topic: str, stack: AsyncExitStack) -> None:
        self.settings = KafkaSettings(bootstrap_servers=bootstrap_servers)
        self.topics = {"log_topic": log_topic, "feed_topic": feed_topic}
        self._stack = stack

    async def store(self, bootstrap_servers: str | None = None) -> KafkaStore:
        settings = KafkaSettings(bootstrap_servers=bootstrap_servers) if bootstrap_servers else self.settings
        wire = await self._stack.enter_async_context(Wire(settings))
        store = KafkaStore(wire, settings, **self.topics)
        self._stack.push_async_callback(store.close)
        return store

    async def lead(self, instance: str) -> Shard:
        """An instance that takes the partition over, and serves it when this returns."""
        wire = await self._stack.enter_async_context(Wire(self.settings))
        store = KafkaStore(wire, self.settings, **self.topics)
        self._stack.push_async_callback(store.close)
        markers = MarkerWriter(wire)
        self._stack.push_async_callback(markers.close)

        async def fetch() -> int:
            while True:
                identity = await wire.init_producer_id()
                if not identity.error:
                    return identity.producer_id
                await asyncio.sleep(0.1)

        pool = ProducerIdPool(fetch)
        self._stack.push_async_callback(pool.close)
        changed = asyncio.Event()
        shard = Shard(
            partition=0,
            store=store,
            markers=markers,
            producer_ids=pool,
            instance=instance,
            address=instance,
            now_ms=lambda: time.time_ns() // 1_000_000,
            nonce=lambda: secrets.token_bytes(16),
            settings=ShardSettings(),
            watchers=set(),
            listeners={},
            state_changed=changed.set,
        )
        task = asyncio.create_task(shard.lead())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._stack.push_async_callback(_cancel, task)
        async with asyncio.timeout(90):
            await changed.wait()
        assert shard.state is ShardState.SERVING
        return shard


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def place(bootstrap_servers: str, new_topic: TopicFactory) -> AsyncIterator[Place]:
    log_topic = new_topic(config={"cleanup.policy": "compact", "message.timestamp.type": "LogAppendTime"})
    async with AsyncExitStack() as stack:
        yield Place(bootstrap_servers, log_topic, new_topic(), stack)


async def init(shard: Shard, name: str) -> Grant:
    command = InitProducer(transactional_id=name, instance="i", address="a", transaction_timeout_ms=60_000)
    answer = await shard.call(command, 10_000)
    assert isinstance(answer, Answer), answer
    assert isinstance(answer.reply, Granted)
    return answer.reply.grant


async def test_r3_a_leader_change_does_not_forget_a_begun_transaction(kafka, new_topic):
    async with place(kafka.bootstrap_servers, new_topic) as here:
        topic = new_topic()
        where = TopicPartition(topic, 0)
        old = await here.lead("old")
        grant = await init(old, "id")
        await old.call(Register(transactional_id="id", grant=grant, partitions=frozenset({where})), 10_000)
        await write(here.settings, where, grant, b"begun")
        new = await here.lead("new")
        assert await asyncio.to_thread(values, kafka.bootstrap_servers, topic, has_open=True) == []
        written = Written(topic=topic, partition=0, record_count=1, runs=(Run(0, 1),))
        end = End(transactional_id="id", grant=grant, result=Result.COMMITTED, contents=Contents(written=(written,)))
        async with asyncio.timeout(60):  # markers may take longer than one answer waits for them
            while True:
                answer = await new.call(end, 10_000)
                assert isinstance(answer, Answer)
                assert isinstance(answer.reply, Ended)
                assert answer.reply.outcome.result is Result.COMMITTED
                if answer.complete:
                    break
        assert answer.owed == frozenset()
    assert await asyncio.to_thread(values, kafka.bootstrap_servers, topic) == [b"begun"]


async def write(settings: KafkaSettings, where: TopicPartition, grant: Grant, value: bytes) -> None:
    """The transaction's first record, as its owner writes it."""
    batch = encode_batch(
        [Record(key=None, value=value)],
        transactional=True,
        producer_id=grant.producer_id,
        producer_epoch=grant.epoch,
        base_sequence=0,
    )
    there = WirePartition(*where)
    async with Wire(settings) as wire:
        await wire.metadata([where.topic])
        leader_id = wire.leader_id(there)
        assert leader_id is not None
        appended = (await wire.produce(leader_id, {there: batch}, transactional_id="id"))[there]
        assert (appended.error.name, appended.base_offset) == ("NONE", 0)


async def test_r5_a_new_leader_knows_all_that_was_acknowledged_before_it_serves(kafka, new_topic):
    async with place(kafka.bootstrap_servers, new_topic) as here:
        old = await here.lead("old")
        granted: dict[str, Grant] = {}

        async def keep_asking() -> None:
            for number in range(100_000):
                name = f"id-{number}"
                command = InitProducer(transactional_id=name, instance="i", address="a", transaction_timeout_ms=60_000)
                answer = await old.call(command, 10_000)
                if isinstance(answer, Refused):
                    return
                assert isinstance(answer.reply, Granted)
                granted[name] = answer.reply.grant

        asking = asyncio.create_task(keep_asking())
        while len(granted) < 20:  # noqa: ASYNC110 - it must be busy before it is deposed
            await asyncio.sleep(0.001)
        new = await here.lead("new")
        await asking
        for name, grant in granted.items():
            state = new.ids.get(name)
            assert state is not None
            assert state.number == grant.number


async def test_r13_a_sequence_is_never_used_again_with_other_bytes(kafka, new_topic, monkeypatch):
    """The answer to an append is lost: what follows it stands once, after it, and the first stands once too."""
    async with place(kafka.bootstrap_servers, new_topic) as here:
        direct = await here.store()
        appender = Appender(direct, Kind.LOG, 0, writer_of(0, 0, 5), 0)
        first = [codec.encode_leader(_leader(b"first"))]
        second = [codec.encode_leader(_leader(b"second"))]
        real = Wire.produce
        sent: list[bytes] = []

        async def produce_and_lose_the_answer(wire, node_id, batches, **options):
            answer = await real(wire, node_id, batches, **options)
            sent.extend(batches.values())
            if len(sent) <= 3:
                raise OutcomeUnknownError("the answer was lost")
            return answer

        monkeypatch.setattr(Wire, "produce", produce_and_lose_the_answer)
        assert await appender.append(first) == 0
        assert await appender.append(second) == 1
        assert len(sent) == 5
        assert len(set(sent[:4])) == 1, "byte for byte"
        stored = [entry async for chunk in direct.read(Kind.LOG, 0, 0, None) for entry in chunk]
        assert [entry.value for entry in stored] == [first[0][1], second[0][1]]


def _leader(nonce: bytes):
    return log_pb2.LeaderState(generation=0, epoch=5, nonce=nonce)


async def test_r14_a_deposed_leader_answers_nothing_not_even_a_repeat(kafka, new_topic):
    async with place(kafka.bootstrap_servers, new_topic) as here:
        old = await here.lead("old")
        grant = await init(old, "id")
        end = End(transactional_id="id", grant=grant, result=Result.ABORTED)
        assert isinstance(await old.call(end, 10_000), Answer)
        await here.lead("new")
        assert old.state is ShardState.SERVING, "it has not noticed"
        for command in (
            end,
            GetOutcome(transactional_id="id", number=grant.number),
            GetOutcome(transactional_id="x", number=1),
        ):
            answer = await old.call(command, 10_000)
            assert isinstance(answer, Refused)
            assert answer.code is ErrorCode.NOT_COORDINATOR


async def test_r23_the_feeds_old_leader_cannot_append_after_the_new_one_has_read_it(kafka, new_topic):
    async with place(kafka.bootstrap_servers, new_topic) as here:
        first, second = await here.store(), await here.store()

        async def taken_over(store: KafkaStore) -> Leadership:
            return await take_over(
                store, 0, instance="i", address="a", nonce=lambda: secrets.token_bytes(16), replay=Replay()
            )

        old = await taken_over(first)
        feed = Appender(first, Kind.FEED, 0, writer_of(0, old.leader.generation, old.leader.epoch), 1)
        await feed.append([codec.encode_feed_leader(old.leader)])
        new = await taken_over(second)
        with pytest.raises(LostError):
            await feed.append([codec.encode_feed_leader(old.leader)])
        assert await second.end_offset(Kind.FEED, 0) == new.feed_offset_next


async def test_r4_a_commit_that_failed_but_happened_is_not_made_again(
    shared_coordinator: Coordinators, new_topic: TopicFactory, monkeypatch
):
    """The answer to the commit is lost. Its outcome is definite, and the producer goes on after it, not over it."""
    topic = new_topic()
    name = f"r4-{uuid.uuid4().hex[:8]}"
    one = shared_coordinator
    async with Producer(one.bootstrap_servers, one.addresses, transactional_id=name) as producer:
        transaction = await producer.begin()
        await transaction.send(topic, b"once")
        real = Session.call

        async def lose_the_answer(session, transactional_id, method, message, **options):
            answer = await real(session, transactional_id, method, message, **options)
            if method != "end":
                return answer
            raise error_from(transaction_pb2.Error(code=transaction_pb2.REQUEST_TIMED_OUT, retriable=True))

        with monkeypatch.context() as patched:
            patched.setattr(Session, "call", lose_the_answer)
            with pytest.raises(RequestTimedOutError):
                await transaction.commit()
        assert (await transaction.outcome()).result == transaction_pb2.COMMITTED
        async with producer.transaction() as transaction:
            await transaction.send(topic, b"next")
    assert await asyncio.to_thread(values, one.bootstrap_servers, topic) == [b"once", b"next"]
    told = [m.number for m in await asyncio.to_thread(manifests, one) if m.transactional_id == name]
    assert len(told) == len(set(told)) == 2
