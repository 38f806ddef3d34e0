"""Ids that nobody uses just now: name → bytes, in the order of the names.

There can be millions, so they are pressed: some names and their bytes become one compressed block. What changes is
loose until `press` is called. No call takes long, however many ids there are.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import pairwise

from cramjam import lz4
from msgspec import msgpack

# The more names in a block the smaller they get, and the longer takes a look into it: with so many about 20 µs.
BLOCK_NAMES = 32
# Cheap to fill when a log is read.
LOOSE_NAMES_MAX = 256

_decoder = msgpack.Decoder(dict[str, bytes])


class PackedIds:
    __slots__ = ("_blocks", "_firsts", "_length", "_loose")

    def __init__(self) -> None:
        # A block has the names from its first up to the next block's first; the first block begins before all names.
        self._firsts = [""]
        self._blocks: list[bytes | dict[str, bytes]] = [{}]
        # The firsts of those blocks that are not pressed.
        self._loose = {""}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedIds) and self._all() == other._all()

    __hash__ = None  # type: ignore[assignment]

    def get(self, name: str) -> bytes | None:
        return self._read(self._index(name)).get(name)

    def put(self, name: str, value: bytes) -> None:
        index = bisect_right(self._firsts, name) - 1
        block = self._blocks[index]
        if isinstance(block, bytes):
            block = self._loosen(index)
        length = len(block)
        block[name] = value
        if len(block) > length:
            self._length += 1
            if length >= LOOSE_NAMES_MAX:
                self._split(index, block)

    def discard(self, name: str) -> None:
        index = self._index(name)
        if name in self._read(index):
            del self._loosen(index)[name]
            self._length -= 1

    def blocks_from(self, name: str = "") -> Iterator[Mapping[str, bytes]]:
        """Those with this name and all after it, block by block. Ids may come and go between two blocks."""
        while True:
            yield self._read(self._index(name))
            index = bisect_right(self._firsts, name)
            if index == len(self._firsts):
                return
            name = self._firsts[index]

    def press(self) -> bool:
        """Presses one more block; whether there are others left."""
        if not self._loose:
            return False
        index = self._index(self._loose.pop())
        block = self._read(index)
        names = sorted(block)
        pieces = -(-len(names) // BLOCK_NAMES) or 1
        cuts = [len(names) * piece // pieces for piece in range(pieces + 1)]
        self._firsts[index + 1 : index + 1] = [names[cut] for cut in cuts[1:-1]]
        self._blocks[index : index + 1] = [
            _press({name: block[name] for name in names[cut:end]}) for cut, end in pairwise(cuts)
        ]
        return bool(self._loose)

    def _all(self) -> dict[str, bytes]:
        return {name: value for block in self.blocks_from() for name, value in block.items()}

    def _index(self, name: str) -> int:
        return bisect_right(self._firsts, name) - 1

    def _read(self, index: int) -> dict[str, bytes]:
        block = self._blocks[index]
        return _decoder.decode(lz4.decompress_block(block)) if isinstance(block, bytes) else block

    def _loosen(self, index: int) -> dict[str, bytes]:
        block = self._blocks[index] = self._read(index)
        self._loose.add(self._firsts[index])
        return block

    def _split(self, index: int, block: dict[str, bytes]) -> None:
        names = sorted(block)
        half = len(names) // 2
        self._firsts.insert(index + 1, names[half])
        self._blocks.insert(index + 1, {name: block.pop(name) for name in names[half:]})
        self._loose.add(names[half])


def _press(block: dict[str, bytes]) -> bytes:
    return bytes(lz4.compress_block(msgpack.encode(block)))
