"""The marker writer against brokers that fail in every way, under a clock that jumps (brokers.py)."""

from __future__ import annotations

import asyncio
import logging
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from oncebox.wire import ErrorCode, TopicPartition
from tests.unit.markers.brokers import (
    LATENCY_S,
    MemoryBrokers,
    Sent,
    State,
    Told,
    debt,
    run,
    unsettled,
    until_settled,
    writing,
)

if TYPE_CHECKING:
    from coordinator.core.records import TopicPartition as CorePartition

A, B, C = (TopicPartition(topic, 0) for topic in ("a", "b", "c"))
MAIN = "markers"


def test_what_is_owed_in_one_moment_goes_in_one_request_and_the_next_gathers_meanwhile():
    async def main() -> None:
        brokers, told = MemoryBrokers(), Told()
        brokers.add(A, B)
        async with writing(brokers) as writer:
            for producer_id in range(10):
                writer.pay(debt(producer_id, [A, B]), coordinator_epoch=1, paid=told.of(producer_id))
            assert not told.times
            await asyncio.sleep(LATENCY_S / 2)
            assert writer.status().in_flight == 20
            for producer_id in range(10, 30):
                writer.pay(debt(producer_id, [A]), coordinator_epoch=1, paid=told.of(producer_id))
            assert writer.status().waiting == 20
            await until_settled(writer, within_s=1)
            assert [len(sent.partitions) for sent in brokers.sent] == [20, 20]
            assert {sent.lane for sent in brokers.sent} == {MAIN}
            assert {marker.transaction_version for sent in brokers.sent for marker in sent.markers} == {2}
            assert len(told.times) == 40
            assert max(told.times.values()) == pytest.approx(2 * LATENCY_S)

    run(main())


def test_each_broker_has_its_own_request_under_way():
    async def main() -> None:
        brokers, told = MemoryBrokers(), Told()
        brokers.add(A, leader=1)
        brokers.add(B, leader=2)
        brokers.unanswered = lambda sent: sent.node_id == 1
        async with writing(brokers) as writer:
            for producer_id in range(5):
                writer.pay(debt(producer_id, [A, B]), coordinator_epoch=1, paid=told.of(producer_id))
            await asyncio.sleep(2 * LATENCY_S)
            assert sorted(told.times) == [(producer_id, B) for producer_id in range(5)]

    run(main())


def test_an_unknown_leader_is_asked_for_once_for_all():
    async def main() -> None:
        brokers, told = MemoryBrokers(), Told()
        brokers.add(A, B, C, known=False)
        async with writing(brokers) as writer:
            for producer_id in range(50):
                writer.pay(debt(producer_id, [A, B, C]), coordinator_epoch=1, paid=told.of(producer_id))
            await until_settled(writer, within_s=1)
            assert len(told.times) == 150
            assert brokers.metadata_requests == 1
            assert {sent.lane for sent in brokers.sent} == {MAIN}

    run(main())


def test_a_leader_that_moved_is_found():
    async def main() -> None:
        brokers, told = MemoryBrokers(), Told()
        brokers.add(A, leader=1)
        brokers.leaders[A] = 2
        async with writing(brokers) as writer:
            writer.pay(debt(1, [A]), coordinator_epoch=1, paid=told.of(1))
            await until_settled(writer, within_s=1)
            assert [(sent.node_id, sent.lane) for sent in brokers.sent] == [(1, MAIN), (2, "markers-retry-1")]
            writer.pay(debt(2, [A]), coordinator_epoch=1, paid=told.of(2))
            await until_settled(writer, within_s=1)
            assert (brokers.sent[-1].node_id, brokers.sent[-1].lane) == (2, MAIN)

    run(main())


