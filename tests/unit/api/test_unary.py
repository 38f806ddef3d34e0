"""Each call over a real connection: from request to answer through the real core."""

import asyncio
from time import monotonic

import grpc
import pytest

from coordinator.api.front import address_of, asked_ms
from coordinator.core.commands import ErrorCode, InitProducer, Refused
from coordinator.core.records import Cause, Grant, Outcome, Result
from oncebox.v1 import coordinator_pb2 as pb
from oncebox.v1 import transaction_pb2
from tests.unit.api.bench import Bench, abort, code_of, commit, on, refused_by, settings_for_tests, written


def outcome_request(number: int, transactional_id: str = "tid") -> pb.GetOutcomeRequest:
    return pb.GetOutcomeRequest(transactional_id=transactional_id, number=number)


async def test_the_life_of_a_transaction(bench: Bench):
    grant = await bench.begin()
    request = commit(grant, written("orders", 0, 10, 3), next_partitions=[on("orders", 0)])
    request.contents.metadata = b"cursor 3"
    ended = await bench.coordinator.End(request)
    assert ended.outcome == transaction_pb2.Outcome(
        transactional_id="tid",
        number=1,
        result=transaction_pb2.COMMITTED,
        decided_at_ms=bench.calls.now_ms,
        state=transaction_pb2.COMPLETE_COMMIT,
    )
    assert ended.next.number == 2
    assert ended.next_registered
    assert (await bench.coordinator.End(request)) == ended
    known = await bench.coordinator.GetOutcome(outcome_request(1))
    assert known.outcome == ended.outcome
    undecided = await bench.coordinator.GetOutcome(outcome_request(2))
    assert (undecided.outcome.result, undecided.outcome.state) == (transaction_pb2.UNDECIDED, transaction_pb2.ONGOING)
    again = await bench.init()
    assert again.resume_token == b"cursor 3"
    assert (await bench.coordinator.GetOutcome(outcome_request(2))).outcome.cause == transaction_pb2.NEWER_INSTANCE


async def test_the_owner_is_known_by_where_it_called_from(bench: Bench):
    await bench.init(instance="worker-1")
    command, _ = bench.calls.calls_made[-1]
    assert isinstance(command, InitProducer)
    assert command.instance == "worker-1"
    assert command.address.startswith("127.0.0.1:")


def test_addresses_as_people_write_them():
    class Context:
        def __init__(self, peer: str) -> None:
            self.peer = lambda: peer

    assert address_of(Context("ipv4:10.1.2.3:4567")) == "10.1.2.3:4567"
    assert address_of(Context("ipv6:%5B::1%5D:4567")) == "[::1]:4567"
    assert address_of(Context("unix:/run/x")) == "unix:/run/x"


async def test_init_with_the_newest_grant_returns_its_outcome(bench: Bench):
    grant = await bench.begin()
    again = await bench.init(grant=grant)
    assert again.grant.number == 2
    assert again.outcome.number == 1
    assert (again.outcome.result, again.outcome.cause) == (transaction_pb2.ABORTED, transaction_pb2.OWNER)


async def test_a_fenced_owner_learns_by_whom(bench: Bench):
    old = await bench.begin()
    await bench.init(instance="newer")
    _, error = await refused_by(bench.coordinator.End(commit(old, written("orders", 0))))
    assert error.code == transaction_pb2.PRODUCER_FENCED
    assert error.owner.instance == "newer"
    assert error.outcome.cause == transaction_pb2.NEWER_INSTANCE


async def test_what_is_owed_is_told(bench: Bench):
    bench.calls.markers_are_held = True
    ended = await bench.coordinator.End(commit(await bench.begin(), written("orders", 1), written("orders", 0)))
    assert ended.outcome.state == transaction_pb2.PREPARE_COMMIT
    assert list(ended.outcome.owed) == [on("orders", 0, 1)]


async def test_offsets_of_groups(bench: Bench):
    granted = await bench.init()
    request = pb.AddOffsetsRequest(transactional_id="tid", grant=granted.grant, group_ids=["g"])
    registered = await bench.coordinator.AddOffsets(request)
    end = commit(registered.grant)
    end.contents.group_offsets.add(group_id="g").offsets.add(topic="in", partition=0, offset_next=5)
    assert (await bench.coordinator.End(end)).outcome.result == transaction_pb2.COMMITTED


