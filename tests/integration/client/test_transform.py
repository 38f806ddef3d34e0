"""Consume, transform, produce: each record in exactly one committed transaction, whoever fails or dies."""

import asyncio
import os
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient

import oncebox
from oncebox import Producer, Transaction, TransformSettings, group_consumer
from oncebox.errors import NamesakeError, PoisonRecordError, UsageError
from oncebox.local import LocalKafka
from oncebox.reader import Record
from proof.faults.process import ChildProcess
from tests.integration.client.conftest import fresh
from tests.support.coordinator import Coordinators, manifests, read_committed, values
from tests.support.kafka import TopicFactory, create_topic

QUICK = {"session.timeout.ms": 6_000, "heartbeat.interval.ms": 300}


async def fill(servers: str, topic: str, count: int, partitions: int, first: int = 0) -> None:
    async with Producer(servers) as mine:
        for number in range(first, count):
            await mine.send(topic, b"%d" % number, partition=number % partitions)


async def copied(servers: str, topic: str) -> dict[int, list[int]]:
    """What stands in each partition."""
    found: dict[int, list[int]] = defaultdict(list)
    for message in await asyncio.to_thread(read_committed, servers, topic):
        found[message.partition() or 0].append(int(message.value() or b""))
    return found


def expected(count: int, partitions: int) -> dict[int, list[int]]:
    return {partition: list(range(partition, count, partitions)) for partition in range(partitions)}


async def until(servers: str, topic: str, count: int, timeout_s: float = 120) -> None:
    async with asyncio.timeout(timeout_s):
        while len(await asyncio.to_thread(values, servers, topic)) < count:  # noqa: ASYNC110 - others write it
            await asyncio.sleep(0.1)


@asynccontextmanager
async def running(one: Coordinators, source: str, group: str, handler: Any, **settings: Any) -> AsyncIterator[Any]:
    """A transform in this process; stopped in good order at the end."""
    stop = asyncio.Event()
    settings = {"consumer": QUICK, **settings}
    task = asyncio.create_task(
        oncebox.transform(
            source,
            group,
            handler,
            kafka=one.bootstrap_servers,
            coordinators=one.addresses,
            stop=stop,
            settings=TransformSettings(**settings),
        )
    )
    try:
        yield task
    finally:
        stop.set()
        await asyncio.wait([task])
    task.result()


async def test_a_topic_is_copied_and_the_groups_offsets_with_it(one: Coordinators, new_topic: TopicFactory):
    source, target, group = new_topic(partitions=3), new_topic(partitions=3), fresh("copy")
    await fill(one.bootstrap_servers, source, 1_000, 3)
    handled: list[Record] = []

    async def copy(record: Record, transaction: Transaction) -> None:
        handled.append(record)
        await transaction.send(target, record.value, partition=record.partition)

    # No partition is taken from it, and nothing is handled twice, because the machine is busy for some seconds.
    patient = {"session.timeout.ms": 45_000}
    async with running(one, source, group, copy, consumer=patient, transaction_records=50):
        await until(one.bootstrap_servers, target, 1_000)
    assert await copied(one.bootstrap_servers, target) == expected(1_000, 3)
    assert len(handled) == 1_000
    async with running(one, source, group, copy, consumer=patient):  # goes on where the group stands
        await fill(one.bootstrap_servers, source, 30, 3)
        await until(one.bootstrap_servers, target, 1_030)
    assert len(handled) == 1_030


async def test_a_handler_that_fails_now_and_then_loses_and_doubles_nothing(one: Coordinators, new_topic: TopicFactory):
    source, target = new_topic(partitions=2), new_topic(partitions=2)
    await fill(one.bootstrap_servers, source, 400, 2)
    random = Random(5)
    failed: Counter[int] = Counter()

    async def shaky(record: Record, transaction: Transaction) -> None:
        await transaction.send(target, record.value, partition=record.partition)
        number = int(record.value or b"")
        if random.random() < 0.02 and failed[number] < 2:
            failed[number] += 1
            raise ConnectionError("the weather")

    async with running(one, source, fresh("shaky"), shaky, transaction_records=40):
        await until(one.bootstrap_servers, target, 400)
    assert failed
    assert await copied(one.bootstrap_servers, target) == expected(400, 2)