def test_r19_a_partition_that_never_acknowledges_blocks_nobody_else():
    async def main() -> None:
        brokers, told = MemoryBrokers(), Told()
        brokers.add(A, B)
        dead = True
        brokers.unanswered = lambda sent: dead and A in sent.partitions
        async with writing(brokers) as writer:
            for producer_id in (-2, -1, 0):  # the last two gather behind the first, which hangs
                writer.pay(debt(producer_id, [A, B]), coordinator_epoch=1, paid=told.of(producer_id))
                await asyncio.sleep(1)
            await asyncio.sleep(3)
            assert {(-2, B), (-1, B), (0, B)} <= set(told.times)
            for producer_id in range(1, 500):
                began_s = asyncio.get_running_loop().time()
                writer.pay(debt(producer_id, [A, B]), coordinator_epoch=1, paid=told.of(producer_id))
                await asyncio.sleep(0.05)
                assert told.times[producer_id, B] - began_s < 2 * LATENCY_S
            status = writer.status()
            assert status.retrying == 502
            assert status.oldest_retrying_s > 30
            assert list(status.problems) == [A]
            # Bounded: at most two under way for it, each five seconds.
            assert len([sent for sent in brokers.sent if A in sent.partitions]) < 20
            dead = False
            await until_settled(writer, within_s=12)
            assert len(told.times) == 1004
            assert not writer.status().problems

    run(main())


def test_r20_a_request_that_is_never_answered_costs_the_others_one_timeout_at_most():
    """Kafka never answers a request where a producer's partitions are all hosted elsewhere, after one that is done."""

    def kafka_forgets(sent: Sent) -> bool:
        elsewhere = [
            not any(partition in brokers.leaders for partition in marker.partitions) for marker in sent.markers
        ]
        return any(elsewhere) and not all(elsewhere)

    brokers = MemoryBrokers()

    async def main() -> None:
        told = Told()
        brokers.add(A, B, C)
        del brokers.leaders[C]
        brokers.unanswered = kafka_forgets
        async with writing(brokers) as writer:
            for producer_id in range(20):
                writer.pay(debt(producer_id, [A, B]), coordinator_epoch=1, paid=told.of(producer_id))
            writer.pay(debt(99, [C]), coordinator_epoch=1, paid=told.of(99))
            await asyncio.sleep(5.5)
            assert len(told.times) == 40
            began_s = asyncio.get_running_loop().time()
            for producer_id in range(100, 120):
                writer.pay(debt(producer_id, [A, C]), coordinator_epoch=1, paid=told.of(producer_id))
            await asyncio.sleep(1)
            assert len(told.times) == 60
            assert max(told.times.values()) - began_s < 3 * LATENCY_S
            brokers.add(C, leader=2)
            await until_settled(writer, within_s=15)

    run(main())


def test_r20_a_producer_whose_marker_is_never_answered_even_alone_keeps_no_other_back():
    async def main() -> None:
        brokers, told = MemoryBrokers(), Told()
        brokers.add(A, B)
        brokers.unanswered = lambda sent: any(marker.producer_id == 13 for marker in sent.markers)
        async with writing(brokers) as writer:
            writer.pay(debt(13, [A]), coordinator_epoch=1, paid=told.of(13))
            await asyncio.sleep(5.1)
            worst_s = 0.0
            for producer_id in range(100, 400):
                began_s = asyncio.get_running_loop().time()
                writer.pay(debt(producer_id, [A, B]), coordinator_epoch=1, paid=told.of(producer_id))
                await asyncio.sleep(0.1)
                worst_s = max(worst_s, told.times[producer_id, A] - began_s)
            assert worst_s <= 4 * LATENCY_S
            assert writer.status().retrying == 1
            attempts = [sent for sent in brokers.sent if sent.markers[0].producer_id == 13]
            assert all(len(sent.markers) == 1 for sent in attempts)
            assert 3 < len(attempts) < 12

    run(main())


def test_many_hanging_partitions_leave_room_for_the_others_of_their_broker():
    async def main() -> None:
        brokers, told = MemoryBrokers(), Told()
        hanging = {TopicPartition("hanging", index) for index in range(20)}
        brokers.add(A, B, *hanging)
        brokers.unanswered = lambda sent: not hanging.isdisjoint(sent.partitions)
        async with writing(brokers) as writer:
            writer.pay(debt(1, [*hanging, A]), coordinator_epoch=1, paid=told.of(1))
            await asyncio.sleep(25)
            assert (1, A) in told.times
            writer.pay(debt(2, [A]), coordinator_epoch=1, paid=told.of(2))
            await asyncio.sleep(2 * LATENCY_S)
            assert (2, A) in told.times
            lanes = {sent.lane for sent in brokers.sent}
            assert lanes <= {MAIN} | {f"markers-retry-{index}" for index in range(1, 9)}

    run(main())


