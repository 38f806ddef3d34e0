"""A partition that is served: how many records a busy id costs, that a commit leaves nothing to be searched for, and
that what waits for the log has a limit.
"""

import asyncio
import gc
from collections import Counter

import pytest
from msgspec.structs import replace

from coordinator.calls import Answer
from coordinator.core.commands import (
    End,
    Ended,
    GetOutcome,
    Granted,
    Heartbeat,
    InitProducer,
    Prepare,
    Refused,
    Register,
)
from coordinator.core.owed import owed
from coordinator.core.records import Contents, Grant, Result
from coordinator.core.state import TransactionState
from coordinator.inbox import CALLS_KEPT, Call, Inbox
from coordinator.log.port import Kind, UnavailableError
from coordinator.markers.writer import MarkerWriter
from coordinator.serving import ShardSettings
from oncebox.wire import TopicPartition
from tests.support.memory_instance import TIMEOUT_MS, MemoryInstance, serving
from tests.support.memory_store import MemoryStore
from tests.unit.core.states import P0, id_state
from tests.unit.markers.brokers import MemoryBrokers, run
from tests.unit.test_debts import commit, open_debts

COMMITS = 20
# Far more than what tests before this one may have left to be found.
MANY = 500
FEW = 10


def test_a_busy_id_is_completed_by_its_next_record_an_idle_one_by_its_own() -> None:
    async def work() -> None:
        async with serving() as instance:
            log = instance.store.records[Kind.LOG]
            answer = await instance.init("a")
            assert isinstance(answer, Answer)
            assert isinstance(answer.reply, Granted)
            grant = answer.reply.grant
            before = len(log)
            for number in range(COMMITS):
                await asyncio.sleep(0.03)
                ended = await instance.router.call(
                    End(
                        transactional_id="a",
                        grant=grant,
                        result=Result.COMMITTED,
                        contents=Contents(metadata=b"%d" % number),
                    ),
                    TIMEOUT_MS,
                )
                assert isinstance(ended, Answer)
                assert isinstance(ended.reply, Ended)
                assert ended.reply.next_grant is not None
                grant = ended.reply.next_grant
            assert len(log) - before == COMMITS
            await asyncio.sleep(1)
            assert len(log) - before == COMMITS + 1

    run(work())


def test_a_paid_debt_is_forgotten_without_a_search_for_garbage() -> None:
    async def work() -> int:
        brokers = MemoryBrokers()
        brokers.add(TopicPartition("t", 0))
        markers = MarkerWriter(brokers)
        debts = open_debts(MemoryStore(), markers)
        writing = asyncio.create_task(debts.write_manifests())
        for number in range(1, MANY + 1):
            debts.take_on(owed(id_state(commit(number), number=number + 1)))
            await asyncio.sleep(0.1)
            assert debts.of("a")[number].paid
            debts.settle("a", set())
        found = gc.collect()
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await markers.close()
        return found

    gc.collect()
    gc.disable()
    try:
        assert run(work()) < MANY
    finally:
        gc.enable()