async def test_poison_stops(one: Coordinators, new_topic: TopicFactory):
    source, target, group = new_topic(), new_topic(), fresh("poison")
    await fill(one.bootstrap_servers, source, 20, 1)

    async def choke(record: Record, transaction: Transaction) -> None:
        await transaction.send(target, record.value)
        if record.value == b"12":
            raise ValueError("twelve")

    with pytest.raises(PoisonRecordError, match=f"{source}:0 offset 12") as caught:  # noqa: PT012 - the block is tested
        # (It is their number that ends them, however slowly they are handled.)
        whole = {"transaction_records": 5, "transaction_ms": 30_000}
        async with running(one, source, group, choke, attempts=2, **whole) as task:
            await asyncio.wait_for(asyncio.shield(task), 120)
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.record.value == b"12"
    seen = await asyncio.to_thread(values, one.bootstrap_servers, target)
    assert seen == [b"%d" % number for number in range(10)]


@pytest.mark.parametrize("poison", ["skip", "dead-letter"])
async def test_poison_is_left_out_or_buried(one: Coordinators, new_topic: TopicFactory, poison: str):
    source, target, dead = new_topic(), new_topic(), new_topic()
    await fill(one.bootstrap_servers, source, 20, 1)

    async def choke(record: Record, transaction: Transaction) -> None:
        await transaction.send(target, record.value)  # what it has sent of the poison must not be seen
        if record.value in {b"3", b"4", b"17"}:
            raise ValueError("indigestible")

    dead_letter_topic = dead if poison == "dead-letter" else ""
    async with running(
        one, source, fresh(poison), choke, attempts=2, poison=poison, dead_letter_topic=dead_letter_topic
    ):
        await until(one.bootstrap_servers, target, 17)
    assert (await copied(one.bootstrap_servers, target))[0] == [n for n in range(20) if n not in {3, 4, 17}]
    buried = await asyncio.to_thread(read_committed, one.bootstrap_servers, dead)
    assert [message.value() for message in buried] == ([b"3", b"4", b"17"] if dead_letter_topic else [])
    for message in buried:
        headers = dict(message.headers() or [])
        assert headers["oncebox.error"] == b"ValueError: indigestible"
        assert headers["oncebox.source"] == b"%s:0:%s" % (source.encode(), message.value())


async def test_a_dead_letter_that_is_too_large_stops(one: Coordinators, new_topic: TopicFactory):
    """With what is told of it in its headers it does not fit any more; tried again, it would be the same."""
    source, dead = new_topic(), new_topic()
    async with Producer(one.bootstrap_servers) as mine:
        await mine.send(source, bytes(1024 * 1024 - 300))

    async def choke(_record: Record, _transaction: Transaction) -> None:
        raise ValueError("indigestible" * 30)

    settings = {"attempts": 2, "poison": "dead-letter", "dead_letter_topic": dead}
    with pytest.raises(PoisonRecordError, match=f"{source}:0 offset 0 can neither be handled nor be buried") as caught:
        async with running(one, source, fresh("large"), choke, **settings) as task, asyncio.timeout(120):
            await asyncio.shield(task)
    assert isinstance(caught.value.__cause__, ValueError)


async def test_members_come_and_go(one: Coordinators, new_topic: TopicFactory):
    """Partitions move from one to the other in the middle of transactions; nothing is handled twice or not at all."""
    source, target, group = new_topic(partitions=4), new_topic(partitions=4), fresh("moving")
    await fill(one.bootstrap_servers, source, 4_000, 4)
    by_member: Counter[str] = Counter()

    def handler(name: str) -> Any:
        async def copy(record: Record, transaction: Transaction) -> None:
            by_member[name] += 1
            await transaction.send(target, record.value, partition=record.partition)
            # The first one must not be done before the other has come.
            await asyncio.sleep(0.002 if by_member["second"] else 0.01)

        return copy

    async with running(one, source, group, handler("first"), transaction_ms=300):
        await until(one.bootstrap_servers, target, 300)
        async with running(one, source, group, handler("second"), transaction_ms=300):
            async with asyncio.timeout(60):
                while not by_member["second"]:  # noqa: ASYNC110 - the group decides when
                    await asyncio.sleep(0.05)
            await until(one.bootstrap_servers, target, 2_000)
        await until(one.bootstrap_servers, target, 4_000)
    assert await copied(one.bootstrap_servers, target) == expected(4_000, 4)


