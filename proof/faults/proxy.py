"""A TCP proxy that cuts, delays and drops, and holds, repeats or hides single Kafka requests (requests.py).
Put one before each advertised listener (Kafka, gRPC, PostgreSQL). It never re-orders a connection's bytes; a
connection that lost bytes stays silent in that direction until it is closed, as nothing could make it whole.
"""

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from proof.faults.requests import (
    Action,
    NotKafkaError,
    RequestFault,
    frame,
    read_frame,
    reply_correlation_id,
    request_correlation_id,
)

HOST = "127.0.0.1"
CHUNK_BYTES = 65536
QUEUE_LIMIT = 1024  # chunks or frames under way in one direction of one connection

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Direction:
    """The faults of one direction; all connections look here, so a change is felt at once."""

    delay_s: float = 0.0
    dropping: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    due_s: float
    data: bytes  # b"": the stream ends here


class Proxy:
    """`async with Proxy(("127.0.0.1", 9092), kafka=True) as proxy:` listens on proxy.port. `target` may be
    changed at any time (a server whose port was not known before, or that came back elsewhere).
    """

    def __init__(self, target: tuple[str, int], *, kafka: bool = False) -> None:
        self.target = target
        self.kafka = kafka
        self.to_server = _Direction()
        self.to_client = _Direction()
        self._armed: list[RequestFault] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        # Bound but never listening: while cut, clients are refused and the port stays ours for heal().
        self._reserved = _bind(0)
        self.port: int = self._reserved.getsockname()[1]

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def connections(self) -> int:
        return len(self._tasks)

    async def __aenter__(self) -> Self:
        await self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cut()
        self._reserved.close()

    async def cut(self) -> None:
        """Resets all connections and refuses new ones. Requests in hand (hold, copy) stay in hand."""
        if self._server:
            self._server.close()
            self._server = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def heal(self) -> None:
        """Plain forwarding again: no cut, delay, drop, armed fault. What is in hand waits for release()"""
        self.delay()
        self.drop()
        self._armed.clear()
        await self._listen()

    def delay(self, *, to_server_s: float = 0.0, to_client_s: float = 0.0) -> None:
        """Latency per direction, for what arrives from now on; throughput stays."""
        self.to_server.delay_s, self.to_client.delay_s = to_server_s, to_client_s

    def drop(self, *, to_server: bool = False, to_client: bool = False) -> None:
        """A black hole per direction: connections stay open, their bytes and their end go nowhere."""
        self.to_server.dropping, self.to_client.dropping = to_server, to_client

    def hold(self, api_key: int, where: Callable[[bytes], bool] = bool) -> RequestFault:
        """Keeps the next matching request, and all behind it on its connection, until release()."""
        return self._arm(Action.HOLD, api_key, where)

    def copy(self, api_key: int, where: Callable[[bytes], bool] = bool) -> RequestFault:
        """Lets the next matching request pass and keeps a copy, which release() sends on a new connection."""
        return self._arm(Action.COPY, api_key, where)

    def double(self, api_key: int, where: Callable[[bytes], bool] = bool) -> RequestFault:
        """Sends the next matching request twice in a row; the client sees the first reply only."""
        return self._arm(Action.DOUBLE, api_key, where)

    def swallow_reply(
        self, api_key: int, where: Callable[[bytes], bool] = bool, *, close: bool = False
    ) -> RequestFault:
        """The next matching request is executed and the client never hears of it: its connection falls silent
        (it must time out), or with `close` is reset.
        """
        return self._arm(Action.SWALLOW_REPLY, api_key, where, close_after=close)

    def claim(self, request: bytes) -> RequestFault | None:
        """The armed fault for this request, disarmed by this: each befalls one request."""
        for fault in self._armed:
            if fault.matches(request):
                self._armed.remove(fault)
                fault.request.set_result(request)
                return fault
        return None

    def disarm(self, fault: RequestFault) -> None:
        """It befalls nothing any more, if it has not yet; all else stays as it is."""
        with suppress(ValueError):  # claimed, or healed meanwhile
            self._armed.remove(fault)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.target)

    def _arm(
        self, action: Action, api_key: int, where: Callable[[bytes], bool], *, close_after: bool = False
    ) -> RequestFault:
        if not self.kafka:
            raise ValueError("this proxy forwards bytes; make it with kafka=True to see requests")
        fault = RequestFault(action, api_key=api_key, where=where, close_after=close_after, connect=self.connect)
        self._armed.append(fault)
        return fault

    async def _listen(self) -> None:
        if not self._server:
            self._server = await asyncio.start_server(self._accept, sock=_bind(self.port))

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._server:  # accepted just before the cut
            _reset(writer)
            return
        task = asyncio.create_task(_Connection(self, reader, writer).run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Connection:
    """One client's connection and its twin to the server; each way a reader, a queue and a writer."""

    def __init__(self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._client_reader = reader
        self._client_writer = writer
        self._broken = False  # an end has been read from either side
        self._held: RequestFault | None = None
        self._awaited: dict[int, RequestFault] = {}  # by correlation id
        self._answered_once: set[int] = set()  # doubled requests whose first reply has passed
        self._silenced = False

    async def run(self) -> None:
        writers = [self._client_writer]
        try:
            server_reader, server_writer = await self._proxy.connect()
            writers.append(server_writer)
            requests: asyncio.Queue[_Piece] = asyncio.Queue(QUEUE_LIMIT)
            replies: asyncio.Queue[_Piece] = asyncio.Queue(QUEUE_LIMIT)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(self._client_reader, requests, self._proxy.to_server))
                group.create_task(self._read(server_reader, replies, self._proxy.to_client))
                group.create_task(self._write_requests(requests, server_writer))
                group.create_task(self._write_replies(replies))
            for writer in writers:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
        except OSError as error:
            log.info("no connection to %s:%d: %s", *self._proxy.target, error)
        finally:
            for writer in writers:
                _reset(writer)
            self._give_up_replies()

    async def _read(self, source: asyncio.StreamReader, queue: asyncio.Queue[_Piece], direction: _Direction) -> None:
        clock = asyncio.get_running_loop().time
        try:
            while data := await (read_frame(source) if self._proxy.kafka else source.read(CHUNK_BYTES)):
                await queue.put(_Piece(due_s=clock() + direction.delay_s, data=data))
        except NotKafkaError as error:
            log.warning("proxy before %s:%d: %s", *self._proxy.target, error)
        except OSError:
            pass  # a reset ends the stream as a close does
        self._broken = True
        if self._held:
            self._held.wake.set()
        await queue.put(_Piece(due_s=clock() + direction.delay_s, data=b""))

    async def _write_requests(self, queue: asyncio.Queue[_Piece], sink: asyncio.StreamWriter) -> None:
        silent = False
        while data := await _due(queue):
            silent = silent or self._proxy.to_server.dropping
            if silent:
                continue
            if self._proxy.kafka:
                data = await self._befall(data)
            if not data:
                _end(sink)
            silent = not data or not await _send(sink, data)
        if self._awaited:  # a broker that knows its client gone would not tell how the request ended
            await asyncio.wait([fault.answer for fault in self._awaited.values()])
        if not silent and not self._proxy.to_server.dropping:
            _end(sink)

    async def _write_replies(self, queue: asyncio.Queue[_Piece]) -> None:
        while data := await _due(queue):
            passes = not self._proxy.kafka or self._notice(data)
            self._silenced = self._silenced or self._proxy.to_client.dropping
            if passes and not self._silenced:
                self._silenced = not await _send(self._client_writer, frame(data) if self._proxy.kafka else data)
        self._give_up_replies()
        if not self._silenced and not self._proxy.to_client.dropping:
            _end(self._client_writer)

    async def _befall(self, request: bytes) -> bytes:
        """The bytes to send for this request; b"" when its connection ended while it was held."""
        fault = self._proxy.claim(request)
        if fault is None:
            return frame(request)
        if fault.action is Action.COPY:
            fault.on_own_connection.set_result(False)
            return frame(request)
        if fault.action is Action.HOLD and not await self._hold(fault):
            return b""
        self._awaited[request_correlation_id(request)] = fault
        return frame(request) * (2 if fault.action is Action.DOUBLE else 1)

    async def _hold(self, fault: RequestFault) -> bool:
        alive = False
        self._held = fault
        try:
            if not self._broken:
                await fault.wake.wait()
            alive = not self._broken
        finally:  # also when cut
            self._held = None
            fault.on_own_connection.set_result(alive)
        return alive

    def _give_up_replies(self) -> None:
        while self._awaited:
            _, fault = self._awaited.popitem()
            fault.answer.set_exception(ConnectionError("the connection ended before the reply"))
            fault.answer.exception()  # nobody has to ask for it

    def _notice(self, reply: bytes) -> bool:
        """Tells the fault that waits for this reply; whether the client may see it."""
        correlation_id = reply_correlation_id(reply)
        fault = self._awaited.get(correlation_id)
        if fault is None:
            return True
        if fault.action is Action.DOUBLE and correlation_id not in self._answered_once:
            self._answered_once.add(correlation_id)
            return True
        del self._awaited[correlation_id]
        fault.answer.set_result(reply)
        if fault.action is Action.SWALLOW_REPLY:
            # Later replies would tell the client that this one is missing, which no network does.
            self._silenced = True
            if fault.close_after:
                _reset(self._client_writer)
        return fault.action is Action.HOLD


def _bind(port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind((HOST, port))
    return bound


async def _due(queue: asyncio.Queue[_Piece]) -> bytes:
    piece = await queue.get()
    wait_s = piece.due_s - asyncio.get_running_loop().time()
    if wait_s > 0:
        await asyncio.sleep(wait_s)
    return piece.data


async def _send(sink: asyncio.StreamWriter, data: bytes) -> bool:
    try:
        sink.write(data)
        await sink.drain()
    except OSError:
        return False
    return True


def _reset(writer: asyncio.StreamWriter) -> None:
    """As when the peer's machine forgets the connection: the other side's next read or write fails."""
    with suppress(OSError):  # closed already
        no_linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
    writer.transport.abort()


def _end(sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        if not sink.is_closing():
            sink.write_eof()
