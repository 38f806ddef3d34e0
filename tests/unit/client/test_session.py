"""The client's line to the coordinators, on real gRPC: what is asked together, again, elsewhere, and what is not."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from oncebox import session as module
from oncebox.errors import (
    CoordinatorNotAvailableError,
    InvalidTransactionTimeoutError,
    MessageTooLargeError,
    RequestTimedOutError,
    UsageError,
)
from oncebox.session import Line, Request, Session, open_plain_channel, shared_session
from oncebox.v1 import coordinator_pb2 as pb
from oncebox.v1 import coordinator_pb2_grpc, transaction_pb2

MESSAGE_BYTES_MAX = 4 * 1024 * 1024
GRANT = transaction_pb2.Grant(number=7, producer_id=1)


class Coordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """Says who leads and answers heartbeats as it is told."""

    def __init__(self) -> None:
        self.address = ""
        self.leader = ""
        self.asked: list[str] = []
        self.streams = 0
        self.messages: list[int] = []
        # What it answers, one after another; then the grant.
        self.refusals: list[transaction_pb2.Error] = []
        self.broken_streams = 0
        self.hangs = False
        self.push: Callable[[pb.SessionResponse], Any]

    async def FindCoordinator(self, _request: Any, _context: Any) -> pb.FindCoordinatorResponse:  # noqa: N802 - gRPC
        return pb.FindCoordinatorResponse(address=self.leader)

    async def Session(self, requests: AsyncIterator[pb.SessionRequests], context: Any) -> None:  # type: ignore[override] # noqa: N802
        self.streams += 1
        turn = asyncio.Lock()  # gRPC takes one message at a time

        async def write(responses: list[pb.SessionResponse]) -> None:
            async with turn:
                await context.write(pb.SessionResponses(responses=responses))

        self.push = lambda response: write([response])
        async for message in requests:
            self.messages.append(message.ByteSize())
            for request in message.requests:
                self.asked.append(
                    (request.heartbeat if request.HasField("heartbeat") else request.end).transactional_id
                )
            if self.broken_streams:
                self.broken_streams -= 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "moving")
            if not self.hangs:
                await write([self._answer(each) for each in message.requests])

    def _answer(self, request: pb.SessionRequest) -> pb.SessionResponse:
        if self.refusals:
            return pb.SessionResponse(request_id=request.request_id, error=self.refusals.pop(0))
        if request.HasField("end"):
            return pb.SessionResponse(request_id=request.request_id, end=pb.EndResponse())
        return pb.SessionResponse(request_id=request.request_id, heartbeat=pb.HeartbeatResponse(grant=GRANT))


@pytest.fixture
async def coordinators() -> AsyncIterator[list[Coordinator]]:
    """Two, of which the first leads."""
    async with AsyncExitStack() as leaving:
        both = [Coordinator(), Coordinator()]  # type: ignore[abstract] # it needs no more
        for one in both:
            server = grpc.aio.server(options=[("grpc.max_receive_message_length", MESSAGE_BYTES_MAX)])
            coordinator_pb2_grpc.add_CoordinatorServicer_to_server(one, server)
            one.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            leaving.push_async_callback(server.stop, None)
        for one in both:
            one.leader = both[0].address
        yield both


@pytest.fixture
async def session(coordinators: list[Coordinator]) -> AsyncIterator[Session]:
    session = Session([one.address for one in coordinators])
    yield session
    await session.close()


def beat(transactional_id: str = "teller") -> pb.Heartbeat:
    return pb.Heartbeat(transactional_id=transactional_id, grant=GRANT)


async def ask(session: Session, transactional_id: str = "teller", *, timeout_s: float = 20.0) -> None:
    answer = await session.call(transactional_id, "heartbeat", beat(transactional_id), timeout_s=timeout_s)
    assert answer.grant == GRANT


def refusal(code: "transaction_pb2.ErrorCode", **fields: Any) -> transaction_pb2.Error:
    return transaction_pb2.Error(code=code, message="as told", **fields)


async def test_what_is_asked_at_the_same_time_travels_together(session: Session, coordinators: list[Coordinator]):
    await ask(session)
    await asyncio.gather(*(ask(session) for _ in range(100)))
    assert coordinators[0].streams == 1
    assert len(coordinators[0].asked) == 101
    assert len(coordinators[0].messages) < 10
    assert not coordinators[1].streams


async def test_messages_stay_below_the_coordinators_limit(session: Session, coordinators: list[Coordinator]):
    """Were they all in one, the coordinator would end the stream, again and again."""
    await ask(session)
    contents = pb.Contents(metadata=b"x" * 1024 * 1024)
    end = pb.EndRequest(transactional_id="teller", grant=GRANT, contents=contents)
    await asyncio.gather(*(session.call("teller", "end", end, timeout_s=20) for _ in range(9)))
    assert coordinators[0].streams == 1
    assert coordinators[0].asked == ["teller"] * 10


async def test_a_request_that_no_coordinator_would_read_is_not_sent(session: Session, coordinators: list[Coordinator]):
    await ask(session)
    contents = pb.Contents(metadata=b"x" * MESSAGE_BYTES_MAX)
    end = pb.EndRequest(transactional_id="teller", grant=GRANT, contents=contents)
    with pytest.raises(MessageTooLargeError, match="nothing was sent") as caught:
        await session.call("teller", "end", end, timeout_s=20)
    assert (caught.value.transactional_id, caught.value.number) == ("teller", 7)
    await ask(session)
    assert coordinators[0].streams == 1
    assert coordinators[0].asked == ["teller"] * 2


async def test_it_asks_again_while_that_can_help(session: Session, coordinators: list[Coordinator]):
    loading = refusal(transaction_pb2.COORDINATOR_LOAD_IN_PROGRESS, retriable=True)
    coordinators[0].refusals = [loading, loading]
    await ask(session)
    assert coordinators[0].asked == ["teller"] * 3


async def test_a_refusal_that_stays_is_told_at_once(session: Session, coordinators: list[Coordinator]):
    coordinators[0].refusals = [refusal(transaction_pb2.INVALID_TRANSACTION_TIMEOUT)]
    with pytest.raises(InvalidTransactionTimeoutError, match="as told"):
        await ask(session)
    assert coordinators[0].asked == ["teller"]


@pytest.mark.parametrize("names_the_leader", [True, False])
async def test_it_follows_the_leader(session: Session, coordinators: list[Coordinator], names_the_leader: bool):
    old, new = coordinators
    await ask(session)
    for one in coordinators:
        one.leader = new.address
    leader = new.address if names_the_leader else ""
    old.refusals = [refusal(transaction_pb2.NOT_COORDINATOR, retriable=True, leader_address=leader)]
    await ask(session)
    await ask(session)
    assert (len(old.asked), len(new.asked)) == (2, 2)


async def test_a_broken_stream_is_opened_again(session: Session, coordinators: list[Coordinator]):
    coordinators[0].broken_streams = 2
    await ask(session)
    assert coordinators[0].streams == 3


async def test_what_is_asked_on_a_line_that_is_closed_at_once_is_not_waited_for(coordinators: list[Coordinator]):
    """By a call that failed: before the line has begun to read."""
    line = Line(open_plain_channel(coordinators[0].address), lambda _: None)
    asking = line.ask("a", Request(), 30).__await__()
    answer = next(asking)
    await line.close()
    assert answer.done()
    with pytest.raises(module._LostError):
        answer.result()
    asking.close()
    with pytest.raises(module._LostError):
        await line.ask("a", Request(), 30)


async def test_a_line_that_others_have_opened_meanwhile_stays(session: Session, coordinators: list[Coordinator]):
    failed = session._line(coordinators[0].address)
    await failed.close()
    session._leaders["a"] = coordinators[0].address
    fresh = session._line(coordinators[0].address)
    await session._forget("a", failed)
    assert fresh.is_open
    assert session._line(coordinators[0].address) is fresh
    assert "a" not in session._leaders


async def test_the_last_refusal_is_told_at_the_deadline(session: Session, coordinators: list[Coordinator]):
    await ask(session)  # so that the line is there
    coordinators[0].refusals = [refusal(transaction_pb2.REQUEST_TIMED_OUT, retriable=True)] * 1_000
    with pytest.raises(RequestTimedOutError, match="as told"):
        await ask(session, timeout_s=2)


async def test_nobody_there():
    session = Session(["127.0.0.1:1", "127.0.0.1:2"])
    with pytest.raises(CoordinatorNotAvailableError, match=r"127\.0\.0\.1:1, 127\.0\.0\.1:2"):
        await ask(session, timeout_s=0.3)
    await session.close()


async def test_one_that_hangs_is_left_when_another_leads(
    session: Session, coordinators: list[Coordinator], monkeypatch: pytest.MonkeyPatch
):
    """It breaks no connection, so only an answer that is overdue tells."""
    monkeypatch.setattr(module, "OVERDUE_S", 0.2)
    old, new = coordinators
    await ask(session)
    old.hangs = True
    new.leader = new.address
    await ask(session)
    assert set(new.asked) == {"teller"}  # more than once where it takes its time, too


async def test_one_that_hangs_is_left_also_where_others_cannot_be_asked_for_a_moment(
    coordinators: list[Coordinator], monkeypatch: pytest.MonkeyPatch
):
    """Such as while a certificate's file is replaced."""
    monkeypatch.setattr(module, "OVERDUE_S", 0.2)
    old, new = coordinators
    troubles = 0

    def open_channel(address: str) -> grpc.aio.Channel:
        nonlocal troubles
        if old.hangs and troubles < 2:
            troubles += 1
            raise UsageError("ca.pem: No such file or directory")
        return open_plain_channel(address)

    session = Session([one.address for one in coordinators], open_channel=open_channel)
    await ask(session)
    old.hangs = True
    new.leader = new.address
    await ask(session)
    assert (set(new.asked), troubles) == ({"teller"}, 2)
    await session.close()


