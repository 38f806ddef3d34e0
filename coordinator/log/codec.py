"""Core records <-> the bytes of protos/oncebox/v1/log.proto. Pure.

Whatever cannot be read exactly (a newer version, an unknown key) is an error: a partition is never served on a guess.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import Any

from coordinator.core.records import (
    NOTHING,
    Cause,
    Contents,
    Grant,
    GroupOffset,
    GroupOffsets,
    GroupPartition,
    IdState,
    NumberFloor,
    Origin,
    Outcome,
    Owner,
    Record,
    Result,
    Run,
    Slot,
    Tombstone,
    TopicPartition,
    TopicState,
    Transaction,
    Written,
)
from coordinator.core.state import TransactionState
from coordinator.log import pieces
from coordinator.log.pieces import sized
from oncebox.v1 import log_pb2, manifest_pb2, transaction_pb2

VERSION = 1
LEADER_KEY = log_pb2.LogKey(leader=True).SerializeToString()
PARTITION_KEY = log_pb2.LogKey(partition=True).SerializeToString()


class CorruptLogError(Exception):
    """The log holds something that this process cannot read; it must not serve the partition."""


# Field 1 of a key is the id's name.
_NAME_TAG = 0x0A
_NAME = bytes([_NAME_TAG])
# Field 1 is the version, field 2 the id's state; in the feed, field 2 is the manifest.
_ID_PREFIX = bytes([0x08, VERSION, 0x12])
# Tags of an id's transactions, and of what they and manifests say was written.
_TRANSACTION = b"\x4a"
_WRITTEN = b"\x2a"
_MANIFEST_WRITTEN = b"\x4a"


def raw(value: IntEnum) -> Any:
    """Core's enums have the protocol's numbers; the generated types want their own."""
    return value


def id_key(transactional_id: str) -> bytes:
    return sized(_NAME, transactional_id.encode())


def id_of(key: bytes | None) -> str | None:
    """The transactional id, where the key is an id's."""
    # A short name that is all there is: nearly every key of a long log, and this is much quicker than a message.
    if key is not None and 2 < len(key) < 130 and key[0] == _NAME_TAG and key[1] == len(key) - 2:
        try:
            return key[2:].decode()
        except UnicodeDecodeError as error:
            raise CorruptLogError(f"a key in the log cannot be read: {error}") from error
    parsed = parse_key(key)
    return parsed.transactional_id if parsed.HasField("transactional_id") else None


def encode(record: Record) -> tuple[bytes, bytes | None]:
    """Key and value; a value of None is a tombstone."""
    match record:
        case IdState():
            return id_key(record.transactional_id), encode_id(record)
        case Tombstone():
            return id_key(record.transactional_id), None
        case NumberFloor():
            floor = log_pb2.PartitionState(number_floor=record.number_floor)
            return PARTITION_KEY, log_pb2.LogValue(version=VERSION, partition=floor).SerializeToString()
        case TopicState():
            topic = log_pb2.TopicState(topic_id=record.topic_id, change=record.change)
            key = log_pb2.LogKey(topic=record.topic).SerializeToString()
            return key, log_pb2.LogValue(version=VERSION, topic=topic).SerializeToString()


def encode_leader(leader: log_pb2.LeaderState) -> tuple[bytes, bytes]:
    return LEADER_KEY, log_pb2.LogValue(version=VERSION, leader=leader).SerializeToString()


def parse_key(key: bytes | None) -> log_pb2.LogKey:
    if key is None:
        raise CorruptLogError("a record without a key stands in the log")
    try:
        parsed = log_pb2.LogKey.FromString(key)
    except Exception as error:
        raise CorruptLogError(f"a key in the log cannot be read: {error}") from error
    if parsed.WhichOneof("key") is None:
        raise CorruptLogError("the log holds a kind of key that this version does not know; upgrade this process")
    return parsed


def parse_value(value: bytes) -> log_pb2.LogValue:
    try:
        parsed = log_pb2.LogValue.FromString(value)
    except Exception as error:
        raise CorruptLogError(f"a value in the log cannot be read: {error}") from error
    if parsed.version > VERSION:
        raise CorruptLogError(
            f"the log holds records of version {parsed.version}, this process reads up to {VERSION}; upgrade it"
        )
    if parsed.WhichOneof("value") is None:
        raise CorruptLogError("the log holds a kind of value that this version does not know; upgrade this process")
    return parsed


