"""What one database transaction takes in transaction mode: whole transactions, and where the reader is behind them."""

from __future__ import annotations

from functools import partial
from itertools import chain
from math import inf
from typing import TYPE_CHECKING

from oncebox.reader import Bulk
from relay.plan import Piece, Pieces, Unit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from oncebox.reader import Position, TransactionReader
    from relay.config import Limits
    from relay.kafka import Place


class Batch:
    def __init__(self, reader: TransactionReader, limits: Limits) -> None:
        """With what is there already."""
        self.reader = reader
        self._limits = limits
        self._more_bytes = 0
        self.pieces: list[Piece] = []
        # Some are not all in memory.
        self.has_large = False
        # Of each partition: the timestamp of its last record, and its lowest offset in memory.
        self.newest: dict[Place, int] = {}
        self.lowest: dict[Place, int] = {}
        self.position: Position
        self._take()

    @property
    def units(self) -> Pieces:
        return Pieces(self.pieces)

    @property
    def is_full(self) -> bool:
        """What was added to it takes as much memory as it may."""
        return self._more_bytes > self._limits.buffer_bytes

    def take(self) -> None:
        """Adds what is there by now."""
        first = len(self.pieces)
        self._take()
        more = chain.from_iterable(piece.records.values() for piece in self.pieces[first:])
        self._more_bytes += sum(len(record.value or b"") for records in more for record in records)

    def _take(self) -> None:
        limits = self._limits
        for each in self.reader.take(records_max=limits.batch_rows, bytes_max=limits.batch_bytes):
            for where, some in each.records.items():
                self.newest[where] = some[-1].timestamp_ms
                if self.lowest.get(where, inf) > some[0].offset:
                    self.lowest[where] = some[0].offset
            if isinstance(each, Bulk):
                self.pieces.append(Piece(each.records, transactions=partial(_units, each)))
                continue
            self.pieces.append(
                Piece(each.records, each.unloaded, transactional_id=each.transactional_id, number=each.number)
            )
            self.has_large |= bool(each.unloaded)
            each.forget()
        self.position = self.reader.position()


def _units(bulk: Bulk) -> Iterator[Unit]:
    for each in bulk.transactions():
        yield Unit([*chain.from_iterable(each.records.values())], each.transactional_id, each.number)
