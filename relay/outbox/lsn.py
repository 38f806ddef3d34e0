"""Positions in PostgreSQL's write-ahead log, as numbers and as PostgreSQL writes them (16/B374D848)."""


def lsn_text(lsn: int) -> str:
    return f"{lsn >> 32:X}/{lsn & 0xFFFF_FFFF:X}"


def lsn_number(text: str) -> int:
    high, slash, low = text.partition("/")
    if not slash:
        raise ValueError(f"{text!r} is no position in a write-ahead log: it should look like 16/B374D848")
    return int(high, 16) << 32 | int(low, 16)
