"""One stream, many calls at once: answers as they are ready, fencing as it happens, an end that ends nothing else."""

import asyncio
from typing import Any

import grpc
import pytest

from coordinator.api import session as session_module
from oncebox.v1 import coordinator_pb2 as pb
from oncebox.v1 import transaction_pb2
from tests.unit.api.bench import Bench, abort, commit, eventually, on, refused_by, written


def init(transactional_id: str = "tid", **fields: Any) -> pb.InitProducerRequest:
    return pb.InitProducerRequest(transactional_id=transactional_id, transaction_timeout_ms=60_000, **fields)


class Client:
    def __init__(self, bench: Bench) -> None:
        self.stream = bench.coordinator.Session()
        self.sent = 0
        self.received: list[pb.SessionResponse] = []

    async def send(self, **request: Any) -> int:
        self.sent += 1
        await self.stream.write(pb.SessionRequests(requests=[pb.SessionRequest(request_id=self.sent, **request)]))
        return self.sent

    async def receive(self) -> pb.SessionResponse:
        if not self.received:
            async with asyncio.timeout(60):
                message = await self.stream.read()
            assert message is not grpc.aio.EOF, await self.stream.details()
            assert isinstance(message, pb.SessionResponses)
            self.received.extend(message.responses)
        return self.received.pop(0)

    async def ask(self, **request: Any) -> pb.SessionResponse:
        request_id = await self.send(**request)
        response = await self.receive()
        assert response.request_id == request_id
        return response


@pytest.fixture
async def client(bench: Bench):
    client = Client(bench)
    yield client
    client.stream.cancel()


async def test_the_same_calls_as_unary(client: Client):
    granted = await client.ask(init_producer=init())
    grant = granted.init_producer.grant
    add = pb.AddPartitionsRequest(transactional_id="tid", grant=grant, partitions=[on("orders", 0)])
    assert (await client.ask(add_partitions=add)).add_partitions.grant == grant
    groups = pb.AddOffsetsRequest(transactional_id="tid", grant=grant, group_ids=["g"])
    assert (await client.ask(add_offsets=groups)).add_offsets.grant == grant
    beat = pb.Heartbeat(transactional_id="tid", grant=grant, begun_ms_ago=5, extend=True)
    assert (await client.ask(heartbeat=beat)).heartbeat.grant == grant
    contents = pb.Contents(written=[written("orders", 0)])
    prepare = pb.PrepareRequest(transactional_id="tid", grant=grant, contents=contents)
    assert (await client.ask(prepare=prepare)).prepare.outcome.state == transaction_pb2.PREPARED
    ended = (await client.ask(end=commit(grant))).end
    assert ended.outcome.result == transaction_pb2.COMMITTED
    outcome = pb.GetOutcomeRequest(transactional_id="tid", number=1)
    assert (await client.ask(get_outcome=outcome)).get_outcome.outcome == ended.outcome


async def test_a_slow_call_blocks_no_other(bench: Bench, client: Client):
    grant = (await client.ask(init_producer=init())).init_producer.grant
    bench.calls.gated.add("slow")
    slow = await client.send(init_producer=init("slow"))
    beat = await client.ask(heartbeat=pb.Heartbeat(transactional_id="tid", grant=grant))
    assert beat.heartbeat.grant == grant
    bench.calls.gate.set()
    assert (await client.receive()).request_id == slow


async def test_a_refusal_is_a_message_and_the_stream_goes_on(client: Client):
    grant = transaction_pb2.Grant(number=7, producer_id=1)
    error = (await client.ask(end=abort(grant))).error
    assert error.code == transaction_pb2.INVALID_PRODUCER_ID_MAPPING
    assert (error.transactional_id, error.number) == ("tid", 7)
    assert (await client.ask(init_producer=init())).HasField("init_producer")


@pytest.mark.parametrize(
    "request_",
    [
        pb.SessionRequest(request_id=5),
        pb.SessionRequest(request_id=5, init_producer=init(""), timeout_ms=1),
        pb.SessionRequest(request_id=5, init_producer=init(), timeout_ms=-1),
        pb.SessionRequest(init_producer=init()),
    ],
)
async def test_malformed_requests(bench: Bench, client: Client, request_):
    await client.stream.write(pb.SessionRequests(requests=[request_]))
    response = await client.receive()
    assert response.error.code == transaction_pb2.INVALID_REQUEST
    assert response.request_id == request_.request_id
    assert len(bench.calls.state) == 0


