"""Calls that wait to be decided, and the batches that they become.

At most one undecided record per id goes into a batch; other calls on that id keep their place for the next one.
A call that a debt of its id blocks is parked until that debt is paid, or its time has come.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from coordinator.calls import Answer, Told
from coordinator.core.apply import PartitionState
from coordinator.core.clocks import Clocks
from coordinator.core.commands import (
    Accepted,
    Blocked,
    Command,
    Decision,
    Done,
    End,
    Ended,
    ErrorCode,
    Heartbeat,
    NeedsProducerId,
    Refused,
    Register,
    Timeout,
)
from coordinator.core.decide import decide
from coordinator.core.grants import Context, Limits
from coordinator.core.invariants import check_step
from coordinator.core.records import IdState, NumberFloor, TopicState
from coordinator.core.state import INDEBTED
from coordinator.debts import Debts
from coordinator.log import codec
from coordinator.log.port import size_of
from coordinator.producer_ids import ProducerIdPool

# So many calls may wait before those are looked for that are over.
CALLS_KEPT = 100


class Call:
    """A command under way, and who is told of its answer (nobody: our own commands)."""

    __slots__ = ("command", "has_waited", "held", "is_over", "timer", "told")

    def __init__(self, command: Command, told: Told | None = None) -> None:
        self.command = command
        self.told = told
        self.is_over = False
        self.has_waited = False
        # While it is parked: why. Afterwards it may be decided any moment.
        self.held: Refused | None = None
        self.timer: asyncio.TimerHandle | None = None

    def resolve(self, answer: Answer | Refused) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if not self.is_over:
            self.is_over = True
            told, self.told = self.told, None
            if told is not None:
                told(answer)

    def at_deadline(self, do: Callable[[], None], not_after: float) -> None:
        """What happens at the call's deadline instead of what would have, or at `not_after` if that is earlier."""
        if self.timer is not None:
            when = min(self.timer.when(), not_after)
            self.timer.cancel()
            self.timer = asyncio.get_running_loop().call_at(when, do)


@dataclass(slots=True)
class Batch:
    """What is appended at once, and what was decided on each call in it."""

    number_floor: int
    # As after its records; the partition's own until one of them changes a topic.
    topics: dict[str, TopicState]
    topic_changes: int
    records: list[tuple[bytes, bytes | None]] = field(default_factory=list)
    decided: list[tuple[Call, Accepted | Refused]] = field(default_factory=list)
    touched: set[str] = field(default_factory=set)
    size: int = 0


