"""A partition that is served: how many records a busy id costs, and that a commit leaves nothing to be searched for."""

import asyncio
import gc

from coordinator.calls import Answer
from coordinator.core.commands import End, Ended, Granted
from coordinator.core.owed import owed
from coordinator.core.records import Contents, Result
from coordinator.log.port import Kind
from coordinator.markers.writer import MarkerWriter
from oncebox.wire import TopicPartition
from tests.support.memory_instance import TIMEOUT_MS, serving
from tests.support.memory_store import MemoryStore
from tests.unit.core.states import id_state
from tests.unit.markers.brokers import MemoryBrokers, run
from tests.unit.test_debts import commit, open_debts

COMMITS = 20
# Far more than what tests before this one may have left to be found.
MANY = 500


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
