"""The coordinator's core in memory, behind the seam that the API calls: the real decisions, with no log and no Kafka.

Debts are paid at once unless `markers_are_held`. What a shard adds (appends, timers, leadership) is left out.
"""

import asyncio
import itertools
import zlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from coordinator.calls import Answer, Change, Fenced, Led, Told, WatchOverrunError
from coordinator.core.apply import PartitionState, apply
from coordinator.core.commands import (
    Accepted,
    Blocked,
    Command,
    Ended,
    ErrorCode,
    Granted,
    NeedsProducerId,
    OutcomeKnown,
    Refused,
)
from coordinator.core.decide import decide
from coordinator.core.grants import Context, refuse_fenced
from coordinator.core.invariants import check_step
from coordinator.core.owed import owed
from coordinator.core.records import IdState, Outcome, TopicPartition


def _never_packed(_transactional_id: str, _value: bytes) -> IdState:
    raise NotImplementedError


class MemoryCalls:
    """Implements coordinator.calls.Calls."""

    def __init__(self, *, address: str = "127.0.0.1:1", partition_count: int = 4) -> None:
        self.instance = "memory"
        self.address = address
        self.partition_count = partition_count
        self.state = PartitionState(unpack=_never_packed)
        self.now_ms = 1_000_000
        self.markers_are_held = False
        # Answered to every call, as by a partition that is loading or led elsewhere.
        self.refusal: Refused | None = None
        # While it is not set, calls of the ids named here do not come back.
        self.gate = asyncio.Event()
        self.gated: set[str] = set()
        self.calls_made: list[tuple[Command, int]] = []
        self.leader_is_known = True
        self.watch_is_overrun = False
        self.listeners: dict[str, set[Fenced]] = {}
        self._asked: set[asyncio.Task[None]] = set()
        self._watchers: set[asyncio.Queue[Change]] = set()
        self._producer_ids = itertools.count(1_000)
        self._decisions = itertools.count(1)

    def partition_of(self, transactional_id: str) -> int:
        return zlib.crc32(transactional_id.encode()) % self.partition_count

    async def call(self, command: Command, timeout_ms: int) -> Answer | Refused:
        self.calls_made.append((command, timeout_ms))
        if command.transactional_id in self.gated:
            try:
                async with asyncio.timeout(timeout_ms / 1_000):
                    await self.gate.wait()
            except TimeoutError:
                return Refused(code=ErrorCode.REQUEST_TIMED_OUT, message="the deadline passed", retriable=True)
        return self.refusal or self._decide(command)

    def ask(self, command: Command, timeout_ms: int, told: Told) -> None:
        async def tell() -> None:
            told(await self.call(command, timeout_ms))

        task = asyncio.get_running_loop().create_task(tell())
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)

    def _decide(self, command: Command) -> Answer | Refused:
        before = self.state.get(command.transactional_id)
        context: dict[str, Any] = {
            "now_ms": self.now_ms,
            "decision": next(self._decisions),
            "number_floor": self.state.number_floor,
            "paid": self._paid(before),
        }
        decision = decide(before, command, Context(**context))
        while isinstance(decision, NeedsProducerId):
            fresh = tuple(next(self._producer_ids) for _ in range(4))
            decision = decide(before, command, Context(**context, producer_ids=fresh))
        if isinstance(decision, Blocked):
            return decision.refusal
        if isinstance(decision, Refused):
            return decision
        self._apply(before, decision)
        return self._answer(command.transactional_id, decision)

    def _paid(self, state: IdState | None) -> frozenset[int]:
        if state is None or self.markers_are_held:
            return frozenset()
        return frozenset(debt.number for debt in owed(state))

    def _apply(self, before: IdState | None, decision: Accepted) -> None:
        for record in decision.records:
            if isinstance(record, IdState):
                check_step(before, record)
            apply(self.state, record)
            if isinstance(record, IdState):
                self._tell(before, record)

    def _tell(self, before: IdState | None, after: IdState) -> None:
        if before is not None and before.owner != after.owner:
            for fenced in list(self.listeners.get(after.transactional_id, ())):
                fenced(after.transactional_id, refuse_fenced(after))
        known = {(t.grant.number, t.state) for t in before.transactions} if before else set()
        for transaction in after.transactions:
            if (transaction.grant.number, transaction.state) not in known:
                change = Change(
                    transactional_id=after.transactional_id,
                    log_partition=self.partition_of(after.transactional_id),
                    transaction=transaction,
                    state=transaction.state,
                    cause=transaction.cause,
                    at_ms=self.now_ms,
                )
                for queue in self._watchers:
                    queue.put_nowait(change)

    def _answer(self, transactional_id: str, decision: Accepted) -> Answer:
        reply = decision.reply
        outcome: Outcome | None = None
        if isinstance(reply, Ended | OutcomeKnown | Granted):
            outcome = reply.outcome
        state = self.state.get(transactional_id)
        unpaid: frozenset[TopicPartition] = frozenset()
        in_all: frozenset[TopicPartition] = frozenset()
        if self.markers_are_held and state is not None:
            debts = {debt.number: debt.partitions for debt in owed(state)}
            unpaid = debts.get(outcome.grant.number, unpaid) if outcome is not None else unpaid
            in_all = frozenset().union(*debts.values()) if isinstance(reply, Granted) else in_all
        return Answer(reply=reply, owed=unpaid, complete=not unpaid, owed_in_all=in_all)

    def leader_of(self, log_partition: int) -> Led | None:
        return self.leaders()[log_partition] if self.leader_is_known else None

    def leaders(self) -> list[Led]:
        return [
            Led(
                log_partition=partition,
                instance=self.instance,
                address=self.address,
                coordinator_epoch=7,
                state="serving",
                transactional_ids=len(self.state),
            )
            for partition in range(self.partition_count)
        ]

    def describe(self, transactional_id: str) -> IdState | Refused:
        state = self.state.get(transactional_id)
        if state is None:
            return Refused(code=ErrorCode.INVALID_PRODUCER_ID_MAPPING, message="unknown")
        return state

    def page(self, prefix: str, after: str, limit: int) -> Iterable[IdState]:
        ids = sorted(name for name in self.state.active if name.startswith(prefix) and name > after)
        return [self.state.active[name] for name in ids[:limit]]

    async def watch(self, prefix: str) -> AsyncIterator[Change]:
        queue: asyncio.Queue[Change] = asyncio.Queue()
        self._watchers.add(queue)
        try:
            while True:
                change = await queue.get()
                if self.watch_is_overrun:
                    raise WatchOverrunError("5 changes lay unread")
                if change.transactional_id.startswith(prefix):
                    yield change
        finally:
            self._watchers.discard(queue)

    @property
    def watcher_count(self) -> int:
        return len(self._watchers)

    def listen(self, transactional_id: str, fenced: Fenced) -> Callable[[], None]:
        self.listeners.setdefault(transactional_id, set()).add(fenced)
        return lambda: self.listeners[transactional_id].discard(fenced)
