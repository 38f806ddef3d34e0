"""Replication messages as PostgreSQL writes them, for tests."""

from collections.abc import Sequence
from struct import pack

COLUMNS = ("id", "aggregatetype", "aggregateid", "type", "payload", "headers", "created_at")
TEXT_OID, BYTEA_OID = 25, 17


def begin(commit_lsn: int, xid: int = 7) -> bytes:
    return b"B" + pack(">qqI", commit_lsn, 0, xid)


def commit(commit_lsn: int, end_lsn: int | None = None) -> bytes:
    return b"C" + pack(">Bqqq", 0, commit_lsn, commit_lsn + 8 if end_lsn is None else end_lsn, 0)


def relation(
    name: str = "outbox", columns: Sequence[str] = COLUMNS, *, relation_id: int = 1, payload_oid: int = TEXT_OID
) -> bytes:
    data = b"R" + pack(">I", relation_id) + b"public\0" + name.encode() + b"\0d" + pack(">H", len(columns))
    for column in columns:
        oid = payload_oid if column == "payload" else TEXT_OID
        data += b"\0" + column.encode() + b"\0" + pack(">Ii", oid, -1)
    return data


def insert(*values: str | bytes | None, relation_id: int = 1) -> bytes:
    data = b"I" + pack(">I", relation_id) + b"N" + pack(">H", len(values))
    for value in values:
        if value is None:
            data += b"n"
        else:
            encoded = value.encode() if isinstance(value, str) else value
            data += b"t" + pack(">I", len(encoded)) + encoded
    return data


def row(row_id: str, payload: str | None = "{}", key: str = "k") -> bytes:
    return insert(row_id, "order", key, "made", payload, None, "2026-01-01")


def message(prefix: str, content: bytes, *, transactional: bool = True) -> bytes:
    return b"M" + pack(">Bq", transactional, 0) + prefix.encode() + b"\0" + pack(">I", len(content)) + content
