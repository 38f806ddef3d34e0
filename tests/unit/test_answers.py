"""When an answer leaves, and what it says of what is still owed."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from coordinator.api import replies
from coordinator.calls import Answer
from coordinator.core.commands import (
    Command,
    End,
    Ended,
    ErrorCode,
    GetOutcome,
    Granted,
    InitProducer,
    Refused,
    Register,
)
from coordinator.core.records import Contents, Grant, Result, Run, TopicPartition, Written
from oncebox.v1 import coordinator_pb2, transaction_pb2
from tests.support.memory_instance import TIMEOUT_MS, MemoryInstance, serving
from tests.unit.markers.brokers import run

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
TOPIC_ID = b"topic-id-of-t..."


class Served:
    """One id, on a partition whose markers are acknowledged when the test says so."""

    def __init__(self, instance: MemoryInstance) -> None:
        self.instance = instance

    async def call(self, command: Command, timeout_ms: int = TIMEOUT_MS) -> Answer | Refused:
        return await self.instance.router.call(command, timeout_ms)

    async def init(self, **how: Any) -> tuple[Answer, Granted]:
        answer = await self.call(self.to_init(**how))
        assert isinstance(answer, Answer)
        assert isinstance(answer.reply, Granted)
        return answer, answer.reply

    def to_init(self, **how: Any) -> InitProducer:
        return InitProducer(transactional_id="a", instance="o", address="o", transaction_timeout_ms=60_000, **how)

    async def commit(self, grant: Grant, partition: TopicPartition, **how: Any) -> tuple[Answer, Ended]:
        ids = {"t": TOPIC_ID}
        register = Register(transactional_id="a", grant=grant, partitions=frozenset({partition}), topic_ids=ids)
        assert isinstance(await self.call(register), Answer)
        written = Written(
            topic="t", partition=partition.partition, record_count=1, runs=(Run(0, 1),), topic_id=TOPIC_ID
        )
        answer = await self.call(
            End(
                transactional_id="a",
                grant=grant,
                result=Result.COMMITTED,
                contents=Contents(written=(written,)),
                topic_ids=ids,
                **how,
            )
        )
        assert isinstance(answer, Answer)
        assert isinstance(answer.reply, Ended)
        return answer, answer.reply


def serve(work: Callable[[Served], Awaitable[None]]) -> None:
    """In a time that passes only while everybody waits."""

    async def main() -> None:
        async with serving() as instance:
            await work(Served(instance))

    run(main())


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_an_end_waits_for_its_markers_a_second_and_then_says_what_is_owed() -> None:
    async def work(served: Served) -> None:
        _, granted = await served.init()
        began_s = now_s()
        answer, ended = await served.commit(granted.grant, P0)
        assert 1.0 <= now_s() - began_s < 1.1
        assert (answer.complete, answer.owed) == (False, frozenset({P0}))
        assert ended.outcome.result is Result.COMMITTED
        assert ended.next_grant is not None
        # So does who asks later, until nothing is owed.
        outcome = GetOutcome(transactional_id="a", number=granted.grant.number)
        known = await served.call(outcome)
        assert isinstance(known, Answer)
        assert (known.complete, known.owed) == (False, frozenset({P0}))
        served.instance.markers.acknowledge()
        known = await served.call(outcome)
        assert isinstance(known, Answer)
        assert (known.complete, known.owed) == (True, frozenset())

    serve(work)


def test_an_end_answers_as_soon_as_its_own_markers_are_acknowledged() -> None:
    async def work(served: Served) -> None:
        _, granted = await served.init()
        began_s = now_s()
        asyncio.get_running_loop().call_later(0.3, served.instance.markers.acknowledge)
        answer, _ = await served.commit(granted.grant, P0)
        assert 0.3 <= now_s() - began_s < 0.4
        assert (answer.complete, answer.owed) == (True, frozenset())

    serve(work)


async def _two_debts(served: Served) -> Grant:
    """Numbers 1 and 2 are committed, each owes a marker; the grant that follows."""
    _, granted = await served.init(slots_max=4)
    _, first = await served.commit(granted.grant, P0, decided_is_enough=True)
    assert first.next_grant is not None
    _, second = await served.commit(first.next_grant, P1, decided_is_enough=True)
    assert second.next_grant is not None
    return second.next_grant


def test_an_init_waits_until_nothing_is_owed() -> None:
    async def work(served: Served) -> None:
        await _two_debts(served)
        began_s = now_s()
        asyncio.get_running_loop().call_later(7.0, served.instance.markers.acknowledge)
        answer, _ = await served.init()
        assert 7.0 <= now_s() - began_s < 7.1
        assert answer.owed_in_all == frozenset()

    serve(work)


def test_an_init_that_does_not_wait_tells_what_all_and_what_its_outcome_owe() -> None:
    async def work(served: Served) -> None:
        grant = await _two_debts(served)
        # It has heard of no newer grant than its second one.
        second = Grant(number=grant.number - 1, producer_id=2, epoch=0)
        command = served.to_init(grant=second, without_waiting=True)
        answer = await served.call(command)
        assert isinstance(answer, Answer)
        assert (answer.complete, answer.owed, answer.owed_in_all) == (
            False,
            frozenset({P1}),
            frozenset({P0, P1}),
        )
        told = coordinator_pb2.InitProducerResponse()
        replies.fill_init_producer(told, command, answer)
        assert (told.outcome.number, told.outcome.state) == (second.number, transaction_pb2.PREPARE_COMMIT)
        assert [(entry.topic, list(entry.partitions)) for entry in told.outcome.owed] == [("t", [1])]
        assert [(entry.topic, list(entry.partitions)) for entry in told.owed] == [("t", [0, 1])]

    serve(work)


def test_an_init_whose_time_is_up_names_what_is_owed() -> None:
    async def work(served: Served) -> None:
        await _two_debts(served)
        answer = await served.call(served.to_init(), 3_000)
        assert isinstance(answer, Refused)
        assert (answer.code, answer.retriable) == (ErrorCode.REQUEST_TIMED_OUT, True)
        assert answer.message == (
            "no answer in time for InitProducer of 'a'; markers are owed to t:0, t:1; "
            "GetOutcome tells what became of the transaction"
        )

    serve(work)