class Inbox:
    def __init__(
        self,
        *,
        ids: PartitionState,
        debts: Debts,
        clocks: Clocks,
        producer_ids: ProducerIdPool,
        now_ms: Callable[[], int],
        limits: Limits,
        batch_max_bytes: int,
        batch_max_records: int,
        feed_wait_ms: int,
        decision_next: int,
    ) -> None:
        self._ids = ids
        self._debts = debts
        self._clocks = clocks
        self._producer_ids = producer_ids
        self._now_ms = now_ms
        self._limits = limits
        self._batch_max_bytes = batch_max_bytes
        self._batch_max_records = batch_max_records
        self._feed_wait_s = feed_wait_ms / 1000
        self._decision_next = decision_next
        self._calls: deque[Call] = deque()
        self._looked_through_at = CALLS_KEPT
        self._parked: dict[str, list[Call]] = {}
        # By id: when the first of its parked calls is looked at again, and with it the others.
        self._again: dict[str, asyncio.TimerHandle] = {}
        self._filled = asyncio.Event()

    def put(self, call: Call) -> None:
        self._calls.append(call)
        if len(self._calls) > self._looked_through_at:
            # While the log takes no appends nothing is decided: callers who have given up must not pile up here.
            waiting = [other for other in self._calls if not other.is_over]
            self._calls.clear()
            self._calls.extend(waiting)
            self._looked_through_at = 2 * len(waiting) + CALLS_KEPT
        self._filled.set()

    def wake(self) -> None:
        self._filled.set()

    async def wait(self) -> None:
        """Until there is something to do."""
        if not self._calls:
            await self._filled.wait()
        self._filled.clear()

    def unpark(self, transactional_id: str) -> None:
        if (timer := self._again.pop(transactional_id, None)) is not None:
            timer.cancel()
        for call in self._parked.pop(transactional_id, ()):
            if not call.is_over:
                call.held = None
                self.put(call)

    def drain(self) -> list[Call]:
        calls = [*self._calls, *(call for parked in self._parked.values() for call in parked)]
        self._calls.clear()
        self._parked.clear()
        for timer in self._again.values():
            timer.cancel()
        self._again.clear()
        return calls

    def next_batch(self) -> Batch:
        """Decides every waiting call whose id has no record in the batch yet, until the batch is full."""
        ids = self._ids
        batch = Batch(number_floor=ids.number_floor, topics=ids.topics, topic_changes=ids.topic_changes)
        later: list[Call] = []
        now_ms = self._now_ms()
        try:
            while self._calls and len(batch.records) < self._batch_max_records:
                call = self._calls.popleft()
                if call.is_over:
                    continue
                if call.command.transactional_id in batch.touched:
                    later.append(call)
                elif not self._decide(call, now_ms, batch):
                    later.append(call)
                    break
        except BaseException:
            # A broken promise ends the service: whoever stops it answers them all.
            later = [*(decided for decided, _ in batch.decided), *later, call]
            raise
        finally:
            self._calls.extendleft(reversed(later))
        return batch

    def _decide(self, call: Call, now_ms: int, batch: Batch) -> bool:
        """False: the batch is full, the call comes with the next one."""
        command = call.command
        transactional_id = command.transactional_id
        if isinstance(command, Timeout) and not self._clocks.is_expired(transactional_id, command.number, now_ms):
            # While it waited for the log its owner was heard of.
            call.resolve(Answer(reply=Done()))
            return True
        state = self._ids.get(transactional_id)
        debts = self._debts.of(transactional_id)
        paid = frozenset(number for number, entry in debts.items() if entry.paid)
        context = Context(
            now_ms=now_ms,
            producer_ids=self._producer_ids.available,
            decision=self._decision_next,
            feed_offset_next=self._debts.feed_offset_next,
            feed_is_available=self._debts.feed_waits_s <= self._feed_wait_s,
            number_floor=batch.number_floor,
            paid=paid,
            owed={number: frozenset(entry.remaining) for number, entry in debts.items() if not entry.paid},
            dropped=frozenset(number for number in paid if debts[number].dropped),
            manifests=self._debts.manifests_of(transactional_id),
            topics=batch.topics,
            topic_changes=batch.topic_changes,
            may_wait=not call.has_waited,
            limits=self._limits,
        )
        return self._take(call, decide(state, command, context), state, context, batch)

    def _take(self, call: Call, decision: Decision, state: IdState | None, context: Context, batch: Batch) -> bool:
        match decision:
            case NeedsProducerId():
                self._park_without_id(call)
            case Blocked():
                self._park(call, decision, context.now_ms)
            case Refused():
                batch.decided.append((call, decision))
            case Accepted(records=()):
                self._accept_without_record(call, decision, state, context.now_ms, batch)
            case Accepted():
                return self._accept(call, decision, state, context, batch)
        return True

    def _park_without_id(self, call: Call) -> None:
        """Until there are producer ids again."""
        transactional_id = call.command.transactional_id
        self._still_parked(transactional_id).append(call)
        self._producer_ids.refill(self.unpark, transactional_id)

    def _still_parked(self, transactional_id: str) -> list[Call]:
        """Without those who have given up: what is in their way may last, and they come again and again."""
        still = [call for call in self._parked.get(transactional_id, ()) if not call.is_over]
        self._parked[transactional_id] = still
        return still

    def _park(self, call: Call, blocked: Blocked, now_ms: int) -> None:
        transactional_id = call.command.transactional_id
        self._still_parked(transactional_id).append(call)
        call.has_waited = True
        call.held = blocked.refusal
        loop = asyncio.get_running_loop()
        again_at_s = loop.time() + max(blocked.again_at_ms - now_ms, 1) / 1000
        timer = self._again.get(transactional_id)
        # One for all: each of several would set one more for every call that it brings back.
        if timer is None or again_at_s < timer.when():
            if timer is not None:
                timer.cancel()
            self._again[transactional_id] = loop.call_at(again_at_s, self.unpark, transactional_id)

    def _accept_without_record(
        self, call: Call, decision: Accepted, state: IdState | None, now_ms: int, batch: Batch
    ) -> None:
        command = call.command
        if state is not None and isinstance(command, Heartbeat | Register):
            self._clocks.tick(state, command, now_ms)
        if isinstance(decision.reply, Done) or isinstance(command, Heartbeat):
            # Promises nothing, so it needs no append behind it.
            call.resolve(Answer(reply=decision.reply))
        else:
            batch.decided.append((call, decision))

    def _accept(self, call: Call, decision: Accepted, before: IdState | None, context: Context, batch: Batch) -> bool:
        encoded = [codec.encode(record) for record in decision.records]
        size = sum(size_of(key, value) for key, value in encoded)
        instead = self._instead_of_too_large(call.command, decision, before, context, size)
        if instead is not None:
            return self._take(call, instead, before, context, batch)
        if batch.records and batch.size + size > self._batch_max_bytes:
            return False
        for record in decision.records:
            if isinstance(record, IdState):
                # Before it is appended: a broken promise must not get into the log.
                check_step(before, record)
            elif isinstance(record, NumberFloor):
                batch.number_floor = record.number_floor
        for record in decision.records:
            if isinstance(record, TopicState):
                if batch.topics is self._ids.topics:
                    batch.topics = dict(batch.topics)
                batch.topics[record.topic] = record
                batch.topic_changes = max(batch.topic_changes, record.change)
        self._producer_ids.take(decision.producer_ids_used)
        self._decision_next += 1
        batch.records.extend(encoded)
        batch.size += size
        batch.decided.append((call, decision))
        batch.touched.add(call.command.transactional_id)
        return True

    def _instead_of_too_large(
        self, command: Command, decision: Accepted, before: IdState | None, context: Context, size: int
    ) -> Decision | None:
        """Checked before anything is decided. An open transaction may use half, so that its abort always fits."""
        half = self._batch_max_bytes // 2
        record = decision.records[-1]
        if size <= half or not isinstance(record, IdState):
            return None
        open_after = bool(record.transactions) and record.transactions[-1].state not in INDEBTED
        limit = half if open_after else self._batch_max_bytes
        if size <= limit:
            return None
        if isinstance(command, End) and isinstance(decision.reply, Ended) and decision.reply.next_registered:
            # The next transaction can be registered later; what is to be ended cannot be made smaller any more.
            alone = replace(command, next_partitions=frozenset(), next_groups=frozenset())
            return decide(before, alone, context)
        older = {t.grant.number for t in before.transactions if t.state in INDEBTED} if before else set()
        kept = tuple(t for t in record.transactions if t.grant.number not in older)
        paid_off = size_of(*codec.encode(replace(record, transactions=kept)))
        if size - size_of(*codec.encode(record)) + paid_off <= limit:
            refusal = Refused(
                code=ErrorCode.CONCURRENT_TRANSACTIONS,
                message="large transactions are still being completed; send the call again",
                retriable=True,
            )
            return Blocked(again_at_ms=context.now_ms + context.limits.patience_ms, refusal=refusal)
        return Refused(
            code=ErrorCode.MESSAGE_TOO_LARGE,
            message=f"the transaction's record would be {size} bytes long, {limit} are possible: use fewer partitions, "
            "fewer runs or less metadata",
        )
