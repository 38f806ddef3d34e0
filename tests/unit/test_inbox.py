"""Whatever stops a shard, every call that it has taken gets its answer then, not at its deadline.

An End is held back for a moment where that lets it chain, and no longer.
"""

import asyncio

import pytest
from msgspec.structs import replace

from coordinator import inbox as module
from coordinator.calls import Answer
from coordinator.core.commands import Command, Decision, End, Ended, ErrorCode, Granted, Refused, Register
from coordinator.core.decide import decide
from coordinator.core.grants import Context, Limits
from coordinator.core.invariants import InvariantBrokenError, check_step
from coordinator.core.records import Contents, Grant, IdState, Result, Run, TopicPartition, Written
from coordinator.log.port import Kind
from coordinator.serving import ShardSettings
from tests.support.memory_instance import TIMEOUT_MS, MemoryInstance, serving
from tests.unit.markers.brokers import run

P0 = TopicPartition("t", 0)
TOPIC_ID = b"topic-id-of-t..."


async def test_a_broken_promise_answers_all_that_were_to_be_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(before: IdState | None, after: IdState) -> None:
        if after.transactional_id == "broken":
            raise InvariantBrokenError("planted")
        check_step(before, after)

    async with serving() as instance:
        assert isinstance(await instance.init("a"), Answer)
        monkeypatch.setattr(module, "check_step", check)
        # Decided, waiting for the first of its id, broken, not looked at yet.
        names = ("a", "a", "broken", "b")
        async with asyncio.timeout(30):
            answers = await asyncio.gather(*(instance.init(name) for name in names))
        for answer in answers:
            assert isinstance(answer, Refused)
            assert answer.code is ErrorCode.COORDINATOR_NOT_AVAILABLE
            assert "planted" in answer.message


async def test_who_waits_for_a_producer_id_is_sent_elsewhere_when_the_shard_resigns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as instance:
        # No broker gives one.
        monkeypatch.setattr(instance.producer_ids, "refill", lambda _then, _transactional_id: None)
        asked = asyncio.ensure_future(instance.init("a"))
        for _ in range(5):
            await asyncio.sleep(0)
        await instance.leadership.revoke({0})
        async with asyncio.timeout(30):
            answer = await asked
        assert isinstance(answer, Refused)
        assert answer.code is ErrorCode.NOT_COORDINATOR


def ending(grant: Grant, offset: int) -> End:
    return End(
        transactional_id="a",
        grant=grant,
        result=Result.COMMITTED,
        contents=Contents(
            written=(
                Written(topic="t", partition=0, record_count=1, runs=(Run(offset, offset + 1),), topic_id=TOPIC_ID),
            )
        ),
        decided_is_enough=True,
        next_partitions=frozenset({P0}),
        topic_ids={"t": TOPIC_ID},
    )


async def end(instance: MemoryInstance, grant: Grant, offset: int) -> Ended:
    answer = await instance.router.call(ending(grant, offset), TIMEOUT_MS)
    assert isinstance(answer, Answer)
    assert isinstance(answer.reply, Ended)
    return answer.reply


async def second_grant(instance: MemoryInstance) -> Grant:
    """The first transaction is committed, its marker is owed, and the second one is open in the other slot."""
    granted = await instance.init("a")
    assert isinstance(granted, Answer)
    assert isinstance(granted.reply, Granted)
    grant = granted.reply.grant
    command = Register(transactional_id="a", grant=grant, partitions=frozenset({P0}), topic_ids={"t": TOPIC_ID})
    await instance.router.call(command, TIMEOUT_MS)
    first = await end(instance, grant, 0)
    assert first.next_registered
    assert first.next_grant is not None
    return first.next_grant


async def test_an_end_is_decided_with_its_chain_once_older_debts_are_paid() -> None:
    async with serving(ShardSettings(limits=Limits(chain_patience_ms=30_000))) as instance, asyncio.timeout(60):
        grant = await second_grant(instance)
        waiting = asyncio.ensure_future(end(instance, grant, 1))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        instance.markers.acknowledge()
        assert (await waiting).next_registered


