"""Who may make which call: every method and every message of a session, by every kind of caller, each by itself.

The table below says who is let through; all others must be refused before anything is asked of the coordinator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest

from coordinator.api import auth
from coordinator.config import Limits
from coordinator.core.commands import ErrorCode
from oncebox.status import error_of_call
from oncebox.v1 import admin_pb2, coordinator_pb2, gateway_pb2, peer_pb2, peer_pb2_grpc, transaction_pb2
from oncebox.v1.admin_pb2_grpc import AdminStub
from oncebox.v1.coordinator_pb2_grpc import CoordinatorStub
from oncebox.v1.gateway_pb2_grpc import GatewayStub
from tests.unit.api.bench import Bench, commit, on, refused_by, written
from tests.unit.api.secure import Ground

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pb = coordinator_pb2

CALLERS = ("owner", "neighbour", "auditor", "operator", "admin", "instance", "suspended", "stranger")
A = "a"
GRANT = transaction_pb2.Grant(number=1, producer_id=1_000, epoch=0)
GROUP_OFFSETS = transaction_pb2.GroupOffsets(
    group_id="g", offsets=[transaction_pb2.GroupOffset(topic="orders", partition=0, offset_next=1)]
)
# Another instance hands on what it has let through.
OWNER = {"owner", "instance"}
READERS = {"owner", "instance", "auditor", "operator", "admin"}
# Method -> a request about the id `a` (topic orders, group g), and who may make it.
UNARY: dict[str, tuple[Any, set[str]]] = {
    "Coordinator/FindCoordinator": (pb.FindCoordinatorRequest(transactional_id=A), READERS),
    "Coordinator/InitProducer": (
        pb.InitProducerRequest(transactional_id=A, transaction_timeout_ms=60_000, instance="i"),
        OWNER,
    ),
    "Coordinator/AddPartitions": (
        pb.AddPartitionsRequest(transactional_id=A, grant=GRANT, partitions=[on("orders", 0)]),
        OWNER,
    ),
    "Coordinator/AddOffsets": (pb.AddOffsetsRequest(transactional_id=A, grant=GRANT, group_ids=["g"]), OWNER),
    "Coordinator/Prepare": (pb.PrepareRequest(transactional_id=A, grant=GRANT), OWNER),
    "Coordinator/End": (pb.EndRequest(transactional_id=A, grant=GRANT, result=transaction_pb2.ABORTED), OWNER),
    "Coordinator/GetOutcome": (pb.GetOutcomeRequest(transactional_id=A, number=1), READERS),
    "Admin/List": (admin_pb2.ListRequest(), {"operator", "admin"}),
    "Admin/Describe": (admin_pb2.DescribeRequest(transactional_id=A), READERS),
    "Admin/Abort": (admin_pb2.AbortRequest(transactional_id=A, number=1), {"admin"}),
    "Admin/ForceFence": (admin_pb2.ForceFenceRequest(transactional_id=A), {"admin"}),
    "Admin/ListLeaders": (admin_pb2.ListLeadersRequest(), {"operator", "admin"}),
    "Admin/DescribePartition": (admin_pb2.DescribePartitionRequest(topic="orders"), {"operator", "admin"}),
    "Admin/FindHanging": (admin_pb2.FindHangingRequest(), {"operator", "admin"}),
    "Peers/ListOpen": (peer_pb2.ListOpenRequest(), {"instance"}),
    "Gateway/CommitBatch": (
        gateway_pb2.CommitBatchRequest(
            transactional_id=A, request_id="r", records=[gateway_pb2.Record(topic="orders", value=b"")]
        ),
        OWNER,
    ),
}
STREAMS: dict[str, tuple[Any, set[str]]] = {
    "Admin/WatchTransactions": (admin_pb2.WatchTransactionsRequest(), {"operator", "admin"}),
    "Peers/Follow": (peer_pb2.FollowRequest(), {"instance"}),
}
MESSAGES: dict[str, tuple[Any, set[str]]] = {
    "init_producer": UNARY["Coordinator/InitProducer"],
    "add_partitions": UNARY["Coordinator/AddPartitions"],
    "add_offsets": UNARY["Coordinator/AddOffsets"],
    "prepare": UNARY["Coordinator/Prepare"],
    "end": UNARY["Coordinator/End"],
    "get_outcome": UNARY["Coordinator/GetOutcome"],
    "heartbeat": (pb.Heartbeat(transactional_id=A, grant=GRANT), OWNER),
}
# Of a Transact stream. What needs no right of its own is about what `open` has opened.
GATEWAY: dict[str, tuple[Any, set[str]]] = {
    "open": (gateway_pb2.Open(transactional_id=A), OWNER),
    "begin": (gateway_pb2.Begin(), {*CALLERS}),
    "send": (
        gateway_pb2.Send(records=[gateway_pb2.Record(topic="orders", value=b"")]),
        {*OWNER, "neighbour", "suspended"},
    ),
    "send_offsets": (gateway_pb2.SendOffsets(offsets=GROUP_OFFSETS), OWNER),
    "prepare": (gateway_pb2.PrepareTransaction(), {*CALLERS}),
    "commit": (gateway_pb2.Commit(), {*CALLERS}),
    "abort": (gateway_pb2.AbortTransaction(), {*CALLERS}),
}
DENIALS = {"TRANSACTIONAL_ID_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED"}


class Callers:
    def __init__(self, ground: Ground, bench: Bench) -> None:
        self.bench = bench
        self.channels = {name: ground.caller(name)(bench.api.address) for name in CALLERS}

    @property
    def made(self) -> int:
        """How much was asked of what is behind the gate."""
        bench = self.bench
        return len(bench.calls.calls_made) + len(bench.hanging.asked) + len(bench.gateway.asked)

    def stub(self, name: str, method: str) -> Any:
        service, call = method.split("/")
        kinds: dict[str, Any] = {
            "Coordinator": CoordinatorStub,
            "Admin": AdminStub,
            "Peers": peer_pb2_grpc.PeersStub,
            "Gateway": GatewayStub,
        }
        return getattr(kinds[service](self.channels[name]), call)


@pytest.fixture
async def callers(tmp_path: Path) -> AsyncIterator[Callers]:
    ground = Ground(tmp_path)
    async with ground.serving() as bench:
        callers = Callers(ground, bench)
        yield callers
        for channel in callers.channels.values():
            await channel.close()


def name_of(error: transaction_pb2.Error) -> str:
    return transaction_pb2.ErrorCode.Name(error.code)


async def denial(call: Any) -> str | None:
    """None: let through, whatever came of it then."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.PERMISSION_DENIED:
            return (error.details() or "").partition(":")[0]
        if error_of_call(error) is None:
            raise  # from below the coordinator: it tells nothing
    return None


