"""How long a request id is remembered: as stated, by time and by count."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from coordinator.gateway.batches import Batches, BatchLimits, BusyError
from oncebox.bulk import Receipt
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

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def begin(self) -> Committed:
        return Committed(self)


async def nothing(_transactional_id: str, _since_ms: int) -> AsyncIterator[manifest_pb2.Manifest]:
    for manifest in list[manifest_pb2.Manifest]():
        yield manifest


def batches(clock: Clock, **limits: int) -> tuple[Batches, Quick]:
    producer = Quick(clock)
    stated = {"window_ms": WINDOW_MS, "requests_remembered": 100, "ids": 2, "waiting_bytes": 1_000, "idle_ms": 60_000}
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
    await mine.close()


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
    await mine.close()


async def test_the_oldest_of_too_many_is_forgotten_first():
    mine, producer = batches(Clock(), requests_remembered=3)
    for name in "abcd":
        await mine.commit(request(name))
    for name in "dcb":
        assert (await mine.commit(request(name))).repeated
    assert not (await mine.commit(request("a"))).repeated
    assert len(producer.commits) == 5
    await mine.close()


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
    await mine.close()
