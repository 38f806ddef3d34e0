"""A Transact stream and what outlives it: what was carried out, what was refused, and that nothing is left behind."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from coordinator.api.auth import set_current
from coordinator.gateway.holders import REFUSED_MAX, Holders
from coordinator.gateway.stream import TransactStream
from oncebox.bulk import Outgoing, Receipt
from oncebox.errors import UnknownTopicError, error_from
from oncebox.transaction import State
from oncebox.v1 import gateway_pb2 as pb
from oncebox.v1 import transaction_pb2

GRACE_MS = 60_000
IN_DOUBT = transaction_pb2.Error(code=transaction_pb2.REQUEST_TIMED_OUT, message="no answer in time", retriable=True)


class Transacting:
    """Stands in for Transaction: remembers what it was given."""

    buffered_bytes = 0

    def __init__(self, producer: "Producing", number: int) -> None:
        self.number = number
        self.state = State.OPEN
        self.sent: list[str] = []
        self._producer = producer

    @property
    def is_open(self) -> bool:
        return self.state is State.OPEN

    is_unprepared = is_open

    async def send_many(self, records: Sequence[Outgoing], *, wait_for_room: bool) -> Receipt:
        del wait_for_room
        await self._producer.gate.wait()
        if any(record.topic == "nowhere" for record in records):
            raise UnknownTopicError("nowhere")
        self.sent += [record.topic for record in records]
        nobody: Any = None
        return Receipt(nobody, [], {})

    async def commit(self, *, metadata: bytes, wait: str) -> transaction_pb2.Outcome:
        del metadata, wait
        await self._producer.gate.wait()
        self.state = State.IN_DOUBT
        if self._producer.doubts:
            self._producer.doubts -= 1
            raise error_from(IN_DOUBT)
        self.state = State.ENDED
        self._producer.committed.append(self.number)
        return transaction_pb2.Outcome(number=self.number, result=transaction_pb2.COMMITTED)


class Producing:
    """Stands in for Producer."""

    prepared = None
    next_number = 1
    resume_token = b""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_running = False
        self.stopped = asyncio.Event()
        self.doubts = 0
        self.committed: list[int] = []

    async def start(self) -> None:
        await self.gate.wait()
        self.is_running = True

    async def stop(self) -> None:
        self.is_running = False
        self.stopped.set()

    async def begin(self) -> Transacting:
        return Transacting(self, 7)

    async def outcome_of(self, number: int) -> transaction_pb2.Outcome:
        return transaction_pb2.Outcome(number=number, result=transaction_pb2.ABORTED)


class World:
    """A gateway with as many producers as it may hold, made one after another."""

    def __init__(self, holders_max: int = 2) -> None:
        self.producers: list[Producing] = []
        made: Any = self._make
        self.holders = Holders(made, holders_max)
        # Of the producers to come.
        self.gate_is_open = True

    def _make(self, _request: pb.Open, _address: str) -> Producing:
        producer = Producing()
        if not self.gate_is_open:
            producer.gate.clear()
        self.producers.append(producer)
        return producer


class Caller:
    """A stream's client, in the place of gRPC's context. What is not in hand is waited for."""

    def __init__(self, world: World) -> None:
        admitted: Any = SimpleNamespace(access=SimpleNamespace(refusal=lambda *_: None), is_expired=False)
        self.admitted = admitted
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._answers: asyncio.Queue[pb.TransactResponse] = asyncio.Queue()
        self._ids = 0
        set_current(admitted)
        self.stream = TransactStream(self, "here:1", world.holders, window_bytes=1_000, grace_max_ms=GRACE_MS)
        self.running = asyncio.create_task(self.stream.run())

    async def read(self) -> Any:
        return await self._requests.get()

    async def write(self, answer: pb.TransactResponse) -> None:
        self._answers.put_nowait(answer)

    def put(self, **request: Any) -> int:
        self._ids += 1
        self._requests.put_nowait(pb.TransactRequest(request_id=self._ids, **request))
        return self._ids

    async def ask(self, **request: Any) -> Any:
        request_id = self.put(**request)
        async with asyncio.timeout(60):
            answer = await self._answers.get()
        assert answer.request_id == request_id
        return getattr(answer, answer.WhichOneof("response") or "")

    async def open(self, **fields: Any) -> pb.Opened:
        opened: pb.Opened = await self.ask(open=pb.Open(transactional_id="t", grace_ms=GRACE_MS, **fields))
        return opened

    async def send(self, topic: str = "here") -> Any:
        return await self.ask(send=pb.Send(records=[pb.Record(topic=topic)]))

    async def lose(self) -> None:
        """As gRPC does when the connection breaks."""
        self.running.cancel()
        await asyncio.wait([self.running])

    def close(self) -> None:
        self._requests.put_nowait(grpc.aio.EOF)


@asynccontextmanager
async def calling(world: World) -> AsyncIterator[Caller]:
    caller = Caller(world)
    try:
        yield caller
    finally:
        await caller.lose()


async def settled() -> None:
    """What is ready to run has run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_who_resumes_is_told_what_was_refused_before_the_last_that_was_carried_out():
    world = World()
    async with calling(world) as first:
        await first.open()
        await first.ask(begin=pb.Begin())
        refused = first._ids + 1
        for topic in ("nowhere", "here", "nowhere"):
            await first.send(topic)
    for _ in range(2):  # also if the first to resume is lost before it has read that
        async with calling(world) as again:
            opened = await again.open(resume_number=7)
            assert (opened.resumed, opened.last_request_id) == (True, refused + 1)
            assert [found.request_id for found in opened.refused] == [refused]
            assert opened.refused[0].error.code == transaction_pb2.UNKNOWN_TOPIC_OR_PARTITION
    async with calling(world) as third:
        await third.open(resume_number=7)
        await third.send("nowhere")
        await third.send()
    async with calling(world) as last:
        opened = await last.open(resume_number=7)
        assert (opened.last_request_id, [found.request_id for found in opened.refused]) == (3, [2])
        await last.ask(commit=pb.Commit())
    assert world.producers[0].committed == [7]


