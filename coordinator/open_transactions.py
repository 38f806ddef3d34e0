"""Transactions that are open on a partition, and whose they are. Pure: who was asked what is coordinator.hanging's."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from coordinator.core.records import Result
from oncebox import wire
from oncebox.v1 import manifest_pb2, peer_pb2
from oncebox.wire import OFFSETS_TOPIC, ActiveProducer, TopicPartition


class Kind(IntEnum):
    """As OpenTransaction.Kind."""

    ONCEBOX = 1
    NATIVE = 2
    HANGING = 3
    UNKNOWN = 4


class Seen(NamedTuple):
    """A transaction open on a partition, as the partition's leader sees it."""

    partition: TopicPartition
    producer: ActiveProducer
    offset_first: int


class Unexamined(NamedTuple):
    """A partition that could not be looked at."""

    partition: TopicPartition
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the coordinators know of open transactions."""

    # By (producer id, epoch).
    ours: Mapping[tuple[int, int], peer_pb2.OpenProducer]
    # Transactional ids by producer id.
    native: Mapping[int, str]
    # Whether these are all.
    sees_all_native: bool
    # Who did not answer; while somebody is missing nothing counts as hanging.
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    topic: str
    partition: int
    producer_id: int
    epoch: int
    coordinator_epoch: int
    offset_first: int
    age_ms: int
    kind: Kind
    transactional_id: str = ""
    number: int = 0
    # Of a hanging one: how it is ended, or would be.
    ends_as: Result = Result.UNDECIDED
    # Whether it is certain that it is not Kafka's own.
    may_end: bool = False
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionDescription:
    offset_stable: int
    offset_high_watermark: int
    open: tuple[Open, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    hanging: tuple[Open, ...]
    unexamined: tuple[Unexamined, ...]


def classify(seen: Seen, known: Known, *, now_ms: int, age_min_ms: int) -> Open:
    producer = seen.producer
    age_ms = max(now_ms - producer.last_timestamp_ms, 0)
    ours = known.ours.get((producer.producer_id, producer.producer_epoch))
    native = known.native.get(producer.producer_id)
    if ours is not None:
        kind = Kind.ONCEBOX
    elif native is not None:
        kind = Kind.NATIVE
    elif known.missing or age_ms < age_min_ms:
        kind = Kind.UNKNOWN
    else:
        kind = Kind.HANGING
    return Open(
        topic=seen.partition.topic,
        partition=seen.partition.partition,
        producer_id=producer.producer_id,
        epoch=producer.producer_epoch,
        coordinator_epoch=producer.coordinator_epoch,
        offset_first=seen.offset_first,
        age_ms=age_ms,
        kind=kind,
        transactional_id=ours.transactional_id if ours else native or "",
        number=ours.number if ours else 0,
    )


def covers(manifest: manifest_pb2.Manifest, hanging: Open, topic_id: bytes, offsets_partitions: int) -> bool:
    """Whether the manifest says that this very transaction was committed on this very partition."""
    if (manifest.producer_id, manifest.epoch) != (hanging.producer_id, hanging.epoch):
        return False
    if hanging.topic == OFFSETS_TOPIC:
        homes = {wire.offsets_partition(entry.group_id, offsets_partitions) for entry in manifest.group_offsets}
        return hanging.partition in homes
    return any(
        entry.topic_id == topic_id
        and entry.partition == hanging.partition
        and any(run.offset_first <= hanging.offset_first < run.offset_next for run in entry.runs)
        for entry in manifest.written
    )
