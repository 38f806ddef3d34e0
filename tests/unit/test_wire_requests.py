"""What callers say becomes the request that Kafka defines, and what brokers answer becomes what callers read.

The layouts themselves are compared in test_wire_layouts.py; here values must land in the right fields.
"""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oncebox.wire import (
    EARLIEST,
    LATEST,
    ActiveProducer,
    Appended,
    Broker,
    ClusterMetadata,
    CommittedOffset,
    Coordinator,
    DescribedGroup,
    ErrorCode,
    GroupMember,
    ListedOffset,
    NativeTransaction,
    NativeTransactions,
    PartitionMetadata,
    PartitionProducers,
    ProducerIdentity,
    TopicMetadata,
    TopicPartition,
    TxnMarker,
    UnsupportedRequestError,
    frequent,
    requests,
    schemas,
)
from tests.unit.test_wire_layouts import kio_bytes, kio_module

kio_groups = kio_module("describe_groups", 0, "request")
kio_groups_answer = kio_module("describe_groups", 0, "response")
kio_producers = kio_module("describe_producers", 0, "request")
kio_producers_answer = kio_module("describe_producers", 0, "response")
kio_find = kio_module("find_coordinator", 1, "request")
kio_find_answer = kio_module("find_coordinator", 1, "response")
kio_init = kio_module("init_producer_id", 0, "request")
kio_init_answer = kio_module("init_producer_id", 0, "response")
kio_offsets = kio_module("list_offsets", 3, "request")
kio_offsets_answer = kio_module("list_offsets", 3, "response")
kio_transactions = kio_module("list_transactions", 0, "request")
kio_transactions_answer = kio_module("list_transactions", 0, "response")
kio_metadata = kio_module("metadata", 11, "request")
kio_metadata_answer = kio_module("metadata", 11, "response")
kio_produce = kio_module("produce", 8, "request")
kio_produce_answer = kio_module("produce", 8, "response")
kio_commit = kio_module("txn_offset_commit", 3, "request")
kio_commit_answer = kio_module("txn_offset_commit", 3, "response")
kio_markers_1 = kio_module("write_txn_markers", 1, "request")
kio_markers_2 = kio_module("write_txn_markers", 2, "request")
kio_markers_answer = kio_module("write_txn_markers", 2, "response")

NEWEST = dict.fromkeys([0, 2, 3, 10, 15, 22, 27, 28, 61, 66], (0, 99))
i16, i32, i64 = (st.integers(-(2**bits), 2**bits - 1) for bits in (15, 31, 63))
names = st.text(min_size=1, max_size=12)
notes = st.none() | st.text(max_size=12)
partitions = st.builds(TopicPartition, names, st.integers(0, 2**31 - 1))
errors = st.sampled_from(ErrorCode)
node_ids = st.integers(0, 2**31 - 1)
no_wait = timedelta()
patient = settings(deadline=None)  # a busy machine is no failure


def by_partition(values: Any) -> Any:
    return st.dictionaries(partitions, values, max_size=6)


def encoded(call: Any, versions: dict[int, tuple[int, int]] = NEWEST) -> Any:
    _layout, body = call.prepare(versions)
    return b"".join(body)


def decoded(layout: Any, entity: Any) -> Any:
    return layout.read(kio_bytes(entity), 0)


def by_topic(values: Any, row: Any) -> Any:
    """What Kafka's messages hold: topics in order, each with a tuple of `row(partition, value)`."""
    topics: dict[str, list[Any]] = {}
    for (topic, partition), value in values.items():
        topics.setdefault(topic, []).append(row(partition, value))
    return [(topic, tuple(rows)) for topic, rows in topics.items()]


@given(by_partition(st.binary(max_size=40)), notes, st.sampled_from([-1, 1]), st.integers(0, 2**31 - 1))
@patient
def test_produce(batches, transactional_id, acks, timeout_ms):
    call = requests.produce_call(batches, transactional_id=transactional_id, acks=acks, timeout_ms=timeout_ms)
    rows = by_topic(batches, lambda index, records: kio_produce.PartitionProduceData(index=index, records=records))
    assert encoded(call) == kio_bytes(
        kio_produce.ProduceRequest(
            transactional_id=transactional_id,
            acks=acks,
            timeout=timedelta(milliseconds=timeout_ms),
            topic_data=tuple(kio_produce.TopicProduceData(name=name, partition_data=data) for name, data in rows),
        )
    )


