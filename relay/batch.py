"""What one database transaction takes in transaction mode: whole transactions, and where the reader is behind them."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from relay.plan import Unit

if TYPE_CHECKING:
    from oncebox.reader import Position, Record, TransactionReader
    from relay.config import Limits
    from relay.kafka import Place


class Batch:
    def __init__(self, reader: TransactionReader, limits: Limits) -> None:
        """With what is there already."""
        self.reader = reader
        self._limits = limits
        self._more_bytes = 0
        self.units: list[Unit] = []
        # Some are not all in memory.
        self.has_large = False
        # Of each partition: the timestamp of its last record, and its lowest offset in memory.
        self.newest: dict[Place, int] = {}
        self.lowest: dict[Place, int] = {}
        self.position: Position
        self._take()

    @property
    def is_full(self) -> bool:
        """What was added to it takes as much memory as it may."""
        return self._more_bytes > self._limits.buffer_bytes

    def take(self) -> None:
        """Adds what is there by now."""
        first = len(self.units)
        self._take()
        self._more_bytes += sum(len(record.value or b"") for unit in self.units[first:] for record in unit.records)

    def _take(self) -> None:
        limits = self._limits
        for each in self.reader.take(records_max=limits.batch_rows, bytes_max=limits.batch_bytes):
            records: list[Record] = []
            for where, some in each.records.items():
                records += some
                self.newest[where] = some[-1].timestamp_ms
                if self.lowest.get(where, inf) > some[0].offset:
                    self.lowest[where] = some[0].offset
            self.units.append(Unit(records, each.transactional_id, each.number, each.unloaded))
            self.has_large |= bool(each.unloaded)
            each.forget()
        self.position = self.reader.position()
