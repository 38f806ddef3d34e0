"""The writer against brokers that lose, delay and move: each record stands in its log once, in the order sent."""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import uvloop

from oncebox import under_way
from oncebox import writer as writing
from oncebox.errors import AbortedError, DeliveryError, OnceboxError, RecordTooLargeError, UsageError
from oncebox.partition_queue import Identity
from oncebox.wire import ErrorCode, TopicPartition
from oncebox.writer import Writer
from oncebox.writer_settings import WriterSettings
from tests.unit.client.brokers import Brokers

TRANSACTIONAL = Identity(producer_id=7, epoch=4, transactional_id="t", number=3)
PLAIN = Identity(producer_id=7, epoch=0, transactional_id=None)
OTHER = Identity(producer_id=8, epoch=0, transactional_id=None)
A, B = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "RETRY_FIRST_S", 0.000_1)
    monkeypatch.setattr(writing, "RETRY_MAX_S", 0.001)


def writer(brokers: Brokers, identity: Identity = TRANSACTIONAL, **settings: Any) -> Writer:
    wire: Any = brokers
    return Writer(wire, WriterSettings(**{"batch_bytes": 200, "request_bytes": 500, **settings}), identity)


def value(number: int) -> bytes:
    return b"%06d" % number


@pytest.mark.parametrize("seed", range(200))
async def test_whatever_is_lost_or_moved_each_record_stands_once_and_in_order(seed: int):
    random = Random(seed)
    brokers = Brokers(seed, trouble=random.choice([0.0, 0.2, 0.6]))
    one = writer(brokers, random.choice([TRANSACTIONAL, PLAIN]), linger_ms=random.choice([0, 0, 1]))
    places = [TopicPartition("t", partition) for partition in range(random.randint(1, 6))]
    sent: dict[TopicPartition, list[bytes]] = {}
    waiting = []
    for number in range(300):
        where = random.choice(places)
        sent.setdefault(where, []).append(value(number))
        full = one.append(where, value(number), None, [], None)
        if number % 50 == 0:
            waiting.append((one.future_of_last(where), where, value(number)))
        if full:
            await one.room()
        if random.random() < 0.1:
            await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await one.flush()
    assert {where: log.values for where, log in brokers.logs.items()} == sent
    for future, where, expected in waiting:
        assert brokers.logs[where].values[future.result().offset] == expected
    assert brokers.in_flight_most <= 5
    assert brokers.request_bytes_most <= 500
    if one.identity is TRANSACTIONAL:
        written = {TopicPartition(w.topic, w.partition): w for w in one.written()}
        assert {where: w.record_count for where, w in written.items()} == {w: len(v) for w, v in sent.items()}
        # The logs hold nothing else: one run each.
        assert all([(r.offset_first, r.offset_next) for r in w.runs] == [(0, w.record_count)] for w in written.values())
    one.release()


async def test_five_are_in_flight_only_once_the_first_is_acknowledged():
    brokers = Brokers(0, trouble=0)
    brokers.hang = asyncio.Event()
    one = writer(brokers)
    for number in range(100):
        one.append(A, value(number), None, [], None)
    for _ in range(10):
        await asyncio.sleep(0)
    assert brokers.in_flight == {A: 1}
    brokers.hang.set()
    await one.flush()
    assert 1 < brokers.in_flight_most <= 5
    one.release()


async def test_an_error_that_will_not_pass_fails_all_who_wait():
    brokers = Brokers(0, trouble=0)
    one = writer(brokers)
    brokers.refuse[A] = ErrorCode.INVALID_TIMESTAMP
    one.append(A, b"x", None, [], None)
    future = one.future_of_last(A)
    one.append(B, b"y", None, [], None)
    with pytest.raises(DeliveryError, match="t:0 refuses the records: INVALID_TIMESTAMP") as caught:
        await one.flush()
    assert (caught.value.transactional_id, caught.value.number) == ("t", 3)
    with pytest.raises(DeliveryError):
        await future
    await one.close(AbortedError(""))


