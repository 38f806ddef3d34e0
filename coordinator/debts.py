"""Paying what decided transactions owe: the manifest into the feed, then the markers, in that order.

One code path after a crash and in normal life. Progress is kept in memory only: whatever is paid twice is harmless,
because a marker's epoch can end no other transaction and readers of the feed ignore a repeated part.
"""

import asyncio
from collections.abc import Callable, Sequence

from coordinator.core.owed import Debt
from coordinator.core.records import TopicPartition
from coordinator.log import codec
from coordinator.log.lead import Appender, coordinator_epoch
from coordinator.log.port import size_of
from coordinator.markers.port import Markers, Payment
from oncebox.v1 import log_pb2

# (transactional id, number, part)
Part = tuple[str, int, int]
Feed = list[tuple[bytes, bytes | None]]


class OpenDebt:
    """A debt and how far it is paid."""

    __slots__ = ("debt", "dropped", "feed_offset_next", "is_long", "paid", "payment", "remaining", "waiters")

    def __init__(self, debt: Debt) -> None:
        self.debt = debt
        self.remaining: set[TopicPartition] = set(debt.partitions)
        self.paid = False
        # Paid, but some markers were given up: their partitions are gone.
        self.dropped = False
        # All of its manifest stands below; 0: it does not yet.
        self.feed_offset_next = debt.transaction.feed_offset_next
        # So old that the log is to tell where its manifest stands.
        self.is_long = False
        self.payment: Payment | None = None
        self.waiters: dict[object, Callable[[], None]] = {}


