"""One client's stream: the same calls as the unary ones, many under way at once, and fencing pushed as it happens.

Answers come in the order in which they are ready. The stream's end stops what it was waiting for and nothing else:
a decision under way is taken all the same, and the next stream asks for it by its number.
"""

import asyncio
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import grpc

from coordinator.api.auth import SESSION, current
from coordinator.api.errors import EXPIRED, GOING_DOWN, UNDECODABLE, abort, unexpected
from coordinator.api.front import Front, named_by
from coordinator.api.guard import Streams, Undecodable
from coordinator.api.replies import METHODS, error_of
from coordinator.calls import Answer
from coordinator.core.commands import Command, ErrorCode, Refused
from coordinator.telemetry import Telemetry
from oncebox.v1 import coordinator_pb2 as pb
from oncebox.v1.transaction_pb2 import COMMITTED

if TYPE_CHECKING:
    from collections.abc import Callable

# As the unary calls are called.
NAMES = {name: "".join(part.title() for part in name.split("_")) for name in METHODS}
# Ids whose fencing one session is told of; one that uses more hears of it with its next call.
LISTENED_MAX = 1_000
# Answers that a client leaves unread before no more of its requests are read.
UNREAD_MAX = 1_000
# Of requests that may be under way, however few they are.
UNDER_WAY_BYTES = 16 * 1024 * 1024
# Answers share a message up to this size: gRPC ends a stream, with all that is under way on it, for one that is too
# large for it (limits.message_bytes), and what is smaller gains nothing.
MESSAGE_BYTES = 256 * 1024


async def serve_session(
    front: Front, streams: Streams, telemetry: Telemetry, context: Any, address: str, requests_max: int
) -> None:
    async with asyncio.TaskGroup() as tasks:
        session = _Session(front, telemetry, context, address, tasks, requests_max)
        telemetry.sessions += 1
        try:
            ended = await streams.run(session.read())
            await session.all_told()
        finally:
            telemetry.sessions -= 1
            session.end()
    if not ended:
        await abort(context, GOING_DOWN)
    if session.is_garbled:
        await abort(context, UNDECODABLE)
    if session.is_expired:
        await abort(context, EXPIRED)


