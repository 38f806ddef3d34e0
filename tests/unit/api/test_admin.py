"""What operators see and do."""

from typing import Any

import grpc
import pytest
from msgspec.structs import replace

from coordinator.core.commands import ErrorCode, Refused
from coordinator.core.records import Result
from coordinator.open_transactions import Found, Kind, Open, PartitionDescription, Unexamined
from oncebox import resolver
from oncebox.v1 import admin_pb2 as pb
from oncebox.v1 import coordinator_pb2, transaction_pb2
from oncebox.wire import TopicPartition
from tests.unit.api.bench import Bench, abort, code_of, commit, eventually, on, refused_by, written


async def listed(bench: Bench, **fields: Any) -> list[tuple[str, int]]:
    response = await bench.admin.List(pb.ListRequest(**fields))
    return [(entry.transactional_id, entry.state) for entry in response.transactions]


async def test_list_by_state_prefix_and_age(bench: Bench):
    await bench.init("a-idle")
    await bench.begin("a-open")
    bench.calls.now_ms += 60_000
    await bench.begin("b-open")
    everything = await listed(bench)
    assert everything == [
        ("a-idle", transaction_pb2.EMPTY),
        ("a-open", transaction_pb2.ONGOING),
        ("b-open", transaction_pb2.ONGOING),
    ]
    assert await listed(bench, prefix="a-") == everything[:2]
    assert await listed(bench, states=[transaction_pb2.ONGOING]) == everything[1:]
    assert await listed(bench, states=[transaction_pb2.PREPARED]) == []
    # Ages are counted by the real clock; these states are from the year 1970.
    response = await bench.admin.List(pb.ListRequest(prefix="a-open"))
    age_ms = response.transactions[0].age_ms
    assert await listed(bench, age_min_ms=age_ms - 30_000) == everything[:2]
    assert await listed(bench, age_min_ms=2**62) == []
    assert list(response.transactions[0].partitions) == [on("orders", 0, 1)]
    assert response.transactions[0].log_partition == bench.calls.partition_of("a-open")


async def test_list_in_pages(bench: Bench):
    names = [f"id-{index:02}" for index in range(25)]
    for name in reversed(names):
        await bench.init(name)
    seen: list[str] = []
    token = ""
    pages = 0
    while pages == 0 or token:
        response = await bench.admin.List(pb.ListRequest(page_size=10, page_token=token))
        assert len(response.transactions) <= 10
        seen += [entry.transactional_id for entry in response.transactions]
        token = response.next_page_token
        pages += 1
    assert seen == names
    assert pages == 3