async def test_a_request_may_name_its_own_deadline(bench: Bench, client: Client):
    bench.calls.gated.add("slow")
    response = await client.ask(init_producer=init("slow"), timeout_ms=20)
    assert response.error.code == transaction_pb2.REQUEST_TIMED_OUT
    assert response.error.transactional_id == "slow"
    await client.ask(init_producer=init("patient"), timeout_ms=10**12)
    assert bench.calls.calls_made[-1][1] == bench.settings.limits.call_timeout_max_ms
    await client.ask(init_producer=init("silent"))
    assert bench.calls.calls_made[-1][1] == bench.settings.limits.call_timeout_ms


async def test_bytes_that_are_no_message_end_the_stream_by_name(bench: Bench):
    stream = bench.channel.stream_stream("/oncebox.v1.Coordinator/Session")()
    first = pb.SessionRequest(request_id=1, init_producer=init())
    await stream.write(pb.SessionRequests(requests=[first]).SerializeToString())
    await stream.write(b"\xff\xff")
    (answer,) = pb.SessionResponses.FromString(await stream.read()).responses
    assert answer.init_producer.grant.number == 1
    status, error = await refused_by(stream.read())
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert error.code == transaction_pb2.INVALID_REQUEST


async def test_no_more_is_read_than_may_be_under_way(bench: Bench, client: Client):
    bench.calls.gated.add("slow")
    limit = bench.settings.limits.requests_per_session
    for _ in range(limit + 10):
        await client.send(get_outcome=pb.GetOutcomeRequest(transactional_id="slow", number=1))
    await eventually(lambda: len(bench.calls.calls_made) == limit)
    # The server is at work all the same, on other streams.
    await bench.init("quick")
    assert len(bench.calls.calls_made) == limit + 1
    bench.calls.gate.set()
    answered = {(await client.receive()).request_id for _ in range(limit + 10)}
    assert answered == set(range(1, limit + 11))


async def test_many_that_wait_keep_no_others_from_being_read(bench: Bench, client: Client):
    """More producers than a few share a stream, and a partition that all of them write may be down."""
    bench.calls.gated.add("slow")
    for _ in range(500):
        await client.send(get_outcome=pb.GetOutcomeRequest(transactional_id="slow", number=1))
    await client.ask(init_producer=init("quick"))
    bench.calls.gate.set()
    for _ in range(500):
        await client.receive()


async def test_large_requests_leave_room_in_the_memory(bench: Bench, client: Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session_module, "UNDER_WAY_BYTES", 10_000)
    bench.calls.gated.add("slow" * 60)
    for _ in range(100):
        await client.send(get_outcome=pb.GetOutcomeRequest(transactional_id="slow" * 60, number=1))
    await eventually(lambda: len(bench.calls.calls_made) >= 30)
    await bench.init("quick")
    assert len(bench.calls.calls_made) - 1 <= 10_000 // 240
    bench.calls.gate.set()
    assert {(await client.receive()).request_id for _ in range(100)} == set(range(1, 101))
    # Also one that is larger than all of that, by itself.
    monkeypatch.setattr(session_module, "UNDER_WAY_BYTES", 10)
    await client.ask(init_producer=init("alone"))


async def test_fencing_is_pushed(bench: Bench, client: Client):
    grant = (await client.ask(init_producer=init(instance="old"))).init_producer.grant
    await bench.init(instance="new")
    push = await client.receive()
    assert push.request_id == 0
    assert push.fenced.code == transaction_pb2.PRODUCER_FENCED
    assert push.fenced.transactional_id == "tid"
    assert push.fenced.owner.instance == "new"
    assert push.fenced.owner.number_first > grant.number


async def test_fencing_is_pushed_once_and_again_after_the_id_was_taken_back(bench: Bench, client: Client):
    await client.ask(init_producer=init())
    await bench.init()
    assert (await client.receive()).HasField("fenced")
    assert not bench.calls.listeners["tid"]
    await bench.init()
    assert (await client.ask(init_producer=init())).HasField("init_producer")
    await bench.init()
    assert (await client.receive()).HasField("fenced")


