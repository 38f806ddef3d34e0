"""Serving one log partition that has been won and loaded: decide, append, apply, answer.

    call -> inbox -> one group-committed append -> apply -> answer (once what it waits for is paid)

No answer leaves before an append begun after the call arrived is acknowledged: a deposed leader can never answer. Only
a heartbeat's does, which promises nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from coordinator.answers import Answers
from coordinator.calls import Change, Fenced, Told
from coordinator.changes import changes, completed
from coordinator.core.apply import apply, idle_ids, pack_idle
from coordinator.core.clocks import Clocks
from coordinator.core.commands import Command, Complete, Expire, Refused
from coordinator.core.grants import Limits, refuse_fenced
from coordinator.core.owed import owed
from coordinator.core.records import IdState
from coordinator.debts import Debts
from coordinator.inbox import Batch, Call, Inbox
from coordinator.loading import Loaded
from coordinator.log import codec
from coordinator.log.lead import LostError
from coordinator.markers.port import Markers
from coordinator.producer_ids import ProducerIdPool

logger = logging.getLogger(__name__)

SWEEP_S = 0.25
EXPIRE_PAUSE_S = 0.01
# How long a paid transaction waits to be completed by its id's next record before it gets one of its own.
COMPLETE_AFTER_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSettings:
    limits: Limits = field(default_factory=Limits)
    # How long End waits for markers before it answers with what is owed.
    marker_wait_ms: int = 1_000
    # Brokers refuse larger batches (max.message.bytes).
    batch_max_bytes: int = 900_000
    batch_max_records: int = 1_000
    transaction_timeout_max_ms: int = 900_000
    id_expiration_ms: int = 7 * 24 * 3_600_000
    pack_after_ms: int = 60_000
    # An idle leader's sign of life in the log: so it learns that another has taken over, and what that one left open.
    sign_of_life_ms: int = 10_000
    # One in the feed, long before brokers forget this writer; after half that time it takes over anew before it acts.
    keep_alive_ms: int = 3_600_000
    writer_forgotten_ms: int = 24 * 3_600_000
    # No commit is decided while the feed has not acknowledged what it was sent for so long.
    feed_wait_ms: int = 5_000
    # A commit whose markers take longer gets the place of its manifest noted in the log.
    long_debt_ms: int = 30_000
    # Begin anew where the log is gone and only the feed remembers it.
    accept_lost_log: bool = False
    # Told of each durable step of an id: its state before and after.
    applied: Callable[[IdState | None, IdState], None] | None = None


class Serving:
    def __init__(
        self,
        partition: int,
        loaded: Loaded,
        *,
        markers: Markers,
        producer_ids: ProducerIdPool,
        now_ms: Callable[[], int],
        settings: ShardSettings,
        watchers: set[Callable[[Change], None]],
        listeners: dict[str, set[Fenced]],
    ) -> None:
        self._partition = partition
        self._leader = loaded.leader
        self._ids = loaded.ids
        self._log = loaded.log
        self._now_ms = now_ms
        self._settings = settings
        self._watchers = watchers
        self._listeners = listeners
        # Half as much again as when a grant is made: who is busy has a younger one by then, and is never in its way.
        age_max_ms = settings.limits.producer_id_age_max_ms * 3 // 2
        self._clocks = Clocks(settings.transaction_timeout_max_ms, unbegun_age_max_ms=age_max_ms)
        self._appended_at_ms = now_ms()
        for state in loaded.ids.active.values():
            self._clocks.tick(state, None, self._appended_at_ms)
        self.debts = Debts(
            feed=loaded.feed,
            markers=markers,
            leader=loaded.leader,
            paid=self._debt_is_paid,
            feed_offset_next=loaded.feed_offset_next,
            feed_batch_max_bytes=settings.batch_max_bytes,
            feed_batch_max_records=settings.batch_max_records,
        )
        self._answers = Answers(self.debts, marker_wait_ms=settings.marker_wait_ms)
        self._inbox = Inbox(
            ids=loaded.ids,
            debts=self.debts,
            clocks=self._clocks,
            producer_ids=producer_ids,
            now_ms=now_ms,
            limits=settings.limits,
            batch_max_bytes=settings.batch_max_bytes,
            batch_max_records=settings.batch_max_records,
            feed_wait_ms=settings.feed_wait_ms,
            decision_next=1 + max((debt.decision for debt in loaded.debts), default=0),
        )
        self._in_flight: Batch | None = None
        self._sign_of_life = False
        self._resigned = False
        self._feed_was_away = False
        # When an id's last paid transaction has waited long enough; a busy id's next record is always sooner.
        self._to_complete: dict[str, float] = {}
        # By id: while the log takes no appends they wait, and must not become more and more.
        self._timing_out: dict[str, Call] = {}
        self.debts.take_on(loaded.debts, loaded.written)

    def resign(self) -> None:
        """Ends `run` in good order: what is being appended is still answered."""
        self._resigned = True
        self._inbox.wake()

    async def run(self) -> None:
        """Until resigned (returns) or lost (raises LostError)."""
        work = (self._serve(), self.debts.write_manifests(), self._sweep(), self._tidy(), self._keep_feed_alive())
        tasks = [asyncio.ensure_future(part) for part in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self, refusal: Refused) -> None:
        """Nothing is paid or promised from here on; whoever still waits is told to go elsewhere."""
        self._answers.stop(refusal)
        self.debts.cancel()
        in_flight = [call for call, _ in self._in_flight.decided] if self._in_flight else []
        for call in [*in_flight, *self._inbox.drain()]:
            call.resolve(refusal)

    def ask(self, command: Command, timeout_ms: int, told: Told) -> None:
        call = Call(command, told)
        loop = asyncio.get_running_loop()
        call.timer = loop.call_later(timeout_ms / 1000, self._answers.time_out, call)
        self._inbox.put(call)

    async def _serve(self) -> None:
        while not self._resigned:
            await self._inbox.wait()
            batch = self._inbox.next_batch()
            if batch.decided or self._sign_of_life:
                self._sign_of_life = False
                await self._append(batch)

    async def _append(self, batch: Batch) -> None:
        self._in_flight = batch
        if self._now_ms() - self._appended_at_ms > self._settings.writer_forgotten_ms // 2:
            raise LostError("idle for so long that brokers may have forgotten this writer; taking over anew")
        # Answers without a record of their own still wait for an append: the leader's sign of life.
        await self._log.append(batch.records or [codec.encode_leader(self._leader)])
        self._in_flight = None
        self._appended_at_ms = self._now_ms()
        for call, decision in batch.decided:
            if isinstance(decision, Refused):
                call.resolve(decision)
                continue
            for record in decision.records:
                before = self._ids.get(record.transactional_id) if isinstance(record, IdState) else None
                apply(self._ids, record)
                if isinstance(record, IdState):
                    self._applied(before, record, call.command)
            self._answers.answer(call, decision)

    def _applied(self, before: IdState | None, record: IdState, command: Command) -> None:
        transactional_id = record.transactional_id
        self._clocks.tick(record, command, self._appended_at_ms)
        self.debts.settle(transactional_id, {t.grant.number for t in record.transactions})
        self.debts.take_on(owed(record))
        if self._settings.applied is not None:
            self._settings.applied(before, record)
        # Not by its first number alone: of two who find the same one PREPARED, both have the same.
        if before is not None and before.owner != record.owner:
            for listener in tuple(self._listeners.get(transactional_id, ())):
                listener(transactional_id, refuse_fenced(record))
        if self._watchers:
            self._tell(changes(before, record, self._partition, self._appended_at_ms))

    def _debt_is_paid(self, transactional_id: str, number: int) -> None:
        loop = asyncio.get_running_loop()
        if not self._to_complete:
            loop.call_later(COMPLETE_AFTER_S, self._complete_paid)
        self._to_complete[transactional_id] = loop.time() + COMPLETE_AFTER_S
        self._inbox.unpark(transactional_id)
        state = self._ids.active.get(transactional_id)
        if self._watchers and state is not None:
            self._tell(completed(state, number, self._partition, self._now_ms()))

    def _tell(self, news: Iterable[Change]) -> None:
        for change in news:
            for watcher in tuple(self._watchers):
                watcher(change)

    def _complete_paid(self) -> None:
        """Gives those a record of their own that no other record of their id has completed in the meantime."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for transactional_id in sorted(name for name, due_s in self._to_complete.items() if due_s <= now_s):
            del self._to_complete[transactional_id]
            if any(entry.paid for entry in self.debts.of(transactional_id).values()):
                self._inbox.put(Call(Complete(transactional_id=transactional_id)))
        if self._to_complete:
            loop.call_later(COMPLETE_AFTER_S, self._complete_paid)

    async def _sweep(self) -> None:
        """Ends what outlived its timeout, and gives a sign of life."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now_ms = self._now_ms()
            # Asked again by a later sweep if nothing came of it.
            self._timing_out = {name: call for name, call in self._timing_out.items() if not call.is_over}
            for command in self._clocks.expired(now_ms):
                if command.transactional_id not in self._timing_out:
                    self._timing_out[command.transactional_id] = call = Call(command)
                    self._inbox.put(call)
            for transactional_id in self.debts.grow_long(now_ms - self._settings.long_debt_ms):
                self._inbox.put(Call(Complete(transactional_id=transactional_id)))
            self._tell_of_feed()
            if now_ms - self._appended_at_ms >= self._settings.sign_of_life_ms:
                self._sign_of_life = True
                self._inbox.wake()

    def _tell_of_feed(self) -> None:
        is_away = self.debts.feed_waits_s * 1000 > self._settings.feed_wait_ms
        if is_away and not self._feed_was_away:
            logger.error(
                "feed partition %d takes no appends: no commit is decided until it does; if its topic is gone, restart "
                "an instance, see docs/when-the-log-is-lost.md",
                self._partition,
            )
        self._feed_was_away = is_away

    async def _tidy(self) -> None:
        """Packs ids that are not in use and expires those long unused: in small steps, for there can be millions."""
        pack_every_ms = self._settings.pack_after_ms
        expire_every_ms = min(self._settings.id_expiration_ms // 10, 3_600_000)
        packed_at_ms = expired_at_ms = now_ms = self._now_ms()
        while True:
            due_ms = min(packed_at_ms + pack_every_ms, expired_at_ms + expire_every_ms)
            await asyncio.sleep(max((due_ms - now_ms) / 1000, SWEEP_S))
            now_ms = self._now_ms()
            if now_ms - packed_at_ms >= pack_every_ms:
                packed_at_ms = now_ms
                for _ in pack_idle(self._ids, codec.encode_id, now_ms - self._settings.pack_after_ms):
                    await asyncio.sleep(0)
            if now_ms - expired_at_ms >= expire_every_ms:
                expired_at_ms = now_ms
                await self._expire_idle(now_ms - self._settings.id_expiration_ms)

    async def _keep_feed_alive(self) -> None:
        while True:
            await asyncio.sleep(self._settings.keep_alive_ms / 1000)
            await self.debts.keep_alive()

    async def _expire_idle(self, idle_since_before_ms: int) -> None:
        for names in idle_ids(self._ids, codec.updated_at_ms, idle_since_before_ms):
            calls = [Call(Expire(transactional_id=n, idle_since_before_ms=idle_since_before_ms)) for n in names]
            for call in calls:
                self._inbox.put(call)
            await asyncio.sleep(0)
            # Clients' calls must not wait behind thousands of these.
            while not all(call.is_over for call in calls):  # noqa: ASYNC110 - nobody is in a hurry
                await asyncio.sleep(EXPIRE_PAUSE_S)
