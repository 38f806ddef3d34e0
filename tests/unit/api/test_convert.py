"""Requests as commands: what is taken over as it is, and what is refused before anybody is asked."""

from typing import Any

import pytest

from coordinator.api import convert
from coordinator.api.rules import RequestRefusedError, Rules, UnknownTopicsError
from coordinator.core.commands import ErrorCode
from coordinator.core.records import (
    NOTHING,
    Cause,
    Grant,
    GroupOffset,
    GroupOffsets,
    GroupPartition,
    Origin,
    Result,
    Run,
    TopicPartition,
    Written,
)
from coordinator.core.state import TransactionState
from oncebox.v1 import coordinator_pb2 as pb
from oncebox.v1 import log_pb2, transaction_pb2
from oncebox.wire import offsets_partition
from tests.unit.api.bench import FixedTopics, commit, on, written

# Nothing that is asked for here is found: it does not exist.
ASKED = frozenset({"orders", "payments", "deleted", "nowhere", "__consumer_offsets"})
GRANT = transaction_pb2.Grant(number=3, producer_id=1_000, epoch=4)


def rules(*, fresh: bool = False, topics: FixedTopics | None = None) -> Rules:
    return Rules(
        topics=topics or FixedTopics(),
        internal_topics=frozenset({"__consumer_offsets", "oncebox.log"}),
        transaction_timeout_max_ms=900_000,
        partitions_max=10,
        groups_max=3,
        metadata_max_bytes=100,
        asked=ASKED if fresh else frozenset(),
    )


def refused(to_command: Any, request: Any, given: Rules | None = None) -> ErrorCode:
    with pytest.raises(RequestRefusedError) as caught:
        to_command(request, given or rules(fresh=True), "")
    return caught.value.refused.code


def test_the_numbers_of_core_and_contract_are_the_same():
    pairs: list[tuple[Any, Any, str]] = [
        (TransactionState, transaction_pb2.TransactionState, "TRANSACTION_STATE_UNSPECIFIED"),
        (Result, transaction_pb2.Result, ""),
        (Cause, transaction_pb2.Cause, "CAUSE_UNSPECIFIED"),
        (Origin, log_pb2.IdState.Origin, ""),
    ]
    for ours, theirs, without in pairs:
        named = {name: value for name, value in theirs.items() if name != without}
        assert {member.name: member.value for member in ours if member.name != "UNSPECIFIED"} == named
    assert {code.name: code.value for code in ErrorCode}.items() <= dict(transaction_pb2.ErrorCode.items()).items()


def test_init():
    request = pb.InitProducerRequest(
        transactional_id="tid", transaction_timeout_ms=900_000, instance="me", grant=GRANT, keep_prepared=True, slots=4
    )
    command = convert.init_producer(request, rules(), "10.0.0.1:5")
    assert command.grant == Grant(number=3, producer_id=1_000, epoch=4)
    assert (command.instance, command.address, command.slots_max) == ("me", "10.0.0.1:5", 4)
    assert command.keep_prepared
    assert not command.without_waiting


def test_init_takes_two_slots_by_default_and_needs_no_instance_name():
    command = convert.init_producer(pb.InitProducerRequest(transactional_id="t", transaction_timeout_ms=1), rules(), "")
    assert (command.slots_max, command.instance, command.grant) == (2, "", None)


@pytest.mark.parametrize("timeout_ms", [0, -1, 900_001, 2**62])
def test_absurd_timeouts(timeout_ms):
    request = pb.InitProducerRequest(transactional_id="tid", transaction_timeout_ms=timeout_ms)
    assert refused(convert.init_producer, request) is ErrorCode.INVALID_TRANSACTION_TIMEOUT


@pytest.mark.parametrize("slots", [-1, 5, 2**31 - 1])
def test_slots_that_are_not_possible(slots):
    request = pb.InitProducerRequest(transactional_id="tid", transaction_timeout_ms=1, slots=slots)
    assert refused(convert.init_producer, request) is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("name", ["", "x" * 513, "ä" * 257, "a\x00b", "a\nb", "\x7f", "\x85"])
def test_names_that_are_none(name):
    assert refused(convert.get_outcome, pb.GetOutcomeRequest(transactional_id=name, number=1)) is (
        ErrorCode.INVALID_REQUEST
    )
    offsets = pb.AddOffsetsRequest(transactional_id="tid", grant=GRANT, group_ids=[name])
    assert refused(convert.add_offsets, offsets) is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("name", ["x", "x" * 512, "ä" * 256, "Zahlung 7 / 日本", "a'b\"c;--"])