def test_r9_retries_wait_longer_and_longer_and_are_counted(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        brokers, told = MemoryBrokers(), Told()
        brokers.add(A)
        failing = True
        brokers.refuse = lambda _sent, _partition, _id: ErrorCode.NOT_ENOUGH_REPLICAS if failing else None
        async with writing(brokers) as writer:
            writer.pay(debt(1, [A]), coordinator_epoch=1, paid=told.of(1))
            await asyncio.sleep(600)
            times = [sent.at_s for sent in brokers.sent]
            gaps = [later - earlier for earlier, later in pairwise(times)]
            assert gaps[-1] == pytest.approx(5, abs=0.01)
            assert gaps[2] < gaps[4] < gaps[6]
            assert len(times) < 140
            status = writer.status()
            assert (status.waiting, status.in_flight, status.retrying) == (0, 0, 1)
            assert status.oldest_retrying_s == pytest.approx(600)
            assert status.problems == {A: "NOT_ENOUGH_REPLICAS"}
            failing = False
            await until_settled(writer, within_s=6)
            assert writer.status().oldest_retrying_s == 0.0

    with caplog.at_level(logging.INFO):
        run(main())
    assert [record.getMessage() for record in caplog.records] == [
        "markers on a-0 wait: NOT_ENOUGH_REPLICAS",
        "a-0 takes markers again",
    ]


@pytest.mark.parametrize("fault", ["lost answers", "slow replicas"])
def test_a_marker_of_unknown_outcome_is_written_again_until_it_is_acknowledged(fault: str):
    """That a marker stands on the leader does not say that it is replicated; only an acknowledgement does."""

    async def main() -> None:
        brokers, told = MemoryBrokers(), Told()
        brokers.add(A)
        brokers.write(A, 1, 0)
        if fault == "lost answers":
            brokers.answers_lost = lambda sent: sent.lane == MAIN
        else:
            brokers.states[A][1] = State(epoch=1, coordinator_epoch=1)  # by a predecessor that crashed; not replicated
        async with writing(brokers) as writer:
            writer.pay(debt(1, [A]), coordinator_epoch=1, paid=told.of(1))
            await until_settled(writer, within_s=10)
            assert brokers.logs[A] == [(1, 1, True)] * len(brokers.sent)
            assert (1, A) in told.times

    run(main())


def test_r15_a_doubled_debt_spares_the_next_transaction_that_is_open():
    async def main() -> None:
        brokers, told, again = MemoryBrokers(), Told(), Told()
        brokers.add(A)
        brokers.write(A, 1, 0)
        async with writing(brokers) as writer:
            writer.pay(debt(1, [A]), coordinator_epoch=1, paid=told.of(1))
            await until_settled(writer, within_s=1)
            brokers.write(A, 1, 2)
            writer.pay(debt(1, [A]), coordinator_epoch=2, paid=again.of(1))
            await until_settled(writer, within_s=1)
            assert (1, A) in again.times
            assert brokers.states[A][1].open_epoch == 2
            assert brokers.logs[A] == [(1, 1, True)]

    run(main())


def test_a_deposed_coordinators_marker_is_not_taken_for_paid(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        brokers, told = MemoryBrokers(), Told()
        brokers.add(A)
        brokers.states[A][1] = State(epoch=0, coordinator_epoch=9, open_epoch=0)
        async with writing(brokers) as writer:
            payment = writer.pay(debt(1, [A]), coordinator_epoch=8, paid=told.of(1))
            await asyncio.sleep(100)
            assert not told.times
            assert "deposed" in writer.status().problems[A]
            # Others of that partition are not concerned.
            writer.pay(debt(2, [A]), coordinator_epoch=8, paid=told.of(2))
            await asyncio.sleep(2 * LATENCY_S)
            assert (2, A) in told.times
            payment.cancel()
            await asyncio.sleep(10)
            assert (writer.status().retrying, writer.status().problems) == (0, {})

    run(main())
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_what_a_newer_coordinator_has_ended_is_paid():
    async def main() -> None:
        brokers, told = MemoryBrokers(), Told()
        brokers.add(A)
        brokers.states[A][1] = State(epoch=1, coordinator_epoch=9)
        async with writing(brokers) as writer:
            writer.pay(debt(1, [A]), coordinator_epoch=8, paid=told.of(1))
            await until_settled(writer, within_s=1)
            assert (1, A) in told.times

    run(main())


def test_a_missing_privilege_is_named_once_and_mended_without_a_restart(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        brokers, told = MemoryBrokers(), Told()
        brokers.add(A, B, C)
        granted = False
        brokers.refuse = lambda *_: None if granted else ErrorCode.CLUSTER_AUTHORIZATION_FAILED
        async with writing(brokers) as writer:
            for producer_id in range(30):
                writer.pay(debt(producer_id, [A, B, C]), coordinator_epoch=1, paid=told.of(producer_id))
            await asyncio.sleep(60)
            assert len(brokers.sent) < 150
            granted = True
            await until_settled(writer, within_s=12)

    run(main())
    [record] = caplog.records
    assert "ALTER or CLUSTER_ACTION" in record.getMessage()


def test_what_is_absent_from_the_answer_is_not_done():
    class Forgetful(MemoryBrokers):
        async def write_txn_markers(self, node_id, markers, *, timeout_ms, lane):
            answer = await super().write_txn_markers(node_id, markers, timeout_ms=timeout_ms, lane=lane)
            if lane == MAIN:
                del answer[1][B]
                del answer[2]
            return answer

    async def main() -> None:
        brokers, told = Forgetful(), Told()
        brokers.add(A, B)
        async with writing(brokers) as writer:
            for producer_id in (1, 2):
                writer.pay(debt(producer_id, [A, B]), coordinator_epoch=1, paid=told.of(producer_id))
            await until_settled(writer, within_s=1)
            again = {(sent.markers[0].producer_id, *sent.partitions) for sent in brokers.sent[1:]}
            assert again == {(1, B), (2, A), (2, B)}
            assert len(told.times) == 4

    run(main())


def test_r21_markers_of_one_producer_on_one_partition_keep_their_order_through_failures():
    async def main() -> None:
        brokers, told = MemoryBrokers(), Told()
        brokers.add(A)
        brokers.write(A, 1, 0)
        failures = 3

        def refuse(_sent: Sent, _partition: TopicPartition, _id: int) -> ErrorCode | None:
            nonlocal failures
            failures -= 1
            return ErrorCode.NOT_LEADER_OR_FOLLOWER if failures >= 0 else None

        brokers.refuse = refuse
        async with writing(brokers) as writer:
            writer.pay(debt(1, [A]), coordinator_epoch=1, paid=told.of(1))
            writer.pay(debt(1, [A], marker_epoch=3, commit=False), coordinator_epoch=1, paid=Told().of(1))
            writer.pay(debt(1, [A], marker_epoch=5), coordinator_epoch=1, paid=Told().of(1))
            await until_settled(writer, within_s=1)
            assert brokers.logs[A] == [(1, 1, True), (1, 3, False), (1, 5, True)]

    run(main())


def test_a_cancelled_payment_sends_and_tells_nothing_more():
    async def main() -> None:
        brokers, told = MemoryBrokers(), Told()
        brokers.add(A)
        brokers.add(B, leader=2)
        brokers.refuse = lambda _sent, partition, _id: ErrorCode.NOT_ENOUGH_REPLICAS if partition == B else None
        async with writing(brokers) as writer:
            under_way = writer.pay(debt(1, [A, B]), coordinator_epoch=1, paid=told.of(1))
            await asyncio.sleep(LATENCY_S / 2)
            waiting = writer.pay(debt(2, [A, B]), coordinator_epoch=1, paid=told.of(2))
            under_way.cancel()
            waiting.cancel()
            waiting.cancel()
            await asyncio.sleep(30)
            assert not told.times
            assert {marker.producer_id for sent in brokers.sent for marker in sent.markers} == {1}
            assert len(brokers.sent) == 2
            assert unsettled(writer) == 0
            retried = writer.pay(debt(3, [B]), coordinator_epoch=1, paid=told.of(3))
            await asyncio.sleep(30)
            before = len(brokers.sent)
            retried.cancel()
            brokers.refuse = lambda *_: None
            await asyncio.sleep(30)
            assert len(brokers.sent) == before
            assert not told.times

    run(main())


def test_a_payment_cancelled_while_its_retry_is_under_way_is_not_retried_again():
    async def main() -> None:
        brokers, told = MemoryBrokers(), Told()
        brokers.add(A)
        brokers.unanswered = lambda _sent: True
        async with writing(brokers) as writer:
            payment = writer.pay(debt(1, [A]), coordinator_epoch=1, paid=told.of(1))
            await asyncio.sleep(7)
            assert [sent.lane for sent in brokers.sent] == [MAIN, "markers-retry-1"]
            payment.cancel()
            await asyncio.sleep(60)
            assert len(brokers.sent) == 2
            assert unsettled(writer) == 0

    run(main())


def test_the_first_success_frees_all_that_wait_for_their_partition():
    async def main() -> None:
        brokers, told = MemoryBrokers(), Told()
        brokers.add(A)
        failing = True
        brokers.refuse = lambda *_: ErrorCode.NOT_ENOUGH_REPLICAS if failing else None
        async with writing(brokers) as writer:
            writer.pay(debt(0, [A]), coordinator_epoch=1, paid=told.of(0))
            await asyncio.sleep(61)  # not a multiple of five: so the old one is tried before the new ones
            for producer_id in range(1, 31):
                writer.pay(debt(producer_id, [A]), coordinator_epoch=1, paid=told.of(producer_id))
            await asyncio.sleep(41)
            failing = False
            probed = {sent.markers[0].producer_id for sent in brokers.sent}
            await until_settled(writer, within_s=11)
            times = [told.times[producer_id, A] for producer_id in range(31) if producer_id not in probed]
            assert len(times) > 10
            assert min(told.times.values()) <= min(times) <= max(times) <= min(told.times.values()) + 2 * LATENCY_S

    run(main())


def test_the_same_debt_paid_by_the_next_leadership_waits_for_what_the_last_has_under_way():
    async def main() -> None:
        brokers, told = MemoryBrokers(), Told()
        brokers.add(A)
        async with writing(brokers) as writer:
            first = writer.pay(debt(1, [A]), coordinator_epoch=1, paid=Told().of(1))
            await asyncio.sleep(LATENCY_S / 2)
            first.cancel()
            writer.pay(debt(1, [A]), coordinator_epoch=2, paid=told.of(1))
            await until_settled(writer, within_s=1)
            assert (1, A) in told.times
            assert brokers.states[A][1] == State(epoch=1, coordinator_epoch=2)

    run(main())


def test_a_payment_may_be_cancelled_from_within_what_it_is_told():
    async def main() -> None:
        brokers = MemoryBrokers()
        brokers.add(A, B, C)
        told: list[CorePartition] = []
        async with writing(brokers) as writer:

            def paid(partition: CorePartition) -> None:
                told.append(partition)
                payment.cancel()

            payment = writer.pay(debt(1, [A, B, C]), coordinator_epoch=1, paid=paid)
            await until_settled(writer, within_s=1)
            assert len(told) == 1

    run(main())


def test_a_callback_that_fails_harms_only_itself(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        brokers, told = MemoryBrokers(), Told()
        brokers.add(A)

        def broken(_partition: CorePartition) -> None:
            raise KeyError

        async with writing(brokers) as writer:
            writer.pay(debt(1, [A]), coordinator_epoch=1, paid=broken)
            writer.pay(debt(2, [A]), coordinator_epoch=1, paid=told.of(2))
            await until_settled(writer, within_s=1)
            assert (2, A) in told.times

    run(main())
    assert "a-0" in caplog.text


def test_a_dead_brokers_partitions_go_on_with_their_new_leaders():
    async def main() -> None:
        brokers, told = MemoryBrokers(), Told()
        moved = [TopicPartition("t", index) for index in range(8)]
        brokers.add(*moved, leader=1)
        brokers.add(B, leader=2)
        brokers.down.add(1)
        async with writing(brokers) as writer:
            for producer_id in range(200):
                partitions = [moved[producer_id % 8], B]
                writer.pay(debt(producer_id, partitions), coordinator_epoch=1, paid=told.of(producer_id))
                await asyncio.sleep(0.01)
            assert sum(partition == B for _, partition in told.times) == 200
            brokers.leaders |= dict.fromkeys(moved, 3)
            await until_settled(writer, within_s=20)
            assert len(told.times) == 400

    run(main())


def test_the_end_leaves_no_task():
    async def main() -> None:
        brokers = MemoryBrokers()
        brokers.add(A, B)
        brokers.unanswered = lambda sent: A in sent.partitions
        async with writing(brokers) as writer:
            writer.pay(debt(1, [A, C]), coordinator_epoch=1, paid=Told().of(1))
            await asyncio.sleep(7)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())