async def test_a_gap_in_the_log_is_refused_and_not_retried():
    """The partition has lost what was acknowledged: no resending mends that."""
    brokers = Brokers(0, trouble=0)
    one = writer(brokers)
    one.append(A, b"x", None, [], None)
    await one.flush()
    brokers.logs[A].recent.clear()
    one.append(A, b"y", None, [], None)
    with pytest.raises(DeliveryError, match="OUT_OF_ORDER_SEQUENCE_NUMBER"):
        await one.flush()
    await one.close(AbortedError(""))


async def test_a_refused_epoch_is_explained_by_who_knows():
    brokers = Brokers(0, trouble=0)
    reason = AbortedError("a newer instance")

    async def explain(error: OnceboxError) -> OnceboxError:
        assert "INVALID_PRODUCER_EPOCH" in str(error)
        return reason

    wire: Any = brokers
    one = Writer(wire, WriterSettings(), TRANSACTIONAL, explain=explain)
    brokers.refuse[A] = ErrorCode.INVALID_PRODUCER_EPOCH
    one.append(A, b"x", None, [], None)
    with pytest.raises(AbortedError, match="a newer instance"):
        await one.flush()
    await one.close(AbortedError(""))


async def test_nothing_leaves_before_its_partition_is_registered():
    brokers = Brokers(0, trouble=0)
    asked: list[TopicPartition] = []
    wire: Any = brokers
    one = Writer(wire, WriterSettings(), TRANSACTIONAL, register=asked.append, registered=frozenset({B}))
    one.append(A, b"a", None, [], None)
    one.append(B, b"b", None, [], None)
    for _ in range(20):
        await asyncio.sleep(0)
    assert asked == [A]
    assert set(brokers.logs) == {B}
    one.registered(frozenset({A}))
    await one.flush()
    assert set(brokers.logs) == {A, B}
    one.release()