@given(
    by_partition(
        st.builds(
            Appended,
            error=errors,
            base_offset=i64,
            log_append_time_ms=st.just(-1),
            log_start_offset=i64,
            error_message=notes,
        )
    )
)
@patient
def test_produce_answer(answers):
    rows = by_topic(
        answers,
        lambda index, answer: kio_produce_answer.PartitionProduceResponse(
            index=index,
            error_code=answer.error,
            base_offset=answer.base_offset,
            log_append_time=None,
            log_start_offset=answer.log_start_offset,
            record_errors=(kio_produce_answer.BatchIndexAndErrorMessage(batch_index=3),),
            error_message=answer.error_message,
        ),
    )
    entity = kio_produce_answer.ProduceResponse(
        responses=tuple(
            kio_produce_answer.TopicProduceResponse(name=name, partition_responses=data) for name, data in rows
        )
    )
    assert decoded(frequent.PRODUCE_V8, entity) == answers


@pytest.mark.parametrize("acks", [0, 2, -2])
def test_produce_without_an_answer_is_refused(acks):
    with pytest.raises(ValueError, match="acks"):
        requests.produce_call({}, transactional_id=None, acks=acks, timeout_ms=1)


# More than a varint of one byte can count: markers, topics, partitions of a topic, bytes of a name.
MANY = [
    tuple(TopicPartition(f"topic-{index}", 0) for index in range(200)),
    tuple(TopicPartition("n" * 249, index) for index in range(20_000)),
    *[(TopicPartition("t", 0),)] * 130,
]
MANY_MARKERS = [
    TxnMarker(producer_id=number, producer_epoch=1, committed=True, partitions=partitions, coordinator_epoch=2)
    for number, partitions in enumerate(MANY)
]
markers = st.lists(
    st.builds(
        TxnMarker,
        producer_id=i64,
        producer_epoch=i16,
        committed=st.booleans(),
        partitions=st.lists(partitions, unique=True, max_size=5).map(tuple),
        coordinator_epoch=i32,
        transaction_version=st.integers(-128, 127),
    ),
    unique_by=lambda marker: marker.producer_id,
    max_size=5,
)


@pytest.mark.parametrize("kio", [kio_markers_1, kio_markers_2])
@given(markers=markers)
@example(markers=MANY_MARKERS)
@patient
def test_write_txn_markers(kio, markers):
    version = kio.WriteTxnMarkersRequest.__version__

    def entity(marker: TxnMarker) -> Any:
        rows = by_topic(dict.fromkeys(marker.partitions), lambda index, _: index)
        return kio.WritableTxnMarker(
            producer_id=marker.producer_id,
            producer_epoch=marker.producer_epoch,
            transaction_result=marker.committed,
            topics=tuple(kio.WritableTxnMarkerTopic(name=name, partition_indexes=data) for name, data in rows),
            coordinator_epoch=marker.coordinator_epoch,
            **({"transaction_version": marker.transaction_version} if version == 2 else {}),
        )

    expected = kio_bytes(kio.WriteTxnMarkersRequest(markers=tuple(entity(marker) for marker in markers)))
    assert encoded(requests.markers_call(markers), {27: (1, version)}) == expected


@given(st.dictionaries(i64, by_partition(errors), max_size=5))
@example({number: dict.fromkeys(partitions, ErrorCode.NONE) for number, partitions in enumerate(MANY)})
@patient
def test_write_txn_markers_answer(answers):
    kio = kio_markers_answer

    def topics(answer: Any) -> Any:
        rows = by_topic(
            answer, lambda index, error: kio.WritableTxnMarkerPartitionResult(partition_index=index, error_code=error)
        )
        return tuple(kio.WritableTxnMarkerTopicResult(name=name, partitions=data) for name, data in rows)

    entity = kio.WriteTxnMarkersResponse(
        markers=tuple(
            kio.WritableTxnMarkerResult(producer_id=producer_id, topics=topics(answer))
            for producer_id, answer in answers.items()
        )
    )
    assert decoded(frequent.WRITE_TXN_MARKERS_V2, entity) == answers


def test_tags_of_a_newer_broker_are_passed_over():
    tags = b"\x02" + b"\x00\x01x" + b"\x81\x01\x80\x01" + b"y" * 128  # two: tag 0 of one byte, tag 129 of 128 bytes
    rows = b"".join((7).to_bytes(4, "big") + code.to_bytes(2, "big") + tags for code in (0, 47))
    topic = b"\x02t" + b"\x03" + rows + tags
    marker = (2**40).to_bytes(8, "big") + b"\x03" + topic + topic.replace(b"t", b"u", 1) + tags
    answer = frequent.WRITE_TXN_MARKERS_V2.read(b"\x02" + marker + tags, 0)
    fenced = ErrorCode.INVALID_PRODUCER_EPOCH
    assert answer == {2**40: {TopicPartition("t", 7): fenced, TopicPartition("u", 7): fenced}}


