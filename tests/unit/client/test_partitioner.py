"""Keys go where Kafka's Java clients put them; the vectors are those of the Java client's own test."""

import pickle
from collections.abc import Callable

import pytest

from oncebox.partitioner import Partitioner, by_key, murmur2, round_robin, sticky

VECTORS = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize(("key", "expected"), VECTORS.items())
def test_murmur2_is_javas(key: bytes, expected: int):
    assert murmur2(key) == expected % 2**32
    assert by_key(key, 7) == (expected & 0x7FFF_FFFF) % 7


def test_sticky_places_keys_by_hash_and_stays_with_one_partition_without():
    choose = sticky()
    assert choose("t", b"abc", 7) == by_key(b"abc", 7)
    without = [choose("t", None, 50) for _ in range(400)]
    assert len(set(without[:200])) == len(set(without[200:])) == 1
    assert all(0 <= choose("t", None, 1) < 1 for _ in range(3))


@pytest.mark.parametrize("make", [sticky, round_robin])
def test_other_processes_are_given_the_same(make: Callable[[], Partitioner]):
    choose = make()
    choose("t", None, 5)
    again = pickle.loads(pickle.dumps(choose))
    assert [choose("t", None, 5) for _ in range(9)] == [again("t", None, 5) for _ in range(9)]


def test_round_robin_takes_turns_by_topic():
    choose = round_robin()
    assert [choose("t", b"same", 3) for _ in range(5)] == [0, 1, 2, 0, 1]
    assert choose("u", b"same", 3) == 0
