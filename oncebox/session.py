"""A client's line to the coordinators: finds who leads a transactional id, and carries its calls on one stream.

One stream per coordinator address, shared by all producers of the process. A call is repeated only where that is safe:
every call names its transaction by number, so the coordinator answers a repeat with what became of the first.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import grpc

from oncebox.errors import CoordinatorError, OnceboxError, RetriableError, error_from
from oncebox.status import error_of_call
from oncebox.v1 import coordinator_pb2, coordinator_pb2_grpc, transaction_pb2

RETRY_FIRST_S = 0.02
RETRY_MAX_S = 1.0
FIND_TIMEOUT_S = 2.0
# An answer that takes longer makes us ask the other instances whether its leader still leads.
OVERDUE_S = 3.0
# Requests share a message up to this size: what is larger gains nothing by it.
MESSAGE_BYTES = 256 * 1024
# The coordinators' limit (limits.message_bytes), less what is around a request. Beyond it a coordinator ends the whole
# stream, with all the others that are under way on it.
REQUEST_BYTES_MAX = 4 * 1024 * 1024 - 1024

Request = coordinator_pb2.SessionRequest
Response = coordinator_pb2.SessionResponse
OpenChannel = Callable[[str], grpc.aio.Channel]
Fenced = Callable[[transaction_pb2.Error], None]

# For a connection to come up, before it is tried anew with more and more time.
CONNECT_TIMEOUT_MS = 100
_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.max_send_message_length", 16 * 1024 * 1024),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Each session keeps its own connection state; global sub-channel sharing would share its back-off too.
    ("grpc.use_local_subchannel_pool", 1),
    # Answers are small: to measure how large a window the line bears would take a ping with nearly each of them.
    ("grpc.http2.bdp_probe", 0),
]


def channel_options(connect_timeout_ms: int) -> list[tuple[str, int | str]]:
    # By this name gRPC also knows the least time that an attempt gets.
    return [*_CHANNEL_OPTIONS, ("grpc.min_reconnect_backoff_ms", connect_timeout_ms)]


def open_plain_channel(address: str, *, connect_timeout_ms: int = CONNECT_TIMEOUT_MS) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=channel_options(connect_timeout_ms))


class _LostError(Exception):
    """The stream broke before the answer came."""


class _Asked:
    """A request that is under way."""

    __slots__ = ("asked_at", "future", "transactional_id")

    def __init__(self, transactional_id: str, future: "asyncio.Future[Response]", asked_at: float) -> None:
        self.transactional_id = transactional_id
        self.future = future
        self.asked_at = asked_at

    def lose(self) -> None:
        if not self.future.done():
            self.future.set_exception(_LostError())


class Line:
    """One stream to one coordinator instance."""

    def __init__(self, channel: grpc.aio.Channel, fenced: Fenced) -> None:
        self._channel = channel
        self._fenced = fenced
        self._ids = count(1)
        self._waiting: dict[int, _Asked] = {}
        self._stream = coordinator_pb2_grpc.CoordinatorStub(channel).Session()
        self._reader = asyncio.get_running_loop().create_task(self._read())
        # What is asked while a message is being written goes into the next.
        self._ready: list[Request] = []
        self._writer: asyncio.Task[None] | None = None
        self.is_open = True

    async def ask(self, transactional_id: str, request: Request, timeout_s: float) -> Response:
        if not self.is_open:
            raise _LostError
        loop = asyncio.get_running_loop()
        request.request_id = next(self._ids)
        request.timeout_ms = max(int(timeout_s * 1000), 1)
        asked = self._waiting[request.request_id] = _Asked(transactional_id, loop.create_future(), loop.time())
        # The coordinator answers at its deadline; ours only covers a coordinator that is gone.
        timer = loop.call_later(timeout_s + 0.5, asked.lose)
        try:
            self._ready.append(request)
            if self._writer is None or self._writer.done():
                self._writer = loop.create_task(self._write())
            return await asked.future
        finally:
            timer.cancel()
            self._waiting.pop(request.request_id, None)

    def _heard(self, response: Response) -> None:
        if response.request_id == 0:
            self._fenced(response.fenced)
            return
        asked = self._waiting.get(response.request_id)
        if asked is not None and not asked.future.done():
            asked.future.set_result(response)

    def overdue(self, asked_before: float) -> list[_Asked]:
        return [asked for asked in self._waiting.values() if asked.asked_at < asked_before]

    async def close(self) -> None:
        # Not left to the reader: one that is cancelled before its first step does not get to it.
        self._end()
        self._stream.cancel()
        tasks = [self._reader] if self._writer is None else [self._reader, self._writer]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._channel.close()

    async def _write(self) -> None:
        try:
            while self._ready:
                # One more round of the loop: a message costs more than the requests in it.
                await asyncio.sleep(0)
                await self._stream.write(coordinator_pb2.SessionRequests(requests=self._take()))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            # The reader hears of it too, and tells all who wait.
            self._stream.cancel()

    def _take(self) -> list[Request]:
        """What goes into the next message."""
        taken, size = 0, 0
        for request in self._ready:
            size += request.ByteSize()
            if taken and size > MESSAGE_BYTES:
                break
            taken += 1
        ready, self._ready = self._ready[:taken], self._ready[taken:]
        return ready

    async def _read(self) -> None:
        try:
            while True:
                message = await self._stream.read()
                if message is grpc.aio.EOF:
                    return
                for response in message.responses:
                    self._heard(response)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            return
        finally:
            self._end()

    def _end(self) -> None:
        self.is_open = False
        for asked in self._waiting.values():
            asked.lose()


class Session:
    """Calls to whichever coordinator leads each transactional id."""

    def __init__(self, addresses: Sequence[str], *, open_channel: OpenChannel = open_plain_channel) -> None:
        self._addresses = list(addresses)
        self._open_channel = open_channel
        self._lines: dict[str, Line] = {}
        self._leaders: dict[str, str] = {}
        self._listeners: dict[str, set[Fenced]] = {}
        self._watch: asyncio.Task[None] | None = None
        # Why the last that was asked did not answer, as gRPC tells it.
        self._trouble = ""

    def listen(self, transactional_id: str, fenced: Fenced) -> Callable[[], None]:
        """Until what is returned is called."""
        listeners = self._listeners.setdefault(transactional_id, set())
        listeners.add(fenced)

        def leave() -> None:
            listeners.discard(fenced)
            if not listeners and self._listeners.get(transactional_id) is listeners:
                # Ids may come and go for as long as the process lives.
                del self._listeners[transactional_id]
                self._leaders.pop(transactional_id, None)

        return leave

    async def close(self) -> None:
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        lines, self._lines = list(self._lines.values()), {}
        await asyncio.gather(*(line.close() for line in lines))

    async def call(self, transactional_id: str, name: str, message: Any, *, timeout_s: float) -> Any:
        """The answer to one call, sent again while the coordinator moves or loads, until the deadline."""
        size = message.ByteSize()
        if size > REQUEST_BYTES_MAX:
            raise _too_large(transactional_id, message, size)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        pause_s = RETRY_FIRST_S
        last: CoordinatorError | None = None
        while True:
            left_s = deadline - loop.time()
            if left_s <= 0:
                raise last or _unavailable(transactional_id, self._addresses, self._trouble)
            line: Line | None = None
            try:
                line = self._line(await self._leader(transactional_id, left_s))
                response = await line.ask(transactional_id, Request(**{name: message}), left_s)
                if response.WhichOneof("response") != "error":
                    return getattr(response, name)
                last = error_from(response.error)
                if not isinstance(last, RetriableError):
                    raise last
                self._learn(transactional_id, response.error)
            except (_LostError, grpc.aio.AioRpcError):
                await self._forget(transactional_id, line)
            await asyncio.sleep(min(pause_s, max(deadline - loop.time(), 0)))
            pause_s = min(pause_s * 2, RETRY_MAX_S)

    def _learn(self, transactional_id: str, error: transaction_pb2.Error) -> None:
        if error.code == transaction_pb2.NOT_COORDINATOR:
            if error.leader_address:
                self._leaders[transactional_id] = error.leader_address
            else:
                self._leaders.pop(transactional_id, None)

    async def _forget(self, transactional_id: str, line: Line | None) -> None:
        """Who leads it, and the line that has failed: another one to the same address may be in use already."""
        address = self._leaders.pop(transactional_id, "")
        if line is not None and self._lines.get(address) is line:
            del self._lines[address]
            await line.close()

    async def _watch_lines(self) -> None:
        """A coordinator that hangs breaks no connection: when an answer is overdue, the others are asked who leads."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(OVERDUE_S / 3)
            for address, line in list(self._lines.items()):
                for asked in line.overdue(loop.time() - OVERDUE_S):
                    # Whatever it is, also of a way there that cannot be used just now: the next look may find more.
                    with suppress(_LostError, OnceboxError):
                        others = [other for other in self._known() if other != address]
                        if await self._find(asked.transactional_id, others, FIND_TIMEOUT_S) != address:
                            self._leaders.pop(asked.transactional_id, None)
                            asked.lose()

    def _known(self) -> list[str]:
        return list(dict.fromkeys([*self._addresses, *self._lines]))

    def _line(self, address: str) -> Line:
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._watch_lines())
        line = self._lines.get(address)
        if line is None or not line.is_open:
            line = self._lines[address] = Line(self._open_channel(address), self._pushed)
        return line

    def _pushed(self, error: transaction_pb2.Error) -> None:
        for listener in tuple(self._listeners.get(error.transactional_id, ())):
            listener(error)

    async def _leader(self, transactional_id: str, timeout_s: float) -> str:
        known = self._leaders.get(transactional_id)
        if known is not None:
            return known
        found = await self._find(transactional_id, self._known(), min(FIND_TIMEOUT_S, timeout_s))
        self._leaders[transactional_id] = found
        return found

    async def _find(self, transactional_id: str, addresses: Sequence[str], timeout_s: float) -> str:
        """Asks all at once and takes the first answer: some may be gone, or hang."""
        asking = [asyncio.ensure_future(self._find_at(transactional_id, address, timeout_s)) for address in addresses]
        refusal: CoordinatorError | None = None
        try:
            for answer in asyncio.as_completed(asking):
                try:
                    return await answer
                except grpc.aio.AioRpcError as error:
                    refusal = refusal or error_of_call(error)
                    self._trouble = error.details() or ""
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        if refusal is not None and not isinstance(refusal, RetriableError):
            raise refusal
        raise _LostError

    async def _find_at(self, transactional_id: str, address: str, timeout_s: float) -> str:
        async with self._open_channel(address) as channel:
            request = coordinator_pb2.FindCoordinatorRequest(transactional_id=transactional_id)
            found = await coordinator_pb2_grpc.CoordinatorStub(channel).FindCoordinator(request, timeout=timeout_s)
            return str(found.address)


