"""The transform loop's own bookkeeping, on a source and a producer in memory: what is due, poison, going back."""

import asyncio
from collections import Counter
from random import Random
from typing import Any, Self

import pytest

from oncebox import transform_loop
from oncebox.errors import (
    DeliveryError,
    GroupFencedError,
    OffsetsRefusedError,
    OnceboxError,
    PoisonRecordError,
    TransactionTimedOutError,
    UsageError,
    error_from,
    refused_by_broker,
)
from oncebox.producer import ProducerSettings
from oncebox.reader.types import Record
from oncebox.transform_loop import TransformSettings, _Loop
from oncebox.v1 import transaction_pb2
from oncebox.wire import TopicPartition
from tests.unit.markers.brokers import run

PARTITIONS = (0, 1)


class World:
    """What has been committed: records, and the group's offsets with them."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.committed: dict[TopicPartition, int] = {}
        self.sizes: list[int] = []
        # How long a transaction may last, and how many commits time out whatever they hold.
        self.timeout_s = 60.0
        self.slow_commits = 0
        # Raised by the next commits with offsets, one after another.
        self.troubles: list[OnceboxError] = []


class Sending:
    def __init__(self, world: World) -> None:
        self.is_open = True
        self._begun_at = asyncio.get_running_loop().time()
        self._world = world
        self._sent: list[bytes] = []
        self._offsets: dict[TopicPartition, int] = {}

    async def send(self, _topic: str, value: bytes) -> None:
        self._sent.append(value)

    async def send_offsets(self, offsets: dict[TopicPartition, int], _member: bytes) -> None:
        if self._world.troubles:
            raise self._world.troubles.pop(0)
        self._offsets = dict(offsets)

    async def commit(self, wait: str = "") -> None:
        del wait
        self.is_open = False
        is_slow = bool(self._offsets) and self._world.slow_commits > 0
        self._world.slow_commits -= is_slow
        if is_slow or asyncio.get_running_loop().time() > self._begun_at + self._world.timeout_s:
            outcome = transaction_pb2.Outcome(result=transaction_pb2.ABORTED, cause=transaction_pb2.TIMEOUT)
            raise error_from(transaction_pb2.Error(code=transaction_pb2.INVALID_TXN_STATE, outcome=outcome))
        self._world.seen += self._sent
        self._world.committed |= self._offsets
        self._world.sizes.append(len(self._sent))

    async def abort(self) -> None:
        self.is_open = False


class Sender:
    def __init__(self, world: World) -> None:
        self._world = world

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def begin(self) -> Sending:
        return Sending(self._world)


class Source:
    def __init__(self, world: World, count: int) -> None:
        self._world = world
        self._count = count
        self._positions = dict.fromkeys(PARTITIONS, 0)

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def gather(self, count: int, _timeout_s: float) -> tuple[list[Record], bytes]:
        await asyncio.sleep(0)
        records = []
        for partition in PARTITIONS:
            first = self._positions[partition]
            after = min(first + count // 2 + 1, self._count)
            records += [Record("t", partition, n, 0, None, b"%d/%d" % (partition, n), ()) for n in range(first, after)]
            self._positions[partition] = after
        return records, b"member"

    async def rewind(self, firsts: dict[TopicPartition, int]) -> None:
        for where, first in firsts.items():
            self._positions[where.partition] = self._world.committed.get(where, first)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transform_loop, "RETRY_FIRST_S", 0.0)
    monkeypatch.setattr(transform_loop, "RETRY_MAX_S", 0.0)


@pytest.mark.parametrize("seed", range(10))
async def test_each_record_once_whatever_fails(seed: int):
    random, world, stop = Random(seed), World(), asyncio.Event()
    failed: set[bytes] = set()

    async def handle(record: Record, transaction: Any) -> None:
        value = record.value or b""
        await transaction.send("target", value)
        if value == b"0/77":
            raise ValueError("poison")
        if random.random() < 0.01 and value not in failed:
            failed.add(value)
            raise ConnectionError

    settings = TransformSettings(transaction_ms=5, transaction_records=40, poison="skip")
    loop: Any = _Loop(handle, stop, settings)
    running = asyncio.create_task(loop.run(Sender(world), Source(world, 500)))
    async with asyncio.timeout(30):
        while len(world.seen) < 999:  # noqa: ASYNC110 - the loop makes it grow
            await asyncio.sleep(0.001)
        stop.set()
        await running
    for partition in PARTITIONS:
        mine = [int(value.split(b"/")[1]) for value in world.seen if value.startswith(b"%d/" % partition)]
        assert mine == [n for n in range(500) if (partition, n) != (0, 77)]
    assert max(world.sizes) <= 40
    assert world.committed == {("t", 0): 500, ("t", 1): 500}


def test_a_record_that_never_fits_into_a_transaction_stops_the_loop_by_name():
    """Whatever is done with poison: it would be read again for ever, and leaving it out is not ours to say. In a time
    that passes only while the handler sleeps: no other record is slow.
    """
    world = World()
    world.timeout_s = 0.2

    async def handle(record: Record, transaction: Any) -> None:
        if record.value == b"0/77":
            await asyncio.sleep(0.3)
        await transaction.send("target", record.value)

    producer = ProducerSettings(transaction_timeout_ms=200)
    settings = TransformSettings(transaction_ms=5, transaction_records=40, poison="skip", producer=producer)

    async def work() -> None:
        loop: Any = _Loop(handle, asyncio.Event(), settings)
        await asyncio.wait_for(loop.run(Sender(world), Source(world, 100)), 60)

    with pytest.raises(
        PoisonRecordError, match=r"t:0 offset 77 takes longer .* producer.transaction_timeout_ms"
    ) as caught:
        run(work())
    assert isinstance(caught.value.__cause__, TransactionTimedOutError)
    assert b"0/20" in world.seen
    assert b"0/77" not in world.seen


async def test_commits_that_are_slow_are_tried_until_they_are_not():
    """The brokers are slow, no record is."""
    world, stop = World(), asyncio.Event()
    world.slow_commits = 10

    async def handle(record: Record, transaction: Any) -> None:
        await transaction.send("target", record.value)

    loop: Any = _Loop(handle, stop, TransformSettings(transaction_ms=5, attempts=2))
    running = asyncio.create_task(loop.run(Sender(world), Source(world, 50)))
    async with asyncio.timeout(30):
        while len(world.seen) < 100:  # noqa: ASYNC110 - the loop makes it grow
            await asyncio.sleep(0.001)
        stop.set()
        await running
    assert sorted(world.seen) == sorted(b"%d/%d" % (partition, n) for partition in PARTITIONS for n in range(50))


async def test_it_stops_also_while_no_coordinator_answers():
    """What could not be committed is aborted by its timeout, and read again by whoever starts next."""
    world, stop = World(), asyncio.Event()
    away = refused(transaction_pb2.COORDINATOR_NOT_AVAILABLE)

    class Away(Sending):
        async def commit(self, wait: str = "") -> None:
            del wait
            raise away

        async def abort(self) -> None:
            raise away

    class Leaving(Sender):
        begun = 0

        async def begin(self) -> Sending:
            self.begun += 1
            if self.begun > 1:
                raise away
            return Away(self._world)

    async def handle(record: Record, transaction: Any) -> None:
        await copy(record, transaction)
        stop.set()

    loop: Any = _Loop(handle, stop, TransformSettings(transaction_ms=60_000))
    async with asyncio.timeout(10):
        await loop.run(Leaving(world), Source(world, 50))
    assert world.seen == []


class Unhurried(Sending):
    """Offsets are not taken before the gate is open."""

    gate: asyncio.Event
    halves: list[Counter[int]]

    async def send_offsets(self, offsets: dict[TopicPartition, int], member: bytes) -> None:
        await self.gate.wait()
        await super().send_offsets(offsets, member)

    async def commit(self, wait: str = "") -> None:
        sent = Counter(int(value.split(b"/")[0]) for value in [*self._world.seen, *self._sent])
        told = {where.partition: offset for where, offset in {**self._world.committed, **self._offsets}.items()}
        if sent != told:
            self.halves.append(sent)
        await super().commit(wait)


async def test_nothing_is_added_to_what_is_committed_for_partitions_that_go(monkeypatch: pytest.MonkeyPatch):
    """Though that takes longer than the consumer waits for it: it would be committed without its offset."""
    monkeypatch.setattr(transform_loop, "REVOKE_TIMEOUT_S", 0.01)
    world, stop, gate, gathered = World(), asyncio.Event(), asyncio.Event(), asyncio.Event()
    Unhurried.gate, Unhurried.halves = gate, []

    class Moving(Source):
        gathers = 0

        async def gather(self, _count: int, _timeout_s: float) -> tuple[list[Record], bytes]:
            self.gathers += 1
            if self.gathers == 1:
                return [Record("t", partition, 0, 0, None, b"%d/0" % partition, ()) for partition in PARTITIONS], b"1"
            if self.gathers == 2:
                await asyncio.to_thread(loop.revoked, frozenset({TopicPartition("t", 0)}), False, b"2")
                gathered.set()
                return [Record("t", 1, 1, 0, None, b"1/1", ())], b"3"
            await gate.wait()
            stop.set()
            return [], b"3"

    class Beginning(Sender):
        async def begin(self) -> Sending:
            return Unhurried(self._world)

    loop: Any = _Loop(copy, stop, TransformSettings(transaction_ms=60_000))
    running = asyncio.create_task(loop.run(Beginning(world), Moving(world, 2)))
    async with asyncio.timeout(30):
        await gathered.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        gate.set()
        await running
    assert world.sizes == [2, 1]
    assert Unhurried.halves == []


def refused(code: "transaction_pb2.ErrorCode") -> OnceboxError:
    return error_from(transaction_pb2.Error(code=code))


@pytest.mark.parametrize(
    "error",
    [
        refused_by_broker("no", "TOPIC_AUTHORIZATION_FAILED"),
        OffsetsRefusedError("no", "GROUP_AUTHORIZATION_FAILED"),
        refused(transaction_pb2.TOPIC_AUTHORIZATION_FAILED),
        refused(transaction_pb2.GROUP_AUTHORIZATION_FAILED),
        refused(transaction_pb2.INVALID_TOPIC_EXCEPTION),
        refused(transaction_pb2.UNKNOWN_TOPIC_OR_PARTITION),
        refused(transaction_pb2.MESSAGE_TOO_LARGE),
        refused(transaction_pb2.INVALID_REQUEST),
    ],
)
async def test_what_is_refused_again_and_again_stops_the_loop(error: OnceboxError):
    world = World()
    world.troubles = [error] * 100
    loop: Any = _Loop(copy, asyncio.Event(), TransformSettings(transaction_ms=5, attempts=3))
    with pytest.raises(type(error)) as caught:
        async with asyncio.timeout(30):
            await loop.run(Sender(world), Source(world, 50))
    assert caught.value is error
    assert len(world.troubles) == 97


@pytest.mark.parametrize(
    "error",
    [
        GroupFencedError("no", "ILLEGAL_GENERATION"),
        OffsetsRefusedError("no answer"),
        DeliveryError("no answer"),
        refused(transaction_pb2.TRANSACTION_ABORTABLE),
        refused(transaction_pb2.REQUEST_TIMED_OUT),
    ],
)
async def test_what_may_pass_is_tried_until_it_has(error: OnceboxError):
    world, stop = World(), asyncio.Event()
    world.troubles = [error] * 10
    loop: Any = _Loop(copy, stop, TransformSettings(transaction_ms=5, attempts=3))
    running = asyncio.create_task(loop.run(Sender(world), Source(world, 50)))
    async with asyncio.timeout(30):
        while len(world.seen) < 100:  # noqa: ASYNC110 - the loop makes it grow
            await asyncio.sleep(0.001)
        stop.set()
        await running
    assert not world.troubles


async def copy(record: Record, transaction: Any) -> None:
    await transaction.send("target", record.value)


def test_the_timeout_follows_the_length_of_the_transactions():
    assert TransformSettings(transaction_ms=30_000).producer_settings.transaction_timeout_ms == 40_000
    with pytest.raises(UsageError, match="raise that, or set"):
        TransformSettings(transaction_ms=30_000, producer=ProducerSettings(transaction_timeout_ms=10_000))
    extended = ProducerSettings(transaction_timeout_ms=10_000, extend_transactions=True)
    assert TransformSettings(transaction_ms=30_000, producer=extended).producer_settings is extended