def test_two_markers_of_one_producer_id_are_refused():
    marker = TxnMarker(producer_id=7, producer_epoch=1, committed=True, partitions=(), coordinator_epoch=0)
    with pytest.raises(ValueError, match="one producer id"):
        requests.markers_call([marker, marker])


@given(
    by_partition(st.builds(CommittedOffset, offset=i64, leader_epoch=i32, metadata=notes)),
    st.builds(GroupMember, member_id=names, generation_id=i32, group_instance_id=notes),
    names,
    i64,
    i16,
)
@patient
def test_txn_offset_commit(offsets, member, name, producer_id, producer_epoch):
    kio = kio_commit
    call = requests.txn_offset_commit_call(
        offsets,
        group_id=name,
        member=member,
        transactional_id=name[::-1],
        producer_id=producer_id,
        producer_epoch=producer_epoch,
    )
    rows = by_topic(
        offsets,
        lambda index, committed: kio.TxnOffsetCommitRequestPartition(
            partition_index=index,
            committed_offset=committed.offset,
            committed_leader_epoch=committed.leader_epoch,
            committed_metadata=committed.metadata,
        ),
    )
    assert encoded(call) == kio_bytes(
        kio.TxnOffsetCommitRequest(
            transactional_id=name[::-1],
            group_id=name,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            generation_id=member.generation_id,
            member_id=member.member_id,
            group_instance_id=member.group_instance_id,
            topics=tuple(kio.TxnOffsetCommitRequestTopic(name=name, partitions=data) for name, data in rows),
        )
    )


@given(by_partition(errors))
@patient
def test_txn_offset_commit_answer(answers):
    kio = kio_commit_answer
    rows = by_topic(
        answers, lambda index, error: kio.TxnOffsetCommitResponsePartition(partition_index=index, error_code=error)
    )
    entity = kio.TxnOffsetCommitResponse(
        throttle_time=no_wait,
        topics=tuple(kio.TxnOffsetCommitResponseTopic(name=name, partitions=data) for name, data in rows),
    )
    assert requests.read_txn_offset_commit(decoded(schemas.TXN_OFFSET_COMMIT_V3, entity)) == answers


def test_init_producer_id_without_a_transactional_id():
    expected = kio_init.InitProducerIdRequest(transactional_id=None, transaction_timeout=no_wait)
    assert encoded(requests.init_producer_id_call()) == kio_bytes(expected)


@given(st.builds(ProducerIdentity, error=errors, producer_id=i64, producer_epoch=i16))
@patient
def test_init_producer_id_answer(answer):
    entity = kio_init_answer.InitProducerIdResponse(
        throttle_time=no_wait,
        error_code=answer.error,
        producer_id=answer.producer_id,
        producer_epoch=answer.producer_epoch,
    )
    assert requests.read_init_producer_id(decoded(schemas.INIT_PRODUCER_ID_V0, entity)) == answer


@given(by_partition(st.sampled_from([EARLIEST, LATEST]) | i64), st.booleans(), st.booleans())
@patient
def test_list_offsets(timestamps, read_committed, of_replica):
    kio = kio_offsets
    rows = by_topic(timestamps, lambda index, time: kio.ListOffsetsPartition(partition_index=index, timestamp=time))
    expected = kio.ListOffsetsRequest(
        replica_id=-2 if of_replica else -1,
        isolation_level=1 if read_committed else 0,
        topics=tuple(kio.ListOffsetsTopic(name=name, partitions=data) for name, data in rows),
    )
    call = requests.list_offsets_call(timestamps, read_committed=read_committed, of_replica=of_replica)
    assert encoded(call) == kio_bytes(expected)


@given(by_partition(st.builds(ListedOffset, error=errors, offset=i64, timestamp_ms=i64)))
@patient
def test_list_offsets_answer(answers):
    kio = kio_offsets_answer
    rows = by_topic(
        answers,
        lambda index, answer: kio.ListOffsetsPartitionResponse(
            partition_index=index, error_code=answer.error, timestamp=answer.timestamp_ms, offset=answer.offset
        ),
    )
    entity = kio.ListOffsetsResponse(
        throttle_time=no_wait,
        topics=tuple(kio.ListOffsetsTopicResponse(name=name, partitions=data) for name, data in rows),
    )
    assert requests.read_list_offsets(decoded(schemas.LIST_OFFSETS_V3, entity)) == answers