class _Session:
    def __init__(
        self,
        front: Front,
        telemetry: Telemetry,
        context: Any,
        address: str,
        tasks: asyncio.TaskGroup,
        requests_max: int,
    ) -> None:
        self.is_garbled = False
        self.is_expired = False
        self._pass = current()
        self._front = front
        self._telemetry = telemetry
        self._context = context
        self._address = address
        self._tasks = tasks
        # Flow control: as long as there is no room nothing is read, and gRPC holds the client back. Many may wait for
        # what is down, and must not be in the way of others: all producers of a process share a stream.
        self._requests_max = requests_max
        self._room = asyncio.Event()
        # gRPC takes one message at a time; what is ready meanwhile goes into the next.
        self._ready: list[pb.SessionResponse] = []
        self._is_writing = False
        self._all_written = asyncio.Event()
        # A call whose session has ended is told to nobody.
        self._is_over = False
        self._under_way = 0
        self._bytes_under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._listening: dict[str, Callable[[], None]] | None = {}

    async def read(self) -> None:
        while True:
            try:
                message = await self._context.read()
            except grpc.aio.BaseError:
                # The server has stopped.
                return
            if message is grpc.aio.EOF:
                return
            if isinstance(message, Undecodable):
                # Nobody knows which requests these were meant to be: their sender would wait for ever.
                self.is_garbled = True
                return
            if self._pass.is_expired:
                # Whoever goes on comes with a new token, on a new stream.
                self.is_expired = True
                return
            for request in message.requests:
                if len(self._ready) > UNREAD_MAX:
                    await self._all_written.wait()
                size = request.ByteSize()
                while self._is_full(size):
                    self._room.clear()
                    await self._room.wait()
                self._under_way += 1
                self._bytes_under_way += size
                self._idle.clear()
                self._start(request)

    def _is_full(self, size: int) -> bool:
        """One alone is always taken: gRPC has a limit for it."""
        too_large = self._bytes_under_way + size > UNDER_WAY_BYTES
        return self._under_way >= self._requests_max or (too_large and self._under_way > 0)

    def _start(self, request: pb.SessionRequest) -> None:
        """Most calls need no task of their own: they are converted, asked, and written when the shard tells."""
        began_s = perf_counter()
        name = request.WhichOneof("request")
        if name is None or not request.request_id or request.timeout_ms < 0:
            self._refuse(request, began_s, _malformed(request), ("", 0))
            return
        message = getattr(request, name)
        refused = self._pass.access.refusal(SESSION, name, message)
        if refused is not None:
            self._refuse(request, began_s, refused, named_by(message))
            return
        timeout_ms = self._front.timeout_ms(request.timeout_ms or None)
        try:
            command = None if name == "get_outcome" else self._front.convert(METHODS[name], message, self._address)
            if isinstance(command, Refused):
                self._refuse(request, began_s, command, named_by(message))
            elif command is None:
                self._tasks.create_task(self._handle(request, began_s, name, message, timeout_ms))
            else:
                self._front.calls.ask(
                    command, timeout_ms, partial(self._told, request, began_s, name, message, command)
                )
        except Exception as error:  # noqa: BLE001 - one call's failure must not end the others
            self._refuse(request, began_s, unexpected(error, f"{name} on a session"), ("", 0))

    def _told(
        self,
        request: pb.SessionRequest,
        began_s: float,
        name: str,
        message: Any,
        command: Command,
        answer: Answer | Refused,
    ) -> None:
        if isinstance(answer, Refused):
            self._refuse(request, began_s, answer, named_by(message))
            return
        response = pb.SessionResponse(request_id=request.request_id)
        try:
            METHODS[name].fill(getattr(response, name), command, answer)
        except Exception as error:  # noqa: BLE001 - as above
            self._refuse(request, began_s, unexpected(error, f"{name} on a session"), ("", 0))
            return
        self._listen(message.transactional_id)
        self._answer(request, began_s, response)

    async def _handle(
        self, request: pb.SessionRequest, began_s: float, name: str, message: Any, timeout_ms: int
    ) -> None:
        """A call that asks for more than a shard: for topics not known yet, or for the feed."""
        response = pb.SessionResponse(request_id=request.request_id)
        named = named_by(message)
        try:
            filled = getattr(response, name)
            refused = await self._front.handle(METHODS[name], message, filled, self._address, timeout_ms)
        except Exception as error:  # noqa: BLE001 - as above
            refused, named = unexpected(error, f"{name} on a session"), ("", 0)
        if refused is not None:
            self._refuse(request, began_s, refused, named)
            return
        if name != "get_outcome":
            self._listen(message.transactional_id)
        self._answer(request, began_s, response)

    def _refuse(self, request: pb.SessionRequest, began_s: float, refused: Refused, named: tuple[str, int]) -> None:
        response = pb.SessionResponse(request_id=request.request_id)
        response.error.CopyFrom(error_of(refused, *named))
        self._answer(request, began_s, response, refused.code)

    def _answer(self, request: pb.SessionRequest, began_s: float, response: pb.SessionResponse, code: int = 0) -> None:
        name = request.WhichOneof("request") or ""
        is_commit = name == "end" and request.end.result == COMMITTED
        self._telemetry.answered(NAMES.get(name, "Unknown"), code, perf_counter() - began_s, is_commit=is_commit)
        self._under_way -= 1
        self._bytes_under_way -= request.ByteSize()
        self._room.set()
        if not self._under_way:
            self._idle.set()
        self._write(response)

    async def all_told(self) -> None:
        """A client that sends no more still gets its answers."""
        await self._idle.wait()

    def _write(self, response: pb.SessionResponse) -> None:
        if self._is_over:
            return
        self._ready.append(response)
        if not self._is_writing:
            self._is_writing = True
            self._all_written.clear()
            self._tasks.create_task(self._write_ready())

    async def _write_ready(self) -> None:
        try:
            while self._ready:
                # One more round of the loop: a message costs more than the answers in it.
                await asyncio.sleep(0)
                await self._context.write(pb.SessionResponses(responses=self._take()))
        except grpc.aio.BaseError:
            # The client is gone; the reader hears of it too, and ends the session.
            self._ready.clear()
        finally:
            self._is_writing = False
            self._all_written.set()

    def _take(self) -> list[pb.SessionResponse]:
        """What goes into the next message."""
        taken, size = 0, 0
        for response in self._ready:
            size += response.ByteSize()
            if taken and size > MESSAGE_BYTES:
                break
            taken += 1
        ready, self._ready = self._ready[:taken], self._ready[taken:]
        return ready

    def _listen(self, transactional_id: str) -> None:
        listening = self._listening
        if listening is None or transactional_id in listening or len(listening) >= LISTENED_MAX:
            return
        listening[transactional_id] = self._front.calls.listen(transactional_id, self._push)

    def _push(self, transactional_id: str, refused: Refused) -> None:
        if self._listening is None:
            return
        stop = self._listening.pop(transactional_id, None)
        if stop is not None:
            stop()
            response = pb.SessionResponse(fenced=error_of(refused, transactional_id))
            self._write(response)

    def end(self) -> None:
        self._is_over = True
        listening, self._listening = self._listening, None
        for stop in (listening or {}).values():
            stop()


def _malformed(request: pb.SessionRequest) -> Refused:
    if not request.request_id:
        what = "request_id is missing: count from 1, for 0 marks what is pushed"
    elif request.timeout_ms < 0:
        what = f"a timeout of {request.timeout_ms} ms is not possible; 0 is the default"
    else:
        what = "it holds no request that this coordinator knows"
    return Refused(code=ErrorCode.INVALID_REQUEST, message=what)