def take_the_name(servers: str, group: str, name: str, source: str) -> None:
    """Takes a member's place in its group, as its own repeated request to join does, and is gone."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": group,
            "group.instance.id": name,
            "partition.assignment.strategy": "roundrobin",
            "enable.auto.commit": False,
            **QUICK,
        }
    )
    consumer.subscribe([source])
    deadline_s = time.monotonic() + 60
    while not consumer.memberid():
        assert time.monotonic() < deadline_s
        consumer.poll(0.1)
    consumer.close()


async def test_one_that_is_shut_out_of_its_name_joins_anew(
    one: Coordinators, new_topic: TopicFactory, caplog: pytest.LogCaptureFixture
):
    source, target, group = new_topic(partitions=2), new_topic(partitions=2), fresh("name")

    async def copy(record: Record, transaction: Transaction) -> None:
        await transaction.send(target, record.value, partition=record.partition)

    named = {**QUICK, "group.instance.id": "a"}
    async with running(one, source, group, copy, consumer=named, transaction_records=20):
        for turn in range(2):
            await fill(one.bootstrap_servers, source, 400 * (turn + 1), 2, 400 * turn)
            await until(one.bootstrap_servers, target, 400 * turn + 100)
            await asyncio.to_thread(take_the_name, one.bootstrap_servers, group, "a", source)
            await until(one.bootstrap_servers, target, 400 * (turn + 1))
            async with asyncio.timeout(60):  # where all was copied before, it notices with its next heartbeat
                while caplog.text.count("it has joined anew") <= turn:  # noqa: ASYNC110 - the log tells
                    await asyncio.sleep(0.05)
    assert caplog.text.count("it has joined anew") >= 2
    assert await copied(one.bootstrap_servers, target) == expected(800, 2)


async def test_of_two_living_namesakes_one_ends_and_says_why(
    one: Coordinators, new_topic: TopicFactory, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(group_consumer, "SHUT_OUT_S", 600.0)  # on a busy machine it takes them longer
    source, target, group = new_topic(partitions=2), new_topic(partitions=2), fresh("namesakes")

    async def copy(record: Record, transaction: Transaction) -> None:
        await transaction.send(target, record.value, partition=record.partition)

    named = {**QUICK, "group.instance.id": "a"}
    tasks = [
        asyncio.create_task(
            oncebox.transform(
                source,
                group,
                copy,
                kafka=one.bootstrap_servers,
                coordinators=one.addresses,
                settings=TransformSettings(consumer=named),
            )
        )
        for _ in range(2)
    ]
    try:
        ended, going = await asyncio.wait(tasks, timeout=120, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(NamesakeError, match=r"another member with group\.instance\.id 'a'"):
            ended.pop().result()
        assert len(going) == 1
        await fill(one.bootstrap_servers, source, 100, 2)
        await until(one.bootstrap_servers, target, 100)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert await copied(one.bootstrap_servers, target) == expected(100, 2)


async def test_a_cancelled_transform_leaves_nothing_half_done(one: Coordinators, new_topic: TopicFactory):
    source, target, group = new_topic(), new_topic(), fresh("cancelled")
    await fill(one.bootstrap_servers, source, 100, 1)
    arrived = asyncio.Event()

    async def slow(record: Record, transaction: Transaction) -> None:
        await transaction.send(target, record.value)
        if record.value == b"50":
            arrived.set()
            await asyncio.Event().wait()

    async def copy(record: Record, transaction: Transaction) -> None:
        await transaction.send(target, record.value)

    task = asyncio.create_task(
        oncebox.transform(source, group, slow, kafka=one.bootstrap_servers, coordinators=one.addresses)
    )
    await asyncio.wait_for(arrived.wait(), 120)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    async with running(one, source, group, copy):
        await until(one.bootstrap_servers, target, 100)
    assert await copied(one.bootstrap_servers, target) == expected(100, 1)


async def test_bad_input(one: Coordinators, new_topic: TopicFactory):
    async def nothing(record: Record, transaction: Transaction) -> None:
        pass

    with pytest.raises(UsageError, match="'no-such-topic' cannot be read"):
        await oncebox.transform(
            "no-such-topic", "group", nothing, kafka=one.bootstrap_servers, coordinators=one.addresses
        )
    with pytest.raises(UsageError, match="need each other"):
        TransformSettings(poison="dead-letter")


async def copy_through_kills(
    coordinators: Coordinators,
    tmp_path: Path,
    count: int,
    per_transaction: int,
    *,
    pause_s: float,
    kills: int,
    trouble: Any = None,
) -> None:
    """Two processes copy; each is killed hard, now and then, wherever it is, and started again.

    There is a portion to copy for each kill, so that none comes when all is done.
    """
    servers = coordinators.bootstrap_servers
    source, target = (create_topic(servers, partitions=4) for _ in range(2))
    portion = count // (kills + 1)
    group = fresh("killed")
    arguments = [servers, ",".join(coordinators.addresses), group, source, target]
    random = Random(count)
    copiers = [
        ChildProcess(
            [
                sys.executable,
                "-m",
                "tests.integration.client.copier",
                *arguments,
                name,
                str(per_transaction),
                str(pause_s),
            ],
            log=tmp_path / f"copier-{name}.log",
        )
        for name in ("a", "b")
    ]
    try:
        for copier in copiers:
            await asyncio.to_thread(copier.start)
        for turn in range(kills):
            await fill(servers, source, (turn + 1) * portion, 4, turn * portion)
            await until(servers, target, turn * portion + portion // 4, 300)
            victim = random.choice(copiers)
            await asyncio.to_thread(victim.kill)
            if trouble is not None:
                await trouble(turn)
            await asyncio.to_thread(victim.start)
        await fill(servers, source, count, 4, kills * portion)
        await until(servers, target, count, 600)
        for copier in copiers:
            await asyncio.to_thread(copier.stop)
            assert copier.log_contains("stopped")
    finally:
        for copier in copiers:
            copier.kill()
    assert await copied(servers, target) == expected(count, 4)
    sizes = await asyncio.to_thread(sizes_of, coordinators, group)
    assert sum(sizes) == count
    # All but those that a kill, a rebalance or the end of a portion has cut short.
    assert (max(sizes), sorted(sizes)[len(sizes) // 2]) == (per_transaction, per_transaction)


def sizes_of(coordinators: Coordinators, group: str) -> list[int]:
    """How many records were committed with each transaction of the group's copiers."""
    # A part of a manifest may stand in the feed twice.
    parts = {
        (manifest.transactional_id, manifest.number, manifest.part): manifest.written
        for manifest in manifests(coordinators)
        if manifest.transactional_id.startswith(group)
    }
    sizes: Counter[tuple[str, int]] = Counter()
    for (name, number, _), written in parts.items():
        sizes[name, number] += sum(entry.record_count for entry in written)
    return list(sizes.values())


