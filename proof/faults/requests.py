"""Faults on one whole Kafka request: held and sent late, copied, doubled, or executed with no reply.
Works on plaintext frames (int32 length, then int16 API key, int16 version, int32 correlation id), not on TLS.
Changes no byte of a request: only whether, when and how often it is sent.
"""

import asyncio
import struct
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from typing import TypeVar

# Twice what a broker accepts by default (socket.request.max.bytes); more means these are no Kafka frames.
FRAME_LIMIT_BYTES = 200 * 1024 * 1024
TIMEOUT_S = 30.0

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
Value = TypeVar("Value")


class NotKafkaError(ConnectionError):
    """The bytes are not Kafka frames."""


class Action(Enum):
    HOLD = auto()
    COPY = auto()
    DOUBLE = auto()
    SWALLOW_REPLY = auto()


class RequestFault:
    """What befalls the next request that matches, and what became of it. Armed by the proxy's methods."""

    def __init__(
        self,
        action: Action,
        *,
        api_key: int,
        where: Callable[[bytes], bool],
        close_after: bool,
        connect: Connect,
    ) -> None:
        self.action = action
        self.close_after = close_after
        self.wake = asyncio.Event()  # a held request may go, or its connection has gone
        self.request: asyncio.Future[bytes] = asyncio.Future()
        self.on_own_connection: asyncio.Future[bool] = asyncio.Future()
        self.answer: asyncio.Future[bytes] = asyncio.Future()
        self._api_key = api_key
        self._where = where
        self._connect = connect

    def matches(self, request: bytes) -> bool:
        return api_key(request) == self._api_key and self._where(request)

    async def caught(self, timeout_s: float = TIMEOUT_S) -> bytes:
        """Waits until a request has matched; the request without its length prefix."""
        return await _within(timeout_s, self.request, f"no request with API key {self._api_key} came")

    async def reply(self, timeout_s: float = TIMEOUT_S) -> bytes:
        """The broker's reply without its length prefix; of a doubled request the second reply.
        ConnectionError: the connection ended before the reply, so the broker may or may not have executed it.
        """
        return await _within(timeout_s, self.answer, f"no reply to the request with API key {self._api_key}")

    async def release(self, timeout_s: float = TIMEOUT_S) -> bytes:
        """Sends the held request (or the copy) and returns the broker's reply. It goes on its own connection
        while that lives; otherwise on a new one, as from a network that delivers late. A late one, or a copy,
        can be released again and again.
        """
        request = await self.caught(timeout_s)
        self.wake.set()
        if await _within(timeout_s, self.on_own_connection, "the held request is not to be released"):
            return await self.reply(timeout_s)
        async with asyncio.timeout(timeout_s):
            return await _ask(self._connect, request)


def frame(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next frame's body; b"" at the end of the stream, also where that is in the midst of a frame."""
    try:
        (size,) = struct.unpack(">i", await reader.readexactly(4))
        if not 4 <= size <= FRAME_LIMIT_BYTES:
            raise NotKafkaError(f"not a Kafka frame: its length would be {size} bytes")
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError:
        return b""


def api_key(request: bytes) -> int:
    return int.from_bytes(request[:2], "big", signed=True)


def request_correlation_id(request: bytes) -> int:
    return int.from_bytes(request[4:8], "big", signed=True)


def client_id(request: bytes) -> str:
    size = int.from_bytes(request[8:10], "big", signed=True)
    return request[10 : 10 + max(size, 0)].decode()


def reply_correlation_id(reply: bytes) -> int:
    return int.from_bytes(reply[:4], "big", signed=True)


async def _ask(connect: Connect, request: bytes) -> bytes:
    reader, writer = await connect()
    try:
        writer.write(frame(request))
        await writer.drain()
        reply = await read_frame(reader)
    finally:
        writer.transport.abort()
    if not reply:
        raise ConnectionError("the broker closed the connection without a reply")
    return reply


async def _within(timeout_s: float, future: asyncio.Future[Value], otherwise: str) -> Value:
    """A future stays usable for the next caller when this one gives up."""
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(future)
    except TimeoutError:
        raise TimeoutError(f"{otherwise} within {timeout_s:g} s") from None
