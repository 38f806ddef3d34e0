"""Bad input over the wire: the named error, and nothing has changed."""

import asyncio
from copy import deepcopy

import grpc
import pytest

from oncebox.v1 import coordinator_pb2 as pb
from oncebox.v1 import transaction_pb2
from tests.unit.api.bench import Bench, abort, code_of, commit, eventually, on, refused_by, settings_for_tests, written

SERVICE = "/oncebox.v1.Coordinator/"


@pytest.fixture
async def unchanged(bench: Bench):
    """An id with an open transaction, compared before and after."""
    await bench.begin()
    before = deepcopy(bench.calls.state)
    yield bench
    assert bench.calls.state == before


def raw(bench: Bench, method: str, payload: bytes):
    """A call whose bytes no client library of ours would send."""
    return bench.channel.unary_unary(SERVICE + method)(payload)


def field(number: int, payload: bytes) -> bytes:
    return bytes([number << 3 | 2, len(payload)]) + payload


@pytest.mark.parametrize(
    "method", ["FindCoordinator", "InitProducer", "AddPartitions", "AddOffsets", "Prepare", "End", "GetOutcome"]
)
async def test_ids_that_are_not_utf8(unchanged: Bench, method):
    assert await code_of(raw(unchanged, method, field(1, b"\xff\xfe"))) == "INVALID_REQUEST"


@pytest.mark.parametrize("payload", [b"\xff", b"\x0a\x7fabc", bytes(100)])
async def test_bytes_that_are_no_message(unchanged: Bench, payload):
    assert await code_of(raw(unchanged, "End", payload)) == "INVALID_REQUEST"


@pytest.mark.parametrize("transactional_id", ["", "x" * 513, "tab\there", "nul\x00"])
async def test_ids_that_are_none(unchanged: Bench, transactional_id):
    stub, grant = unchanged.coordinator, unchanged.grant
    for call in [
        unchanged.init(transactional_id),
        stub.AddPartitions(
            pb.AddPartitionsRequest(transactional_id=transactional_id, grant=grant, partitions=[on("orders", 2)])
        ),
        stub.AddOffsets(pb.AddOffsetsRequest(transactional_id=transactional_id, grant=grant, group_ids=["g"])),
        stub.Prepare(pb.PrepareRequest(transactional_id=transactional_id, grant=grant)),
        stub.End(abort(grant, transactional_id)),
        stub.GetOutcome(pb.GetOutcomeRequest(transactional_id=transactional_id, number=1)),
        stub.FindCoordinator(pb.FindCoordinatorRequest(transactional_id=transactional_id)),
    ]:
        assert await code_of(call) == "INVALID_REQUEST"


@pytest.mark.parametrize(
    ("topic", "partition", "code"),
    [
        ("nowhere", 0, "UNKNOWN_TOPIC_OR_PARTITION"),
        ("orders", 8, "UNKNOWN_TOPIC_OR_PARTITION"),
        ("orders", -1, "INVALID_REQUEST"),
        ("no topic", 0, "INVALID_TOPIC_EXCEPTION"),
        ("__consumer_offsets", 0, "INVALID_TOPIC_EXCEPTION"),
        ("__transaction_state", 0, "INVALID_TOPIC_EXCEPTION"),
        ("__cluster_metadata", 0, "INVALID_TOPIC_EXCEPTION"),
        ("oncebox.log", 0, "INVALID_TOPIC_EXCEPTION"),
        ("oncebox.commits", 0, "INVALID_TOPIC_EXCEPTION"),
    ],
)
async def test_partitions_that_cannot_be_registered(unchanged: Bench, topic, partition, code):
    request = pb.AddPartitionsRequest(
        transactional_id="tid", grant=unchanged.grant, partitions=[on("orders", 3), on(topic, partition)]
    )
    assert await code_of(unchanged.coordinator.AddPartitions(request)) == code


async def test_a_topic_that_kafka_does_not_let_us_see(unchanged: Bench):
    unchanged.topics.denied.add("secret")
    request = pb.AddPartitionsRequest(transactional_id="tid", grant=unchanged.grant, partitions=[on("secret", 0)])
    status, error = await refused_by(unchanged.coordinator.AddPartitions(request))
    assert status is grpc.StatusCode.PERMISSION_DENIED
    assert (error.code, error.retriable) == (transaction_pb2.TOPIC_AUTHORIZATION_FAILED, False)
    assert "its principal needs Describe there" in error.message


async def test_a_commit_may_not_name_what_was_not_registered(unchanged: Bench):
    for entry in [written("orders", 5), written("__consumer_offsets", 0), written("payments", -1)]:
        assert await code_of(unchanged.coordinator.End(commit(unchanged.grant, entry))) == "INVALID_REQUEST"
    request = commit(unchanged.grant)
    request.contents.group_offsets.add(group_id="stranger").offsets.add(topic="in", offset_next=1)
    assert await code_of(unchanged.coordinator.End(request)) == "INVALID_REQUEST"


@pytest.mark.parametrize(
    "entry",
    [
        transaction_pb2.Written(topic="orders", record_count=2, runs=[transaction_pb2.Run(offset_next=1)]),
        transaction_pb2.Written(topic="orders", record_count=-1),
        transaction_pb2.Written(
            topic="orders", record_count=1, runs=[transaction_pb2.Run(offset_first=-5, offset_next=-4)]
        ),
        transaction_pb2.Written(
            topic="orders",
            record_count=2,
            runs=[transaction_pb2.Run(offset_first=4, offset_next=5), transaction_pb2.Run(offset_next=1)],
        ),
    ],
)
async def test_runs_that_cannot_be(unchanged: Bench, entry):
    assert await code_of(unchanged.coordinator.End(commit(unchanged.grant, entry))) == "INVALID_REQUEST"