def encode_id(state: IdState) -> bytes:
    message = log_pb2.IdState(
        number=state.number,
        slot=state.slot,
        origin=raw(state.origin),
        origin_number=state.origin_number,
        transaction_timeout_ms=state.transaction_timeout_ms,
        slots_max=state.slots_max,
        resume_token=state.resume_token,
        updated_at_ms=state.updated_at_ms,
    )
    parts = [
        message.SerializeToString(),
        *map(pieces.slot, state.slots),
        pieces.owner(state.owner),
        *[sized(_TRANSACTION, _encode_transaction(transaction)) for transaction in state.transactions],
        *map(pieces.outcome, state.outcomes),
    ]
    return sized(_ID_PREFIX, b"".join(parts))


def _encode_transaction(transaction: Transaction) -> bytes:
    grant = transaction.grant
    message = log_pb2.TransactionRecord(
        number=grant.number,
        producer_id=grant.producer_id,
        epoch=grant.epoch,
        state=raw(transaction.state),
        started_at_ms=transaction.started_at_ms,
        decided_at_ms=transaction.decided_at_ms,
        cause=raw(transaction.cause),
        decision=transaction.decision,
        feed_offset_first=transaction.feed_offset_first,
        feed_offset_next=transaction.feed_offset_next,
    )
    if transaction.groups:
        message.groups.extend(log_pb2.GroupPartition(group_id=g, partition=p) for g, p in sorted(transaction.groups))
    contents = transaction.contents
    # Half of all: the next transaction, registered with the end of one.
    if contents is NOTHING:
        return message.SerializeToString() + pieces.partitions(transaction.partitions)
    message.metadata = contents.metadata
    if contents.group_offsets:
        message.group_offsets.extend(group_offsets_messages(contents.group_offsets))
    written = [sized(_WRITTEN, pieces.written(entry)) for entry in contents.written]
    return b"".join((message.SerializeToString(), pieces.partitions(transaction.partitions), *written))


def decode_id(transactional_id: str, value: bytes) -> IdState:
    parsed = parse_value(value)
    if parsed.WhichOneof("value") != "id":
        raise CorruptLogError(f"the record of the id {transactional_id!r} is not an id's state")
    return id_state(transactional_id, parsed.id)


def updated_at_ms(value: bytes) -> int:
    """When an id's state was last changed; the rest of it is not looked at."""
    return parse_value(value).id.updated_at_ms


def producer_ids(value: bytes) -> set[int]:
    """Those that an id has, and those of its last transactions; the rest of it is not looked at."""
    state = parse_value(value).id
    return {slot.producer_id for slot in state.slots} | {outcome.producer_id for outcome in state.outcomes}


def id_state(transactional_id: str, message: log_pb2.IdState) -> IdState:
    owner = message.owner
    return IdState(
        transactional_id=transactional_id,
        slots=tuple(
            Slot(producer_id=s.producer_id, epoch=s.epoch, since_ms=s.since_ms, topic_changes=s.topic_changes)
            for s in message.slots
        ),
        number=message.number,
        slot=message.slot,
        origin=Origin(message.origin),
        origin_number=message.origin_number,
        owner=Owner(
            instance=owner.instance,
            address=owner.address,
            since_ms=owner.since_ms,
            number_first=owner.number_first,
            cause=Cause(owner.cause),
        ),
        transaction_timeout_ms=message.transaction_timeout_ms,
        slots_max=message.slots_max,
        transactions=tuple(_transaction(transaction) for transaction in message.transactions),
        outcomes=tuple(
            Outcome(
                grant=Grant(number=outcome.number, producer_id=outcome.producer_id, epoch=outcome.epoch),
                result=Result(outcome.result),
                cause=Cause(outcome.cause),
                decided_at_ms=outcome.decided_at_ms,
            )
            for outcome in message.outcomes
        ),
        resume_token=message.resume_token,
        updated_at_ms=message.updated_at_ms,
    )


def group_offsets_messages(group_offsets: Iterable[GroupOffsets]) -> list[transaction_pb2.GroupOffsets]:
    return [
        transaction_pb2.GroupOffsets(
            group_id=group.group_id,
            offsets=[
                transaction_pb2.GroupOffset(
                    topic=o.topic, partition=o.partition, offset_next=o.offset_next, metadata=o.metadata
                )
                for o in group.offsets
            ],
        )
        for group in group_offsets
    ]


