"""How long a request id is remembered: as stated, by time and by count. And what is under way at the end."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from coordinator.gateway import batches as module
from coordinator.gateway.batches import Batches, BatchLimits, BusyError
from oncebox.bulk import Receipt
from oncebox.errors import CoordinatorError
from oncebox.transaction import State
from oncebox.v1 import gateway_pb2 as pb
from oncebox.v1 import manifest_pb2, transaction_pb2

WINDOW_MS = 1_000
HOUR_MS = 3_600_000


class Clock:
    now_ms = 1_000_000

    def __call__(self) -> int:
        return self.now_ms


class Committed:
    """Stands in for Transaction: whatever is committed is committed."""

    def __init__(self, producer: "Quick") -> None:
        self.state = State.OPEN
        self._producer = producer

    async def send_many(self, _records: object) -> Receipt:
        nobody: Any = None
        return Receipt(nobody, [], {})

    async def flush(self) -> None:
        await self._producer.gate.wait()

    async def abort(self) -> None:
        self._producer.aborted += 1
        self.state = State.ENDED

    async def commit(self, *, metadata: bytes) -> transaction_pb2.Outcome:
        self.state = State.ENDED
        self._producer.commits.append(metadata)
        now_ms = self._producer.clock.now_ms
        return transaction_pb2.Outcome(number=len(self._producer.commits), decided_at_ms=now_ms)


class Quick:
    """Stands in for Producer."""

    resume_token = b""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.commits: list[bytes] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.begun = 0
        self.aborted = 0
        self.stopping = asyncio.Event()
        self.may_stop = asyncio.Event()
        self.may_stop.set()

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        self.stopping.set()
        await self.may_stop.wait()

    async def begin(self) -> Committed:
        self.begun += 1
        return Committed(self)


async def nothing(_transactional_id: str, _since_ms: int) -> AsyncIterator[manifest_pb2.Manifest]:
    for manifest in list[manifest_pb2.Manifest]():
        yield manifest


def batches(clock: Clock, **limits: int) -> tuple[Batches, Quick]:
    producer = Quick(clock)
    stated = {
        "window_ms": WINDOW_MS,
        "requests_remembered": 100,
        "ids": 2,
        "waiting_bytes": 1_000,
        "metadata_bytes": 500,
        "idle_ms": 60_000,
    }
    made: Any = lambda _transactional_id: producer  # noqa: E731
    return Batches(made, nothing, BatchLimits(**{**stated, **limits}), clock), producer


def request(request_id: str, name: str = "t", metadata: bytes = b"m") -> pb.CommitBatchRequest:
    return pb.CommitBatchRequest(transactional_id=name, request_id=request_id, metadata=metadata)


async def test_a_request_is_remembered_for_the_window_and_then_new():
    clock = Clock()
    mine, producer = batches(clock)
    await mine.commit(request("a"))
    clock.now_ms += WINDOW_MS
    assert (await mine.commit(request("a"))).repeated
    clock.now_ms += 1
    assert not (await mine.commit(request("a"))).repeated
    assert len(producer.commits) == 2
    await mine.close(within_s=10)


@pytest.mark.parametrize("ahead_ms", [-HOUR_MS, HOUR_MS])
async def test_the_window_is_counted_by_one_clock_not_by_that_of_who_decided(ahead_ms: int):
    clock = Clock()
    mine, producer = batches(clock)
    producer.clock = Clock()
    producer.clock.now_ms = clock.now_ms + ahead_ms
    await mine.commit(request("a"))
    clock.now_ms += WINDOW_MS
    assert (await mine.commit(request("a"))).repeated
    clock.now_ms += 1
    assert not (await mine.commit(request("a"))).repeated
    await mine.close(within_s=10)


async def test_the_oldest_of_too_many_is_forgotten_first():
    mine, producer = batches(Clock(), requests_remembered=3)
    for name in "abcd":
        await mine.commit(request(name))
    for name in "dcb":
        assert (await mine.commit(request(name))).repeated
    assert not (await mine.commit(request("a"))).repeated
    assert len(producer.commits) == 5
    await mine.close(within_s=10)


async def test_what_is_under_way_is_bounded_and_outlives_its_caller():
    mine, producer = batches(Clock(), waiting_bytes=100, ids=1)
    producer.gate.clear()
    caller = asyncio.create_task(mine.commit(request("a", metadata=bytes(60))))
    await asyncio.sleep(0)
    with pytest.raises(BusyError, match="later"):
        await mine.commit(request("b", metadata=bytes(60)))
    with pytest.raises(BusyError, match="fewer ids"):
        await mine.commit(request("b", name="another"))
    caller.cancel()
    await asyncio.wait([caller])
    again = asyncio.create_task(mine.commit(request("a", metadata=bytes(60))))
    await asyncio.sleep(0)
    producer.gate.set()
    assert (await again).repeated
    assert len(producer.commits) == 1
    await mine.close(within_s=10)


async def test_what_the_ids_resume_token_leaves_no_room_for_is_refused_before_anything_is_sent():
    mine, producer = batches(Clock())
    producer.resume_token = bytes(490)
    with pytest.raises(CoordinatorError, match="an earlier commit") as told:
        await mine.commit(request("a", metadata=b""))
    assert told.value.detail.code == transaction_pb2.MESSAGE_TOO_LARGE
    assert not producer.begun
    assert (await mine.commit(request("a", metadata=b"m"))).outcome.number == 1
    await mine.close(within_s=10)


async def refused(caller: "asyncio.Task[pb.CommitBatchResponse]") -> transaction_pb2.Error:
    with pytest.raises(CoordinatorError) as told:
        await caller
    return told.value.detail


async def test_an_end_is_bounded_and_nothing_begins_in_it():
    mine, producer = batches(Clock())
    producer.gate.clear()
    callers = [asyncio.create_task(mine.commit(request(name))) for name in "abc"]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        while not producer.begun:  # noqa: ASYNC110 - some rounds of the loop
            await asyncio.sleep(0)
        await mine.close(within_s=0.1)
    assert (producer.begun, producer.aborted, producer.commits) == (1, 1, [])
    callers.append(asyncio.create_task(mine.commit(request("late"))))
    for error in [await refused(caller) for caller in callers]:
        assert (error.code, error.retriable) == (transaction_pb2.COORDINATOR_NOT_AVAILABLE, True)
        assert "going down: send it again" in error.message


async def test_what_waits_is_refused_at_once_and_what_has_begun_is_finished():
    mine, producer = batches(Clock())
    producer.gate.clear()
    first, second = [asyncio.create_task(mine.commit(request(name))) for name in "ab"]
    async with asyncio.timeout(10):
        while not producer.begun:  # noqa: ASYNC110 - some rounds of the loop
            await asyncio.sleep(0)
        closing = asyncio.create_task(mine.close(within_s=1_000))
        assert (await refused(second)).retriable
        assert not closing.done()
        producer.gate.set()
        assert (await first).outcome.number == 1
        await closing
    assert (producer.begun, producer.aborted) == (1, 0)


async def test_an_end_does_not_wait_for_producers_that_hang():
    mine, producer = batches(Clock(), ids=1)
    await mine.commit(request("a"))
    producer.may_stop.clear()
    await mine.commit(request("b", name="another"))  # the one before is being stopped to make room
    async with asyncio.timeout(10):
        await mine.close(within_s=0.1)


async def test_a_desk_is_closed_while_idle_and_only_then(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "IDLE_LOOK_S", 0.01)
    made: dict[str, list[Quick]] = {}

    def new_producer(name: str) -> Any:
        producer = Quick(Clock())
        producer.may_stop.clear()
        made.setdefault(name, []).append(producer)
        if name == "b" and len(made[name]) == 2:
            producer.gate.clear()
        return producer

    limits = BatchLimits(
        window_ms=WINDOW_MS, requests_remembered=100, ids=3, waiting_bytes=1_000, metadata_bytes=500, idle_ms=1
    )
    mine = Batches(new_producer, nothing, limits, Clock())
    async with asyncio.timeout(10):
        for name in "abc":
            await mine.commit(request("r", name=name))
        # A look has begun; its first producer takes its time to stop, and others are used meanwhile.
        await made["a"][0].stopping.wait()
        for name in "de":
            await mine.commit(request("r", name=name))
        again = asyncio.create_task(mine.commit(request("again", name="b")))
        while len(made["b"]) < 2:  # noqa: ASYNC110 - some rounds of the loop
            await asyncio.sleep(0)
        under_way = mine._desks["b"]
        for producers in made.values():
            for producer in producers:
                producer.may_stop.set()
        # It goes on looking: in the end all that are idle are closed, and only they.
        while set(mine._desks) != {"b"}:  # noqa: ASYNC110 - a task of its own looks
            await asyncio.sleep(0.01)
        assert mine._desks["b"] is under_way
        made["b"][1].gate.set()
        assert (await again).outcome.number == 1
        while mine._desks:  # noqa: ASYNC110 - a task of its own looks
            await asyncio.sleep(0.01)
        await mine.close(within_s=10)
