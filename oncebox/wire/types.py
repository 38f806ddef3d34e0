"""What goes over the wire and what comes back, as plain data.

Nothing here does I/O or decides anything. An `error` of ErrorCode.NONE means that the broker did what it was
asked. What is made for every batch and every marker is a named tuple: a frozen dataclass takes three times as
long to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from oncebox.wire.errors import ErrorCode

# What ListOffsets takes instead of a timestamp.
EARLIEST: Final = -2
LATEST: Final = -1


class TopicPartition(NamedTuple):
    topic: str
    partition: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    node_id: int
    host: str
    port: int
    rack: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionMetadata:
    error: ErrorCode
    leader_id: int | None
    leader_epoch: int
    replica_ids: tuple[int, ...]
    in_sync_ids: tuple[int, ...]
    offline_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicMetadata:
    error: ErrorCode
    topic_id: UUID | None
    is_internal: bool
    partitions: Mapping[int, PartitionMetadata]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMetadata:
    cluster_id: str | None
    controller_id: int | None
    brokers: Mapping[int, Broker]
    topics: Mapping[str, TopicMetadata]


class Appended(NamedTuple):
    """The answer to one batch. A repeated batch is answered with the offset of the first."""

    error: ErrorCode
    base_offset: int
    log_append_time_ms: int
    log_start_offset: int
    error_message: str | None


class TxnMarker(NamedTuple):
    """The end of one producer id's transaction on some partitions of one broker.

    `transaction_version` 2 makes brokers from 4.2 on refuse an epoch that is not above the producer's
    (KIP-1228); older brokers never see it and accept an equal one.
    """

    producer_id: int
    producer_epoch: int
    committed: bool
    partitions: tuple[TopicPartition, ...]
    coordinator_epoch: int
    transaction_version: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """Who commits group offsets, for the broker to fence (KIP-447). By default a group without members."""

    member_id: str = ""
    generation_id: int = -1
    group_instance_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedOffset:
    offset: int
    leader_epoch: int = -1
    metadata: str | None = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerIdentity:
    error: ErrorCode
    producer_id: int
    producer_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedOffset:
    error: ErrorCode
    offset: int
    timestamp_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveProducer:
    """A producer's state on one partition. `txn_start_offset` is None unless a transaction is open."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_timestamp_ms: int
    coordinator_epoch: int
    txn_start_offset: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionProducers:
    error: ErrorCode
    error_message: str | None
    producers: tuple[ActiveProducer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeTransaction:
    """A transaction of Kafka's own coordinator, as the asked broker knows it."""

    transactional_id: str
    producer_id: int
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeTransactions:
    error: ErrorCode
    transactions: tuple[NativeTransaction, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinator:
    error: ErrorCode
    error_message: str | None
    node_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedGroup:
    """One client id per member; none of a group that the asked broker knows nothing of."""

    error: ErrorCode
    client_ids: tuple[str, ...]