@given(st.lists(partitions, unique=True, max_size=6))
@patient
def test_describe_producers(asked):
    rows = by_topic(dict.fromkeys(asked), lambda index, _: index)
    expected = kio_producers.DescribeProducersRequest(
        topics=tuple(kio_producers.TopicRequest(name=name, partition_indexes=data) for name, data in rows)
    )
    assert encoded(requests.describe_producers_call(asked)) == kio_bytes(expected)


active_producers = st.builds(
    ActiveProducer,
    producer_id=i64,
    producer_epoch=i32,
    last_sequence=i32,
    last_timestamp_ms=i64,
    coordinator_epoch=i32,
    txn_start_offset=st.none() | st.integers(0, 2**63 - 1),
)


@given(
    by_partition(
        st.builds(
            PartitionProducers,
            error=errors,
            error_message=notes,
            producers=st.lists(active_producers, max_size=3).map(tuple),
        )
    )
)
@patient
def test_describe_producers_answer(answers):
    kio = kio_producers_answer

    def state(producer: ActiveProducer) -> Any:
        return kio.ProducerState(
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            last_sequence=producer.last_sequence,
            last_timestamp=producer.last_timestamp_ms,
            coordinator_epoch=producer.coordinator_epoch,
            current_txn_start_offset=-1 if producer.txn_start_offset is None else producer.txn_start_offset,
        )

    rows = by_topic(
        answers,
        lambda index, answer: kio.PartitionResponse(
            partition_index=index,
            error_code=answer.error,
            error_message=answer.error_message,
            active_producers=tuple(state(producer) for producer in answer.producers),
        ),
    )
    entity = kio.DescribeProducersResponse(
        throttle_time=no_wait, topics=tuple(kio.TopicResponse(name=name, partitions=data) for name, data in rows)
    )
    assert requests.read_describe_producers(decoded(schemas.DESCRIBE_PRODUCERS_V0, entity)) == answers


@given(st.lists(i64, max_size=5))
@patient
def test_list_transactions(producer_ids):
    expected = kio_transactions.ListTransactionsRequest(state_filters=(), producer_id_filters=tuple(producer_ids))
    assert encoded(requests.list_transactions_call(producer_ids)) == kio_bytes(expected)


transactions = st.builds(NativeTransaction, transactional_id=names, producer_id=i64, state=names)


@given(st.builds(NativeTransactions, error=errors, transactions=st.lists(transactions, max_size=4).map(tuple)))
@patient
def test_list_transactions_answer(answer):
    kio = kio_transactions_answer
    entity = kio.ListTransactionsResponse(
        throttle_time=no_wait,
        error_code=answer.error,
        unknown_state_filters=(),
        transaction_states=tuple(
            kio.TransactionState(
                transactional_id=one.transactional_id, producer_id=one.producer_id, transaction_state=one.state
            )
            for one in answer.transactions
        ),
    )
    assert requests.read_list_transactions(decoded(schemas.LIST_TRANSACTIONS_V0, entity)) == answer


@given(names)
@patient
def test_find_group_coordinator(group_id):
    expected = kio_find.FindCoordinatorRequest(key=group_id, key_type=0)
    assert encoded(requests.find_group_coordinator_call(group_id)) == kio_bytes(expected)


@given(st.builds(Coordinator, error=errors, error_message=notes, node_id=st.none() | node_ids))
@patient
def test_find_coordinator_answer(answer):
    entity = kio_find_answer.FindCoordinatorResponse(
        throttle_time=no_wait,
        error_code=answer.error,
        error_message=answer.error_message,
        node_id=-1 if answer.node_id is None else answer.node_id,
        host="",
        port=-1,
    )
    assert requests.read_find_coordinator(decoded(schemas.FIND_COORDINATOR_V1, entity)) == answer


@given(names)
@patient
def test_describe_group(group_id):
    expected = kio_groups.DescribeGroupsRequest(groups=(group_id,))
    assert encoded(requests.describe_group_call(group_id)) == kio_bytes(expected)


