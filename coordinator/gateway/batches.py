"""CommitBatch: one call, one transaction, once per request id.

Which requests were committed is not kept here but by the commits themselves (tokens.py). Whoever begins with an id
first takes it over, which fences all others and waits until every commit of theirs stands in the feed; then reads the
feed: from there on nobody else can commit, so what is known here is all there is. After any doubt it begins so anew.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from coordinator.gateway import convert, tokens
from coordinator.gateway.tokens import Remembered
from oncebox.bulk import Outgoing
from oncebox.errors import (
    AbortableError,
    FatalError,
    OnceboxError,
    ProducerFencedError,
    RetriableError,
    UsageError,
    error_from,
)
from oncebox.producer import Producer
from oncebox.transaction import State, Transaction
from oncebox.v1 import gateway_pb2 as pb
from oncebox.v1 import manifest_pb2, transaction_pb2

# Two clocks are compared when the feed is read back: that of the brokers, and our own.
CLOCKS_APART_MS = 60_000
IDLE_LOOK_S = 10.0
# Of the time that a stop has, what is under way gets so much to come to its end. The rest is for aborting the others.
FINISH_SHARE = 0.5

# The commits of an id that the feed got since a time, in order.
ReadFeed = Callable[[str, int], AsyncIterator[manifest_pb2.Manifest]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    window_ms: int
    requests_remembered: int
    ids: int
    waiting_bytes: int
    metadata_bytes: int
    idle_ms: int


class BusyError(RetriableError):
    """More is under way than may be; nothing was done."""


class OtherRecordsError(UsageError):
    """The request id has been used for other records."""


class _Desk:
    """One transactional id: its producer, and the requests that were committed."""

    def __init__(self, transactional_id: str, new_producer: Callable[[str], Producer], batches: "Batches") -> None:
        self.transactional_id = transactional_id
        self.used_at = 0.0
        self.running: dict[str, tuple[bytes, asyncio.Task[bytes]]] = {}
        # Of these, the request that is being committed: the others wait for it.
        self._at_work: str | None = None
        self._new_producer = new_producer
        self._batches = batches
        self._turn = asyncio.Lock()
        self._producer: Producer | None = None
        # With the time at which we learned of it: when it was decided is said by another's clock.
        self._known: OrderedDict[str, tuple[int, Remembered]] = OrderedDict()

    async def commit(self, request: pb.CommitBatchRequest, records: list[Outgoing], fingerprint: bytes) -> bytes:
        async with self._turn:
            self._at_work = request.request_id
            try:
                return await self._carry_out(request, records, fingerprint)
            finally:
                self._at_work = None

    async def _carry_out(self, request: pb.CommitBatchRequest, records: list[Outgoing], fingerprint: bytes) -> bytes:
        producer = await self._ready()
        known = self.recall(request.request_id, fingerprint)
        if known is not None:
            return known
        refused = tokens.too_large(request, producer.resume_token, self._batches.limits.metadata_bytes)
        if refused is not None:
            raise error_from(refused)
        try:
            transaction = await producer.begin()
        except OnceboxError as error:
            await self.close()
            raise _again(error) from error
        try:
            return await self._commit(producer, transaction, request, records, fingerprint)
        except BaseException as error:
            await self._clean_up(transaction)
            if isinstance(error, FatalError | AbortableError) and self._producer is None:
                raise _again(error) from error
            raise

    async def _commit(
        self,
        producer: Producer,
        transaction: Transaction,
        request: pb.CommitBatchRequest,
        records: list[Outgoing],
        fingerprint: bytes,
    ) -> bytes:
        receipt = await transaction.send_many(records)
        await transaction.flush()
        metadata = tokens.encode(request, receipt.places, fingerprint, producer.resume_token)
        outcome = await transaction.commit(metadata=metadata)
        if outcome is None:
            raise RuntimeError("a commit with metadata has an outcome")
        response = tokens.response_of(outcome, convert.sent_records(receipt.offsets())).SerializeToString()
        self._remember(request.request_id, Remembered(fingerprint=fingerprint, response=response))
        return response

    async def _clean_up(self, transaction: Transaction) -> None:
        """Nothing of it is visible; where that is not sure, the next call asks the log and the feed."""
        with suppress(OnceboxError):
            if transaction.state is State.OPEN:
                await transaction.abort()
        if transaction.state is not State.ENDED:
            await self.close()

    # --- what was committed -------------------------------------------------------------------------------------------

    def recall(self, request_id: str, fingerprint: bytes) -> bytes | None:
        self._forget_old()
        if request_id not in self._known:
            return None
        _, known = self._known[request_id]
        if known.fingerprint != fingerprint:
            raise OtherRecordsError(f"request_id {request_id!r} was committed with other records: choose a new one")
        response = pb.CommitBatchResponse.FromString(known.response)
        response.repeated = True
        return response.SerializeToString()

    def _remember(self, request_id: str, what: Remembered) -> None:
        self._known[request_id] = (self._batches.now_ms(), what)
        self._known.move_to_end(request_id)
        if len(self._known) > self._batches.limits.requests_remembered:
            self._known.popitem(last=False)

    def _forget_old(self) -> None:
        before_ms = self._batches.now_ms() - self._batches.limits.window_ms
        while self._known and next(iter(self._known.values()))[0] < before_ms:
            self._known.popitem(last=False)

    async def _ready(self) -> Producer:
        if self._producer is not None:
            return self._producer
        producer = self._new_producer(self.transactional_id)
        try:
            await producer.start()
            # Only now: no commit of anybody else can follow.
            await self._learn()
        except BaseException:
            await asyncio.shield(_stop(producer))
            raise
        self._producer = producer
        return producer

    async def _learn(self) -> None:
        self._known.clear()
        since_ms = self._batches.now_ms() - self._batches.limits.window_ms - CLOCKS_APART_MS
        parts: dict[int, dict[int, manifest_pb2.Manifest]] = {}
        async for manifest in self._batches.read_feed(self.transactional_id, since_ms):
            of_number = parts.setdefault(manifest.number, {})
            of_number[manifest.part] = manifest
            # A part may stand in the feed twice; a commit whose first parts were deleted is beyond the window.
            if len(of_number) == manifest.part_count:
                found = tokens.remembered([of_number[index] for index in sorted(of_number)])
                del parts[manifest.number]
                if found is not None:
                    self._remember(*found)

    async def end(self, finish_by: float, until: float) -> None:
        """Nothing begins any more, and what has begun is given up when its time has passed."""
        tasks = {request_id: task for request_id, (_, task) in self.running.items()}
        for request_id, task in tasks.items():
            if request_id != self._at_work:
                task.cancel()
        await _end_by(finish_by, tasks.values())
        await _end_by(until, tasks.values())
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self.close()

    async def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await _stop(producer)


class Batches:
    def __init__(
        self,
        new_producer: Callable[[str], Producer],
        read_feed: ReadFeed,
        limits: BatchLimits,
        now_ms: Callable[[], int],
    ) -> None:
        self.limits = limits
        self.now_ms = now_ms
        self.read_feed = read_feed
        self._new_producer = new_producer
        self._desks: OrderedDict[str, _Desk] = OrderedDict()
        self._waiting_bytes = 0
        self._is_closing = False
        self._looking: asyncio.Task[None] | None = None
        self._freeing: set[asyncio.Task[None]] = set()

    async def commit(self, request: pb.CommitBatchRequest) -> pb.CommitBatchResponse:
        """Goes on to its end when its caller has gone: the same request again finds what became of it."""
        records = convert.outgoing(request.records)
        fingerprint = tokens.fingerprint_of(records, request.metadata)
        if self._is_closing:
            raise _going_down()
        desk = self._desk(request.transactional_id)
        known = desk.recall(request.request_id, fingerprint)
        if known is not None:
            return pb.CommitBatchResponse.FromString(known)
        running = desk.running.get(request.request_id)
        if running is not None and running[0] != fingerprint:
            raise OtherRecordsError(f"request_id {request.request_id!r} is under way with other records")
        repeated = running is not None
        task = running[1] if running is not None else self._begin(desk, request, records, fingerprint)
        await asyncio.wait((task,))
        if task.cancelled():
            raise _going_down()
        response = pb.CommitBatchResponse.FromString(task.result())
        response.repeated = response.repeated or repeated
        return response

    def _desk(self, transactional_id: str) -> _Desk:
        desk = self._desks.get(transactional_id)
        if desk is None:
            if len(self._desks) >= self.limits.ids:
                self._free_one()
            desk = self._desks[transactional_id] = _Desk(transactional_id, self._new_producer, self)
        self._desks.move_to_end(transactional_id)
        desk.used_at = asyncio.get_running_loop().time()
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._close_idle())
        return desk

    def _free_one(self) -> None:
        for name, desk in self._desks.items():
            if not desk.running:
                self._free(name)
                return
        raise BusyError(f"batches of {len(self._desks)} transactional ids are under way: use fewer ids, or wait")

    def _free(self, name: str) -> None:
        """Forgotten at once, and closed behind that: whoever comes for the id meanwhile gets a desk of its own."""
        task = asyncio.get_running_loop().create_task(self._desks.pop(name).close())
        self._freeing.add(task)
        task.add_done_callback(self._freeing.discard)

    def _begin(
        self, desk: _Desk, request: pb.CommitBatchRequest, records: list[Outgoing], fingerprint: bytes
    ) -> asyncio.Task[bytes]:
        size = request.ByteSize()
        if self._waiting_bytes + size > self.limits.waiting_bytes:
            raise BusyError("more batches are under way than this gateway holds: send it again later")
        self._waiting_bytes += size
        task = asyncio.get_running_loop().create_task(desk.commit(request, records, fingerprint))
        desk.running[request.request_id] = (fingerprint, task)

        def ended(task: asyncio.Task[bytes]) -> None:
            self._waiting_bytes -= size
            del desk.running[request.request_id]
            if not task.cancelled():
                task.exception()  # told to its callers, should there be any left

        task.add_done_callback(ended)
        return task

    async def _close_idle(self) -> None:
        """A producer that is not used frees its connections; what it knew, the feed knows."""
        while True:
            await asyncio.sleep(IDLE_LOOK_S)
            before = asyncio.get_running_loop().time() - self.limits.idle_ms / 1000
            idle = [name for name, desk in self._desks.items() if desk.used_at < before and not desk.running]
            for name in idle:
                self._free(name)

    async def close(self, within_s: float) -> None:
        """What is being committed comes to its end first, if it does in time; what waits for its turn is refused."""
        self._is_closing = True
        if self._looking is not None:
            self._looking.cancel()
        now = asyncio.get_running_loop().time()
        finish_by, until = now + within_s * FINISH_SHARE, now + within_s
        ending = (desk.end(finish_by, until) for desk in self._desks.values())
        await asyncio.gather(_end_by(until, self._freeing), *ending)
        self._desks.clear()


async def _end_by(when: float, tasks: Collection[asyncio.Task[Any]]) -> None:
    """Those that have not ended by then are cancelled."""
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=max(when - asyncio.get_running_loop().time(), 0))
        for task in late:
            task.cancel()


async def _stop(producer: Producer) -> None:
    with suppress(OnceboxError):
        await producer.stop()


def _again(error: OnceboxError) -> OnceboxError:
    """What to tell where the id's next user finds out what became of the request."""
    if isinstance(error, ProducerFencedError | AbortableError):
        return error_from(
            convert.refusal(
                f"the batch was interrupted ({error}); send it again with the same request_id",
                transaction_pb2.CONCURRENT_TRANSACTIONS,
            )
        )
    return error


def _going_down() -> OnceboxError:
    return error_from(
        convert.refusal("this gateway is going down: send it again", transaction_pb2.COORDINATOR_NOT_AVAILABLE)
    )