async def test_moving_to_another_grant_registers_all_partitions_anew():
    brokers = Brokers(0, trouble=0)
    asked: list[TopicPartition] = []
    wire: Any = brokers
    one = Writer(wire, WriterSettings(), TRANSACTIONAL, register=asked.append, registered=frozenset({B}))
    one.append(B, b"b", None, [], None)
    one.move(Identity(producer_id=8, epoch=2, transactional_id="t"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert (asked, brokers.logs) == ([B], {})
    one.registered(frozenset({B}))
    await one.flush()
    assert list(brokers.logs[B].recent) == [(8, 2)]
    one.release()


async def test_the_delivery_timeout_holds_behind_a_broker_that_hangs():
    brokers = Brokers(0, trouble=0)
    brokers.hang = asyncio.Event()
    one = writer(brokers, request_timeout_ms=50, delivery_timeout_ms=50)
    one.append(A, b"x", None, [], None)
    future = one.future_of_last(A)
    async with asyncio.timeout(60):
        with pytest.raises(DeliveryError, match="within the delivery timeout of 50 ms: no answer"):
            await one.flush()
        with pytest.raises(DeliveryError):
            await future
    await one.close(AbortedError(""))


@pytest.mark.parametrize("seed", range(60))
async def test_whoever_hangs_and_is_replaced_each_record_stands_once_and_in_order(
    monkeypatch: pytest.MonkeyPatch, seed: int
):
    monkeypatch.setattr(writing, "LOOK_S", 0.01)
    monkeypatch.setattr(under_way, "OVERDUE_S", 0.01)
    random = Random(seed)
    brokers = Brokers(seed, trouble=random.choice([0.0, 0.2]))
    one = writer(brokers, random.choice([TRANSACTIONAL, PLAIN]), linger_ms=random.choice([0, 0, 1]))
    places = [TopicPartition("t", partition) for partition in range(random.randint(1, 6))]
    sent: dict[TopicPartition, list[bytes]] = {}

    async def hang() -> None:
        while True:
            node_id = random.randrange(3)
            brokers.hanging.add(node_id)
            await asyncio.sleep(random.random() * 0.02)
            for where, leader in list(brokers.leaders.items()):
                if leader == node_id:
                    brokers.lead(where, random.choice([other for other in range(3) if other != node_id]))
            await asyncio.sleep(random.random() * 0.03)
            brokers.hanging.discard(node_id)
            await asyncio.sleep(random.random() * 0.01)

    hanging = asyncio.create_task(hang())
    for number in range(400):
        where = random.choice(places)
        sent.setdefault(where, []).append(value(number))
        if one.append(where, value(number), None, [], None):
            await one.room()
        if random.random() < 0.1:
            await asyncio.sleep(0.001)
    async with asyncio.timeout(60):
        await one.flush()
    hanging.cancel()
    assert {where: log.values for where, log in brokers.logs.items()} == sent
    one.release()


def test_a_timer_that_comes_by_uvloops_clock_is_in_time(monkeypatch: pytest.MonkeyPatch):
    """It counts whole milliseconds, and sums of them are not exact: some were just not due, and nothing came after."""
    monkeypatch.undo()  # the pauses as they are

    async def main() -> None:
        brokers = Brokers(0, trouble=0)
        eager, lingering = writer(brokers, PLAIN), writer(brokers, OTHER, linger_ms=5)
        for number in range(100):
            brokers.lead(A, number % 2)
            async with asyncio.timeout(60):
                # Refused once, by who led before; then again after a pause.
                eager.append(A, b"x", None, [], None)
                await eager.flush()
                lingering.append(B, b"y", None, [], None)
                await lingering.future_of_last(B)
        assert len(brokers.logs[A].values) == len(brokers.logs[B].values) == 100
        for one in (eager, lingering):
            await one.close(AbortedError(""))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("identity", [TRANSACTIONAL, PLAIN])
async def test_a_leader_that_hangs_is_left_for_its_successor_long_before_its_time_is_up(
    monkeypatch: pytest.MonkeyPatch, identity: Identity
):
    monkeypatch.setattr(writing, "LOOK_S", 0.01)
    monkeypatch.setattr(under_way, "OVERDUE_S", 0.02)
    brokers = Brokers(0, trouble=0)
    one = writer(brokers, identity)
    before, after = 0, 1
    brokers.lead(A, before)
    brokers.lead(B, before)
    brokers.hanging.add(before)
    for number in range(100):
        one.append((A, B)[number % 2], value(number), None, [], None)
    flushing = asyncio.create_task(one.flush())
    async with asyncio.timeout(30):
        await until(lambda: before in brokers.doubted)
        assert not flushing.done()
        # As long as nobody else leads it is waited for: it may be slow.
        assert not brokers.logs
        # What goes to both of them is given up where either has moved.
        brokers.lead(A, after)
        await until(lambda: A in brokers.logs)
        brokers.lead(B, after)
        await flushing
    assert [brokers.logs[where].values for where in (A, B)] == [
        [value(number) for number in range(first, 100, 2)] for first in (0, 1)
    ]
    await one.close(AbortedError(""))


async def until(done: Callable[[], bool]) -> None:
    while not done():  # noqa: ASYNC110 - nobody else knows
        await asyncio.sleep(0.001)


async def test_one_that_names_a_broker_which_leads_no_longer_is_in_doubt():
    brokers = Brokers(0, trouble=0)
    one = writer(brokers)
    brokers.lead(A, 0)
    brokers.topics = frozenset({"t", "another"})
    assert brokers.leader_id(A) == 0
    brokers.lead(A, 1)
    one.append(A, b"x", None, [], None)
    async with asyncio.timeout(30):
        await one.flush()
    assert set(brokers.doubted) == {None}
    # The next transaction may write elsewhere, where it leads no longer either.
    assert set(brokers.looked_for) == {frozenset({"t", "another"})}
    await one.close(AbortedError(""))


@pytest.mark.parametrize("error", [ErrorCode.REQUEST_TIMED_OUT, ErrorCode.NOT_ENOUGH_REPLICAS])
async def test_one_that_waits_for_its_replicas_is_in_doubt(error: ErrorCode):
    brokers = Brokers(0, trouble=0)
    one = writer(brokers)
    brokers.lead(A, 2)
    brokers.refuse[A] = error
    one.append(A, b"x", None, [], None)
    flushing = asyncio.create_task(one.flush())
    async with asyncio.timeout(30):
        await until(lambda: 2 in brokers.doubted)
        del brokers.refuse[A]
        await flushing
    assert brokers.logs[A].values == [b"x"]
    await one.close(AbortedError(""))


async def test_the_delivery_timeout_holds_without_a_leader():
    brokers = Brokers(0, trouble=0)
    brokers.without_leader.add(A)
    one = writer(brokers, request_timeout_ms=50, delivery_timeout_ms=50)
    one.append(A, b"x", None, [], None)
    async with asyncio.timeout(60):
        with pytest.raises(DeliveryError, match="delivery timeout of 50 ms: it has no leader"):
            await one.flush()
    await one.close(AbortedError(""))


async def test_the_buffer_is_bounded_over_many_partitions():
    brokers = Brokers(0, trouble=0)
    brokers.hang = asyncio.Event()
    one = writer(brokers, buffer_bytes=10_000, batch_bytes=500, request_bytes=1_000, linger_ms=10_000)

    async def fill() -> int:
        for number in range(10_000):
            if one.append(TopicPartition("t", number % 100), bytes(40), None, [], None):
                await one.room()
        return number

    filling = asyncio.create_task(fill())
    for _ in range(200):
        await asyncio.sleep(0)
    assert not filling.done()
    buffered = sum(
        batch.size or batch.builder.size() for queue in one._partitions.values() for batch in queue.outstanding()
    )
    assert 9_000 < buffered < 10_000 + 200
    brokers.hang.set()
    async with asyncio.timeout(30):
        await filling
        await one.flush()
    assert sum(len(log.values) for log in brokers.logs.values()) == 10_000
    assert one._buffered == 0
    one.release()


@pytest.mark.parametrize(
    "record",
    [
        {"value": "text"},
        {"value": {"a": 1}},
        {"key": 5},
        {"headers": [("h", "text")]},
        {"headers": [(b"h", b"v")]},
        {"timestamp_ms": "now"},
        {"timestamp_ms": 2**70},
    ],
)
async def test_what_is_no_record_changes_nothing(record: dict[str, Any]):
    brokers = Brokers(0, trouble=0)
    one = writer(brokers)
    fields = {"value": b"v", "key": None, "headers": [], "timestamp_ms": None, **record}
    with pytest.raises((TypeError, OverflowError)):
        one.append(A, **fields)
    one.append(A, b"first", None, [], None)
    with pytest.raises((TypeError, OverflowError)):
        one.append(A, **fields)
    one.append(A, b"second", None, [], None)
    await one.flush()
    assert brokers.logs[A].values == [b"first", b"second"]
    one.release()


async def test_too_large_and_negative_times_are_refused_at_once():
    brokers = Brokers(0, trouble=0)
    one = writer(brokers)
    with pytest.raises(RecordTooLargeError, match="a request holds 500"):
        one.append(A, bytes(600), None, [], None)
    with pytest.raises(UsageError):
        one.append(A, b"x", None, [], -1)
    assert one.partitions == frozenset()
    one.append(A, bytes(350), None, [], None)  # larger than a batch, not than a request
    await one.flush()
    assert len(brokers.logs[A].values) == 1
    one.release()


@pytest.mark.parametrize(
    "settings",
    [{"in_flight_max": 6}, {"batch_bytes": 2**21}, {"acks": 0}, {"request_timeout_ms": 10, "delivery_timeout_ms": 5}],
)
def test_settings_that_cannot_keep_the_promise_are_refused(settings: dict[str, Any]):
    with pytest.raises(ValueError, match=r"in_flight_max|batch_bytes|acks|delivery_timeout_ms"):
        WriterSettings(**settings)