async def test_one_that_is_only_slow_is_waited_for(
    session: Session, coordinators: list[Coordinator], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "OVERDUE_S", 0.1)
    slow, other = coordinators
    slow.hangs = True
    asking = asyncio.create_task(ask(session))
    async with asyncio.timeout(20):
        while not slow.asked:  # noqa: ASYNC110 - the other side writes it
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)  # overdue by far, and the other has said who leads
    await slow.push(pb.SessionResponse(request_id=1, heartbeat=pb.HeartbeatResponse(grant=GRANT)))
    await asking
    assert slow.asked == ["teller"]
    assert not other.asked


async def test_all_of_a_process_share_a_line_until_the_last_has_left(coordinators: list[Coordinator]):
    addresses = [one.address for one in coordinators]
    async with shared_session(addresses, open_plain_channel) as first:
        async with shared_session(addresses, open_plain_channel) as second:
            assert first is second
            await asyncio.gather(ask(first, "a"), ask(second, "b"))
        await ask(first, "a")
        assert coordinators[0].streams == 1
    async with shared_session(addresses, open_plain_channel) as another:
        assert another is not first
        await ask(another)
    assert coordinators[0].streams == 2


async def test_who_is_fenced_is_told_and_nobody_else(session: Session, coordinators: list[Coordinator]):
    await ask(session)
    told: dict[str, list[str]] = {"mine": [], "other": []}
    leave = session.listen("mine", lambda error: told["mine"].append(error.message))
    session.listen("other", lambda error: told["other"].append(error.message))
    fenced = refusal(transaction_pb2.PRODUCER_FENCED, transactional_id="mine")
    await coordinators[0].push(pb.SessionResponse(fenced=fenced))
    await ask(session)
    assert told == {"mine": ["as told"], "other": []}
    leave()
    await coordinators[0].push(pb.SessionResponse(fenced=fenced))
    await ask(session)
    assert told == {"mine": ["as told"], "other": []}


async def test_nothing_is_kept_of_an_id_that_nobody_uses_any_more(session: Session):
    first = session.listen("teller", lambda _: None)
    second = session.listen("teller", lambda _: None)
    await ask(session)
    first()
    assert session._leaders.keys() == {"teller"}
    second()
    second()
    assert (session._leaders, session._listeners) == ({}, {})
