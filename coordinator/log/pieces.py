"""Pieces of records as bytes of protos/oncebox/v1, for coordinator.log.codec to put together. Pure.

In protobuf a message's fields may follow each other in any order, and what contains a message takes it as bytes: so
what comes again with each record of an id is encoded once. A busy log spends most of its time on encoding.
"""

from collections.abc import Iterable
from functools import lru_cache

from coordinator.core.records import Outcome, Owner, Slot, TopicPartition, Written
from oncebox.v1 import log_pb2, transaction_pb2
from oncebox.wire.varints import varint

# A larger set is encoded each time: what is kept must be small.
_PARTITIONS_KEPT_MAX = 100


def sized(tag: bytes, message: bytes) -> bytes:
    """A message as a field of another one."""
    return tag + varint(len(message)) + message


@lru_cache(maxsize=10_000)
def owner(owner: Owner) -> bytes:
    """As a field of an id's state, as are the next two."""
    return log_pb2.IdState(owner=owner_message(owner)).SerializeToString()


@lru_cache(maxsize=20_000)
def slot(slot: Slot) -> bytes:
    message = log_pb2.Slot(
        producer_id=slot.producer_id, epoch=slot.epoch, since_ms=slot.since_ms, topic_changes=slot.topic_changes
    )
    return log_pb2.IdState(slots=[message]).SerializeToString()


@lru_cache(maxsize=50_000)
def outcome(outcome: Outcome) -> bytes:
    record = log_pb2.OutcomeRecord(
        number=outcome.grant.number,
        producer_id=outcome.grant.producer_id,
        epoch=outcome.grant.epoch,
        result=outcome.result,  # type: ignore[arg-type]  # core's enums have the protocol's numbers
        cause=outcome.cause,  # type: ignore[arg-type]
        decided_at_ms=outcome.decided_at_ms,
    )
    return log_pb2.IdState(outcomes=[record]).SerializeToString()


def partitions(partitions: frozenset[TopicPartition]) -> bytes:
    """As fields of a transaction."""
    return _partitions(partitions) if len(partitions) <= _PARTITIONS_KEPT_MAX else _partitions.__wrapped__(partitions)


@lru_cache(maxsize=5_000)
def _partitions(partitions: frozenset[TopicPartition]) -> bytes:
    return log_pb2.TransactionRecord(partitions=partitions_messages(partitions)).SerializeToString()


def written(entry: Written) -> bytes:
    """A message of its own: a transaction and its manifest have it in different fields."""
    runs = [transaction_pb2.Run(offset_first=run[0], offset_next=run[1]) for run in entry.runs]
    offsets = transaction_pb2.Written(record_count=entry.record_count, runs=runs)
    return _where(entry.topic, entry.partition, entry.topic_id) + offsets.SerializeToString()


@lru_cache(maxsize=10_000)
def _where(topic: str, partition: int, topic_id: bytes) -> bytes:
    return transaction_pb2.Written(topic=topic, partition=partition, topic_id=topic_id).SerializeToString()


def owner_message(owner: Owner) -> transaction_pb2.Owner:
    return transaction_pb2.Owner(
        instance=owner.instance,
        address=owner.address,
        since_ms=owner.since_ms,
        number_first=owner.number_first,
        cause=owner.cause,  # type: ignore[arg-type]
    )


def partitions_messages(partitions: Iterable[TopicPartition]) -> list[transaction_pb2.TopicPartitions]:
    by_topic: dict[str, list[int]] = {}
    for topic, partition in partitions:
        by_topic.setdefault(topic, []).append(partition)
    return [transaction_pb2.TopicPartitions(topic=t, partitions=sorted(by_topic[t])) for t in sorted(by_topic)]
