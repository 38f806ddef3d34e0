"""What a Transact stream holds: a producer and its open transaction. Both may outlive the stream, for a while.

A lost stream's transaction is aborted when its grace period has passed, unless another stream has resumed it by number.
Who opens an id anew fences whoever held it: also a holder of this gateway.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from oncebox.errors import OnceboxError
from oncebox.producer import Producer, Transaction
from oncebox.v1 import gateway_pb2 as pb
from oncebox.v1 import transaction_pb2

log = logging.getLogger(__name__)

NewProducer = Callable[[pb.Open, str], Producer]

# Refusals that are kept for whoever resumes; after more of them in one transaction nobody can.
REFUSED_MAX = 100


class TooManyError(Exception):
    """As many producers are held as may be."""


class Holder:
    def __init__(self, producer: Producer, transactional_id: str, grace_ms: int) -> None:
        self.producer = producer
        self.transactional_id = transactional_id
        self.grace_ms = grace_ms
        self.transaction: Transaction | None = None
        # The last request that was carried out: what a stream that resumes need not send again.
        self.last_request_id = 0
        # Why requests since Begin were not carried out, in their order: the answers may be lost with the stream.
        self._refused: list[pb.RefusedRequest] = []
        # As many of them came before the last that was carried out.
        self._passed_over = 0
        # Of the stream that has it: ends that stream, and returns when its last request is carried out.
        self.detach: Callable[[], Coroutine[Any, Any, None]] | None = None
        self.waiting: asyncio.TimerHandle | None = None

    @property
    def number(self) -> int:
        """Of the open transaction; 0: there is none."""
        return self.transaction.number if self.transaction is not None and self.transaction.is_open else 0

    def carried_out(self, request_id: int) -> None:
        self.last_request_id = request_id
        self._passed_over = len(self._refused)

    def refused(self, request_id: int, error: transaction_pb2.Error) -> None:
        # One more tells that there were too many.
        if len(self._refused) <= REFUSED_MAX:
            self._refused.append(pb.RefusedRequest(request_id=request_id, error=error))

    def forget_refused(self) -> None:
        self._refused, self._passed_over = [], 0

    @property
    def passed_over(self) -> list[pb.RefusedRequest]:
        """What a stream that resumes would else take for carried out."""
        return self._refused[: self._passed_over]

    def can_be_resumed(self, number: int) -> bool:
        return self.number == number and len(self._refused) <= REFUSED_MAX


class Holders:
    def __init__(self, new_producer: NewProducer, holders_max: int) -> None:
        self._new_producer = new_producer
        self._holders_max = holders_max
        self._held: dict[str, Holder] = {}
        # Fenced, by whoever opened their id anew, and still held by a stream. As many more.
        self._fenced: set[Holder] = set()
        self._opening = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def resume(self, transactional_id: str, number: int) -> Holder | None:
        """The holder of this open transaction, taken from the stream that had it."""
        holder = self._held.get(transactional_id)
        if holder is None or not number or not holder.can_be_resumed(number):
            return None
        if holder.waiting is not None:
            holder.waiting.cancel()
            holder.waiting = None
        if holder.detach is not None:
            await holder.detach()
        # Its last request may have ended it, or been refused as one too many; or another stream have been quicker.
        if holder.detach is not None:
            return None
        if not holder.can_be_resumed(number):
            # No stream has it any more, and no time will end it.
            self._give_up(holder)
            return None
        return holder

    async def open(self, request: pb.Open, address: str) -> Holder:
        """Takes the id over: what was open is aborted."""
        if len(self._held) + self._opening >= self._holders_max or len(self._fenced) >= self._holders_max:
            raise TooManyError
        producer = self._new_producer(request, address)
        self._opening += 1
        try:
            await producer.start()
        finally:
            self._opening -= 1
        holder = Holder(producer, request.transactional_id, request.grace_ms)
        former = self._held.pop(request.transactional_id, None)
        self._held[request.transactional_id] = holder
        if former is not None and former.detach is None:
            self._start(self._drop(former))
        elif former is not None:
            # The stream that still has it is told that it is fenced, and leaves it behind by itself.
            self._fenced.add(former)
        return holder

    def leave(self, holder: Holder, *, lost: bool) -> None:
        """By its stream, which has ended."""
        holder.detach = None
        transaction = holder.transaction
        is_current = self._held.get(holder.transactional_id) is holder
        if is_current and lost and holder.grace_ms and transaction is not None and transaction.is_unprepared:
            loop = asyncio.get_running_loop()
            holder.waiting = loop.call_later(holder.grace_ms / 1000, self._give_up, holder)
        else:
            self._give_up(holder)

    def _give_up(self, holder: Holder) -> None:
        if self._held.get(holder.transactional_id) is holder:
            del self._held[holder.transactional_id]
        self._start(self._drop(holder))

    async def _drop(self, holder: Holder) -> None:
        if holder.waiting is not None:
            holder.waiting.cancel()
        if holder.detach is not None:
            await holder.detach()
        try:
            with suppress(OnceboxError):
                await holder.producer.stop()
        finally:
            self._fenced.discard(holder)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a producer of the gateway was not stopped in good order", exc_info=error)

    async def close(self, within_s: float) -> None:
        """Aborts what is open; what cannot be aborted in time is left to its timeout."""
        for holder in (*self._held.values(), *self._fenced):
            self._give_up(holder)
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._tasks:
                    await asyncio.wait(self._tasks)
        for task in self._tasks:
            task.cancel()
