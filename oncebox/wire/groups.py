"""Where Kafka keeps a consumer group's offsets."""

from __future__ import annotations

from struct import unpack
from typing import Final

OFFSETS_TOPIC: Final = "__consumer_offsets"


def offsets_partition(group_id: str, partition_count: int) -> int:
    """The partition of the offsets topic that a group's offsets, and so its markers, go to.

    Java's String.hashCode over UTF-16 units, made positive as Kafka does it: the smallest integer becomes 0.
    """
    encoded = group_id.encode("utf-16-be")
    hashed = 0
    for unit in unpack(f">{len(encoded) // 2}H", encoded):
        hashed = (31 * hashed + unit) & 0xFFFF_FFFF
    signed = hashed - 2**32 if hashed >= 2**31 else hashed
    return 0 if signed == -(2**31) else abs(signed) % partition_count