class Debts:
    """The open debts of one log partition, by id and number."""

    def __init__(
        self,
        *,
        feed: Appender,
        markers: Markers,
        leader: log_pb2.LeaderState,
        paid: Callable[[str, int], None],
        feed_offset_next: int,
        feed_batch_max_bytes: int,
        feed_batch_max_records: int,
    ) -> None:
        self._feed = feed
        self._markers = markers
        self._leader = leader
        self._coordinator_epoch = coordinator_epoch(leader)
        self._on_paid = paid
        self.feed_offset_next = feed_offset_next
        self._feed_batch_max_bytes = feed_batch_max_bytes
        self._feed_batch_max_records = feed_batch_max_records
        # Since the leader's last record in the feed.
        self._records_since_leader = 0
        self._open: dict[str, dict[int, OpenDebt]] = {}
        self._manifests: list[OpenDebt] = []
        self._written: frozenset[Part] = frozenset()
        # Whether any debt ever was: most never are, and every call asks.
        self.has_long = False
        self._wake = asyncio.Event()
        self._appending = asyncio.Lock()

    @property
    def feed_waits_s(self) -> float:
        """For how long the feed has not acknowledged what it was sent."""
        return self._feed.waits_s

    def __len__(self) -> int:
        return sum(len(debts) for debts in self._open.values())

    def of(self, transactional_id: str) -> dict[int, OpenDebt]:
        return self._open.get(transactional_id, {})

    def take_on(self, debts: Sequence[Debt], written: frozenset[Part] = frozenset()) -> None:
        """Starts paying those not known yet. `written`: parts of manifests that stand in the feed already."""
        self._written |= written
        for debt in debts:
            known = self._open.setdefault(debt.transactional_id, {})
            if debt.number in known:
                continue
            known[debt.number] = entry = OpenDebt(debt)
            if debt.commit and not entry.feed_offset_next:
                self._manifests.append(entry)
                self._wake.set()
            else:
                self._pay_markers(entry)

    def grow_long(self, decided_before_ms: int) -> list[str]:
        """Ids of commits decided before then whose manifest's place is to be noted, each told once."""
        names = []
        for name, known in self._open.items():
            for entry in known.values():
                long = entry.debt.transaction.decided_at_ms < decided_before_ms
                if long and entry.debt.commit and not (entry.is_long or entry.debt.transaction.feed_offset_next):
                    entry.is_long = bool(entry.feed_offset_next)
                    names.extend([name] if entry.is_long else [])
        self.has_long = self.has_long or bool(names)
        return names

    def manifests_of(self, transactional_id: str) -> dict[int, int]:
        """Where those of its long debts end in the feed."""
        if not self.has_long:
            return {}
        return {number: e.feed_offset_next for number, e in self.of(transactional_id).items() if e.is_long}

    def settle(self, transactional_id: str, open_numbers: set[int]) -> None:
        """Forgets paid debts once the log says that they are complete."""
        known = self._open.get(transactional_id)
        if known is None:
            return
        for number in [n for n, entry in known.items() if entry.paid and n not in open_numbers]:
            del known[number]
        if not known:
            del self._open[transactional_id]

    def cancel(self) -> None:
        for debts in self._open.values():
            for entry in debts.values():
                if entry.payment is not None:
                    entry.payment.cancel()

    async def keep_alive(self) -> None:
        """A sign of life in the feed, so that brokers do not forget this writer nor retention its leader record."""
        async with self._appending:
            await self._feed.append([codec.encode_feed_leader(self._leader)])

    async def write_manifests(self) -> None:
        """Runs while the partition is led: appends manifests in decision order, group-committed."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            # Two rounds of the loop: the answers of what has just been decided leave first. Their clients have work to
            # do meanwhile, and nobody waits for a manifest but its markers.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            while self._manifests:
                entries, records = self._next_batch()
                for batch in self._cut(records):
                    async with self._appending:
                        offset = await self._feed.append(batch)
                    self.feed_offset_next = offset + len(batch)
                for entry in entries:
                    entry.feed_offset_next = self.feed_offset_next
                    self._pay_markers(entry)

    def _next_batch(self) -> tuple[list[OpenDebt], Feed]:
        # Decisions reach us in order within a batch of the log, but a take-over brings all at once.
        self._manifests.sort(key=lambda entry: entry.debt.decision)
        entries: list[OpenDebt] = []
        records: Feed = []
        if self._records_since_leader >= self._feed_batch_max_records:
            # A successor looks for the last one from the end, before it reads the log: it must never look for long.
            records.append(codec.encode_feed_leader(self._leader))
            self._records_since_leader = 0
        size = sum(size_of(*record) for record in records)
        for entry in self._manifests:
            if entries and len(records) >= self._feed_batch_max_records:
                break
            debt = entry.debt
            parts = codec.encode_manifest(debt.transactional_id, debt.transaction, self._feed_batch_max_bytes)
            parts_size = sum(size_of(*part) for part in parts)
            if entries and size + parts_size > self._feed_batch_max_bytes:
                break
            entries.append(entry)
            size += parts_size
            records.extend(
                part
                for index, part in enumerate(parts)
                if (debt.transactional_id, debt.number, index) not in self._written
            )
        del self._manifests[: len(entries)]
        self._records_since_leader += len(records)
        return entries, records

    def _cut(self, records: Feed) -> list[Feed]:
        """Only a manifest in parts is longer than one batch may be."""
        batches: list[Feed] = []
        size = self._feed_batch_max_bytes
        for key, value in records:
            size += size_of(key, value)
            if size > self._feed_batch_max_bytes:
                batches.append([])
                size = size_of(key, value)
            batches[-1].append((key, value))
        return batches

    def _pay_markers(self, entry: OpenDebt) -> None:
        if not entry.remaining:
            self._is_paid(entry)
            return
        entry.payment = self._markers.pay(
            entry.debt,
            coordinator_epoch=self._coordinator_epoch,
            paid=lambda partition: self._marked(entry, partition),
        )

    def _marked(self, entry: OpenDebt, partition: TopicPartition) -> None:
        entry.remaining.discard(partition)
        if not entry.remaining and not entry.paid:
            self._is_paid(entry)

    def _is_paid(self, entry: OpenDebt) -> None:
        entry.paid = True
        entry.dropped = entry.payment is not None and bool(entry.payment.dropped)
        # It knows whom to tell, and we know it: a circle that only a search for garbage would end.
        entry.payment = None
        self._on_paid(entry.debt.transactional_id, entry.debt.number)
        waiters, entry.waiters = entry.waiters, {}
        for waiter in waiters.values():
            waiter()