async def test_refusals_of_a_transaction_that_has_ended_are_not_told_of_the_next():
    world = World()
    async with calling(world) as first:
        await first.open()
        await first.ask(begin=pb.Begin())
        await first.send("nowhere")
        await first.ask(commit=pb.Commit())
        await first.ask(begin=pb.Begin())
        await first.send()
    async with calling(world) as again:
        assert not (await again.open(resume_number=7)).refused


async def test_after_more_refusals_than_are_kept_nobody_resumes():
    world = World()
    async with calling(world) as first:
        await first.open()
        await first.ask(begin=pb.Begin())
        for _ in range(REFUSED_MAX + 1):
            await first.send("nowhere")
        await first.send()
    async with calling(world) as again:
        opened = await again.open(resume_number=7)
        assert not opened.resumed
        assert opened.outcome.result == transaction_pb2.ABORTED
        async with asyncio.timeout(60):
            await world.producers[0].stopped.wait()


async def test_a_stream_that_is_lost_while_it_opens_leaves_nothing_behind():
    world = World(holders_max=1)
    world.gate_is_open = False
    async with calling(world) as lost:
        lost.put(open=pb.Open(transactional_id="t"))
        await settled()
    world.producers[0].gate.set()
    async with asyncio.timeout(60):
        await world.producers[0].stopped.wait()
    world.gate_is_open = True
    async with calling(world) as next_one:
        assert isinstance(await next_one.ask(open=pb.Open(transactional_id="u")), pb.Opened)


async def test_a_commit_under_way_when_the_stream_is_lost_is_carried_out():
    world = World()
    async with calling(world) as lost:
        await lost.open()
        await lost.ask(begin=pb.Begin())
        world.producers[0].gate.clear()
        lost.put(commit=pb.Commit())
        await settled()
    assert world.producers[0].committed == []
    assert world.producers[0].is_running
    world.producers[0].gate.set()
    async with asyncio.timeout(60):
        await world.producers[0].stopped.wait()
    assert world.producers[0].committed == [7]


async def test_what_is_resumed_while_the_lost_streams_last_request_is_under_way_has_no_grace_left_to_end():
    world = World()
    async with calling(world) as lost:
        await lost.open()
        await lost.ask(begin=pb.Begin())
        world.producers[0].gate.clear()
        lost.put(send=pb.Send(records=[pb.Record(topic="here")]))
        await settled()
    async with calling(world) as again:
        opening = asyncio.create_task(again.open(resume_number=7))
        await settled()
        world.producers[0].gate.set()
        opened = await opening
        assert (opened.resumed, opened.last_request_id) == (True, 3)
        assert world.holders._held["t"].waiting is None