def test_what_waits_for_the_log_does_not_become_more_and_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timeouts and expiries are asked for once, however long the log takes no appends."""
    asked: Counter[str] = Counter()
    real = Inbox.put

    def put(self: Inbox, call: Call) -> None:
        asked[type(call.command).__name__] += 1
        real(self, call)

    async def work() -> None:
        settings = ShardSettings(id_expiration_ms=600_000)
        async with serving(settings) as instance:
            for number in range(COMMITS):
                answer = await instance.init(f"open-{number}")
                assert isinstance(answer, Answer)
                assert isinstance(answer.reply, Granted)
                command = Register(
                    transactional_id=f"open-{number}",
                    grant=answer.reply.grant,
                    partitions=frozenset({P0}),
                )
                assert isinstance(await instance.router.call(command, TIMEOUT_MS), Answer)
                assert isinstance(await instance.init(f"idle-{number}"), Answer)
            monkeypatch.setattr(Inbox, "put", put)
            instance.store.takes_appends[Kind.LOG].clear()
            for _ in range(100):
                instance.now_ms += 60_000
                await asyncio.sleep(1)
            assert asked["Timeout"] == COMMITS
            assert asked["Expire"] <= COMMITS
            instance.store.takes_appends[Kind.LOG].set()
            await asyncio.sleep(60)
            ids = instance.leadership.shards[0].ids
            assert {state.transactions[-1].state for state in ids} == {TransactionState.PREPARE_ABORT}
            assert len(ids) == COMMITS
            assert asked["Timeout"] == COMMITS

    run(work())


async def _registered(instance: MemoryInstance, name: str) -> Grant:
    answer = await instance.init(name)
    assert isinstance(answer, Answer)
    assert isinstance(answer.reply, Granted)
    command = Register(transactional_id=name, grant=answer.reply.grant, partitions=frozenset({P0}))
    assert isinstance(await instance.router.call(command, TIMEOUT_MS), Answer)
    return answer.reply.grant


def test_whose_owner_was_heard_of_while_the_log_was_away_is_not_timed_out() -> None:
    """What waits for the log is decided in its order: signs of life first, then the timeout that they make void."""

    async def work() -> None:
        async with serving() as instance:
            grant = await _registered(instance, "a")
            instance.store.takes_appends[Kind.LOG].clear()
            # Something is being appended, so that nothing else is decided.
            appending = asyncio.ensure_future(instance.init("other"))
            beats = []
            for _ in range(5):
                await asyncio.sleep(1)
                instance.now_ms += 15_000
                beat = Heartbeat(transactional_id="a", grant=grant, begun_ms_ago=None)
                beats.append(asyncio.ensure_future(instance.router.call(beat, 10 * TIMEOUT_MS)))
            await asyncio.sleep(1)
            instance.store.takes_appends[Kind.LOG].set()
            await appending
            assert all(isinstance(answer, Answer) for answer in await asyncio.gather(*beats))
            await asyncio.sleep(1)
            (state,) = [state for state in instance.leadership.shards[0].ids if state.transactional_id == "a"]
            assert state.transactions[-1].state is TransactionState.ONGOING
            instance.now_ms += 60_000
            await asyncio.sleep(1)
            (state,) = [state for state in instance.leadership.shards[0].ids if state.transactional_id == "a"]
            assert state.transactions[-1].state is TransactionState.PREPARE_ABORT

    run(work())


def _init(name: str, owner: str) -> InitProducer:
    return InitProducer(transactional_id=name, instance=owner, address="a", transaction_timeout_ms=TIMEOUT_MS)


def test_of_two_who_find_the_same_prepared_the_older_is_told() -> None:
    """Their first numbers are the same: that of the transaction after it, which neither of them has been granted."""

    async def work() -> None:
        async with serving() as instance:
            grant = await _registered(instance, "a")
            prepare = Prepare(transactional_id="a", grant=grant, contents=Contents(metadata=b"row"))
            assert isinstance(await instance.router.call(prepare, TIMEOUT_MS), Answer)
            told: list[tuple[str, int]] = []

            def listen(_name: str, refused: Refused) -> None:
                assert refused.owner is not None
                told.append((refused.owner.instance, refused.owner.number_first))

            instance.router.listen("a", listen)
            for owner in ("two", "three"):
                command = replace(_init("a", owner), keep_prepared=True)
                assert isinstance(await instance.router.call(command, TIMEOUT_MS), Answer)
            assert told == [("two", grant.number + 1), ("three", grant.number + 1)]
            # What its owner does is news to nobody.
            assert isinstance(await instance.router.call(replace(command, grant=grant), TIMEOUT_MS), Answer)
            commit = End(transactional_id="a", grant=grant, result=Result.COMMITTED, decided_is_enough=True)
            assert isinstance(await instance.router.call(commit, TIMEOUT_MS), Answer)
            assert len(told) == 2

    run(work())


def _calls_in_memory() -> int:
    gc.collect()
    return sum(isinstance(each, Call) for each in gc.get_objects())


def test_callers_who_have_given_up_are_not_kept_while_the_log_is_away() -> None:
    async def work() -> None:
        async with serving() as instance:
            grant = await _registered(instance, "a")
            instance.store.takes_appends[Kind.LOG].clear()
            appending = asyncio.ensure_future(instance.init("other"))
            await asyncio.sleep(1)
            # Patient ones are kept, also in front of others.
            patient = asyncio.ensure_future(instance.router.call(_init("third", "i"), 10 * TIMEOUT_MS))
            await asyncio.sleep(1)
            before = _calls_in_memory()
            for _ in range(MANY):
                refused = await instance.router.call(GetOutcome(transactional_id="a", number=grant.number), 100)
                assert isinstance(refused, Refused)
            assert _calls_in_memory() - before < CALLS_KEPT + FEW
            instance.store.takes_appends[Kind.LOG].set()
            await appending
            assert isinstance(await patient, Answer)

    run(work())


def test_callers_who_have_given_up_are_not_kept_while_a_debt_is_not_paid() -> None:
    async def work() -> None:
        async with serving() as instance:
            grant = await _registered(instance, "a")
            abort = End(transactional_id="a", grant=grant, result=Result.ABORTED, decided_is_enough=True)
            assert isinstance(await instance.router.call(abort, TIMEOUT_MS), Answer)
            before = _calls_in_memory()
            for number in range(MANY):
                assert isinstance(await instance.router.call(_init("a", f"{number}"), 100), Refused)
            assert _calls_in_memory() - before < FEW

    run(work())


def test_who_asks_for_an_end_again_and_again_is_not_kept_while_its_debt_is_not_paid() -> None:
    """Each time it is told what is owed, after a wait."""

    async def work() -> None:
        async with serving() as instance:
            grant = await _registered(instance, "a")
            abort = End(transactional_id="a", grant=grant, result=Result.ABORTED)
            assert isinstance(await instance.router.call(abort, TIMEOUT_MS), Answer)
            before = _calls_in_memory()
            for _ in range(MANY):
                answer = await instance.router.call(abort, TIMEOUT_MS)
                assert isinstance(answer, Answer)
                assert not answer.complete
            assert _calls_in_memory() - before < FEW

    run(work())


def test_callers_who_gave_up_during_the_append_are_not_kept_while_a_debt_is_not_paid() -> None:
    async def work() -> None:
        async with serving() as instance:
            grant = await _registered(instance, "a")
            abort = End(transactional_id="a", grant=grant, result=Result.ABORTED, decided_is_enough=True)
            assert isinstance(await instance.router.call(abort, TIMEOUT_MS), Answer)
            before = _calls_in_memory()
            for number in range(MANY):
                instance.store.takes_appends[Kind.LOG].clear()
                assert isinstance(await instance.router.call(_init("a", f"{number}"), 100), Refused)
                instance.store.takes_appends[Kind.LOG].set()
                await asyncio.sleep(1)
            assert _calls_in_memory() - before < FEW

    run(work())


def test_callers_who_have_given_up_are_not_kept_while_no_producer_ids_come() -> None:
    async def work() -> None:
        async with serving() as instance:

            async def away() -> int:
                raise UnavailableError("no broker")

            pool = instance.producer_ids
            pool._fetch = away
            pool.take(len(pool._ids))
            before = _calls_in_memory()
            for _ in range(MANY):
                assert isinstance(await instance.router.call(_init("new", "i"), 100), Refused)
            assert _calls_in_memory() - before < FEW
            assert len(pool._waiting) == 1

    run(work())
