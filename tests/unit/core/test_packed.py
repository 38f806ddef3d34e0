"""Ids that nobody uses: a mapping, whatever is pressed, and small."""

from random import Random

import pytest

from coordinator.core.packed import BLOCK_NAMES, LOOSE_NAMES_MAX, PackedIds


def press(packed: PackedIds) -> None:
    while packed.press():
        pass


def contents(packed: PackedIds, name: str = "") -> dict[str, bytes]:
    return {name: value for block in packed.blocks_from(name) for name, value in block.items()}


@pytest.mark.parametrize("seed", range(5))
def test_it_holds_what_a_dict_would(seed: int) -> None:
    rng = Random(seed)
    packed, plain = PackedIds(), dict[str, bytes]()
    names = [f"id-{number}-ü" for number in range(4_000)]
    for step in range(20_000):
        name = rng.choice(names)
        match rng.randrange(8):
            case 0 | 1 | 2 | 3 | 4:
                plain[name] = value = rng.randbytes(rng.randrange(40))
                packed.put(name, value)
            case 5:
                plain.pop(name, None)
                packed.discard(name)
            case 6:
                packed.press()
            case _:
                assert packed.get(name) == plain.get(name)
        if step % 5_000 == 0:
            press(packed)
    for _ in range(2):
        assert len(packed) == len(plain)
        assert contents(packed) == plain
        press(packed)


@pytest.mark.parametrize("pressed", [False, True])
def test_blocks_are_in_the_order_of_the_names(pressed: bool) -> None:
    packed = PackedIds()
    names = [f"{number:05d}" for number in range(3 * LOOSE_NAMES_MAX)]
    for name in Random(1).sample(names, len(names)):
        packed.put(name, b"")
    if pressed:
        press(packed)
    blocks = [sorted(block) for block in packed.blocks_from()]
    assert [name for block in blocks for name in block] == names
    assert max(map(len, blocks)) <= (BLOCK_NAMES if pressed else LOOSE_NAMES_MAX)
    found = [name for block in packed.blocks_from("00500") for name in sorted(block)]
    assert found[-1] == names[-1]
    assert "00500" in found
    assert len(found) < len(names)


def test_ids_may_come_and_go_between_two_blocks() -> None:
    packed = PackedIds()
    names = [f"{number:05d}" for number in range(1_000)]
    for name in names:
        packed.put(name, b"")
    press(packed)
    seen = set[str]()
    for block in packed.blocks_from():
        seen |= set(block)
        for name in list(block):
            packed.discard(name)
            packed.put(f"{name}-new", b"")
        packed.press()
    assert seen >= set(names)
    assert len(packed) == 1_000


def test_pressed_ids_are_small() -> None:
    packed = PackedIds()
    for number in range(10_000):
        packed.put(f"a-service-with-a-name-{number:08d}", b"x" * 100 + Random(number).randbytes(100))
    press(packed)
    assert sum(len(block) for block in packed._blocks) < 10_000 * 130