async def test_an_end_is_decided_without_its_chain_where_they_are_not_paid() -> None:
    async with serving() as instance, asyncio.timeout(60):
        grant = await second_grant(instance)
        second = await end(instance, grant, 1)
        assert second.outcome.result is Result.COMMITTED
        assert not second.next_registered


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def large(topic: str, partitions: int) -> frozenset[TopicPartition]:
    return frozenset(TopicPartition(topic, number) for number in range(partitions))


def test_a_held_end_whose_append_is_under_way_is_not_said_to_be_undecided() -> None:
    """It may have been committed: only GetOutcome knows."""

    async def work() -> None:
        async with serving(ShardSettings(limits=Limits(chain_patience_ms=30_000))) as instance, asyncio.timeout(60):
            grant = await second_grant(instance)
            command = ending(grant, 1)
            held = asyncio.ensure_future(instance.router.call(command, 200))
            decided = asyncio.ensure_future(instance.router.call(command, 200))
            await turns()
            instance.store.takes_appends[Kind.LOG].clear()
            instance.markers.acknowledge()
            for answer in await asyncio.gather(held, decided):
                assert isinstance(answer, Refused)
                assert answer.code is ErrorCode.REQUEST_TIMED_OUT
                assert "GetOutcome" in answer.message
            instance.store.takes_appends[Kind.LOG].set()

    run(work())


def test_a_held_end_that_was_never_decided_tells_why_at_its_deadline() -> None:
    async def work() -> None:
        async with serving(ShardSettings(limits=Limits(chain_patience_ms=30_000))) as instance, asyncio.timeout(60):
            answer = await instance.router.call(ending(await second_grant(instance), 1), 50)
            assert isinstance(answer, Refused)
            assert answer.code is ErrorCode.CONCURRENT_TRANSACTIONS

    run(work())


# What stands for a transaction with many partitions is larger than half of this, and smaller than all of it.
SMALL = ShardSettings(batch_max_bytes=1_800, limits=Limits(patience_ms=30_000))
MANY = large("t", 40)


def commit(grant: Grant, partitions: frozenset[TopicPartition], chain: frozenset[TopicPartition]) -> End:
    written = tuple(
        Written(topic=p.topic, partition=p.partition, record_count=1, runs=(Run(0, 1),), topic_id=TOPIC_ID)
        for p in sorted(partitions)
    )
    return End(
        transactional_id="a",
        grant=grant,
        result=Result.COMMITTED,
        contents=Contents(written=written),
        decided_is_enough=True,
        next_partitions=chain,
        topic_ids={"t": TOPIC_ID},
    )


async def registered(instance: MemoryInstance, partitions: frozenset[TopicPartition]) -> Grant:
    granted = await instance.init("a")
    assert isinstance(granted, Answer)
    assert isinstance(granted.reply, Granted)
    assert isinstance(await register(instance, granted.reply.grant, partitions), Answer)
    return granted.reply.grant


async def register(
    instance: MemoryInstance, grant: Grant, partitions: frozenset[TopicPartition], timeout_ms: int = TIMEOUT_MS
) -> Answer | Refused:
    command = Register(transactional_id="a", grant=grant, partitions=partitions, topic_ids={"t": TOPIC_ID})
    return await instance.router.call(command, timeout_ms)


def test_an_end_whose_record_would_be_too_large_with_its_chain_is_decided_without_it() -> None:
    async def work() -> None:
        async with serving(SMALL) as instance, asyncio.timeout(60):
            grant = await registered(instance, MANY)
            answer = await instance.router.call(commit(grant, MANY, frozenset({P0})), TIMEOUT_MS)
            assert isinstance(answer, Answer)
            assert isinstance(answer.reply, Ended)
            assert answer.reply.outcome.result is Result.COMMITTED
            assert not answer.reply.next_registered
            next_grant = answer.reply.next_grant
            assert next_grant is not None
            # What is still owed leaves no room for an open transaction, but will.
            refused = await register(instance, next_grant, frozenset({P0}), 50)
            assert isinstance(refused, Refused)
            assert (refused.code, refused.retriable) == (ErrorCode.CONCURRENT_TRANSACTIONS, True)
            waiting = asyncio.ensure_future(register(instance, next_grant, frozenset({P0})))
            await turns()
            assert not waiting.done()
            instance.markers.acknowledge()
            assert isinstance(await waiting, Answer)

    run(work())