async def test_prepare_keeps_until_decided(bench: Bench):
    grant = await bench.begin()
    contents = pb.Contents(written=[written("orders", 0)], metadata=b"token")
    request = pb.PrepareRequest(transactional_id="tid", grant=grant, contents=contents)
    prepared = await bench.coordinator.Prepare(request)
    assert prepared.outcome.state == transaction_pb2.PREPARED
    assert prepared.outcome.result == transaction_pb2.UNDECIDED
    assert await code_of(bench.init()) == "INVALID_TXN_STATE"
    kept = await bench.init(keep_prepared=True)
    assert (kept.prepared.grant, kept.prepared.resume_token) == (grant, b"token")
    assert not kept.HasField("grant")
    assert (await bench.coordinator.End(commit(grant))).outcome.result == transaction_pb2.COMMITTED


async def test_a_chain_left_out_is_not_called_registered(bench: Bench):
    grant = await bench.begin()
    request = commit(grant, written("orders", 0), next_partitions=[on("orders", 0), on("deleted", 0)])
    ended = await bench.coordinator.End(request)
    assert not ended.next_registered
    assert bench.topics.refreshed == [{"deleted"}]
    add = pb.AddPartitionsRequest(transactional_id="tid", grant=ended.next, partitions=[on("orders", 0)])
    await bench.coordinator.AddPartitions(add)
    # The repeated end, though something is registered by now.
    assert not (await bench.coordinator.End(request)).next_registered


async def test_a_topic_just_created_is_found_by_asking(bench: Bench):
    bench.topics.hidden["new"] = 1
    await bench.begin(topic="new", partitions=[0])
    assert bench.topics.refreshed == [{"new"}]


async def test_topics_not_heard_of_for_a_while_are_asked_for_and_are_not_gone(bench: Bench):
    """Idle producers: all their topics are too old at once, and a slow broker's answer may be old when it is here."""
    grant = await bench.begin(topic="orders", partitions=[0])
    add = pb.AddPartitionsRequest(transactional_id="tid", grant=grant, partitions=[on("payments", 0)])
    await bench.coordinator.AddPartitions(add)
    bench.topics.stale = {"orders", "payments"}
    chain = [on("orders", 0), on("payments", 1)]
    ended = await bench.coordinator.End(
        commit(grant, written("orders", 0), written("payments", 0), next_partitions=chain)
    )
    assert ended.outcome.result == transaction_pb2.COMMITTED
    assert ended.next_registered
    assert frozenset().union(*bench.topics.refreshed) == {"orders", "payments"}


async def test_find_coordinator(bench: Bench):
    request = pb.FindCoordinatorRequest(transactional_id="tid")
    found = await bench.coordinator.FindCoordinator(request)
    assert (found.address, found.instance) == (bench.api.address, "memory")
    assert found.log_partition == bench.calls.partition_of("tid")
    bench.calls.leader_is_known = False
    _, error = await refused_by(bench.coordinator.FindCoordinator(request))
    assert error.code == transaction_pb2.COORDINATOR_NOT_AVAILABLE
    assert error.retriable
    assert await code_of(bench.coordinator.FindCoordinator(pb.FindCoordinatorRequest())) == "INVALID_REQUEST"


async def test_the_leader_is_told_with_not_coordinator(bench: Bench):
    bench.calls.refusal = Refused(
        code=ErrorCode.NOT_COORDINATOR, message="led elsewhere", retriable=True, leader_address="there:7"
    )
    status, error = await refused_by(bench.coordinator.GetOutcome(outcome_request(1)))
    assert status is grpc.StatusCode.UNAVAILABLE
    assert error.leader_address == "there:7"


async def forgotten(bench: Bench) -> None:
    """Number 1 is decided, and so many after it that the id's record knows it no more."""
    grant = (await bench.init()).grant
    for _ in range(10):
        grant = (await bench.coordinator.End(abort(grant))).next


async def test_the_feed_remembers_commits(bench: Bench):
    await forgotten(bench)
    assert await code_of(bench.coordinator.GetOutcome(outcome_request(1))) == "OUTCOME_EXPIRED"
    grant = Grant(number=1, producer_id=1, epoch=0)
    bench.feed["tid", 1] = Outcome(grant=grant, result=Result.COMMITTED, cause=Cause.OWNER, decided_at_ms=5)
    known = await bench.coordinator.GetOutcome(outcome_request(1))
    assert (known.outcome.result, known.outcome.state) == (transaction_pb2.COMMITTED, transaction_pb2.COMPLETE_COMMIT)


