"""Whose an open transaction is, and how one that nobody knows is to be ended: the pure part of the search."""

from dataclasses import replace

import pytest

from coordinator.open_transactions import Kind, Known, Open, Seen, classify, covers
from oncebox.v1 import manifest_pb2, peer_pb2, transaction_pb2
from oncebox.wire import OFFSETS_TOPIC, ActiveProducer, TopicPartition, offsets_partition

NOW_MS = 10_000_000
AGE_MIN_MS = 900_000
TOPIC_ID = b"0123456789abcdef"

SEEN = Seen(
    TopicPartition("orders", 3),
    ActiveProducer(
        producer_id=77,
        producer_epoch=4,
        last_sequence=0,
        last_timestamp_ms=NOW_MS - AGE_MIN_MS,
        coordinator_epoch=2,
        txn_start_offset=100,
    ),
    100,
)
NOBODY = Known(ours={}, native={}, sees_all_native=True, missing=())
OURS = peer_pb2.OpenProducer(transactional_id="tid", number=9, producer_id=77, epoch=4)


def kind_of(known: Known, seen: Seen = SEEN) -> Kind:
    return classify(seen, known, now_ms=NOW_MS, age_min_ms=AGE_MIN_MS).kind


def test_known_to_nobody_for_long():
    found = classify(SEEN, NOBODY, now_ms=NOW_MS, age_min_ms=AGE_MIN_MS)
    assert found == Open(
        topic="orders",
        partition=3,
        producer_id=77,
        epoch=4,
        coordinator_epoch=2,
        offset_first=100,
        age_ms=AGE_MIN_MS,
        kind=Kind.HANGING,
    )


def test_ours_are_known_by_producer_id_and_epoch():
    known = replace(NOBODY, ours={(77, 4): OURS})
    found = classify(SEEN, known, now_ms=NOW_MS, age_min_ms=AGE_MIN_MS)
    assert (found.kind, found.transactional_id, found.number) == (Kind.ONCEBOX, "tid", 9)
    # Another transaction of the same producer id says nothing of this one.
    assert kind_of(replace(NOBODY, ours={(77, 6): OURS})) is Kind.HANGING


def test_native_ones_are_never_hanging():
    found = classify(SEEN, replace(NOBODY, native={77: "theirs"}), now_ms=NOW_MS, age_min_ms=AGE_MIN_MS)
    assert (found.kind, found.transactional_id) == (Kind.NATIVE, "theirs")


def test_nothing_is_hanging_while_somebody_has_not_answered():
    assert kind_of(replace(NOBODY, missing=("log partition 3",))) is Kind.UNKNOWN


@pytest.mark.parametrize("age_ms", [AGE_MIN_MS - 1, 0, -5_000])
def test_nothing_young_is_hanging(age_ms):
    producer = replace(SEEN.producer, last_timestamp_ms=NOW_MS - age_ms)
    assert kind_of(NOBODY, SEEN._replace(producer=producer)) is Kind.UNKNOWN


def manifest(**fields: object) -> manifest_pb2.Manifest:
    run = transaction_pb2.Run(offset_first=90, offset_next=110)
    entry = transaction_pb2.Written(topic="orders", partition=3, record_count=20, runs=[run], topic_id=TOPIC_ID)
    made = manifest_pb2.Manifest(transactional_id="tid", number=9, producer_id=77, epoch=4, written=[entry])
    for name, value in fields.items():
        target = made if hasattr(made, name) else made.written[0]
        setattr(target, name, value)
    return made


HANGING = classify(SEEN, NOBODY, now_ms=NOW_MS, age_min_ms=AGE_MIN_MS)


def test_a_manifest_covers_the_transaction_it_names():
    assert covers(manifest(), HANGING, TOPIC_ID, 50)


@pytest.mark.parametrize(
    "fields", [{"producer_id": 78}, {"epoch": 2}, {"partition": 2}, {"topic_id": b"another topic id"}]
)
def test_a_manifest_covers_no_other(fields):
    assert not covers(manifest(**fields), HANGING, TOPIC_ID, 50)


def test_a_manifest_covers_only_its_own_runs():
    assert not covers(manifest(), replace(HANGING, offset_first=110), TOPIC_ID, 50)
    assert not covers(manifest(), replace(HANGING, offset_first=89), TOPIC_ID, 50)
    assert covers(manifest(), replace(HANGING, offset_first=90), TOPIC_ID, 50)


def test_a_manifest_covers_the_offsets_of_its_groups():
    made = manifest()
    made.group_offsets.add(group_id="g")
    home = offsets_partition("g", 50)
    offsets = replace(HANGING, topic=OFFSETS_TOPIC, partition=home)
    assert covers(made, offsets, b"", 50)
    assert not covers(made, replace(offsets, partition=home + 1), b"", 50)