async def test_what_can_never_fit_is_refused_before_anything_is_decided() -> None:
    async with serving(SMALL) as instance, asyncio.timeout(60):
        grant = await registered(instance, MANY)
        too_many = await register(instance, grant, large("t", 600))
        assert isinstance(too_many, Refused)
        assert (too_many.code, too_many.retriable) == (ErrorCode.MESSAGE_TOO_LARGE, False)
        metadata = Contents(written=commit(grant, MANY, frozenset()).contents.written, metadata=b"m" * 4_000)
        for chain in (frozenset[TopicPartition](), frozenset({P0})):
            answer = await instance.router.call(replace(commit(grant, MANY, chain), contents=metadata), TIMEOUT_MS)
            assert isinstance(answer, Refused)
            assert (answer.code, answer.retriable) == (ErrorCode.MESSAGE_TOO_LARGE, False)
        # It is open still, and its abort fits.
        abort = End(transactional_id="a", grant=grant, result=Result.ABORTED, decided_is_enough=True)
        assert isinstance(await instance.router.call(abort, TIMEOUT_MS), Answer)


def test_commits_wait_while_the_feed_is_away(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with serving() as instance:
            feed = instance.store.takes_appends[Kind.FEED]
            feed.clear()
            grant = await registered(instance, frozenset({P0}))
            # Nobody knows yet; it is decided, and cannot be completed.
            first = await instance.router.call(commit(grant, frozenset({P0}), frozenset({P0})), TIMEOUT_MS)
            assert isinstance(first, Answer)
            assert isinstance(first.reply, Ended)
            assert first.reply.next_grant is not None
            await asyncio.sleep(6)
            assert [message.partition(":")[0] for message in caplog.messages] == ["feed partition 0 takes no appends"]
            second = commit(first.reply.next_grant, frozenset({P0}), frozenset())
            answer = await instance.router.call(second, 2_500)
            assert isinstance(answer, Refused)
            assert (answer.code, answer.retriable) == (ErrorCode.COORDINATOR_NOT_AVAILABLE, True)
            waiting = asyncio.ensure_future(instance.router.call(second, TIMEOUT_MS))
            await asyncio.sleep(10)
            assert not waiting.done()
            feed.set()
            assert isinstance(await waiting, Answer)
            assert len(caplog.messages) == 1

    run(work())


def test_who_waits_for_long_is_looked_at_no_more_often_the_more_have_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call would else leave a timer behind, and each timer bring back whoever waits by then, with one more."""
    looks = 0

    def counted(state: IdState | None, command: Command, context: Context) -> Decision:
        nonlocal looks
        looks += isinstance(command, Register)
        return decide(state, command, context)

    async def work() -> None:
        nonlocal looks
        async with serving() as instance, asyncio.timeout(3_600):
            # Two transactions owe their markers to the partition, for hours: nobody may register it.
            grant = await second_grant(instance)
            second = await end(instance, grant, 1)
            assert second.next_grant is not None
            command = Register(
                transactional_id="a",
                grant=second.next_grant,
                partitions=frozenset({P0}),
                topic_ids={"t": TOPIC_ID},
            )
            monkeypatch.setattr(module, "decide", counted)
            counts = []
            for _ in range(100):
                looks = 0
                refused = await instance.router.call(command, 10_300)
                assert isinstance(refused, Refused)
                assert refused.code is ErrorCode.CONCURRENT_TRANSACTIONS
                counts.append(looks)
                await asyncio.sleep(0.02)
            assert max(counts) <= 12

    run(work())