async def test_the_feed_remembers_commits_of_ids_that_have_expired(bench: Bench):
    assert await code_of(bench.coordinator.GetOutcome(outcome_request(1))) == "INVALID_PRODUCER_ID_MAPPING"
    grant = Grant(number=1, producer_id=1, epoch=0)
    bench.feed["tid", 1] = Outcome(grant=grant, result=Result.COMMITTED, cause=Cause.OWNER, decided_at_ms=5)
    assert (await bench.coordinator.GetOutcome(outcome_request(1))).outcome.result == transaction_pb2.COMMITTED


async def test_past_the_deadline_the_transaction_is_named_in_time(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    # A machine under load may need more than the usual margin for the way back.
    monkeypatch.setattr("coordinator.api.front.RETURN_MARGIN_MAX_MS", 60_000)
    monkeypatch.setattr("coordinator.api.front.RETURN_MARGIN_SHARE", 0.975)
    grant = await bench.begin()
    bench.calls.gated.add("tid")
    status, error = await refused_by(bench.coordinator.End(abort(grant), timeout=20.0))
    assert status is grpc.StatusCode.DEADLINE_EXCEEDED
    # A deadline that only the client's side noticed would bring no details.
    assert (error.code, error.transactional_id, error.number) == (transaction_pb2.REQUEST_TIMED_OUT, "tid", 1)
    _, timeout_ms = bench.calls.calls_made[-1]
    assert timeout_ms < 1_000


@pytest.mark.parametrize(("remaining_s", "asked"), [(10.0, 9_800), (1.0, 900), (0.0, 1)])
def test_the_way_back_is_taken_off_the_deadline(remaining_s: float, asked: int):
    class Context:
        def time_remaining(self) -> float:
            return remaining_s

    assert asked_ms(Context()) == asked


async def test_calls_without_a_deadline_get_one(bench: Bench):
    await bench.init()
    assert bench.calls.calls_made[-1][1] == bench.settings.limits.call_timeout_ms
    request = pb.InitProducerRequest(transactional_id="tid", transaction_timeout_ms=1)
    await bench.coordinator.InitProducer(request, timeout=3_000_000)
    assert bench.calls.calls_made[-1][1] == bench.settings.limits.call_timeout_max_ms


async def test_a_search_in_the_feed_ends_with_the_deadline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("coordinator.api.front.RETURN_MARGIN_MAX_MS", 60_000)
    monkeypatch.setattr("coordinator.api.front.RETURN_MARGIN_SHARE", 0.975)
    bench = Bench(settings_for_tests())

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(bench, "_find_in_feed", never)
    await bench.start()
    try:
        before = monotonic()
        assert await code_of(bench.coordinator.GetOutcome(outcome_request(1), timeout=20.0)) == "REQUEST_TIMED_OUT"
        assert monotonic() - before < 15
    finally:
        await bench.stop()


async def test_a_look_at_the_topics_ends_with_the_deadline(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("coordinator.api.front.RETURN_MARGIN_MAX_MS", 60_000)
    monkeypatch.setattr("coordinator.api.front.RETURN_MARGIN_SHARE", 0.975)

    async def never(_topics: object) -> None:
        await asyncio.Event().wait()

    grant = (await bench.init()).grant
    made = len(bench.calls.calls_made)
    monkeypatch.setattr(bench.topics, "refresh", never)
    request = pb.AddPartitionsRequest(transactional_id="tid", grant=grant, partitions=[on("unheard-of", 0)])
    status, error = await refused_by(bench.coordinator.AddPartitions(request, timeout=20.0))
    assert status is grpc.StatusCode.DEADLINE_EXCEEDED
    # A deadline that only the client's side noticed would bring no details.
    assert (error.code, error.transactional_id, error.number) == (transaction_pb2.REQUEST_TIMED_OUT, "tid", 1)
    assert error.retriable
    assert len(bench.calls.calls_made) == made


async def test_what_the_look_at_the_topics_takes_is_not_given_to_the_shard(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    async def slowly(_topics: object) -> None:
        await asyncio.sleep(0.2)
        bench.topics.counts["slowly"] = 1

    grant = (await bench.init()).grant
    monkeypatch.setattr(bench.topics, "refresh", slowly)
    request = pb.AddPartitionsRequest(transactional_id="tid", grant=grant, partitions=[on("slowly", 0)])
    await bench.coordinator.AddPartitions(request)
    _, timeout_ms = bench.calls.calls_made[-1]
    assert 1 <= timeout_ms <= bench.settings.limits.call_timeout_ms - 190