@given(st.builds(DescribedGroup, error=errors, client_ids=st.lists(names, max_size=4).map(tuple)))
@patient
def test_describe_group_answer(answer):
    members = tuple(
        kio_groups_answer.DescribedGroupMember(
            member_id="m", client_id=client_id, client_host="h", member_metadata=b"", member_assignment=b""
        )
        for client_id in answer.client_ids
    )
    group = kio_groups_answer.DescribedGroup(
        error_code=answer.error,
        group_id="g",
        group_state="Stable",
        protocol_type="consumer",
        protocol_data="cooperative-sticky",
        members=members,
    )
    entity = kio_groups_answer.DescribeGroupsResponse(groups=(group,))
    assert requests.read_describe_group(decoded(schemas.DESCRIBE_GROUPS_V0, entity)) == answer


@given(st.none() | st.lists(names, max_size=4))
@patient
def test_metadata_never_creates_a_topic(topics):
    kio = kio_metadata
    asked = None
    if topics is not None:
        asked = tuple(kio.MetadataRequestTopic(topic_id=None, name=topic) for topic in topics)
    expected = kio.MetadataRequest(
        topics=asked, allow_auto_topic_creation=False, include_topic_authorized_operations=False
    )
    assert encoded(requests.metadata_call(topics)) == kio_bytes(expected)


brokers = st.builds(Broker, node_id=node_ids, host=names, port=i32, rack=notes)
partition_metadata = st.builds(
    PartitionMetadata,
    error=errors,
    leader_id=st.none() | node_ids,
    leader_epoch=i32,
    replica_ids=st.lists(i32, max_size=3).map(tuple),
    in_sync_ids=st.lists(i32, max_size=3).map(tuple),
    offline_ids=st.lists(i32, max_size=3).map(tuple),
)
topic_metadata = st.builds(
    TopicMetadata,
    error=errors,
    topic_id=st.none() | st.uuids(),
    is_internal=st.booleans(),
    partitions=st.dictionaries(node_ids, partition_metadata, max_size=3),
)


@given(
    st.builds(
        ClusterMetadata,
        cluster_id=notes,
        controller_id=st.none() | node_ids,
        brokers=st.lists(brokers, max_size=3).map(lambda rows: {broker.node_id: broker for broker in rows}),
        topics=st.dictionaries(names, topic_metadata, max_size=3),
    )
)
@patient
def test_metadata_answer(answer):
    kio = kio_metadata_answer

    def partition(index: int, metadata: PartitionMetadata) -> Any:
        return kio.MetadataResponsePartition(
            error_code=metadata.error,
            partition_index=index,
            leader_id=-1 if metadata.leader_id is None else metadata.leader_id,
            leader_epoch=metadata.leader_epoch,
            replica_nodes=metadata.replica_ids,
            isr_nodes=metadata.in_sync_ids,
            offline_replicas=metadata.offline_ids,
        )

    entity = kio.MetadataResponse(
        throttle_time=no_wait,
        brokers=tuple(
            kio.MetadataResponseBroker(node_id=one.node_id, host=one.host, port=one.port, rack=one.rack)
            for one in answer.brokers.values()
        ),
        cluster_id=answer.cluster_id,
        controller_id=-1 if answer.controller_id is None else answer.controller_id,
        topics=tuple(
            kio.MetadataResponseTopic(
                error_code=topic.error,
                name=name,
                topic_id=topic.topic_id,
                is_internal=topic.is_internal,
                partitions=tuple(partition(index, one) for index, one in topic.partitions.items()),
            )
            for name, topic in answer.topics.items()
        ),
    )
    assert requests.read_metadata(decoded(schemas.METADATA_V11, entity)) == answer


CALLS = [
    requests.metadata_call(()),
    requests.produce_call({}, transactional_id=None, acks=-1, timeout_ms=1),
    requests.markers_call(()),
    requests.init_producer_id_call(),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("offered", [(90, 99), None])
def test_a_broker_without_a_common_version_is_named(call, offered):
    with pytest.raises(UnsupportedRequestError, match="none of ours"):
        call.prepare({} if offered is None else dict.fromkeys(NEWEST, offered))


def test_produce_and_offset_commits_stay_below_the_versions_that_ask_kafkas_coordinator():
    produce = requests.produce_call({}, transactional_id=None, acks=-1, timeout_ms=1)
    commit = requests.txn_offset_commit_call(
        {}, group_id="g", member=GroupMember(), transactional_id="t", producer_id=1, producer_epoch=0
    )
    assert produce.prepare(NEWEST)[0].version <= 11
    assert commit.prepare(NEWEST)[0].version <= 4