async def test_an_administrators_fencing_is_pushed_too(bench: Bench, client: Client):
    from oncebox.v1 import admin_pb2

    await client.ask(init_producer=init())
    await bench.admin.ForceFence(admin_pb2.ForceFenceRequest(transactional_id="tid"))
    assert (await client.receive()).fenced.owner.cause == transaction_pb2.ADMINISTRATOR


async def test_only_who_was_granted_something_is_told_of_fencing(bench: Bench, client: Client):
    await bench.init("theirs")
    await client.ask(get_outcome=pb.GetOutcomeRequest(transactional_id="theirs", number=1))
    await client.ask(end=abort(transaction_pb2.Grant(number=1, producer_id=1), "theirs"))
    assert not bench.calls.listeners


async def test_a_half_closed_stream_gets_its_answers(bench: Bench, client: Client):
    bench.calls.gated.add("slow")
    request_id = await client.send(init_producer=init("slow"))
    await client.stream.done_writing()
    await eventually(lambda: len(bench.calls.calls_made) == 1)
    bench.calls.gate.set()
    assert (await client.receive()).request_id == request_id
    assert await client.stream.read() is grpc.aio.EOF
    assert await client.stream.code() is grpc.StatusCode.OK
    assert not any(bench.calls.listeners.values())


async def test_losing_the_stream_ends_nothing(bench: Bench, client: Client, caplog: pytest.LogCaptureFixture):
    grant = (await client.ask(init_producer=init())).init_producer.grant
    add = pb.AddPartitionsRequest(transactional_id="tid", grant=grant, partitions=[on("orders", 0)])
    await client.ask(add_partitions=add)
    bench.calls.gated.add("slow")
    for _ in range(5):
        await client.send(init_producer=init("slow"))
    await eventually(lambda: len(bench.calls.calls_made) == 7)
    before = bench.calls.state.get("tid")
    assert bench.calls.listeners["tid"]
    client.stream.cancel()
    await eventually(lambda: not bench.calls.listeners["tid"])
    assert bench.calls.state.get("tid") == before
    ended = await bench.coordinator.End(commit(grant, written("orders", 0)))
    assert ended.outcome.result == transaction_pb2.COMMITTED
    assert not caplog.records


async def test_a_client_that_goes_away_while_it_is_answered(
    bench: Bench, client: Client, caplog: pytest.LogCaptureFixture
):
    bench.calls.gated.add("slow")
    for _ in range(20):
        await client.send(init_producer=init("slow"))
    await eventually(lambda: len(bench.calls.calls_made) == 20)
    client.stream.cancel()
    bench.calls.gate.set()
    await eventually(lambda: not any(bench.calls.listeners.values()))
    await bench.init("other")
    assert not caplog.records


async def test_an_unexpected_exception_is_told_by_its_id_alone(
    bench: Bench, client: Client, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: object) -> None:
        raise ValueError("password=hunter2")

    with monkeypatch.context() as patched:
        patched.setattr(bench.calls, "ask", broken)
        error = (await client.ask(init_producer=init())).error
    assert "internal error" in error.message
    assert "hunter2" not in error.message
    assert (await client.ask(init_producer=init())).HasField("init_producer")


async def test_requests_and_answers_travel_together(bench: Bench, client: Client):
    requests = [pb.SessionRequest(request_id=n, init_producer=init(f"id-{n}")) for n in range(1, 21)]
    await client.stream.write(pb.SessionRequests(requests=requests))
    answered = {(await client.receive()).request_id for _ in requests}
    assert answered == set(range(1, 21))
    assert len(bench.calls.state) == 20


async def test_answers_that_are_too_large_together_come_one_after_the_other(bench: Bench, client: Client):
    token = bytes(60_000)
    names = [f"id-{number}" for number in range(100)]
    for name in names:
        grant = (await bench.init(name)).grant
        contents = pb.Contents(metadata=token)
        request = pb.EndRequest(transactional_id=name, grant=grant, result=transaction_pb2.COMMITTED, contents=contents)
        await bench.coordinator.End(request)
    assert len(token) * len(names) > bench.settings.limits.message_bytes
    requests = [pb.SessionRequest(request_id=n, init_producer=init(name)) for n, name in enumerate(names, start=1)]
    await client.stream.write(pb.SessionRequests(requests=requests))
    answers = [await client.receive() for _ in requests]
    assert {answer.request_id for answer in answers} == set(range(1, 101))
    assert all(answer.init_producer.resume_token == token for answer in answers)