@pytest.mark.parametrize("timeout_ms", [0, -1, 900_001, 2**63 - 1])
async def test_absurd_timeouts(unchanged: Bench, timeout_ms):
    assert await code_of(unchanged.init(transaction_timeout_ms=timeout_ms)) == "INVALID_TRANSACTION_TIMEOUT"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"epoch": 2}, "INVALID_PRODUCER_EPOCH"),
        ({"epoch": 2**31 - 1}, "INVALID_PRODUCER_EPOCH"),
        ({"epoch": -1}, "INVALID_REQUEST"),
        ({"producer_id": 1}, "INVALID_PRODUCER_ID_MAPPING"),
        ({"producer_id": -1}, "INVALID_REQUEST"),
        ({"number": 0}, "INVALID_REQUEST"),
        ({"number": 2}, "INVALID_REQUEST"),
        ({"number": 2**63 - 1}, "INVALID_REQUEST"),
    ],
)
async def test_grants_that_were_never_given(unchanged: Bench, change, code):
    grant = transaction_pb2.Grant()
    grant.CopyFrom(unchanged.grant)
    for name, value in change.items():
        setattr(grant, name, value)
    assert await code_of(unchanged.coordinator.End(abort(grant))) == code
    add = pb.AddPartitionsRequest(transactional_id="tid", grant=grant, partitions=[on("orders", 2)])
    assert await code_of(unchanged.coordinator.AddPartitions(add)) == code
    assert await code_of(unchanged.init(grant=grant)) == code


async def test_an_unknown_id(unchanged: Bench):
    assert await code_of(unchanged.coordinator.End(abort(unchanged.grant, "other"))) == "INVALID_PRODUCER_ID_MAPPING"


async def test_stale_numbers(bench: Bench):
    first = await bench.begin()
    second = (await bench.coordinator.End(abort(first))).next
    before = deepcopy(bench.calls.state)
    late = pb.AddPartitionsRequest(transactional_id="tid", grant=first, partitions=[on("orders", 0)])
    _, error = await refused_by(bench.coordinator.AddPartitions(late))
    assert error.code == transaction_pb2.INVALID_TXN_STATE
    assert error.outcome.result == transaction_pb2.ABORTED
    assert await code_of(bench.coordinator.End(commit(first, written("orders", 0)))) == "INVALID_TXN_STATE"
    future = pb.GetOutcomeRequest(transactional_id="tid", number=second.number + 1)
    assert await code_of(bench.coordinator.GetOutcome(future)) == "INVALID_REQUEST"
    assert bench.calls.state == before


async def test_calls_out_of_order(bench: Bench):
    granted = await bench.init()
    before = deepcopy(bench.calls.state)
    assert await code_of(bench.coordinator.End(commit(granted.grant))) == "INVALID_TXN_STATE"
    prepare = pb.PrepareRequest(transactional_id="tid", grant=granted.grant)
    assert await code_of(bench.coordinator.Prepare(prepare)) == "INVALID_TXN_STATE"
    assert bench.calls.state == before


async def test_metadata_over_the_limit(unchanged: Bench):
    request = commit(unchanged.grant, written("orders", 0))
    request.contents.metadata = bytes(64 * 1024 + 1)
    status, error = await refused_by(unchanged.coordinator.End(request))
    assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.code == transaction_pb2.MESSAGE_TOO_LARGE


async def test_too_many_partitions(unchanged: Bench):
    unchanged.topics.counts["wide"] = 10_000
    request = pb.AddPartitionsRequest(
        transactional_id="tid", grant=unchanged.grant, partitions=[on("wide", *range(1_001))]
    )
    assert await code_of(unchanged.coordinator.AddPartitions(request)) == "INVALID_REQUEST"


async def test_messages_over_the_limit(unchanged: Bench):
    request = pb.GetOutcomeRequest(transactional_id="x" * (5 * 1024 * 1024), number=1)
    status, _ = await refused_by(unchanged.coordinator.GetOutcome(request))
    assert status is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_headers_over_the_limit(unchanged: Bench):
    request = pb.GetOutcomeRequest(transactional_id="tid", number=1)
    bomb = [("x-bomb", "x" * 64_000)]
    status, _ = await refused_by(unchanged.coordinator.GetOutcome(request, metadata=bomb))
    assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
    await unchanged.coordinator.GetOutcome(request)


async def test_more_calls_than_the_limit():
    bench = Bench(settings_for_tests(limits={"calls": 2}))
    await bench.start()
    try:
        bench.calls.gated.add("slow")
        running = [asyncio.create_task(bench.init("slow")) for _ in range(2)]
        await eventually(lambda: len(bench.calls.calls_made) == 2)
        status, _ = await refused_by(bench.init("quick"))
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
        bench.calls.gate.set()
        for task in running:
            await task
        await bench.init("quick")
    finally:
        await bench.stop()


async def test_methods_that_do_not_exist(unchanged: Bench):
    status, _ = await refused_by(raw(unchanged, "Destroy", b""))
    assert status is grpc.StatusCode.UNIMPLEMENTED
