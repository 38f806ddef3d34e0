"""Folding records, and keeping idle ids packed."""

import pickle

import pytest
from msgspec.structs import replace

from coordinator.core.apply import PartitionState, apply, idle_ids, pack_idle
from coordinator.core.records import IdState, NumberFloor, Tombstone
from tests.unit.core.states import NOW_MS, id_state, transaction


def unpack(transactional_id: str, value: bytes) -> IdState:
    state = pickle.loads(value)
    assert isinstance(state, IdState)
    assert state.transactional_id == transactional_id
    return state


@pytest.fixture
def partition() -> PartitionState:
    return PartitionState(unpack=unpack)


def test_the_last_record_of_an_id_counts(partition: PartitionState) -> None:
    apply(partition, id_state())
    apply(partition, id_state(number=2))
    state = partition.get("a")
    assert state is not None
    assert state.number == 2
    assert len(partition) == 1


def test_a_tombstone_ends_an_id(partition: PartitionState) -> None:
    apply(partition, id_state())
    apply(partition, Tombstone(transactional_id="a"))
    apply(partition, Tombstone(transactional_id="never there"))
    assert partition.get("a") is None
    assert len(partition) == 0


def test_the_floor_only_rises(partition: PartitionState) -> None:
    for floor in (3, 7, 5):
        apply(partition, NumberFloor(number_floor=floor))
    assert partition.number_floor == 7


def pack(partition: PartitionState) -> None:
    for _ in pack_idle(partition, pickle.dumps, NOW_MS + 1):
        pass


def packed_names(partition: PartitionState) -> set[str]:
    return {name for block in partition.packed.blocks_from() for name in block}


def test_only_idle_ids_are_packed(partition: PartitionState) -> None:
    busy = replace(id_state(transaction()), transactional_id="busy")
    fresh = replace(id_state(), transactional_id="fresh", updated_at_ms=NOW_MS + 1)
    for state in (id_state(), busy, fresh):
        apply(partition, state)
    pack(partition)
    assert (packed_names(partition), set(partition.active)) == ({"a"}, {"busy", "fresh"})


def test_an_id_that_comes_to_life_between_two_steps_is_not_packed(partition: PartitionState) -> None:
    for name in ("a", "b"):
        apply(partition, replace(id_state(), transactional_id=name))
    steps = pack_idle(partition, pickle.dumps, NOW_MS + 1)
    next(steps)
    for name in ("a", "b"):
        apply(partition, replace(id_state(number=2), transactional_id=name))
    assert list(steps) == []
    assert [state.number for state in partition] == [2, 2]
    assert packed_names(partition) == set()


def test_idle_ids_are_found_packed_or_not(partition: PartitionState) -> None:
    apply(partition, replace(id_state(), transactional_id="packed"))
    pack(partition)
    apply(partition, replace(id_state(), transactional_id="not packed"))
    apply(partition, replace(id_state(transaction()), transactional_id="busy"))
    apply(partition, replace(id_state(), transactional_id="fresh", updated_at_ms=NOW_MS + 1))

    def updated_at_ms(value: bytes) -> int:
        return int(pickle.loads(value).updated_at_ms)

    found = [name for names in idle_ids(partition, updated_at_ms, NOW_MS + 1) for name in names]
    assert sorted(found) == ["not packed", "packed"]
    assert [name for names in idle_ids(partition, updated_at_ms, NOW_MS) for name in names] == []


def test_a_packed_id_is_like_any_other(partition: PartitionState) -> None:
    apply(partition, id_state())
    pack(partition)
    assert partition.get("a") == id_state()
    assert list(partition) == [id_state()]
    apply(partition, id_state(number=2))
    assert (len(partition), len(partition.packed)) == (1, 0)
    pack(partition)
    apply(partition, Tombstone(transactional_id="a"))
    assert partition.get("a") is None
