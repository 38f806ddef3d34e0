"""One Transact stream: requests are carried out one after the other, and each is answered once.

A request that has begun is carried out to its end, also when the stream is lost meanwhile: whoever resumes knows what
exactly was done. While more than the window is buffered nothing is read, and gRPC holds the client back.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import grpc

from coordinator.api.auth import GATEWAY, current
from coordinator.api.errors import unexpected
from coordinator.api.guard import Undecodable
from coordinator.api.replies import error_of as error_of_refused
from coordinator.api.rules import RequestRefusedError, check_name
from coordinator.gateway import convert
from coordinator.gateway.holders import Holder, Holders, TooManyError
from oncebox.bulk import Receipt
from oncebox.errors import OnceboxError
from oncebox.transaction import State, Transaction
from oncebox.v1 import gateway_pb2 as pb
from oncebox.v1 import transaction_pb2

# Answers that the client has not taken; beyond it, nothing more is read from it.
UNREAD_MAX = 1_000
UNREAD_PAUSE_S = 0.05
LOST_NOTICE_S = 0.2

Answer = pb.TransactResponse


class _RefusedError(Exception):
    """Inside a stream only: the request is not carried out."""

    def __init__(self, error: transaction_pb2.Error) -> None:
        super().__init__(error.message)
        self.error = error


def _refuse(message: str, code: "transaction_pb2.ErrorCode" = transaction_pb2.INVALID_REQUEST) -> _RefusedError:
    return _RefusedError(convert.refusal(message, code))


class TransactStream:
    def __init__(self, context: Any, address: str, holders: Holders, *, window_bytes: int, grace_max_ms: int) -> None:
        self.is_garbled = False
        self.is_expired = False
        self._pass = current()
        self._context = context
        self._address = address
        self._holders = holders
        self._window_bytes = window_bytes
        self._grace_max_ms = grace_max_ms
        self._holder: Holder | None = None
        self._current: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._answers: asyncio.Queue[Answer] = asyncio.Queue()
        self._is_taken_over = False
        # Something after Open.
        self._has_asked = False
        self._acknowledging: set[asyncio.Task[None]] = set()
        self._handlers: dict[str, Callable[[Any, Answer], Coroutine[Any, Any, None]]] = {
            "open": self._open,
            "begin": self._begin,
            "send": self._send,
            "send_offsets": self._send_offsets,
            "prepare": self._prepare,
            "commit": self._commit,
            "abort": self._abort,
        }

    async def run(self) -> None:
        """Until the client has no more to say, or another stream has taken its transaction over."""
        loop = asyncio.get_running_loop()
        writing = loop.create_task(self._write())
        self._reading = loop.create_task(self._read())
        lost = True
        try:
            await self._reading
            if self._holder is not None and self._holder.number and self._holder.grace_ms:
                # A connection that breaks looks like an orderly end at first; a moment later we are cancelled.
                await asyncio.sleep(LOST_NOTICE_S)
            # With an expired token it is us who end it: the client comes again with a new one.
            lost = self.is_expired
            await asyncio.gather(*self._acknowledging, return_exceptions=True)
            await self._answers.join()
        except asyncio.CancelledError:
            if not self._is_taken_over:
                raise
        finally:
            self._reading.cancel()
            writing.cancel()
            if self._current is None or self._current.done():
                self._leave(lost=lost)
            else:
                self._current.add_done_callback(lambda _: self._leave(lost=lost))

    def _leave(self, *, lost: bool) -> None:
        """Once the last request is carried out: it may be the Open that brings what is to be left behind."""
        if self._holder is not None and not self._is_taken_over:
            holder, self._holder = self._holder, None
            self._holders.leave(holder, lost=lost)

    async def _detach(self) -> None:
        """Another stream goes on with what this one holds."""
        self._is_taken_over = True
        if self._current is not None:
            await asyncio.wait([self._current])
        holder, self._holder = self._holder, None
        if holder is not None:
            holder.detach = None
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self) -> None:
        while True:
            while self._answers.qsize() > UNREAD_MAX:  # noqa: ASYNC110 - a client that reads nothing gets no more
                await asyncio.sleep(UNREAD_PAUSE_S)
            try:
                message = await self._context.read()
            except grpc.aio.BaseError:
                return
            if message is grpc.aio.EOF:
                return
            if self._is_taken_over:
                # It came when the other stream had been told what was carried out here: its client sends it there.
                return
            if isinstance(message, Undecodable):
                self.is_garbled = True
                return
            if self._pass.is_expired:
                # Whoever goes on comes with a new token, on a new stream.
                self.is_expired = True
                return
            self._current = asyncio.get_running_loop().create_task(self._handle(message))
            await asyncio.shield(self._current)
            transaction = self._holder.transaction if self._holder is not None else None
            if transaction is not None and transaction.buffered_bytes > self._window_bytes:
                with suppress(OnceboxError):  # the next request is told
                    await transaction.room()

    async def _write(self) -> None:
        is_gone = False
        while True:
            answer = await self._answers.get()
            try:
                if not is_gone:
                    await self._context.write(answer)
            except grpc.aio.BaseError:
                # The reader hears of it too.
                is_gone = True
            finally:
                self._answers.task_done()

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _handle(self, request: pb.TransactRequest) -> None:
        name = request.WhichOneof("request")
        answer = Answer(request_id=request.request_id)
        holder = self._holder
        try:
            if name is None:
                raise _refuse("it holds no request that this gateway knows")
            refused = self._pass.access.refusal(GATEWAY, name, getattr(request, name))
            if refused is not None:
                raise _RefusedError(error_of_refused(refused))
            await self._handlers[name](getattr(request, name), answer)
        except _RefusedError as error:
            answer.error.CopyFrom(error.error)
        except OnceboxError as error:
            number = holder.number if holder is not None else 0
            whose = holder.transactional_id if holder is not None else request.open.transactional_id
            answer.error.CopyFrom(convert.error_of(error, whose, number))
        except Exception as error:  # noqa: BLE001 - whatever it is, the client must hear of it and the stream go on
            answer.error.CopyFrom(error_of_refused(unexpected(error, f"{name} on a Transact stream")))
        if holder is not None:
            if not self._has_asked:
                # Whoever sends this has read what Opened told of the stream before.
                self._has_asked = True
                holder.forget_refused()
            if answer.WhichOneof("response") == "error":
                holder.refused(request.request_id, answer.error)
            else:
                holder.carried_out(request.request_id)
        if answer.WhichOneof("response") is not None:
            self._answers.put_nowait(answer)

    async def _open(self, request: pb.Open, answer: Answer) -> None:
        if self._holder is not None:
            raise _refuse(f"this stream is open for {self._holder.transactional_id!r} already")
        try:
            check_name("transactional id", request.transactional_id)
            if request.instance:
                check_name("instance", request.instance)
        except RequestRefusedError as error:
            raise _refuse(str(error)) from None
        if not 0 <= request.grace_ms <= self._grace_max_ms:
            raise _refuse(f"grace_ms is 0 to {self._grace_max_ms}, not {request.grace_ms}")
        if request.transaction_timeout_ms < 0 or request.resume_number < 0:
            raise _refuse("transaction_timeout_ms and resume_number are not below 0")
        holder = await self._holders.resume(request.transactional_id, request.resume_number)
        opened = answer.opened
        if holder is not None:
            opened.resumed = True
            opened.last_request_id = holder.last_request_id
            opened.refused.extend(holder.passed_over)
            holder.grace_ms = request.grace_ms
        else:
            try:
                holder = await self._holders.open(request, self._address)
            except TooManyError:
                raise _refuse(
                    "this gateway holds as many producers as it may: call another, or again later",
                    transaction_pb2.THROTTLING_QUOTA_EXCEEDED,
                ) from None
        holder.detach = self._detach
        self._holder = holder
        try:
            await self._tell(holder, request, opened)
        except BaseException:
            self._holder = None
            self._holders.leave(holder, lost=False)
            raise

    async def _tell(self, holder: Holder, request: pb.Open, opened: pb.Opened) -> None:
        producer = holder.producer
        if not opened.resumed and request.resume_number:
            if producer.prepared is not None and producer.prepared.number == request.resume_number:
                # Prepared by a stream that is gone: it can be committed or aborted, and nothing else.
                holder.transaction = producer.prepared
                opened.resumed = True
            opened.outcome.CopyFrom(await producer.outcome_of(request.resume_number))
        opened.number = holder.number or producer.next_number
        opened.resume_token = producer.resume_token
        opened.window_bytes = self._window_bytes

    async def _begin(self, _request: pb.Begin, answer: Answer) -> None:
        holder = self._opened()
        holder.transaction = await holder.producer.begin()
        holder.forget_refused()
        answer.done.number = holder.transaction.number

    async def _send(self, request: pb.Send, answer: Answer) -> None:
        transaction = self._begun()
        if not request.records:
            raise _refuse("no records are given")
        records = convert.outgoing(request.records)
        # Room is waited for before the next request is read, not here: this one is carried out.
        receipt = await transaction.send_many(records, wait_for_room=False)
        if request.acknowledge:
            answer_later = Answer(request_id=answer.request_id)
            self._acknowledge(self._acknowledged(transaction, receipt, answer_later))
        else:
            self._sent(answer, transaction)

    def _acknowledge(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._acknowledging.add(task)
        task.add_done_callback(self._acknowledging.discard)

    async def _acknowledged(self, transaction: Transaction, receipt: Receipt, answer: Answer) -> None:
        try:
            found = await receipt.metadata()
        except OnceboxError as error:
            answer.error.CopyFrom(convert.error_of(error, transaction.name.transactional_id, transaction.name.number))
        else:
            answer.sent.records.extend(convert.sent_records(found))
            self._sent(answer, transaction)
        self._answers.put_nowait(answer)

    def _sent(self, answer: Answer, transaction: Transaction) -> None:
        answer.sent.window_bytes = max(self._window_bytes - transaction.buffered_bytes, 0)

    async def _send_offsets(self, request: pb.SendOffsets, answer: Answer) -> None:
        transaction = self._begun()
        if not request.offsets.group_id or not request.offsets.offsets:
            raise _refuse("a group and its offsets are needed")
        await transaction.send_offsets(convert.offsets_of(request), convert.group_of(request))
        answer.done.number = transaction.number

    async def _prepare(self, request: pb.PrepareTransaction, answer: Answer) -> None:
        answer.done.number = (await self._begun().prepare(metadata=request.metadata)).number

    async def _commit(self, request: pb.Commit, answer: Answer) -> None:
        transaction = self._to_be_ended()
        outcome = await transaction.commit(metadata=request.metadata, wait="decided" if request.decided else "complete")
        self._ended(answer, outcome, transaction_pb2.COMMITTED)

    async def _abort(self, _request: pb.AbortTransaction, answer: Answer) -> None:
        self._ended(answer, await self._to_be_ended().abort(), transaction_pb2.ABORTED)

    def _ended(self, answer: Answer, outcome: transaction_pb2.Outcome | None, result: "transaction_pb2.Result") -> None:
        answer.outcome.CopyFrom(outcome or convert.nothing_ended(self._opened().transactional_id, result))

    def _opened(self) -> Holder:
        if self._holder is None:
            raise _refuse("send Open first")
        return self._holder

    def _begun(self) -> Transaction:
        transaction = self._to_be_ended()
        if not transaction.is_open:
            raise _refuse("its end was asked for: send Commit or Abort again", transaction_pb2.INVALID_TXN_STATE)
        return transaction

    def _to_be_ended(self) -> Transaction:
        """Also the one whose end was asked for, and not answered: asked again, the log says what became of it."""
        transaction = self._opened().transaction
        if transaction is None or transaction.state is State.ENDED:
            raise _refuse("no transaction is open: send Begin first", transaction_pb2.INVALID_TXN_STATE)
        return transaction