def test_names_that_are_good(name):
    command = convert.get_outcome(pb.GetOutcomeRequest(transactional_id=name, number=1), rules(), "")
    assert command.transactional_id == name


def test_a_long_name_is_not_told_back_whole():
    with pytest.raises(RequestRefusedError) as caught:
        convert.get_outcome(pb.GetOutcomeRequest(transactional_id="x" * 100_000, number=1), rules(), "")
    assert len(caught.value.refused.message) < 200


@pytest.mark.parametrize(
    "grant",
    [
        None,
        transaction_pb2.Grant(),
        transaction_pb2.Grant(number=-1, producer_id=1),
        transaction_pb2.Grant(number=1, producer_id=-1),
        transaction_pb2.Grant(number=1, producer_id=1, epoch=-2),
    ],
)
def test_grants_that_are_none(grant):
    for request, to_command in [
        (pb.AddPartitionsRequest(transactional_id="t", grant=grant, partitions=[on("orders", 0)]), "add_partitions"),
        (pb.AddOffsetsRequest(transactional_id="t", grant=grant, group_ids=["g"]), "add_offsets"),
        (pb.PrepareRequest(transactional_id="t", grant=grant), "prepare"),
        (pb.EndRequest(transactional_id="t", grant=grant, result=transaction_pb2.ABORTED), "end"),
        (pb.Heartbeat(transactional_id="t", grant=grant), "heartbeat"),
    ]:
        assert refused(getattr(convert, to_command), request) is ErrorCode.INVALID_REQUEST


def test_begun_ms_ago_absent_and_zero_differ():
    assert convert.heartbeat(pb.Heartbeat(transactional_id="t", grant=GRANT), rules(), "").begun_ms_ago is None
    beaten = convert.heartbeat(pb.Heartbeat(transactional_id="t", grant=GRANT, begun_ms_ago=0), rules(), "")
    assert beaten.begun_ms_ago == 0
    negative = pb.Heartbeat(transactional_id="t", grant=GRANT, begun_ms_ago=-1)
    assert refused(convert.heartbeat, negative) is ErrorCode.INVALID_REQUEST


def add(*entries: transaction_pb2.TopicPartitions) -> pb.AddPartitionsRequest:
    return pb.AddPartitionsRequest(transactional_id="tid", grant=GRANT, partitions=entries)


def test_partitions_are_a_set():
    command = convert.add_partitions(add(on("orders", 0, 1, 0), on("orders", 1), on("payments", 1)), rules(), "")
    expected = {("orders", 0), ("orders", 1), ("payments", 1)}
    assert command.partitions == {TopicPartition(*partition) for partition in expected}


