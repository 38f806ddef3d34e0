"""What a reader of transactions gets, and where it stands. Data only."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from oncebox.errors import FatalError
from oncebox.wire import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from oncebox.v1 import transaction_pb2

VERSION = 1


class ReadError(FatalError):
    """Whole transactions cannot be told any more; reading stops rather than guess."""


class FeedTooShortError(ReadError):
    """The feed has forgotten commits that records still to be read may belong to."""


class Record(NamedTuple):
    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedTransaction:
    """All records of one transaction in the topics that are read, or one record that belongs to none."""

    records: Mapping[TopicPartition, Sequence[Record]]
    # None: a single record that was not written through Oncebox. All below is then without meaning.
    transactional_id: str | None = None
    number: int = 0
    producer_id: int = -1
    epoch: int = -1
    started_at_ms: int = 0
    decided_at_ms: int = 0
    # What the writer gave to commit(); its resume token.
    metadata: bytes = b""
    group_offsets: Sequence[transaction_pb2.GroupOffsets] = ()
    # Where records of it were unloaded before: by partition, the last one's offset. They are missing in `records`.
    unloaded: Mapping[TopicPartition, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPosition:
    # Everything below has been read.
    next_offset: int
    # Beyond it, what has been read too: (first, next) offsets, ascending.
    done: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where to go on: each transaction is read once before it or once after it."""

    feed: Mapping[int, int]
    partitions: Mapping[TopicPartition, PartitionPosition]
    # Kafka's own ids: a topic that was deleted and made again is another.
    topic_ids: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(
            {
                "version": VERSION,
                "feed": {str(partition): offset for partition, offset in sorted(self.feed.items())},
                "partitions": [
                    [where.topic, where.partition, position.next_offset, list(position.done)]
                    for where, position in sorted(self.partitions.items())
                ],
                "topic_ids": dict(sorted(self.topic_ids.items())),
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> Position:
        held = json.loads(text)
        if held["version"] != VERSION:
            raise ReadError(f"the position has version {held['version']}, this process reads {VERSION}")
        return cls(
            feed={int(partition): offset for partition, offset in held["feed"].items()},
            partitions={
                TopicPartition(topic, partition): PartitionPosition(
                    next_offset=next_offset, done=tuple((first, after) for first, after in done)
                )
                for topic, partition, next_offset, done in held["partitions"]
            },
            topic_ids=held["topic_ids"],
        )
