"""fold(log): the last record of each key counts, and nothing is guessed."""

import pickle

import pytest
from msgspec.structs import replace

from coordinator.core.apply import PartitionState
from coordinator.core.records import NumberFloor, Record, Tombstone, TopicState
from coordinator.log import codec
from coordinator.log.port import Stored
from coordinator.log.replay import Replay
from oncebox.v1 import log_pb2
from tests.unit.core.states import NOW_MS, id_state, transaction

LEADER = codec.encode_leader(log_pb2.LeaderState(generation=0, epoch=1))


def folded(*records: Record | tuple[bytes | None, bytes | None]) -> PartitionState:
    replay = Replay()
    for offset, record in enumerate(records):
        replay.fold([Stored(offset, *(record if isinstance(record, tuple) else codec.encode(record)))])
    return replay.finish()


def test_the_last_record_of_an_id_counts() -> None:
    state = folded(LEADER, id_state(), LEADER, id_state(number=2), id_state(number=3))
    assert list(state) == [id_state(number=3)]


def test_ids_with_transactions_are_ready_and_the_others_packed() -> None:
    busy, idle = id_state(transaction(), transactional_id="busy"), id_state(transactional_id="idle")
    state = folded(busy, idle, id_state(transaction()), id_state())
    assert state.active == {"busy": busy}
    assert len(state.packed) == 2
    assert (state.get("idle"), state.get("a")) == (idle, id_state())


def test_an_id_that_expired_is_gone() -> None:
    state = folded(id_state(transaction()), Tombstone(transactional_id="a"), Tombstone(transactional_id="b"))
    assert (len(state), state.get("a")) == (0, None)


def test_the_floor_only_rises() -> None:
    assert folded(NumberFloor(number_floor=7), NumberFloor(number_floor=5)).number_floor == 7


def test_topics_and_the_count_of_their_changes_are_known() -> None:
    orders = TopicState(topic="orders", topic_id=b"3" * 16, change=2)
    audit = TopicState(topic="audit", topic_id=b"1" * 16, change=0)
    state = folded(replace(orders, topic_id=b"2" * 16, change=1), audit, orders, LEADER)
    assert state.topics == {"orders": orders, "audit": audit}
    assert state.topic_changes == 2


def test_the_newest_leader_is_known() -> None:
    replay = Replay()
    assert replay.leader is None
    older = codec.encode_leader(log_pb2.LeaderState(generation=0, epoch=7))
    newer = codec.encode_leader(log_pb2.LeaderState(generation=1, epoch=2))
    replay.fold([Stored(0, *older), Stored(1, *codec.encode(id_state())), Stored(2, *newer)])
    assert replay.leader == (1, 2)


def test_a_replay_can_travel() -> None:
    replay, elsewhere = Replay(), Replay()
    elsewhere.fold([Stored(0, *LEADER), *(Stored(n, *codec.encode(id_state(number=n))) for n in range(1, 5))])
    while elsewhere.press():
        pass
    replay.become(pickle.loads(pickle.dumps(elsewhere)))
    replay.fold([Stored(5, *codec.encode(id_state(transactional_id="b")))])
    assert replay.leader == (0, 1)
    assert sorted(state.transactional_id for state in replay.finish()) == ["a", "b"]


@pytest.mark.parametrize("name", ["a", "ü" * 63, "a" * 127, "a" * 128, "ü" * 100, "a" * 5_000])
def test_every_name_is_read(name: str) -> None:
    assert codec.id_of(codec.id_key(name)) == name
    assert folded(id_state(transactional_id=name)).get(name) == id_state(transactional_id=name)


@pytest.mark.parametrize("key", [codec.LEADER_KEY, codec.PARTITION_KEY])
def test_other_keys_are_no_names(key: bytes) -> None:
    assert codec.id_of(key) is None


VALUE = codec.encode_id(id_state())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, VALUE),
        (b"", VALUE),
        (b"\x0a\x01\xff", VALUE),
        (b"\x0a\x7fa", VALUE),
        (b"\x22\x01a", VALUE),
        (codec.id_key("a"), b"\xff"),
        (codec.id_key("a"), b""),
        (codec.id_key("a"), LEADER[1]),
        (codec.id_key("a"), log_pb2.LogValue(version=codec.VERSION + 1, id=log_pb2.IdState()).SerializeToString()),
        (codec.LEADER_KEY, None),
        (codec.PARTITION_KEY, None),
        (codec.PARTITION_KEY, b"\xff"),
        (codec.PARTITION_KEY, LEADER[1]),
        (codec.LEADER_KEY, VALUE),
    ],
)
def test_what_cannot_be_read_is_an_error(key: bytes | None, value: bytes | None) -> None:
    with pytest.raises(codec.CorruptLogError):
        folded((key, value))


def test_the_age_of_a_packed_id_is_known_without_the_rest() -> None:
    assert codec.updated_at_ms(VALUE) == NOW_MS
