"""Transactions too large for memory: their records wait in temporary tables of the writer's session. Blocking.

They are nobody else's and end with the session, so that a crash leaves nothing behind: the positions have not moved,
and the next session reads the transaction again. See docs/decisions/0025-large-transactions-wait-in-the-session.md.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from psycopg import sql

from oncebox.reader import Record
from relay.plan import NOTHING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from oncebox.reader import CommittedTransaction
    from relay.config import Limits
    from relay.database import Connection
    from relay.plan import Unit

# Pieces of one transaction, in the order in which they are to be written. (Compressing them would take longer.)
CREATE = sql.SQL(
    "CREATE TEMPORARY TABLE {0} (rank integer, piece integer, records bytea, PRIMARY KEY (rank, piece)); "
    "ALTER TABLE {0} ALTER COLUMN records SET STORAGE EXTERNAL"
)
KEEP = sql.SQL("INSERT INTO {} VALUES (%s, %s, %b)")
LIST = sql.SQL("SELECT rank, piece FROM {} ORDER BY rank, piece")
READ = sql.SQL("SELECT records FROM {} WHERE rank = %s AND piece = %s")
DROP = sql.SQL("DROP TABLE {}")


class _Kept(NamedTuple):
    table: sql.Identifier
    piece: Iterator[int]


class LargeTransactions:
    def __init__(self, connection: Connection, limits: Limits, ranks: Mapping[str, int]) -> None:
        """`ranks`: the order in which topics are written, for the sake of foreign keys."""
        self._connection = connection
        self._limits = limits
        self._ranks = ranks
        self._numbers = count()
        self._kept: dict[tuple[str | None, int | None], _Kept] = {}

    def keep(self, part: CommittedTransaction) -> None:
        key = (part.transactional_id, part.number)
        kept = self._kept.get(key)
        if kept is None:
            table = sql.Identifier(f"oncebox_large_{next(self._numbers)}")
            self._connection.execute(CREATE.format(table))
            kept = self._kept[key] = _Kept(table, count())
        for where, records in part.records.items():
            for some in _pieces(records, self._limits):
                piece = [self._ranks[where.topic], next(kept.piece), msgspec.msgpack.encode(some)]
                self._connection.execute(KEEP.format(kept.table), piece)

    def pieces(self, unit: Unit) -> Iterator[Sequence[Record]]:
        """All records of a transaction of which some are kept here, piece by piece."""
        table = self._kept[unit.transactional_id, unit.number].table
        for rank, piece in self._connection.execute(LIST.format(table)).fetchall():
            row = self._connection.execute(READ.format(table), [rank, piece], binary=True).fetchone()
            yield [_record(*each) for each in msgspec.msgpack.decode(row[0] if row else b"")]
        if unit.records:
            yield unit.records

    def whole(self, unit: Unit) -> Unit:
        """With all its records in memory."""
        records = [record for piece in self.pieces(unit) for record in piece]
        return unit._replace(records=records, unloaded=NOTHING)

    def drop(self, units: Sequence[Unit]) -> None:
        """In the transaction in which they are applied."""
        for unit in units:
            if unit.unloaded:
                self._connection.execute(DROP.format(self._kept[unit.transactional_id, unit.number].table))

    def forget(self, units: Sequence[Unit]) -> None:
        """That transaction is committed."""
        for unit in units:
            if unit.unloaded:
                del self._kept[unit.transactional_id, unit.number]


def _pieces(records: Sequence[Record], limits: Limits) -> Iterator[Sequence[Record]]:
    """As large as a batch."""
    first = size = 0
    for at, record in enumerate(records):
        size += len(record.value or b"")
        if at + 1 == len(records) or at + 1 - first == limits.batch_rows or size > limits.batch_bytes:
            yield records[first : at + 1]
            first, size = at + 1, 0


def _record(
    topic: str,
    partition: int,
    offset: int,
    timestamp_ms: int,
    key: bytes | None,
    value: bytes | None,
    headers: Sequence[tuple[str, bytes | None]],
) -> Record:
    return Record(topic, partition, offset, timestamp_ms, key, value, [(name, raw) for name, raw in headers])
