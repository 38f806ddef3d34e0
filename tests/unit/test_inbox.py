"""Whatever stops a shard, every call that it has taken gets its answer then, not at its deadline.

An End is held back for a moment where that lets it chain, and no longer.
"""

import asyncio

import pytest

from coordinator import inbox as module
from coordinator.calls import Answer
from coordinator.core.commands import End, Ended, ErrorCode, Granted, Refused, Register
from coordinator.core.grants import Limits
from coordinator.core.invariants import InvariantBrokenError, check_step
from coordinator.core.records import Contents, Grant, IdState, Result, Run, TopicPartition, Written
from tests.support.memory_instance import TIMEOUT_MS, MemoryInstance, serving

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
        monkeypatch.setattr(instance.producer_ids, "refill", lambda _then: None)
        asked = asyncio.ensure_future(instance.init("a"))
        for _ in range(5):
            await asyncio.sleep(0)
        await instance.leadership.revoke({0})
        async with asyncio.timeout(30):
            answer = await asked
        assert isinstance(answer, Refused)
        assert answer.code is ErrorCode.NOT_COORDINATOR


async def end(instance: MemoryInstance, grant: Grant, offset: int) -> Ended:
    command = End(
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
    answer = await instance.router.call(command, TIMEOUT_MS)
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
    async with serving(Limits(chain_patience_ms=30_000)) as instance, asyncio.timeout(60):
        grant = await second_grant(instance)
        ending = asyncio.ensure_future(end(instance, grant, 1))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not ending.done()
        instance.markers.acknowledge()
        assert (await ending).next_registered


async def test_an_end_is_decided_without_its_chain_where_they_are_not_paid() -> None:
    async with serving() as instance, asyncio.timeout(60):
        grant = await second_grant(instance)
        second = await end(instance, grant, 1)
        assert second.outcome.result is Result.COMMITTED
        assert not second.next_registered