# By event loop and way to the coordinators: the session, and how many use it.
_shared: dict[tuple[asyncio.AbstractEventLoop, tuple[str, ...], OpenChannel], tuple[Session, int]] = {}


@asynccontextmanager
async def shared_session(addresses: Sequence[str], open_channel: OpenChannel) -> AsyncIterator[Session]:
    """All producers of a process share their streams: what they ask at the same time travels together."""
    key = (asyncio.get_running_loop(), tuple(addresses), open_channel)
    session, users = _shared.get(key) or (Session(addresses, open_channel=open_channel), 0)
    _shared[key] = (session, users + 1)
    try:
        yield session
    finally:
        session, users = _shared.pop(key)
        if users > 1:
            _shared[key] = (session, users - 1)
        else:
            await session.close()


def _too_large(transactional_id: str, message: Any, size: int) -> CoordinatorError:
    return error_from(
        transaction_pb2.Error(
            code=transaction_pb2.MESSAGE_TOO_LARGE,
            message=f"the call needs {size} bytes, coordinators read up to {REQUEST_BYTES_MAX}; nothing was sent",
            transactional_id=transactional_id,
            number=message.grant.number if "grant" in message.DESCRIPTOR.fields_by_name else 0,
        )
    )


def _unavailable(transactional_id: str, addresses: Sequence[str], trouble: str) -> CoordinatorError:
    return error_from(
        transaction_pb2.Error(
            code=transaction_pb2.COORDINATOR_NOT_AVAILABLE,
            message=f"no coordinator answered at {', '.join(addresses)}" + (f" ({trouble})" if trouble else ""),
            transactional_id=transactional_id,
            retriable=True,
        )
    )
