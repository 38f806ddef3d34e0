"""Several coordinator instances, killed, paused, told to go; nothing lost, nothing doubled, every outcome definite."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable

import pytest

from coordinator.group import Group, MembersUnknownError
from oncebox.errors import FatalError, OnceboxError, RetriableError
from oncebox.local.ports import free_ports
from oncebox.producer import Producer, Transaction
from oncebox.v1 import transaction_pb2
from oncebox.wire import KafkaSettings, Wire
from proof.bench.instances import leaders
from proof.faults.process import ChildProcess
from tests.support.console_consumer import java_console_consumer
from tests.support.coordinator import Coordinators, manifests, values
from tests.support.kafka import create_topic

PRODUCERS = 4


class Ledger:
    """What the clients know to be committed or aborted; nothing else may exist."""

    def __init__(self) -> None:
        self.committed: set[bytes] = set()
        self.aborted: set[bytes] = set()
        self.errors: list[OnceboxError] = []
        self.stop = False

    async def work(self, producer: Producer, topic: str) -> None:
        turn = 0
        while not self.stop:
            turn += 1
            name = f"{producer.transactional_id}/{turn}".encode()
            transaction = await producer.begin()
            try:
                for partition in (0, 1):
                    await transaction.send(topic, name, partition=partition)
                await transaction.commit()
                self.committed.add(name)
            except FatalError:
                raise
            except OnceboxError as error:
                self.errors.append(error)
                (self.committed if await settled(transaction) else self.aborted).add(name)

    async def grow(self, by: int) -> None:
        goal = len(self.committed) + by
        async with asyncio.timeout(120):
            while len(self.committed) < goal:  # noqa: ASYNC110 - many producers make it grow
                await asyncio.sleep(0.02)


async def settled(transaction: Transaction) -> bool:
    """Whether it is committed; an undecided one is aborted, so that there is an answer."""
    async with asyncio.timeout(60):
        while True:
            try:
                if transaction.is_open:
                    await transaction.abort()
                outcome = await transaction.outcome()
            except RetriableError:
                continue
            if outcome.result != transaction_pb2.UNDECIDED:
                return bool(outcome.result == transaction_pb2.COMMITTED)


async def run_through(coordinators: Coordinators, topic: str, trouble: Callable[[Ledger], Awaitable[None]]) -> Ledger:
    ledger = Ledger()
    producers = [
        Producer(
            coordinators.bootstrap_servers, coordinators.addresses, transactional_id=f"p{n}-{uuid.uuid4().hex[:6]}"
        )
        for n in range(PRODUCERS)
    ]
    try:
        for producer in producers:
            await producer.start()
        working = [asyncio.create_task(ledger.work(producer, topic)) for producer in producers]
        await ledger.grow(20)
        await trouble(ledger)
        await ledger.grow(20)
        ledger.stop = True
        await asyncio.gather(*working)
    finally:
        for producer in producers:
            await producer.stop()
    seen = await asyncio.to_thread(values, coordinators.bootstrap_servers, topic)
    assert sorted(seen) == sorted([*ledger.committed, *ledger.committed])
    told = await asyncio.to_thread(manifests, coordinators)
    assert len(told) == len({(m.transactional_id, m.number) for m in told}) == len(ledger.committed)
    return ledger


@pytest.fixture
def two(coordinators: Coordinators) -> Coordinators:
    coordinators.start()
    coordinators.start()
    return coordinators


async def test_a_killed_coordinator_is_replaced_and_nothing_is_lost(two: Coordinators, new_topic):
    async def kill(ledger: Ledger) -> None:
        await asyncio.to_thread(two.processes[0].kill)

    await run_through(two, new_topic(partitions=2), kill)


async def test_a_paused_leader_that_wakes_up_is_fenced_by_the_log(two: Coordinators, new_topic):
    async def pause(ledger: Ledger) -> None:
        two.processes[0].pause()
        await ledger.grow(30)
        two.processes[0].resume()

    await run_through(two, new_topic(partitions=2), pause)


async def test_an_orderly_stop_hands_over_without_an_error(two: Coordinators, new_topic):
    async def stop(ledger: Ledger) -> None:
        await asyncio.to_thread(two.processes[0].stop)

    ledger = await run_through(two, new_topic(partitions=2), stop)
    assert not ledger.errors
    assert two.processes[0].wait() == 0


async def test_a_third_instance_joins_and_takes_its_share(two: Coordinators, new_topic):
    async def join(ledger: Ledger) -> None:
        await asyncio.to_thread(two.start)

    ledger = await run_through(two, new_topic(partitions=2), join)
    assert not ledger.errors


async def test_all_coordinators_killed_and_one_started_anew(coordinators: Coordinators, new_topic):
    # Where the clients look for it: on the first one's port, which no connection takes meanwhile.
    port = str(free_ports(1)[0])
    await asyncio.to_thread(lambda: coordinators.start(listen_port=port))
    await asyncio.to_thread(coordinators.start)

    async def kill_and_restart(ledger: Ledger) -> None:
        for process in coordinators.processes:
            await asyncio.to_thread(process.kill)
        await asyncio.to_thread(lambda: coordinators.start(listen_port=port))

    await run_through(coordinators, new_topic(partitions=2), kill_and_restart)


def test_a_leader_killed_while_partitions_are_on_their_way_to_another(coordinators: Coordinators):
    """What it has given back and nobody has got yet is not left to the group, which waits for the dead."""
    first = coordinators.start()
    everything = set(leaders(coordinators.addresses[0]))
    for _ in range(10):
        second = coordinators.start(wait_ready=False)
        if are_seen_on_their_way(coordinators, everything, second):
            break
        second.stop()
        first.wait_ready(lambda: set(leaders(coordinators.addresses[0])) == everything, timeout_s=60)
    else:
        pytest.fail("partitions were never seen on their way")
    first.kill()

    def served_by_the_second() -> bool:
        led = leaders(coordinators.addresses[-1])
        return set(led) == everything and set(led.values()) == {coordinators.addresses[-1]}

    second.wait_ready(served_by_the_second, timeout_s=90)


def are_seen_on_their_way(coordinators: Coordinators, everything: set[int], second: ChildProcess) -> bool:
    """From the first to the last one; no: they are there already."""
    first, last = coordinators.addresses[0], coordinators.addresses[-1]
    # Followed: else the group alone would tell that the first one is gone.
    second.wait_ready(lambda: first in leaders(last).values(), timeout_s=90)
    while True:
        led = leaders(first)
        if set(led) != everything:
            return True
        if last in led.values():
            return False


@pytest.mark.timeout(900)
async def test_brokers_killed_one_after_the_other(kafka_cluster, tmp_path):
    topic = create_topic(kafka_cluster.bootstrap_servers, partitions=2)
    with Coordinators(kafka_cluster.bootstrap_servers, tmp_path) as coordinators:
        coordinators.start()
        coordinators.start()

        async def kill_brokers(ledger: Ledger) -> None:
            for broker in kafka_cluster.brokers:
                await asyncio.to_thread(broker.kill)
                await ledger.grow(5)
                await asyncio.to_thread(broker.start)
                await asyncio.to_thread(kafka_cluster.await_in_sync)
                await ledger.grow(5)

        ledger = await run_through(coordinators, topic, kill_brokers)
    seen = await asyncio.to_thread(java_console_consumer, kafka_cluster.bootstrap_servers, topic)
    assert sorted(seen) == sorted([*ledger.committed, *ledger.committed])


async def members_of(group: Group) -> dict[str, str]:
    async with asyncio.timeout(60):
        while True:
            try:
                if found := await group.members():
                    return found
            except MembersUnknownError:
                pass
            await asyncio.sleep(0.1)


@pytest.mark.timeout(300)
async def test_the_members_are_found_while_a_broker_stands_still(kafka_cluster):
    async def revoked(_partitions: set[int]) -> None:
        pass

    settings = KafkaSettings(bootstrap_servers=kafka_cluster.bootstrap_servers)
    group_id = f"group-{uuid.uuid4().hex}"
    async with Wire(settings) as wire:
        group = Group(
            settings,
            wire,
            group_id=group_id,
            topic=create_topic(kafka_cluster.bootstrap_servers, partitions=1),
            instance="one",
            address="one:1",
            assigned=lambda _partitions: None,
            revoked=revoked,
        )
        group.start()
        try:
            assert await members_of(group) == {"one": "one:1"}
            coordinator_id = (await wire.find_group_coordinator(group_id)).node_id
            still = next(broker for broker in kafka_cluster.brokers if broker.node_id != coordinator_id)
            still.pause()
            assert await members_of(group) == {"one": "one:1"}
        finally:
            await group.leave(within_s=10)
