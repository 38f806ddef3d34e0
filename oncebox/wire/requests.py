"""Kafka requests made from plain data, and responses read into plain data. Nothing here does I/O.

The version is agreed per connection: the newest of ours that the broker offers. Produce stays below 12 and
TxnOffsetCommit below 5: from there on brokers ask Kafka's own transaction coordinator, which knows nothing of
ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from oncebox.wire import frequent, schemas
from oncebox.wire.errors import ErrorCode, UnsupportedRequestError
from oncebox.wire.types import (
    ActiveProducer,
    Broker,
    ClusterMetadata,
    CommittedOffset,
    Coordinator,
    DescribedGroup,
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
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from oncebox.wire.schemas import Layout

_NO_TAGS: Final[dict[int, bytes]] = {}


class Call:
    """A request that is not written yet: its version is chosen by what the broker of its connection speaks."""

    __slots__ = ("_layouts", "_values")

    def __init__(self, layouts: Sequence[Layout], *values: Any) -> None:
        self._layouts = layouts  # newest first
        self._values = values

    def prepare(self, versions: Mapping[int, tuple[int, int]]) -> tuple[Layout, list[bytes]]:
        """The layout chosen, and the request's body in it."""
        newest_of_ours = self._layouts[0]
        oldest, newest = versions.get(newest_of_ours.api_key, (0, -1))
        for layout in self._layouts:
            if oldest <= layout.version <= newest:
                return layout, layout.write(*self._values)
        raise UnsupportedRequestError(
            f"the broker takes versions {oldest} to {newest} of {newest_of_ours.name}, which is none of ours"
        )


def _by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    topics: dict[str, list[int]] = {}
    for topic, partition in partitions:
        topics.setdefault(topic, []).append(partition)
    return topics


def metadata_call(topics: Collection[str] | None) -> Call:
    """None asks for every topic, an empty collection for none. Never creates a topic."""
    names = None if topics is None else [(None, topic, _NO_TAGS) for topic in topics]
    return Call((schemas.METADATA_V11,), names, False, False, _NO_TAGS)


def read_metadata(response: Any) -> ClusterMetadata:
    return ClusterMetadata(
        cluster_id=response.cluster_id,
        controller_id=_node(response.controller_id),
        brokers={
            node_id: Broker(node_id=node_id, host=host, port=port, rack=rack)
            for node_id, host, port, rack, _ in response.brokers
        },
        topics={
            name: TopicMetadata(
                error=ErrorCode(error),
                topic_id=topic_id,
                is_internal=internal,
                partitions={
                    partition: PartitionMetadata(
                        error=ErrorCode(code),
                        leader_id=_node(leader),
                        leader_epoch=leader_epoch,
                        replica_ids=tuple(replicas),
                        in_sync_ids=tuple(in_sync),
                        offline_ids=tuple(offline),
                    )
                    for code, partition, leader, leader_epoch, replicas, in_sync, offline, _ in partitions
                },
            )
            for error, name, topic_id, internal, partitions, _, _ in response.topics
        },
    )


def _node(node_id: int) -> int | None:
    return node_id if node_id >= 0 else None


def produce_call(
    batches: Mapping[TopicPartition, bytes], *, transactional_id: str | None, acks: int, timeout_ms: int
) -> Call:
    if acks not in {-1, 1}:
        raise ValueError("acks is -1 (all in-sync replicas) or 1 (the leader): without an answer nothing is known")
    topics: dict[str, list[tuple[int, bytes]]] = {}
    for (topic, partition), batch in batches.items():
        topics.setdefault(topic, []).append((partition, batch))
    return Call((frequent.PRODUCE_V8,), transactional_id, acks, timeout_ms, topics.items())


def markers_call(markers: Sequence[TxnMarker]) -> Call:
    if len({marker.producer_id for marker in markers}) < len(markers):
        raise ValueError("two markers of one producer id in one request: the answer could not tell them apart")
    return Call((frequent.WRITE_TXN_MARKERS_V2, frequent.WRITE_TXN_MARKERS_V1), markers)


def txn_offset_commit_call(
    offsets: Mapping[TopicPartition, CommittedOffset],
    *,
    group_id: str,
    member: GroupMember,
    transactional_id: str,
    producer_id: int,
    producer_epoch: int,
) -> Call:
    topics: dict[str, list[tuple[Any, ...]]] = {}
    for (topic, partition), committed in offsets.items():
        row = (partition, committed.offset, committed.leader_epoch, committed.metadata, _NO_TAGS)
        topics.setdefault(topic, []).append(row)
    values = (
        transactional_id,
        group_id,
        producer_id,
        producer_epoch,
        member.generation_id,
        member.member_id,
        member.group_instance_id,
        [(topic, partitions, _NO_TAGS) for topic, partitions in topics.items()],
        _NO_TAGS,
    )
    return Call((schemas.TXN_OFFSET_COMMIT_V3,), *values)


