"""What is put together from pieces reads as the generated messages do, and is as long as they are."""

import pytest
from msgspec.structs import replace

from coordinator.core.records import (
    Contents,
    GroupOffset,
    GroupOffsets,
    GroupPartition,
    Run,
    Slot,
    TopicPartition,
    Written,
)
from coordinator.core.state import TransactionState
from coordinator.log import codec, pieces
from oncebox.v1 import log_pb2, transaction_pb2
from tests.unit.core.states import NOW_MS, id_state, outcome, transaction

TOPIC_ID = b"0123456789abcdef"
WRITTEN = (
    Written(topic="t", partition=0, record_count=5, runs=(Run(0, 2), Run(300, 303)), topic_id=TOPIC_ID),
    Written(topic="ü" * 200, partition=70_000, record_count=1 << 40, runs=(Run(1 << 50, (1 << 50) + 1),)),
    Written(topic="none", partition=1, record_count=0, runs=()),
)
CONTENTS = Contents(
    written=WRITTEN,
    group_offsets=(GroupOffsets(group_id="g", offsets=(GroupOffset(topic="t", partition=0, offset_next=7),)),),
    metadata=b"resume here",
)
MANY = frozenset(TopicPartition(f"t{n % 7}", n) for n in range(200))
DECIDED = replace(
    transaction(1, TransactionState.PREPARE_COMMIT, partitions=MANY, contents=CONTENTS),
    groups=frozenset({GroupPartition("g", 3)}),
    decided_at_ms=NOW_MS,
    decision=4,
    feed_offset_first=5,
    feed_offset_next=6,
)


@pytest.mark.parametrize("entry", WRITTEN, ids=lambda entry: entry.topic[:4])
def test_written(entry: Written) -> None:
    message = transaction_pb2.Written(
        topic=entry.topic,
        partition=entry.partition,
        record_count=entry.record_count,
        runs=[transaction_pb2.Run(offset_first=first, offset_next=after) for first, after in entry.runs],
        topic_id=entry.topic_id,
    )
    encoded = pieces.written(entry)
    assert transaction_pb2.Written.FromString(encoded) == message
    # Where a manifest is cut must not depend on how it was encoded.
    assert len(encoded) == message.ByteSize()


@pytest.mark.parametrize("name", ["a", "ü" * 100, "x" * 249])
def test_key(name: str) -> None:
    assert codec.id_key(name) == log_pb2.LogKey(transactional_id=name).SerializeToString()


def test_an_id_comes_back_as_it_was() -> None:
    state = id_state(
        DECIDED,
        transaction(2, producer_id=1001),
        slots=(
            Slot(producer_id=1000, epoch=2, since_ms=NOW_MS, topic_changes=-1),
            Slot(producer_id=1, epoch=0, since_ms=0),
        ),
        number=2,
        outcomes=(outcome(1),),
        resume_token=b"token",
    )
    assert codec.decode_id("a", codec.encode_id(state)) == state


@pytest.mark.parametrize("size_max", [1, 520, 900_000])
def test_a_manifest_in_parts_says_it_all_once(size_max: int) -> None:
    parts = [codec.parse_feed(value).manifest for _, value in codec.encode_manifest("a", DECIDED, size_max)]
    assert [(part.part, part.part_count) for part in parts] == [(n, len(parts)) for n in range(len(parts))]
    assert codec.written(entry for part in parts for entry in part.written) == WRITTEN
    assert codec.group_offsets(entry for part in parts for entry in part.group_offsets) == CONTENTS.group_offsets
    assert [part.metadata for part in parts] == [CONTENTS.metadata, *[b""] * (len(parts) - 1)]
    assert {(part.transactional_id, part.number, part.decided_at_ms) for part in parts} == {("a", 1, NOW_MS)}
    assert len(parts) == {1: 3, 520: 2, 900_000: 1}[size_max]
