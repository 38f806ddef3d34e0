"""Which partition a record goes to. Keys as Kafka's Java clients place them: murmur2, so that both agree."""

from collections.abc import Callable
from functools import partial
from random import randrange
from struct import unpack_from

# (topic, key, partition count) -> partition. Ours can be pickled: transform_in_processes() hands them on.
Partitioner = Callable[[str, bytes | None, int], int]

# Records without a key stay with a partition for so many.
STAY = 200

_MASK = 0xFFFF_FFFF
_M = 0x5BD1E995


def murmur2(data: bytes) -> int:
    """Kafka's own variant (org.apache.kafka.common.utils.Utils.murmur2), as an unsigned number."""
    length = len(data)
    value = (0x9747B28C ^ length) & _MASK
    whole = length & ~3
    # Locals, because this is run for each record that has a key.
    m, mask = _M, _MASK
    for word in unpack_from(f"<{whole // 4}I", data):
        k = word * m & mask
        value = (value * m & mask) ^ ((k ^ (k >> 24)) * m & mask)
    tail = data[whole:]
    if tail:
        value = (value ^ int.from_bytes(tail, "little")) * _M & _MASK
    value = (value ^ (value >> 13)) * _M & _MASK
    return value ^ (value >> 15)


def by_key(key: bytes, partition_count: int) -> int:
    return (murmur2(key) & 0x7FFF_FFFF) % partition_count


def sticky() -> Partitioner:
    """Keys by hash; records without a key stay with one partition for a while, so that batches fill (KIP-480)."""
    return partial(_stick, {})


def _stick(chosen: dict[str, tuple[int, int]], topic: str, key: bytes | None, partition_count: int) -> int:
    if key is not None:
        return by_key(key, partition_count)
    partition, left = chosen.get(topic, (0, 0))
    if left == 0 or partition >= partition_count:
        partition, left = randrange(partition_count), STAY  # noqa: S311 - spreads load, protects nothing
    chosen[topic] = (partition, left - 1)
    return partition


def round_robin() -> Partitioner:
    """Every record to the next partition, whatever its key."""
    return partial(_take_turns, {})


def _take_turns(turns: dict[str, int], topic: str, _key: bytes | None, partition_count: int) -> int:
    turn = turns.get(topic, 0)
    turns[topic] = turn + 1
    return turn % partition_count
