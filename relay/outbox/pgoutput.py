"""Reads PostgreSQL's logical replication messages (plugin pgoutput, protocol version 1). Pure: bytes in, values out.

Only what an outbox needs: transactions, relations, inserted rows and logical messages. Values stay in PostgreSQL's text
form. What cannot be part of an outbox (an update, a delete) is read past; what cannot be understood is an error.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct

_BEGIN = Struct(">qqI")  # commit LSN, commit time (microseconds since 2000), xid
_COMMIT = Struct(">Bqqq")  # flags, commit LSN, end LSN, commit time
_INSERT = Struct(">IcH")  # relation, 'N', count of columns
_MESSAGE = Struct(">Bq")  # flags, LSN
_COLUMN = Struct(">BI")  # kind of the value, its length
_EPOCH_US = 946_684_800_000_000  # 2000-01-01 in Unix microseconds

# Origin, type, truncate, update, delete: no part of what an outbox publishes.
_PASSED_OVER = frozenset(b"OYTUD")
NULL, TEXT = ord("n"), ord("t")

INSERT = ord("I")


class ProtocolError(Exception):
    """The server sent what this reader does not understand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    # Of the commit that ends it: a transaction is decoded only when it has committed.
    commit_lsn: int
    commit_time_us: int
    xid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    commit_lsn: int
    # Where the slot stands once this transaction is done with.
    end_lsn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    name: str
    type_oid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    relation_id: int
    schema: str
    name: str
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalMessage:
    """Of pg_logical_emit_message()."""

    is_transactional: bool
    prefix: str
    content: bytes


Values = list[bytes | None]


def parse(data: bytes) -> Begin | Commit | Relation | LogicalMessage | None:
    """Any message but an inserted row; None: of no interest."""
    kind = data[0]
    if kind == ord("B"):
        commit_lsn, time_us, xid = _BEGIN.unpack_from(data, 1)
        return Begin(commit_lsn=commit_lsn, commit_time_us=time_us + _EPOCH_US, xid=xid)
    if kind == ord("C"):
        _flags, commit_lsn, end_lsn, _time = _COMMIT.unpack_from(data, 1)
        return Commit(commit_lsn=commit_lsn, end_lsn=end_lsn)
    if kind == ord("R"):
        return _relation(data)
    if kind == ord("M"):
        flags, _lsn = _MESSAGE.unpack_from(data, 1)
        prefix, offset = _text(data, 1 + _MESSAGE.size)
        length = int.from_bytes(data[offset : offset + 4], "big")
        content = data[offset + 4 : offset + 4 + length]
        return LogicalMessage(is_transactional=bool(flags & 1), prefix=prefix, content=content)
    if kind in _PASSED_OVER:
        return None
    raise ProtocolError(f"a replication message of the kind {chr(kind)!r} is not known to this version")


def inserted(data: bytes) -> tuple[int, Values]:
    """The relation and the values of a message of the kind INSERT, in the order of the relation's columns."""
    relation_id, _new, count = _INSERT.unpack_from(data, 1)
    values: Values = []
    append, column_at = values.append, _COLUMN.unpack_from
    # A NULL has no length: behind the last there must be something to read.
    padded = data + b"\0\0\0\0"
    offset = 8
    for _ in range(count):
        kind, length = column_at(padded, offset)
        if kind == TEXT:
            start = offset + 5
            offset = start + length
            append(data[start:offset])
        elif kind == NULL:
            append(None)
            offset += 1
        else:
            raise ProtocolError(f"a column value of the kind {chr(kind)!r} cannot be part of an inserted row")
    if offset != len(data):
        raise ProtocolError(f"an inserted row has {len(data) - offset} bytes too many")
    return relation_id, values


def _relation(data: bytes) -> Relation:
    relation_id = int.from_bytes(data[1:5], "big")
    schema, offset = _text(data, 5)
    name, offset = _text(data, offset)
    count = int.from_bytes(data[offset + 1 : offset + 3], "big")  # after the replica identity
    columns = tuple(_columns(data, offset + 3, count))
    return Relation(relation_id=relation_id, schema=schema or "pg_catalog", name=name, columns=columns)


def _columns(data: bytes, offset: int, count: int) -> Iterator[Column]:
    for _ in range(count):
        name, offset = _text(data, offset + 1)
        yield Column(name=name, type_oid=int.from_bytes(data[offset : offset + 4], "big"))
        offset += 8


def _text(data: bytes, offset: int) -> tuple[str, int]:
    end = data.index(b"\0", offset)
    return data[offset:end].decode(), end + 1