@pytest.mark.parametrize(
    ("entries", "code"),
    [
        ([], ErrorCode.INVALID_REQUEST),
        ([on("orders")], ErrorCode.INVALID_REQUEST),
        ([on("orders", -1)], ErrorCode.INVALID_REQUEST),
        ([on("nowhere", -1)], ErrorCode.INVALID_REQUEST),
        ([on("orders", *range(8)), on("payments", 0, 1, 0)], ErrorCode.INVALID_REQUEST),
        ([on("", 0)], ErrorCode.INVALID_TOPIC_EXCEPTION),
        ([on(".", 0)], ErrorCode.INVALID_TOPIC_EXCEPTION),
        ([on("..", 0)], ErrorCode.INVALID_TOPIC_EXCEPTION),
        ([on("a b", 0)], ErrorCode.INVALID_TOPIC_EXCEPTION),
        ([on("orders\n", 0)], ErrorCode.INVALID_TOPIC_EXCEPTION),
        ([on("bücher", 0)], ErrorCode.INVALID_TOPIC_EXCEPTION),
        ([on("x" * 250, 0)], ErrorCode.INVALID_TOPIC_EXCEPTION),
        ([on("__consumer_offsets", 0)], ErrorCode.INVALID_TOPIC_EXCEPTION),
        ([on("oncebox.log", 0)], ErrorCode.INVALID_TOPIC_EXCEPTION),
        ([on("nowhere", 0)], ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ([on("orders", 8)], ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ([on("orders", 0), on("orders", 2**31 - 1)], ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    ],
)
def test_partitions_that_cannot_be_registered(entries, code):
    assert refused(convert.add_partitions, add(*entries)) is code


def test_what_is_not_known_is_asked_for_all_at_once():
    with pytest.raises(UnknownTopicsError) as caught:
        convert.add_partitions(add(on("new", 0), on("orders", 0, 9), on("newer", 0)), rules(), "")
    assert caught.value.topics == {"new", "orders", "newer"}


def test_groups_get_their_offsets_partition():
    request = pb.AddOffsetsRequest(transactional_id="tid", grant=GRANT, group_ids=["g", "g", "h"])
    command = convert.add_offsets(request, rules(), "")
    assert command.groups == {GroupPartition(name, offsets_partition(name, 50)) for name in "gh"}


def test_groups_that_cannot_be_registered():
    def adding(*groups: str) -> pb.AddOffsetsRequest:
        return pb.AddOffsetsRequest(transactional_id="tid", grant=GRANT, group_ids=groups)

    assert refused(convert.add_offsets, adding()) is ErrorCode.INVALID_REQUEST
    assert refused(convert.add_offsets, adding(*"abcd")) is ErrorCode.INVALID_REQUEST
    topics = FixedTopics()
    del topics.counts["__consumer_offsets"]
    with pytest.raises(UnknownTopicsError):
        convert.add_offsets(adding("g"), rules(topics=topics), "")
    unavailable = refused(convert.add_offsets, adding("g"), rules(topics=topics, fresh=True))
    assert unavailable is ErrorCode.COORDINATOR_NOT_AVAILABLE


def test_end_with_all_it_can_hold():
    request = commit(GRANT, written("orders", 0, 5, 2), wait=pb.EndRequest.DECIDED, next_group_ids=["g"])
    request.next_partitions.append(on("payments", 0))
    request.contents.metadata = b"cursor"
    request.contents.written.append(
        transaction_pb2.Written(topic="gone", partition=1, record_count=0, topic_id=b"0123456789abcdef")
    )
    request.contents.group_offsets.add(group_id="g").offsets.add(topic="in", partition=2, offset_next=7, metadata="m")
    command = convert.end(request, rules(), "")
    assert command.result is Result.COMMITTED
    assert command.decided_is_enough
    assert command.contents.written == (
        Written(topic="orders", partition=0, record_count=2, runs=(Run(5, 7),), topic_id=b"orders.........."),
        Written(topic="gone", partition=1, record_count=0, runs=(), topic_id=b"0123456789abcdef"),
    )
    offset = GroupOffset(topic="in", partition=2, offset_next=7, metadata="m")
    assert command.contents.group_offsets == (GroupOffsets(group_id="g", offsets=(offset,)),)
    assert command.contents.metadata == b"cursor"
    assert command.next_partitions == {TopicPartition("payments", 0)}
    assert command.next_groups == {GroupPartition("g", offsets_partition("g", 50))}


def test_a_chain_that_cannot_be_registered_does_not_keep_the_transaction_from_its_end():
    request = commit(GRANT, next_partitions=[on("orders", 0), on("deleted", 0)], next_group_ids=["g"])
    with pytest.raises(UnknownTopicsError):
        convert.end(request, rules(), "")
    command = convert.end(request, rules(fresh=True), "")
    assert not command.next_partitions
    assert not command.next_groups
    topics = FixedTopics()
    del topics.counts["__consumer_offsets"]
    without = convert.end(
        commit(GRANT, next_partitions=[on("orders", 0)], next_group_ids=["g"]), rules(topics=topics, fresh=True), ""
    )
    assert not without.next_partitions
    assert not without.next_groups


def test_a_topic_deleted_since_is_told_so():
    with pytest.raises(UnknownTopicsError):
        convert.end(commit(GRANT, written("deleted", 0)), rules(), "")
    command = convert.end(commit(GRANT, written("deleted", 0)), rules(fresh=True), "")
    assert command.contents.written[0].topic_id == b""
    assert command.topic_ids == {"deleted": b""}


def test_which_topics_the_names_stand_for_is_told_whatever_the_client_says():
    request = commit(GRANT, written("orders", 0), next_partitions=[on("payments", 0)])
    request.contents.written[0].topic_id = b"0123456789abcdef"
    ids = {"orders": b"orders..........", "payments": b"payments........"}
    assert convert.end(request, rules(), "").topic_ids == ids
    prepare = pb.PrepareRequest(transactional_id="t", grant=GRANT, contents=request.contents)
    assert convert.prepare(prepare, rules(), "").topic_ids == {"orders": ids["orders"]}
    add = pb.AddPartitionsRequest(transactional_id="t", grant=GRANT, partitions=[on("orders", 0), on("payments", 1)])
    assert convert.add_partitions(add, rules(), "").topic_ids == ids


def spoilt(**fields: Any) -> pb.EndRequest:
    request = commit(GRANT)
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def with_offsets(*groups: transaction_pb2.GroupOffsets) -> pb.EndRequest:
    request = commit(GRANT)
    request.contents.group_offsets.extend(groups)
    return request


def group(name: str, *offsets: transaction_pb2.GroupOffset) -> transaction_pb2.GroupOffsets:
    return transaction_pb2.GroupOffsets(group_id=name, offsets=offsets)


IN = transaction_pb2.GroupOffset(topic="in", partition=0, offset_next=1)


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (spoilt(result=transaction_pb2.UNDECIDED), ErrorCode.INVALID_REQUEST),
        (spoilt(result=9), ErrorCode.INVALID_REQUEST),
        (spoilt(wait=9), ErrorCode.INVALID_REQUEST),
        (commit(GRANT, next_partitions=[on("orders", -1)]), ErrorCode.INVALID_REQUEST),
        (commit(GRANT, next_partitions=[on("orders")]), ErrorCode.INVALID_REQUEST),
        (commit(GRANT, next_partitions=[on("oncebox.log", 0)]), ErrorCode.INVALID_TOPIC_EXCEPTION),
        (commit(GRANT, next_group_ids=[""]), ErrorCode.INVALID_REQUEST),
        (commit(GRANT, *(written("orders", n) for n in range(11))), ErrorCode.INVALID_REQUEST),
        (commit(GRANT, transaction_pb2.Written(topic="orders", topic_id=b"short")), ErrorCode.INVALID_REQUEST),
        (with_offsets(group("", IN)), ErrorCode.INVALID_REQUEST),
        (with_offsets(group("g", IN), group("g", IN)), ErrorCode.INVALID_REQUEST),
        (with_offsets(group("g", IN, IN)), ErrorCode.INVALID_REQUEST),
        (with_offsets(*(group(name, IN) for name in "abcd")), ErrorCode.INVALID_REQUEST),
        (with_offsets(group("g", *[IN] * 11)), ErrorCode.INVALID_REQUEST),
        (
            with_offsets(group("g", transaction_pb2.GroupOffset(topic="in", partition=-1, offset_next=1))),
            ErrorCode.INVALID_REQUEST,
        ),
        (
            with_offsets(group("g", transaction_pb2.GroupOffset(topic="in", partition=1, offset_next=-1))),
            ErrorCode.INVALID_REQUEST,
        ),
        (
            with_offsets(group("g", transaction_pb2.GroupOffset(topic="no topic", offset_next=1))),
            ErrorCode.INVALID_TOPIC_EXCEPTION,
        ),
        (
            with_offsets(group("g", transaction_pb2.GroupOffset(topic="in", offset_next=1, metadata="x" * 4_097))),
            ErrorCode.MESSAGE_TOO_LARGE,
        ),
    ],
)
def test_ends_that_are_malformed(request_, code):
    assert refused(convert.end, request_) is code


def test_metadata_over_the_limit():
    request = commit(GRANT)
    request.contents.metadata = bytes(100)
    assert convert.end(request, rules(), "").contents.metadata == bytes(100)
    request.contents.metadata = bytes(101)
    assert refused(convert.end, request) is ErrorCode.MESSAGE_TOO_LARGE
    prepare = pb.PrepareRequest(transactional_id="tid", grant=GRANT, contents=request.contents)
    assert refused(convert.prepare, prepare) is ErrorCode.MESSAGE_TOO_LARGE


def test_an_abort_holds_no_contents():
    request = commit(GRANT, written("orders", 0))
    request.result = transaction_pb2.ABORTED
    assert refused(convert.end, request) is ErrorCode.INVALID_REQUEST
    request.ClearField("contents")
    assert convert.end(request, rules(), "").contents is NOTHING
    request.contents.SetInParent()
    assert convert.end(request, rules(), "").contents == NOTHING


@pytest.mark.parametrize("number", [0, -1])
def test_numbers_count_from_one(number):
    request = pb.GetOutcomeRequest(transactional_id="tid", number=number)
    assert refused(convert.get_outcome, request) is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("to_command", [convert.end, convert.prepare])
def test_all_topics_that_were_not_heard_of_for_too_long_are_asked_for_together(to_command: Any):
    """One that is not asked for with the others would count as deleted, and the transaction be refused for it."""
    topics = FixedTopics()
    topics.counts = {}
    contents = pb.Contents(written=[written("orders", 0), written("payments", 1)])
    request: Any = pb.PrepareRequest(transactional_id="t", grant=GRANT, contents=contents)
    if to_command is convert.end:
        request = pb.EndRequest(
            transactional_id="t",
            grant=GRANT,
            contents=contents,
            result=transaction_pb2.COMMITTED,
            next_partitions=[on("refunds", 0)],
        )
    with pytest.raises(UnknownTopicsError) as caught:
        to_command(request, rules(topics=topics), "")
    assert caught.value.topics >= {"orders", "payments"}
    assert ("refunds" in caught.value.topics) == (to_command is convert.end)