async def test_a_filtered_page_may_be_short_but_leads_on(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("coordinator.api.listing.IDS_MAX", 3)
    for index in range(7):
        await bench.init(f"id-{index}")
    await bench.begin("id-9")
    request = pb.ListRequest(states=[transaction_pb2.ONGOING])
    found = []
    for _ in range(3):
        response = await bench.admin.List(request)
        found += [entry.transactional_id for entry in response.transactions]
        request.page_token = response.next_page_token
    assert found == ["id-9"]
    assert not request.page_token


async def test_others_have_their_turn_while_many_ids_are_looked_at(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("coordinator.api.admin.TURN_IDS", 4)
    names = [f"id-{index:02}" for index in range(25)]
    for name in names:
        await bench.init(name)
    asked: list[int] = []
    page = bench.calls.page

    def counted(prefix: str, after: str, limit: int):
        asked.append(limit)
        return page(prefix, after, limit)

    monkeypatch.setattr(bench.calls, "page", counted)
    whole = await bench.admin.List(pb.ListRequest(page_size=30))
    assert [entry.transactional_id for entry in whole.transactions] == names
    assert not whole.next_page_token
    assert asked == [4] * 7
    cut = await bench.admin.List(pb.ListRequest(page_size=10))
    assert [entry.transactional_id for entry in cut.transactions] == names[:10]
    assert cut.next_page_token == names[9]


async def test_what_is_too_large_for_one_page_comes_in_several(bench: Bench):
    metadata = bytes(60_000)
    names = [f"id-{number:03}" for number in range(100)]
    for name in names:
        grant = await bench.begin(name)
        contents = coordinator_pb2.Contents(written=[written("orders", 0)], metadata=metadata)
        request = coordinator_pb2.PrepareRequest(transactional_id=name, grant=grant, contents=contents)
        await bench.coordinator.Prepare(request)
    assert len(metadata) * len(names) > bench.settings.limits.message_bytes
    seen: list[str] = []
    token = ""
    while token or not seen:
        response = await bench.admin.List(
            pb.ListRequest(states=[transaction_pb2.PREPARED], page_size=1_000, page_token=token)
        )
        assert all(entry.metadata == metadata for entry in response.transactions)
        seen += [entry.transactional_id for entry in response.transactions]
        token = response.next_page_token
    assert seen == names


@pytest.mark.parametrize(
    "fields",
    [
        {"page_size": -1},
        {"age_min_ms": -1},
        {"states": [99]},
        {"states": [transaction_pb2.TRANSACTION_STATE_UNSPECIFIED]},
        {"prefix": "x" * 513},
        {"page_token": "x" * 513},
    ],
)
async def test_lists_that_cannot_be(bench: Bench, fields):
    assert await code_of(bench.admin.List(pb.ListRequest(**fields))) == "INVALID_REQUEST"


async def test_describe(bench: Bench):
    bench.calls.markers_are_held = True
    first = await bench.begin()
    request = commit(first, written("orders", 0), next_partitions=[on("payments", 1)])
    request.contents.metadata = b"secret cursor"
    grant = (await bench.coordinator.End(request)).next
    described = await bench.admin.Describe(pb.DescribeRequest(transactional_id="tid"))
    assert described.grant == grant
    assert described.state == transaction_pb2.ONGOING
    assert described.owner.instance == "test"
    assert described.transaction_timeout_ms == 60_000
    assert [entry.state for entry in described.transactions] == [
        transaction_pb2.PREPARE_COMMIT,
        transaction_pb2.ONGOING,
    ]
    assert [(entry.number, entry.state) for entry in described.outcomes] == [(1, transaction_pb2.PREPARE_COMMIT)]
    assert described.has_resume_token
    # What applications keep there is theirs.
    assert b"secret cursor" not in described.SerializeToString()
    assert await code_of(bench.admin.Describe(pb.DescribeRequest(transactional_id="x"))) == (
        "INVALID_PRODUCER_ID_MAPPING"
    )
    assert await code_of(bench.admin.Describe(pb.DescribeRequest())) == "INVALID_REQUEST"


async def test_abort_ends_the_transaction_and_not_the_owner(bench: Bench):
    grant = await bench.begin()
    assert await code_of(bench.admin.Abort(pb.AbortRequest(transactional_id="tid", number=9))) == "INVALID_TXN_STATE"
    assert await code_of(bench.admin.Abort(pb.AbortRequest(transactional_id="tid"))) == "INVALID_REQUEST"
    aborted = await bench.admin.Abort(pb.AbortRequest(transactional_id="tid", number=1))
    assert (aborted.outcome.number, aborted.outcome.cause) == (1, transaction_pb2.ADMINISTRATOR)
    assert aborted.outcome.state == transaction_pb2.COMPLETE_ABORT
    # Its owner hears why, and goes on.
    _, error = await refused_by(bench.coordinator.End(commit(grant, written("orders", 0))))
    assert error.outcome.cause == transaction_pb2.ADMINISTRATOR
    assert (await bench.coordinator.End(abort(grant))).next.number == 2


async def test_force_fence_ends_the_owners_claim(bench: Bench):
    grant = await bench.begin()
    fenced = await bench.admin.ForceFence(pb.ForceFenceRequest(transactional_id="tid"))
    assert fenced.outcome.cause == transaction_pb2.ADMINISTRATOR
    _, error = await refused_by(bench.coordinator.End(commit(grant, written("orders", 0))))
    assert error.code == transaction_pb2.PRODUCER_FENCED
    assert error.owner.cause == transaction_pb2.ADMINISTRATOR
    assert error.owner.instance.startswith("administrator at 127.0.0.1:")


async def test_a_prepared_transaction_is_fenced_only_if_meant(bench: Bench):
    grant = await bench.begin()
    contents = coordinator_pb2.Contents(written=[written("orders", 0)])
    await bench.coordinator.Prepare(
        coordinator_pb2.PrepareRequest(transactional_id="tid", grant=grant, contents=contents)
    )
    refused = bench.admin.ForceFence(pb.ForceFenceRequest(transactional_id="tid"))
    assert await code_of(refused) == "INVALID_TXN_STATE"
    meant = await bench.admin.ForceFence(pb.ForceFenceRequest(transactional_id="tid", abort_prepared=True))
    assert meant.outcome.result == transaction_pb2.ABORTED


async def test_a_resolver_says_which_partitions_nobody_serves(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """What is prepared there waits, and is on nobody's list."""
    bench.calls.address = bench.api.address
    assert [each async for each in resolver.prepared([bench.api.address], "", 0)] == []
    first, second, *_ = bench.calls.leaders()
    monkeypatch.setattr(bench.calls, "leaders", lambda: [first, replace(second, state="loading")])
    found = [each async for each in resolver.prepared([bench.api.address], "", 0)]
    assert found == [resolver.Unserved(log_partition=number) for number in (1, 2, 3)]


async def test_leaders(bench: Bench):
    await bench.init()
    response = await bench.admin.ListLeaders(pb.ListLeadersRequest())
    assert [leader.log_partition for leader in response.leaders] == [0, 1, 2, 3]
    assert response.leaders[0].address == bench.api.address
    assert response.leaders[0].coordinator_epoch == 7
    assert response.leaders[0].transactional_ids == 1


async def test_watch(bench: Bench):
    stream = bench.admin.WatchTransactions(pb.WatchTransactionsRequest(prefix="mine"))
    await stream.initial_metadata()
    await eventually(lambda: bench.calls.watcher_count == 1)
    await bench.begin("theirs")
    await bench.begin("mine-1")
    event = await stream.read()
    assert event.transaction.transactional_id == "mine-1"
    assert event.transaction.state == transaction_pb2.ONGOING
    assert list(event.transaction.partitions) == [on("orders", 0, 1)]
    await bench.admin.Abort(pb.AbortRequest(transactional_id="mine-1", number=1))
    event = await stream.read()
    assert event.transaction.state == transaction_pb2.PREPARE_ABORT
    assert event.cause == transaction_pb2.ADMINISTRATOR
    stream.cancel()
    await eventually(lambda: bench.calls.watcher_count == 0)


async def test_a_watch_that_would_miss_something_ends_with_an_error(bench: Bench):
    stream = bench.admin.WatchTransactions(pb.WatchTransactionsRequest())
    await stream.initial_metadata()
    await eventually(lambda: bench.calls.watcher_count == 1)
    bench.calls.watch_is_overrun = True
    await bench.begin("any")
    _, error = await refused_by(stream.read())
    assert error.code == transaction_pb2.THROTTLING_QUOTA_EXCEEDED
    assert error.retriable


HANGING = Open(
    topic="orders",
    partition=3,
    producer_id=77,
    epoch=4,
    coordinator_epoch=2,
    offset_first=100,
    age_ms=5,
    kind=Kind.HANGING,
    ends_as=Result.COMMITTED,
    ended=True,
    transactional_id="tid",
    number=9,
)


async def test_describe_partition(bench: Bench):
    bench.hanging.described = PartitionDescription(offset_stable=100, offset_high_watermark=120, open=(HANGING,))
    response = await bench.admin.DescribePartition(pb.DescribePartitionRequest(topic="orders", partition=3))
    assert (response.offset_stable, response.offset_high_watermark) == (100, 120)
    assert response.open[0] == pb.OpenTransaction(
        topic="orders",
        partition=3,
        producer_id=77,
        epoch=4,
        offset_first=100,
        age_ms=5,
        kind=pb.OpenTransaction.HANGING,
        transactional_id="tid",
        number=9,
        ends_as=transaction_pb2.COMMITTED,
        ended=True,
    )
    for topic, partition, code in [("no topic", 0, "INVALID_TOPIC_EXCEPTION"), ("orders", -1, "INVALID_REQUEST")]:
        call = bench.admin.DescribePartition(pb.DescribePartitionRequest(topic=topic, partition=partition))
        assert await code_of(call) == code
    bench.hanging.described = Refused(code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, message="no")
    call = bench.admin.DescribePartition(pb.DescribePartitionRequest(topic="nowhere"))
    assert await code_of(call) == "UNKNOWN_TOPIC_OR_PARTITION"


async def test_find_hanging(bench: Bench):
    there = Unexamined(TopicPartition("orders", 5), "it has no leader")
    bench.hanging.found = Found(hanging=(HANGING,), unexamined=(there,))
    response = await bench.admin.FindHanging(pb.FindHangingRequest(topics=["orders"], end=True))
    assert bench.hanging.asked == [({"orders"}, True)]
    assert response.hanging[0].kind == pb.OpenTransaction.HANGING
    assert list(response.unexamined) == [pb.UnexaminedPartition(topic="orders", partition=5, why="it has no leader")]
    assert await code_of(bench.admin.FindHanging(pb.FindHangingRequest(topics=[""]))) == "INVALID_TOPIC_EXCEPTION"
    many = pb.FindHangingRequest(topics=["t"] * 1_001)
    assert await code_of(bench.admin.FindHanging(many)) == "INVALID_REQUEST"
    bench.hanging.found = Refused(code=ErrorCode.COORDINATOR_NOT_AVAILABLE, message="no answer", retriable=True)
    status, error = await refused_by(bench.admin.FindHanging(pb.FindHangingRequest()))
    assert status is grpc.StatusCode.UNAVAILABLE
    assert error.retriable


def test_kinds_are_those_of_the_contract():
    named = dict(pb.OpenTransaction.Kind.items())
    assert {kind.name: kind.value for kind in Kind} == {k: v for k, v in named.items() if k != "KIND_UNSPECIFIED"}