def written(messages: Iterable[transaction_pb2.Written]) -> tuple[Written, ...]:
    return tuple(
        Written(
            topic=m.topic,
            partition=m.partition,
            record_count=m.record_count,
            runs=tuple(Run(run.offset_first, run.offset_next) for run in m.runs),
            topic_id=m.topic_id,
        )
        for m in messages
    )


def group_offsets(messages: Iterable[transaction_pb2.GroupOffsets]) -> tuple[GroupOffsets, ...]:
    return tuple(
        GroupOffsets(
            group_id=m.group_id,
            offsets=tuple(
                GroupOffset(topic=o.topic, partition=o.partition, offset_next=o.offset_next, metadata=o.metadata)
                for o in m.offsets
            ),
        )
        for m in messages
    )


def _transaction(message: log_pb2.TransactionRecord) -> Transaction:
    contents = NOTHING
    if message.written or message.group_offsets or message.metadata:
        contents = Contents(
            written=written(message.written),
            group_offsets=group_offsets(message.group_offsets),
            metadata=message.metadata,
        )
    return Transaction(
        grant=Grant(number=message.number, producer_id=message.producer_id, epoch=message.epoch),
        state=TransactionState(message.state),
        partitions=frozenset(
            TopicPartition(t.topic, partition) for t in message.partitions for partition in t.partitions
        ),
        groups=frozenset(GroupPartition(g.group_id, g.partition) for g in message.groups),
        started_at_ms=message.started_at_ms,
        contents=contents,
        decided_at_ms=message.decided_at_ms,
        cause=Cause(message.cause),
        decision=message.decision,
        feed_offset_first=message.feed_offset_first,
        feed_offset_next=message.feed_offset_next,
    )


# --- the feed -------------------------------------------------------------------------------------------------------


def encode_manifest(transactional_id: str, transaction: Transaction, size_max: int) -> list[tuple[bytes, bytes]]:
    """The transaction's manifest as feed records (key, value): one, or as many parts as its size asks for.

    Cut deterministically, partition by partition, so that a successor that finds some parts appends just the others.
    """
    contents = transaction.contents
    head = manifest_pb2.Manifest(
        transactional_id=transactional_id,
        number=transaction.grant.number,
        producer_id=transaction.grant.producer_id,
        epoch=transaction.grant.epoch,
        started_at_ms=transaction.started_at_ms,
        decided_at_ms=transaction.decided_at_ms,
    )
    later_size = head.ByteSize()
    first = b""
    if contents.group_offsets or contents.metadata:
        groups = group_offsets_messages(contents.group_offsets)
        first = manifest_pb2.Manifest(group_offsets=groups, metadata=contents.metadata).SerializeToString()
    parts: list[list[bytes]] = [[]]
    size = later_size + len(first)
    for entry in contents.written:
        piece = pieces.written(entry)
        piece_size = len(piece) + 8
        if parts[-1] and size + piece_size > size_max:
            parts.append([])
            size = later_size
        parts[-1].append(sized(_MANIFEST_WRITTEN, piece))
        size += piece_size
    key = transactional_id.encode()
    head.part_count = len(parts)
    encoded = []
    for index, written_there in enumerate(parts):
        head.part = index
        value = b"".join((head.SerializeToString(), b"" if index else first, *written_there))
        encoded.append((key, sized(_ID_PREFIX, value)))
    return encoded


def encode_feed_leader(leader: log_pb2.LeaderState) -> tuple[bytes, bytes]:
    return b"", manifest_pb2.FeedRecord(version=VERSION, leader=leader).SerializeToString()


def parse_feed(value: bytes | None) -> manifest_pb2.FeedRecord:
    if value is None:
        raise CorruptLogError("a record without a value stands in the feed")
    try:
        parsed = manifest_pb2.FeedRecord.FromString(value)
    except Exception as error:
        raise CorruptLogError(f"a record in the feed cannot be read: {error}") from error
    if parsed.version > VERSION:
        raise CorruptLogError(
            f"the feed holds records of version {parsed.version}, this process reads up to {VERSION}; upgrade it"
        )
    return parsed
