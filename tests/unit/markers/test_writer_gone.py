"""The marker writer where a topic is gone, or is another of the same name, under a clock that jumps (brokers.py)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from uuid import UUID

import pytest

from coordinator.core.records import TopicPartition as CorePartition
from oncebox.wire import ClusterMetadata, ErrorCode, OutcomeUnknownError, TopicMetadata, TopicPartition
from tests.unit.markers.brokers import (
    MemoryBrokers,
    Told,
    debt,
    run,
    until_settled,
    writing,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from coordinator.core.owed import Debt

A, B, C = (TopicPartition(topic, 0) for topic in ("a", "b", "c"))
MAIN = "markers"


class TestGone:
    def test_a_topic_that_two_brokers_miss_for_a_minute_is_dropped(self, caplog: pytest.LogCaptureFixture):
        async def main() -> None:
            brokers, told = MemoryBrokers(), Told()
            brokers.add(A, B)
            del brokers.leaders[A]
            async with writing(brokers) as writer:
                payment = writer.pay(debt(1, [A, B]), coordinator_epoch=1, paid=told.of(1))
                await asyncio.sleep(59)
                assert list(told.times) == [(1, B)]
                assert payment.dropped == frozenset()
                later = writer.pay(debt(2, [A]), coordinator_epoch=1, paid=told.of(2))
                await asyncio.sleep(10)
                assert {(1, A), (2, A)} <= set(told.times)
                assert payment.dropped == later.dropped == {CorePartition(*A)}
                assert writer.status().retrying == 0

        run(main())
        assert "a-0 has been gone for 60 s: 2 markers" in caplog.text

    def test_not_while_one_broker_still_knows_it(self):
        async def main() -> None:
            brokers, told = MemoryBrokers(), Told()
            brokers.add(A, leader=3)
            brokers.down.add(3)  # no leader is known; only one of the others has missed the topic's creation
            brokers.stale = {1: {A}}
            async with writing(brokers) as writer:
                writer.pay(debt(1, [A]), coordinator_epoch=1, paid=told.of(1))
                await asyncio.sleep(600)
                assert not told.times
                brokers.down.clear()
                await until_settled(writer, within_s=12)
                assert brokers.logs[A] == [(1, 1, True)]

        run(main())

    def test_not_by_one_broker_alone_where_there_were_two(self):
        async def main() -> None:
            brokers, told = MemoryBrokers(), Told()
            brokers.add(A)
            del brokers.leaders[A]
            async with writing(brokers) as writer:
                writer.pay(debt(1, [A]), coordinator_epoch=1, paid=told.of(1))
                await asyncio.sleep(10)
                brokers.brokers = {1: "b1"}
                await asyncio.sleep(600)
                assert not told.times
                brokers.brokers = {1: "b1", 2: "b2"}
                await until_settled(writer, within_s=80)

        run(main())

    def test_by_the_only_broker_of_a_small_cluster(self):
        async def main() -> None:
            brokers, told = MemoryBrokers(brokers={1: "b1"}), Told()
            async with writing(brokers) as writer:
                writer.pay(debt(1, [A]), coordinator_epoch=1, paid=told.of(1))
                await until_settled(writer, within_s=70)
                assert told.times[1, A] > 60

        run(main())

    def test_the_minute_begins_anew_when_it_shows_up_meanwhile(self):
        async def main() -> None:
            brokers, told = MemoryBrokers(), Told()
            brokers.refuse = lambda *_: ErrorCode.NOT_ENOUGH_REPLICAS
            async with writing(brokers) as writer:
                writer.pay(debt(1, [A]), coordinator_epoch=1, paid=told.of(1))
                await asyncio.sleep(50)
                brokers.leaders[A] = 2  # made anew, but not ready
                await asyncio.sleep(20)
                del brokers.leaders[A]
                await asyncio.sleep(50)
                brokers.leaders[A] = 2
                brokers.down.add(2)  # without a leader
                await asyncio.sleep(20)
                brokers.down.clear()
                del brokers.leaders[A]
                await asyncio.sleep(50)
                assert not told.times
                await until_settled(writer, within_s=30)

        run(main())

    def test_r12_a_topic_made_anew_gets_the_marker_by_its_name(self):
        async def main() -> None:
            brokers, told = MemoryBrokers(), Told()
            brokers.add(A)
            brokers.write(A, 1, 0)
            del brokers.leaders[A], brokers.states[A]
            async with writing(brokers) as writer:
                payment = writer.pay(debt(1, [A]), coordinator_epoch=1, paid=told.of(1))
                await asyncio.sleep(50)
                brokers.leaders[A] = 2
                await until_settled(writer, within_s=6)
                assert brokers.logs[A] == [(1, 1, True)]
                assert payment.dropped == frozenset()

        run(main())


class TestNamesake:
    """Another topic under the name of the one that was written to: nothing of the transaction is there to commit."""

    OLD, NEW = UUID(int=1), UUID(int=2)

    def markers(self, owed: Debt, *, fails_first: bool = False) -> list[tuple[int, int, bool]]:
        async def main() -> list[tuple[int, int, bool]]:
            brokers, told = MemoryBrokers(topic_ids={"a": self.NEW}), Told()
            brokers.add(A, leader=1)
            if fails_first:
                brokers.leaders[A] = 2
            async with writing(brokers) as writer:
                writer.pay(owed, coordinator_epoch=1, paid=told.of(1))
                await until_settled(writer, within_s=1)
            assert list(told.times) == [(1, A)]
            return brokers.logs[A]

        return run(main())

    def test_r12_a_commit_that_comes_late_aborts_what_an_older_transaction_left_there(self):
        assert self.markers(debt(1, [A], topic_id=self.OLD), fails_first=True) == [(1, 1, False)]

    def test_r12_an_old_debt_looks_first(self):
        assert self.markers(debt(1, [A], topic_id=self.OLD, is_old=True)) == [(1, 1, False)]

    @pytest.mark.parametrize("is_old", [True, False])
    @pytest.mark.parametrize("fails_first", [True, False])
    def test_the_topic_that_was_written_to_gets_the_commit(self, is_old: bool, fails_first: bool):
        owed = debt(1, [A], topic_id=self.NEW, is_old=is_old)
        assert self.markers(owed, fails_first=fails_first) == [(1, 1, True)]

    def test_an_abort_is_one_everywhere(self):
        owed = debt(1, [A], topic_id=self.OLD, is_old=True, commit=False)
        assert self.markers(owed, fails_first=True) == [(1, 1, False)]

    @pytest.mark.parametrize("answers_at_all", [True, False])
    def test_what_was_heard_of_the_topic_before_is_not_believed(
        self, monkeypatch: pytest.MonkeyPatch, answers_at_all: bool
    ):
        """The topic is created again, written to, and no broker says which one it is while the commit is retried: none
        answers, or one that does not know it yet (and who leads it is known all the same: others asked another broker).
        """

        async def main() -> None:
            brokers, told = MemoryBrokers(topic_ids={"a": self.OLD}), Told()
            brokers.add(A, leader=1)
            brokers.leaders[A] = 2
            async with writing(brokers) as writer:
                writer.pay(debt(1, [A], topic_id=self.OLD), coordinator_epoch=1, paid=told.of(1))
                await until_settled(writer, within_s=1)
                brokers.topic_ids["a"] = self.NEW
                brokers.states.clear()
                brokers.logs.clear()
                brokers.write(A, 2, 0)
                answers, fails = brokers.metadata, iter([True] * 3)

                async def metadata(topics: Collection[str] | None, *, timeout_ms: int) -> ClusterMetadata:
                    if next(fails, False):
                        if not answers_at_all:
                            raise OutcomeUnknownError("no broker answered")
                        unknown = TopicMetadata(
                            error=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, topic_id=None, is_internal=False, partitions={}
                        )
                        return ClusterMetadata(
                            cluster_id=None, controller_id=None, brokers={}, topics=dict.fromkeys(topics or (), unknown)
                        )
                    return await answers(topics, timeout_ms=timeout_ms)

                monkeypatch.setattr(brokers, "metadata", metadata)
                brokers.unanswered = lambda sent: sent.lane == MAIN
                writer.pay(debt(2, [A], topic_id=self.NEW), coordinator_epoch=1, paid=told.of(2))
                await until_settled(writer, within_s=30)
            assert brokers.logs[A] == [(2, 1, True)]

        run(main())

    def test_many_old_debts_ask_once(self):
        async def main() -> None:
            brokers, told = MemoryBrokers(topic_ids={"a": self.NEW}), Told()
            brokers.add(A, leader=1)
            async with writing(brokers) as writer:
                for producer_id in range(50):
                    owed = debt(producer_id, [A], topic_id=self.NEW, is_old=True)
                    writer.pay(owed, coordinator_epoch=1, paid=told.of(producer_id))
                await until_settled(writer, within_s=1)
            assert len(brokers.logs[A]) == 50
            assert brokers.metadata_requests == 1

        run(main())