async def test_one_that_slept_while_its_partitions_were_handled_by_another(one: Coordinators, tmp_path: Path):
    """Paused in the middle of transactions, and woken when the group has long gone on: nothing of it counts twice."""
    servers = one.bootstrap_servers
    source, target = (create_topic(servers, partitions=4) for _ in range(2))
    group = fresh("asleep")
    command = [
        sys.executable,
        "-m",
        "tests.integration.client.copier",
        servers,
        one.addresses[0],
        group,
        source,
        target,
    ]
    copiers = [ChildProcess([*command, name, "50", "0.002"], log=tmp_path / f"{name}.log") for name in ("a", "b")]
    try:
        await fill(servers, source, 3_000, 4)
        for copier in copiers:
            await asyncio.to_thread(copier.start)
        await until(servers, target, 500)
        copiers[0].pause()
        await until(servers, target, 3_000)  # the other one has all partitions by then
        await fill(servers, source, 4_000, 4, 3_000)
        copiers[0].resume()
        await until(servers, target, 4_000)
        for copier in copiers:
            await asyncio.to_thread(copier.stop)
    finally:
        for copier in copiers:
            copier.kill()
    assert await copied(servers, target) == expected(4_000, 4)


async def until_joined(servers: str, group: str, count: int) -> None:
    """Then so many have begun to work, and hear signals."""
    admin = AdminClient({"bootstrap.servers": servers})
    async with asyncio.timeout(120):
        while True:
            described = await asyncio.to_thread(admin.describe_consumer_groups([group])[group].result, 60)
            if len(described.members) == count:
                return
            await asyncio.sleep(0.05)