def test_the_tables_name_every_method_there_is():
    described = {
        f"{service.name}/{method.name}"
        for module in (coordinator_pb2, admin_pb2, peer_pb2, gateway_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert {f"/oncebox.v1.{name}" for name in described} == set(auth.METHODS)
    assert described == {*UNARY, *STREAMS, "Coordinator/Session", "Gateway/Transact"}
    kinds = {field.name for field in pb.SessionRequest.DESCRIPTOR.oneofs_by_name["request"].fields}
    assert kinds == set(MESSAGES) == set(auth.SESSION)
    gateway = {field.name for field in gateway_pb2.TransactRequest.DESCRIPTOR.oneofs_by_name["request"].fields}
    assert gateway == set(GATEWAY) == set(auth.GATEWAY)


@pytest.mark.parametrize("method", sorted(UNARY))
async def test_unary_calls(callers: Callers, method: str):
    request, allowed = UNARY[method]
    for caller in CALLERS:
        made = callers.made
        denied = await denial(callers.stub(caller, method)(request))
        assert (denied is None) == (caller in allowed), f"{method} by {caller}: {denied}"
        if denied:
            assert denied in DENIALS
            assert made == callers.made


@pytest.mark.parametrize("method", sorted(STREAMS))
async def test_streams(callers: Callers, method: str):
    request, allowed = STREAMS[method]
    for caller in CALLERS:
        stream = callers.stub(caller, method)(request)
        denied = await denial(stream.initial_metadata()) or (None if caller in allowed else await denial(stream.read()))
        assert (denied is None) == (caller in allowed), f"{method} by {caller}: {denied}"
        stream.cancel()


@pytest.mark.parametrize("kind", sorted(MESSAGES))
async def test_messages_of_a_session(callers: Callers, kind: str):
    """Opening one needs an identity alone; each message in it is looked at."""
    message, allowed = MESSAGES[kind]
    for caller in CALLERS:
        made = len(callers.bench.calls.calls_made)
        session = CoordinatorStub(callers.channels[caller]).Session()
        await session.write(pb.SessionRequests(requests=[pb.SessionRequest(request_id=1, **{kind: message})]))
        response = (await session.read()).responses[0]
        denied = name_of(response.error) in DENIALS
        assert denied == (caller not in allowed), f"{kind} by {caller}: {response}"
        assert not denied or made == len(callers.bench.calls.calls_made)
        session.cancel()


@pytest.mark.parametrize("kind", sorted(GATEWAY))
async def test_messages_of_a_gateways_stream(callers: Callers, kind: str):
    """Here, too, opening one needs an identity alone."""
    message, allowed = GATEWAY[kind]
    for caller in CALLERS:
        made = callers.made
        stream = callers.stub(caller, "Gateway/Transact")()
        await stream.write(gateway_pb2.TransactRequest(request_id=1, **{kind: message}))
        response = await stream.read()
        denied = name_of(response.error).endswith("_AUTHORIZATION_FAILED")
        assert denied == (caller not in allowed), f"{kind} by {caller}: {response}"
        assert callers.made - made == (kind == "open" and not denied)
        stream.cancel()


async def test_ending_what_hangs_needs_more_than_looking_for_it(callers: Callers):
    request = admin_pb2.FindHangingRequest(end=True)
    assert await denial(callers.stub("operator", "Admin/FindHanging")(request))
    assert await denial(callers.stub("admin", "Admin/FindHanging")(request)) is None


@pytest.mark.parametrize("transactional_id", ["ab", "A", "a ", "own", "b"])
async def test_an_id_that_only_looks_like_mine(callers: Callers, transactional_id: str):
    request = pb.InitProducerRequest(transactional_id=transactional_id, transaction_timeout_ms=1_000, instance="i")
    status, error = await refused_by(callers.stub("owner", "Coordinator/InitProducer")(request))
    assert (status, name_of(error)) == (
        grpc.StatusCode.PERMISSION_DENIED,
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
    )


async def test_ids_by_prefix(callers: Callers):
    request = pb.InitProducerRequest(transactional_id="own-7", transaction_timeout_ms=1_000, instance="i")
    assert (await callers.stub("owner", "Coordinator/InitProducer")(request)).grant.number


async def begun(callers: Callers, caller: str, transactional_id: str) -> transaction_pb2.Grant:
    init = pb.InitProducerRequest(transactional_id=transactional_id, transaction_timeout_ms=60_000, instance=caller)
    granted = await callers.stub(caller, "Coordinator/InitProducer")(init)
    add = pb.AddPartitionsRequest(transactional_id=transactional_id, grant=granted.grant, partitions=[on("orders", 0)])
    grant: transaction_pb2.Grant = (await callers.stub(caller, "Coordinator/AddPartitions")(add)).grant
    return grant


async def test_the_grant_of_another_ends_nothing(callers: Callers):
    """A producer id, epoch and number that are somebody else's, named with an id of one's own."""
    theirs = await begun(callers, "owner", "a")
    await begun(callers, "neighbour", "ab")
    foreign = pb.EndRequest(transactional_id="ab", grant=theirs, result=transaction_pb2.ABORTED)
    _, error = await refused_by(callers.stub("neighbour", "Coordinator/End")(foreign))
    assert name_of(error) in {"PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH", "INVALID_PRODUCER_ID_MAPPING"}
    mixed = pb.AddPartitionsRequest(transactional_id="ab", grant=theirs, partitions=[on("orders", 1)])
    _, error = await refused_by(callers.stub("neighbour", "Coordinator/AddPartitions")(mixed))
    assert name_of(error) in {"PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH", "INVALID_PRODUCER_ID_MAPPING"}
    done = await callers.stub("owner", "Coordinator/End")(commit(theirs, written("orders", 0), transactional_id="a"))
    assert done.outcome.result == transaction_pb2.COMMITTED


async def test_topics_and_groups_without_a_right_are_not_marked(callers: Callers):
    """Markers are written with the coordinator's privilege; nobody may borrow it for what is not theirs."""
    grant = await begun(callers, "neighbour", "ab")
    expected = {
        "TOPIC_AUTHORIZATION_FAILED": [
            (
                "AddPartitions",
                pb.AddPartitionsRequest(transactional_id="ab", grant=grant, partitions=[on("payments", 0)]),
            ),
            (
                "AddPartitions",
                pb.AddPartitionsRequest(transactional_id="ab", grant=grant, partitions=[on("oncebox.log", 0)]),
            ),
            (
                "AddPartitions",
                pb.AddPartitionsRequest(transactional_id="ab", grant=grant, partitions=[on("absent", 0)]),
            ),
            ("End", commit(grant, written("payments", 0), transactional_id="ab")),
            ("End", commit(grant, transactional_id="ab", next_partitions=[on("payments", 0)])),
            (
                "Prepare",
                pb.PrepareRequest(
                    transactional_id="ab", grant=grant, contents=pb.Contents(written=[written("payments", 0)])
                ),
            ),
        ],
        "GROUP_AUTHORIZATION_FAILED": [
            ("AddOffsets", pb.AddOffsetsRequest(transactional_id="ab", grant=grant, group_ids=["g"])),
            ("End", commit(grant, transactional_id="ab", next_group_ids=["g"])),
            (
                "Prepare",
                pb.PrepareRequest(
                    transactional_id="ab", grant=grant, contents=pb.Contents(group_offsets=[GROUP_OFFSETS])
                ),
            ),
        ],
    }
    made = len(callers.bench.calls.calls_made)
    for code, requests in expected.items():
        for method, request in requests:
            _, error = await refused_by(callers.stub("neighbour", f"Coordinator/{method}")(request))
            assert name_of(error) == code, method
    assert len(callers.bench.calls.calls_made) == made
    assert not callers.bench.topics.refreshed


async def test_internal_topics_are_nobodys_even_with_a_right_to_all(callers: Callers):
    grant = await begun(callers, "suspended", "c")
    for topic in ("__consumer_offsets", "__transaction_state", "oncebox.log", "oncebox.commits"):
        request = pb.AddPartitionsRequest(transactional_id="c", grant=grant, partitions=[on(topic, 0)])
        _, error = await refused_by(callers.stub("suspended", "Coordinator/AddPartitions")(request))
        assert name_of(error) == "INVALID_TOPIC_EXCEPTION"


async def test_changed_rules_hold_for_open_streams(callers: Callers, tmp_path: Path):
    session = CoordinatorStub(callers.channels["owner"]).Session()

    async def init() -> pb.SessionResponse:
        message = UNARY["Coordinator/InitProducer"][0]
        await session.write(pb.SessionRequests(requests=[pb.SessionRequest(request_id=1, init_producer=message)]))
        response: pb.SessionResponse = (await session.read()).responses[0]
        return response

    assert (await init()).init_producer.grant.number
    (tmp_path / "rules.yaml").write_text("rules: []")
    callers.bench.api.gate.reload()
    assert name_of((await init()).error) == "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"
    session.cancel()


async def test_an_administrator_is_named_where_it_fenced(callers: Callers):
    await begun(callers, "owner", "a")
    await callers.stub("admin", "Admin/ForceFence")(admin_pb2.ForceFenceRequest(transactional_id="a"))
    described = await callers.stub("admin", "Admin/Describe")(admin_pb2.DescribeRequest(transactional_id="a"))
    assert "cert:admin" in described.owner.instance + described.owner.address


def test_a_method_that_nobody_listed_is_nobodys(tmp_path: Path):
    from tests.unit.api.bench import settings_for_tests

    ground = Ground(tmp_path)
    gate = auth.Gate(settings_for_tests(tls=ground.tls(), rules_location=ground.rules))
    refused = auth.Access("cert:admin", gate).refusal(auth.METHODS, "/oncebox.v1.Admin/Added", None)
    assert refused is not None
    assert refused.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED


def test_the_rate_of_one_principal_is_limited_and_not_of_the_others():
    from tests.unit.api.bench import settings_for_tests

    now = [0.0]
    gate = auth.Gate(settings_for_tests(limits=Limits(calls_per_second_per_principal=10)), now_s=lambda: now[0])
    greedy, honest = auth.Access("cert:x", gate), auth.Access("cert:y", gate)

    def allowed(access: auth.Access, calls: int) -> int:
        answers = [access.refusal(auth.METHODS, "", None) for _ in range(calls)]
        assert all(each is None or each.retriable for each in answers)
        return sum(each is None for each in answers)

    assert allowed(greedy, 100) == 20  # a burst of two seconds' worth
    assert allowed(honest, 5) == 5
    now[0] += 1.0
    assert allowed(greedy, 100) == 10
