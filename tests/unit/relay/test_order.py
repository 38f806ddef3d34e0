"""A transaction is not committed ahead of an earlier record of one of its rows."""

from __future__ import annotations

import uuid
from functools import partial

import pytest

from oncebox.reader import PartitionPosition, Record
from oncebox.reader.assembly import Assembly
from oncebox.v1 import manifest_pb2, transaction_pb2
from oncebox.wire import TopicPartition
from relay.mapping import RowMapper
from relay.order import is_done, overtaken
from relay.plan import Piece, Planner, rows_of
from relay.types import Column, TableName, Target

TOPIC_ID = uuid.uuid4()
A, B = TopicPartition("t", 0), TopicPartition("t", 1)


TARGET = Target(
    topic="t",
    table=TableName(schema="public", name="t"),
    format="json",
    insert_mode="upsert",
    columns=(Column(name="id", type="text", path=("id",)),),
    key=("id",),
)
PLANNER = Planner(mappers={"t": [(0, RowMapper(TARGET))]}, sources={}, high_offsets={}, on_error="stop")


def record(where: TopicPartition, offset: int, row: str, *, has_key: bool) -> Record:
    key, value = (row.encode(), b"bad") if has_key else (None, b'{"id": "%s"}' % row.encode())
    return Record(where.topic, where.partition, offset, 0, key, value, ())


def manifest(name: str, runs: dict[TopicPartition, list[tuple[int, int]]]) -> manifest_pb2.Manifest:
    written = [
        transaction_pb2.Written(
            topic=where.topic,
            topic_id=TOPIC_ID.bytes,
            partition=where.partition,
            runs=[{"offset_first": first, "offset_next": after} for first, after in each],
        )
        for where, each in runs.items()
    ]
    return manifest_pb2.Manifest(transactional_id=name, number=1, part_count=1, written=written)


def story(second_row: str, *, has_key: bool, unloads: bool = False) -> list[object]:
    """The first transaction has offsets 0 and 3 on A and one on B, which has not come; the second lies between them."""
    start = PartitionPosition(next_offset=0)
    assembly = Assembly({A: start, B: start}, {0: 0}, {"t": TOPIC_ID.hex})
    assembly.manifest(0, 0, manifest("first", {A: [(0, 1), (3, 4)], B: [(0, 1)]}))
    assembly.manifest(0, 1, manifest("second", {A: [(1, 2)]}))
    assembly.feed_position(0, 2)
    rows = [(0, "k"), (1, second_row), (3, "other")]
    assembly.records(A, [record(A, offset, row, has_key=has_key) for offset, row in rows])
    if unloads:
        assert assembly.unload(1) is not None
    pieces: list[Piece] = []
    told: list[object] = []
    for late in ([], [record(B, 0, "z", has_key=has_key)]):
        assembly.records(B, late)
        for item in assembly.release():
            assembly.done(item)
            whole = item.transaction()
            pieces.append(Piece(whole.records, whole.unloaded))
        given = (assembly.waiting, assembly.first_unloaded, partial(rows_of, PLANNER))
        found = overtaken(pieces, assembly.positions(), *given)
        assert found is None or not is_done(assembly.positions()[found[0]], found[1])
        assert found is None or not assembly.is_whole(*found)
        assert found is None or assembly.needed_for(*found) == {B}
        told.append(found)
    assert len(pieces) == 2
    assert assembly.is_whole(A, 0)
    return told


@pytest.mark.parametrize("has_key", [True, False])
def test_it_waits_for_an_earlier_record_of_the_same_row(has_key: bool) -> None:
    """By the record's key, also of what cannot become a row; and by the row's own, where the record has none."""
    assert story("k", has_key=has_key) == [(A, 0), None]


@pytest.mark.parametrize("has_key", [True, False])
def test_it_does_not_wait_for_other_rows(has_key: bool) -> None:
    assert story("other", has_key=has_key) == [None, None], "the other one stands behind it"
    assert story("mine", has_key=has_key) == [None, None]


def test_what_was_unloaded_may_be_about_any_row() -> None:
    assert story("mine", has_key=False, unloads=True) == [(A, 0), None]


def test_a_transaction_that_was_unloaded_waits_for_all_that_stands_before_it() -> None:
    start = PartitionPosition(next_offset=0)
    assembly = Assembly({A: start, B: start}, {0: 0}, {"t": TOPIC_ID.hex})
    assembly.manifest(0, 0, manifest("late", {A: [(1, 2)], B: [(0, 1)]}))
    assembly.manifest(0, 1, manifest("large", {A: [(0, 1), (2, 4)]}))
    assembly.feed_position(0, 2)
    assembly.records(A, [record(A, offset, row, has_key=False) for offset, row in [(0, "a"), (1, "b"), (2, "c")]])
    part = assembly.unload(1)
    assert part is not None
    assert part.transactional_id == "large"
    assembly.records(A, [record(A, 3, "d", has_key=False)])
    pieces = []
    for item in assembly.release():
        assembly.done(item)
        pieces.append(Piece(item.transaction().records, item.transaction().unloaded))
    given = (assembly.waiting, assembly.first_unloaded, partial(rows_of, PLANNER))
    assert [piece.unloaded for piece in pieces] == [{A: 2}]
    assert overtaken(pieces, assembly.positions(), *given) == (A, 1)