def spawned_by(parent: int) -> list[int]:
    """The processes that multiprocessing has started for it."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def alive(processes: list[int]) -> list[int]:
    return [process for process in processes if Path(f"/proc/{process}").exists()]


async def test_several_processes_of_which_one_is_killed(one: Coordinators, tmp_path: Path):
    servers = one.bootstrap_servers
    source, target = (create_topic(servers, partitions=4) for _ in range(2))
    command = [sys.executable, "-m", "tests.integration.client.processes", servers, one.addresses[0], fresh("many")]
    with ChildProcess([*command, source, target], log=tmp_path / "parent.log") as parent:
        await fill(servers, source, 2_000, 4)
        await until(servers, target, 500)
        workers = await asyncio.to_thread(spawned_by, parent.pid)
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        await fill(servers, source, 3_000, 4, 2_000)
        await until(servers, target, 3_000)
        await asyncio.to_thread(parent.stop)
        assert parent.log_contains("stopped")
    assert await copied(servers, target) == expected(3_000, 4)


async def test_several_processes_stop_in_good_order_when_they_are_interrupted(one: Coordinators, tmp_path: Path):
    """Each of them, as a terminal does it."""
    servers = one.bootstrap_servers
    source, target = (create_topic(servers, partitions=4) for _ in range(2))
    group = fresh("ended")
    command = [sys.executable, "-m", "tests.integration.client.processes", servers, one.addresses[0], group]
    with ChildProcess([*command, source, target], log=tmp_path / "parent.log") as parent:
        await fill(servers, source, 1_000, 4)
        await until(servers, target, 1_000)
        await until_joined(servers, group, 2)
        for process in (parent.pid, *await asyncio.to_thread(spawned_by, parent.pid)):
            os.kill(process, signal.SIGINT)
        assert await asyncio.to_thread(parent.wait) == 0
        assert parent.log_contains("stopped")
        assert not parent.log_contains("Traceback")
    assert await copied(servers, target) == expected(1_000, 4)


async def test_of_several_processes_one_that_raises_stops_all(one: Coordinators, tmp_path: Path):
    servers = one.bootstrap_servers
    source, target = (create_topic(servers, partitions=4) for _ in range(2))
    command = [sys.executable, "-m", "tests.integration.client.processes", servers, one.addresses[0], fresh("raised")]
    with ChildProcess([*command, source, target], log=tmp_path / "parent.log") as parent:
        await fill(servers, source, 1_000, 4)
        await until(servers, target, 1_000)
        workers = await asyncio.to_thread(spawned_by, parent.pid)
        async with Producer(servers) as mine:
            await mine.send(source, b"poison", partition=2)
        assert await asyncio.to_thread(parent.wait) == 1
        assert parent.log_contains("PoisonRecordError")
        assert parent.log_contains(r"ProcessFailedError: .* ended with an error")
        assert not await asyncio.to_thread(alive, workers)
    assert await copied(servers, target) == expected(1_000, 4)


async def copy_through_kills_of_brokers_too(
    kafka: LocalKafka, tmp_path: Path, count: int, per_transaction: int, *, pause_s: float, kills: int
) -> None:
    """With each client a broker of the three is killed, and started again when the others have gone on without it."""
    with Coordinators(kafka.bootstrap_servers, tmp_path) as coordinators:
        await asyncio.to_thread(coordinators.start)
        await asyncio.to_thread(coordinators.start)

        async def kill_broker(turn: int) -> None:
            broker = kafka.brokers[turn % 3]
            await asyncio.to_thread(broker.kill)
            await asyncio.sleep(2)
            await asyncio.to_thread(broker.start)
            await asyncio.to_thread(kafka.await_in_sync)

        await copy_through_kills(
            coordinators, tmp_path, count, per_transaction, pause_s=pause_s, kills=kills, trouble=kill_broker
        )


@pytest.mark.timeout(900)
async def test_clients_and_brokers_killed_hard(kafka_cluster: LocalKafka, tmp_path: Path):
    await copy_through_kills_of_brokers_too(kafka_cluster, tmp_path, 3_000, 50, pause_s=0.002, kills=2)


@pytest.mark.long
@pytest.mark.timeout(1_800)
async def test_a_hundred_thousand_records_with_clients_and_brokers_killed(kafka_cluster: LocalKafka, tmp_path: Path):
    await copy_through_kills_of_brokers_too(kafka_cluster, tmp_path, 100_000, 750, pause_s=0.001, kills=6)