@pytest.mark.parametrize("rounds", range(8))
async def test_what_reaches_the_former_stream_while_another_resumes_is_carried_out_once(rounds: int):
    world = World()
    async with calling(world) as former, calling(world) as again:
        await former.open()
        await former.ask(begin=pb.Begin())
        await former.send("first")
        gate = world.producers[0].gate
        opening = asyncio.create_task(again.open(resume_number=7))
        for _ in range(rounds):
            await asyncio.sleep(0)
        # Not carried out in one go, as where metadata is asked for.
        gate.clear()
        late = former.put(send=pb.Send(records=[pb.Record(topic="second")]))
        await settled()
        gate.set()
        opened = await opening
        if opened.last_request_id < late:
            await again.send("second")
        await settled()
        transaction: Any = world.holders._held["t"].transaction
        assert transaction.sent == ["first", "second"]


async def test_who_comes_to_resume_what_is_just_being_committed_leaves_no_producer_behind():
    world = World(holders_max=1)
    async with calling(world) as former:
        await former.open()
        await former.ask(begin=pb.Begin())
        world.producers[0].gate.clear()
        former.put(commit=pb.Commit())
        await settled()
        async with calling(world) as again:
            opening = asyncio.create_task(again.open(resume_number=7))
            await settled()
            world.gate_is_open = False
            world.producers[0].gate.set()
            async with asyncio.timeout(60):
                await world.producers[0].stopped.wait()
            opening.cancel()
    assert world.producers[0].committed == [7]
    assert world.holders._held == {}


async def test_a_commit_in_doubt_is_asked_for_again():
    world = World()
    async with calling(world) as mine:
        await mine.open()
        await mine.ask(begin=pb.Begin())
        world.producers[0].doubts = 1
        doubt = await mine.ask(commit=pb.Commit())
        assert (doubt.code, doubt.retriable) == (transaction_pb2.REQUEST_TIMED_OUT, True)
        assert "again" in (await mine.send()).message
        assert (await mine.ask(commit=pb.Commit())).result == transaction_pb2.COMMITTED
        assert "Begin first" in (await mine.ask(commit=pb.Commit())).message
    assert world.producers[0].committed == [7]


async def test_a_stream_that_ends_with_its_token_is_resumed_with_the_next():
    world = World()
    async with calling(world) as first:
        await first.open()
        await first.ask(begin=pb.Begin())
        first.admitted.is_expired = True
        first.put(send=pb.Send(records=[pb.Record(topic="here")]))
        async with asyncio.timeout(60):
            await first.running
        assert first.stream.is_expired
    async with calling(world) as again:
        opened = await again.open(resume_number=7)
        assert (opened.resumed, opened.last_request_id) == (True, 2)


async def test_a_stream_that_is_closed_in_good_order_leaves_nothing_to_resume():
    world = World()
    async with calling(world) as first:
        await first.open()
        await first.ask(begin=pb.Begin())
        first.close()
        async with asyncio.timeout(60):
            await first.running
            await world.producers[0].stopped.wait()


async def test_streams_whose_id_others_have_opened_anew_are_bounded_too():
    """Each still holds a producer, until it is told that it is fenced and ends."""
    world = World(holders_max=2)
    async with AsyncExitStack() as streams:
        callers = [await streams.enter_async_context(calling(world)) for _ in range(4)]
        for caller in callers[:3]:
            assert isinstance(await caller.open(), pb.Opened)
        refused: Any = await callers[3].open()
        assert isinstance(refused, transaction_pb2.Error)
        assert refused.code == transaction_pb2.THROTTLING_QUOTA_EXCEEDED
        callers[0].close()
        async with asyncio.timeout(10):
            await world.producers[0].stopped.wait()
        await settled()
        assert isinstance(await callers[3].open(), pb.Opened)
        assert [producer.is_running for producer in world.producers] == [False, True, True, True]


async def test_an_end_does_not_wait_for_a_request_that_hangs():
    world = World()
    async with calling(world) as caller:
        await caller.open()
        await caller.ask(begin=pb.Begin())
        world.producers[0].gate.clear()
        caller.put(commit=pb.Commit())
        while caller.stream._current is None or caller.stream._current.done():  # noqa: ASYNC110 - rounds of the loop
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await world.holders.close(within_s=0.05)
        world.producers[0].gate.set()
