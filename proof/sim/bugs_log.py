"""Bugs in how the log is written, replayed and answered from. Planted by proof.sim.planted."""

# ruff: noqa: SLF001 - a bug is planted from within

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from typing import Any

from coordinator import feed, inbox, loading, serving, shard
from coordinator.calls import Answer
from coordinator.core.apply import PartitionState, apply
from coordinator.core.commands import Accepted, ErrorCode, Refused
from coordinator.core.records import IdState
from coordinator.core.state import TransactionState
from coordinator.log import codec, lead, replay
from coordinator.log.lead import Appender, writer_of
from coordinator.log.port import Kind, Store, Stored, UnavailableError, UnknownOutcomeError, Writer
from proof.sim.planting import changed, put, without_invariants

# --- the log --------------------------------------------------------------------------------------------------------


def ongoing_is_not_replayed(stack: ExitStack) -> None:
    real = replay.Replay.finish

    def finish(self: replay.Replay) -> PartitionState:
        state = real(self)
        for entry in list(state.active.values()):
            kept = tuple(t for t in entry.transactions if t.state is not TransactionState.ONGOING)
            state.active[entry.transactional_id] = changed(entry, transactions=kept)
        return state

    put(stack, replay.Replay, "finish", finish)


def only_the_first_chunk_is_replayed(stack: ExitStack) -> None:
    without_invariants(stack)

    class FirstChunk(replay.Replay):
        chunks = 0

        def fold(self, chunk: Sequence[Stored]) -> None:
            self.chunks += 1
            super().fold(chunk)

        def _fold_id(self, transactional_id: str, value: bytes | None) -> None:
            if self.chunks == 1:
                super()._fold_id(transactional_id, value)

    put(stack, loading, "Replay", FirstChunk)


def _careless_append(*, apply_first: bool) -> Callable[..., Any]:
    """One attempt per batch; where it fails, its calls are refused and the next batch takes the same sequence."""

    async def append(self: Any, batch: inbox.Batch) -> None:
        records = batch.records or [codec.encode_leader(self._leader)]
        log: Appender = self._log
        if apply_first:
            _applied(self, batch)
        try:
            await log._store.append(log._kind, log._partition, log._writer, log._sequence, records)
        except (UnknownOutcomeError, UnavailableError):
            for call, _ in batch.decided:
                call.resolve(Refused(code=ErrorCode.REQUEST_TIMED_OUT, message="", retriable=True))
            return
        except Exception as error:
            raise lead.LostError(str(error)) from error
        log._sequence += len(records)
        if not apply_first:
            _applied(self, batch)
        for call, decision in batch.decided:
            if isinstance(decision, Refused):
                call.resolve(decision)
            else:
                self._answers.answer(call, decision)

    return append


def _applied(self: Any, batch: inbox.Batch) -> None:
    self._appended_at_ms = self._now_ms()
    for call, decision in batch.decided:
        for record in () if isinstance(decision, Refused) else decision.records:
            before = self._ids.get(record.transactional_id) if isinstance(record, IdState) else None
            apply(self._ids, record)
            if isinstance(record, IdState):
                self._applied(before, record, call.command)


def applied_before_it_is_appended(stack: ExitStack) -> None:
    put(stack, serving.Serving, "_append", _careless_append(apply_first=True))


def sequences_are_used_again(stack: ExitStack) -> None:
    put(stack, serving.Serving, "_append", _careless_append(apply_first=False))


def answers_without_an_append(stack: ExitStack) -> None:
    real = inbox.Inbox.next_batch

    def next_batch(self: inbox.Inbox) -> inbox.Batch:
        batch = real(self)
        waiting: list[tuple[inbox.Call, Accepted | Refused]] = []
        for call, decision in batch.decided:
            if isinstance(decision, Refused):
                call.resolve(decision)
            elif not decision.records:
                call.resolve(Answer(reply=decision.reply))
            else:
                waiting.append((call, decision))
        batch.decided = waiting
        return batch

    put(stack, inbox.Inbox, "next_batch", next_batch)


def an_id_is_decided_twice_in_a_batch(stack: ExitStack) -> None:
    real = inbox.Inbox._accept

    def accept(
        self: inbox.Inbox, call: inbox.Call, decision: Accepted, before: Any, context: Any, batch: inbox.Batch
    ) -> bool:
        taken = real(self, call, decision, before, context, batch)
        batch.touched.clear()
        return taken

    put(stack, inbox.Inbox, "_accept", accept)


class _UnfencedFeed:
    """A store whose feed never gets a leader's record, as seen by a take-over."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._leader: Stored | None = None

    async def append(self, kind: Kind, partition: int, writer: Writer, sequence: int, records: Any) -> int:
        if kind is Kind.LOG:
            return await self._store.append(kind, partition, writer, sequence, records)
        end = await self._store.end_offset(kind, partition)
        self._leader = Stored(end, *records[0])
        return end

    async def log_topic_id(self) -> bytes:
        return await self._store.log_topic_id()

    async def end_offset(self, kind: Kind, partition: int) -> int:
        return await self._store.end_offset(kind, partition)

    def read(self, kind: Kind, partition: int, first: int, after: int | None) -> AsyncIterator[Sequence[Stored]]:
        if self._leader is not None and kind is Kind.FEED and first == self._leader.offset:
            return _just(self._leader)
        return self._store.read(kind, partition, first, after)

    async def replay(self, *args: Any) -> None:
        await self._store.replay(*args)


async def _just(entry: Stored) -> AsyncIterator[Sequence[Stored]]:
    yield [entry]


def the_feed_is_not_fenced(stack: ExitStack) -> None:
    real = loading.load

    async def load(store: Store, partition: int, **kwargs: Any) -> loading.Loaded:
        loaded = await real(_UnfencedFeed(store), partition, **kwargs)
        writer = writer_of(partition, loaded.leader.generation, loaded.leader.epoch)
        return changed(
            loaded,
            log=Appender(store, Kind.LOG, partition, writer, 1),
            feed=Appender(store, Kind.FEED, partition, writer, 0),
        )

    put(stack, shard, "load", load)


def the_feed_is_not_asked(stack: ExitStack) -> None:
    async def find_outcome(*_: Any) -> None:
        """Looks nowhere."""

    put(stack, feed.Lookups, "find_outcome", find_outcome)
