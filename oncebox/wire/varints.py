"""Kafka's unsigned varints, and the tagged fields of flexible versions, which all end where a varint says."""

from __future__ import annotations

from typing import Final

_SMALL: Final = tuple(bytes((value,)) for value in range(128))


def varint(value: int) -> bytes:
    if value < 128:
        return _SMALL[value]
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def read_varint(data: bytes | bytearray, position: int) -> tuple[int, int]:
    """The value, and the position after it."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 128:
            return value, position
        shift += 7


def after_tags(data: bytes | bytearray, position: int) -> int:
    """We know none of the tags: they are passed over, as Kafka asks of whoever does not know one."""
    if not data[position]:  # nearly always
        return position + 1
    count, position = read_varint(data, position)
    for _ in range(count):
        _tag, position = read_varint(data, position)
        size, position = read_varint(data, position)
        position += size
    return position