def read_txn_offset_commit(response: Any) -> dict[TopicPartition, ErrorCode]:
    return {
        TopicPartition(topic, partition): ErrorCode(error)
        for topic, partitions, _ in response.topics
        for partition, error, _ in partitions
    }


def init_producer_id_call() -> Call:
    """Without a transactional.id: a producer id that is new in the cluster, no coordinator behind it."""
    return Call((schemas.INIT_PRODUCER_ID_V0,), None, 0)


def read_init_producer_id(response: Any) -> ProducerIdentity:
    return ProducerIdentity(
        error=ErrorCode(response.error_code),
        producer_id=response.producer_id,
        producer_epoch=response.producer_epoch,
    )


# Who asks: a client, which only the leader answers, or somebody who wants to know what this replica has.
_CLIENT: Final = -1
_OBSERVER: Final = -2


def list_offsets_call(
    timestamps: Mapping[TopicPartition, int], *, read_committed: bool, of_replica: bool = False
) -> Call:
    topics: dict[str, list[tuple[int, int]]] = {}
    for (topic, partition), timestamp in timestamps.items():
        topics.setdefault(topic, []).append((partition, timestamp))
    asking = _OBSERVER if of_replica else _CLIENT
    return Call((schemas.LIST_OFFSETS_V3,), asking, int(read_committed), list(topics.items()))


def read_list_offsets(response: Any) -> dict[TopicPartition, ListedOffset]:
    return {
        TopicPartition(topic, partition): ListedOffset(error=ErrorCode(error), offset=offset, timestamp_ms=timestamp)
        for topic, partitions in response.topics
        for partition, error, timestamp, offset in partitions
    }


def describe_producers_call(partitions: Iterable[TopicPartition]) -> Call:
    topics = [(topic, indexes, _NO_TAGS) for topic, indexes in _by_topic(partitions).items()]
    return Call((schemas.DESCRIBE_PRODUCERS_V0,), topics, _NO_TAGS)


def read_describe_producers(response: Any) -> dict[TopicPartition, PartitionProducers]:
    return {
        TopicPartition(topic, partition): PartitionProducers(
            error=ErrorCode(error),
            error_message=message,
            producers=tuple(
                ActiveProducer(
                    producer_id=producer_id,
                    producer_epoch=epoch,
                    last_sequence=sequence,
                    last_timestamp_ms=timestamp,
                    coordinator_epoch=coordinator_epoch,
                    txn_start_offset=start if start >= 0 else None,
                )
                for producer_id, epoch, sequence, timestamp, coordinator_epoch, start, _ in producers
            ),
        )
        for topic, partitions, _ in response.topics
        for partition, error, message, producers, _ in partitions
    }


def list_transactions_call(producer_ids: Collection[int]) -> Call:
    """No producer ids: all transactions."""
    return Call((schemas.LIST_TRANSACTIONS_V0,), (), producer_ids, _NO_TAGS)


def read_list_transactions(response: Any) -> NativeTransactions:
    return NativeTransactions(
        error=ErrorCode(response.error_code),
        transactions=tuple(
            NativeTransaction(transactional_id=transactional_id, producer_id=producer_id, state=state)
            for transactional_id, producer_id, state, _ in response.transactions
        ),
    )


def describe_transactions_call(transactional_ids: Collection[str]) -> Call:
    return Call((schemas.DESCRIBE_TRANSACTIONS_V0,), transactional_ids, _NO_TAGS)


def read_describe_transactions(response: Any) -> dict[str, ErrorCode]:
    return {row[1]: ErrorCode(row[0]) for row in response.transactions}


def find_group_coordinator_call(group_id: str) -> Call:
    return Call((schemas.FIND_COORDINATOR_V1,), group_id, 0)


def read_find_coordinator(response: Any) -> Coordinator:
    return Coordinator(
        error=ErrorCode(response.error_code),
        error_message=response.error_message,
        node_id=_node(response.coordinator_id),
    )


def describe_group_call(group_id: str) -> Call:
    return Call((schemas.DESCRIBE_GROUPS_V0,), [group_id])


def read_describe_group(response: Any) -> DescribedGroup:
    ((error, _group, _state, _type, _protocol, members),) = response.groups
    return DescribedGroup(error=ErrorCode(error), client_ids=tuple(client_id for _, client_id, *_ in members))
