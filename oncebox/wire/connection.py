"""One open connection to a broker: requests leave in call order, and answers come in that order.

aiokafka opens it (TLS, SASL, which versions the broker speaks); from then on its bytes are ours, as its streams, tasks
and timers cost more than the requests. Every way of getting no answer is an OutcomeUnknownError.
"""

from __future__ import annotations

import asyncio
from collections import deque
from math import inf
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from aiokafka.conn import create_conn

from oncebox.wire.errors import OutcomeUnknownError
from oncebox.wire.varints import after_tags

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from oncebox.wire.requests import Call
    from oncebox.wire.schemas import Layout

# Far above any answer to a request of ours: a size beyond it is not one.
MAX_ANSWER_BYTES: Final = 100 * 2**20
# aiokafka times what it sends itself; the deadline of whoever dials is the one that counts.
_NEVER_MS: Final = 24 * 3_600_000
_request_head: Final = Struct(">ihhi")  # size, API key, version, correlation id
_answer_head: Final = Struct(">ii")  # size, correlation id


async def dial(host: str, port: int, *, name: str, max_idle_ms: int, options: Mapping[str, Any]) -> Connection:
    """The options are aiokafka's. A connection is called by its name in errors."""
    opened = await create_conn(host, port, request_timeout_ms=_NEVER_MS, **options)
    if not opened.connected():
        opened.close()
        raise ConnectionResetError("the broker closed the connection at once")
    return Connection(opened, name=name, client_id=options["client_id"], max_idle_ms=max_idle_ms)


def framed(layout: Layout, body: Sequence[bytes], correlation_id: int, client_id: bytes) -> bytes:
    """A request as it goes over the wire, in one piece and copied once. The client id has its length before it."""
    tags = b"\0" if layout.flexible else b""
    size = 8 + len(client_id) + len(tags) + sum(map(len, body))
    head = _request_head.pack(size, layout.api_key, layout.version, correlation_id)
    return b"".join((head, client_id, tags, *body))


class Connection(asyncio.Protocol):
    """Has one timer for all: it closes the connection when an answer is overdue, because brokers answer in order and
    what follows would wait behind it, or when nothing has been asked for a long time.
    """

    def __init__(self, opened: Any, *, name: str, client_id: str, max_idle_ms: int) -> None:
        self._name = name
        self._opened = opened  # kept, as aiokafka's writer closes the transport when it is forgotten
        self._transport: asyncio.Transport = opened._writer.transport  # noqa: SLF001
        self._versions: Mapping[int, tuple[int, int]] = opened._versions  # noqa: SLF001
        encoded = client_id.encode()
        self._client_id = len(encoded).to_bytes(2, "big") + encoded
        self._max_idle_s = max_idle_ms / 1000
        self._loop = asyncio.get_running_loop()
        self._correlation_id = 0
        # In the order sent: correlation id, layout, answer, deadline, timeout_ms.
        self._pending: deque[tuple[int, Layout, asyncio.Future[Any], float, int]] = deque()
        self._received = bytearray()  # an answer whose end is still to come
        self._used_at = self._loop.time()
        self._check_at = self._used_at + self._max_idle_s
        self._timer = self._loop.call_at(self._check_at, self._check)
        self.closed: asyncio.Future[None] = self._loop.create_future()
        # Nothing that aiokafka has asked is under way: its reader ends, and to aiokafka the connection is closed.
        opened._read_task.cancel()  # noqa: SLF001
        opened._reader = None  # noqa: SLF001
        self._transport.set_protocol(self)

    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def send(self, call: Call, timeout_ms: int, deadline: float | None = None) -> asyncio.Future[Any]:
        """Written now; the result is the answer as its layout reads it. Whoever stops waiting disturbs nobody."""
        layout, body = call.prepare(self._versions)
        correlation_id = self._correlation_id = (self._correlation_id + 1) & 0x7FFF_FFFF
        try:
            self._transport.write(framed(layout, body, correlation_id, self._client_id))
        except RuntimeError as error:  # uvloop, of a transport that closed a moment ago
            raise OutcomeUnknownError(f"{self._name}: {error!r}") from error
        if deadline is None:
            deadline = self._loop.time() + timeout_ms / 1000
        if deadline < self._check_at:
            self._check_later(deadline)
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._pending.append((correlation_id, layout, answer, deadline, timeout_ms))
        return answer

    def drop(self, reason: str) -> asyncio.Future[None]:
        """Close without waiting for a peer that may hang; awaiting the result waits until the socket is closed."""
        self._fail_all(reason)
        self._transport.abort()
        return self.closed

    def data_received(self, data: bytes) -> None:
        if self._received:
            self._received += data
        received = self._received or data
        start, available = 0, len(received)
        while available - start >= 8:
            size, correlation_id = _answer_head.unpack_from(received, start)
            if not 4 <= size <= MAX_ANSWER_BYTES:
                self.drop(f"an answer of {size} bytes")
                return
            end = start + 4 + size
            if end > available:
                break
            self._answered(correlation_id, received if end - start == available else received[start:end])
            start = end
        if received is self._received:
            del self._received[:start]
        elif start < available:
            self._received += data[start:]

    def eof_received(self) -> None:
        self.drop("the broker closed the connection")

    def connection_lost(self, error: Exception | None) -> None:
        self._fail_all("connection lost" if error is None else repr(error))
        self.closed.set_result(None)

    def _answered(self, correlation_id: int, frame: bytes | bytearray) -> None:
        if not self._pending or self._pending[0][0] != correlation_id:
            self.drop(f"answer {correlation_id} is not the one awaited")
            return
        _, layout, answer, _, _ = self._pending[0]
        if not answer.done():  # else its caller has given up
            answer.set_result(layout.read(frame, after_tags(frame, 8) if layout.flexible else 8))
        # Not before: should it be unreadable, the loop closes the connection, and that must find it pending.
        self._pending.popleft()
        self._used_at = self._loop.time()

    def _fail_all(self, reason: str) -> None:
        self._timer.cancel()
        self._check_at = inf  # should something still be sent, it sets the timer anew
        while self._pending:
            _, _, answer, _, _ = self._pending.popleft()
            if not answer.done():
                answer.set_exception(OutcomeUnknownError(f"{self._name}: {reason}"))

    def _check_later(self, check_at: float) -> None:
        self._timer.cancel()
        self._check_at = check_at
        self._timer = self._loop.call_at(check_at, self._check)

    def _check(self) -> None:
        now = self._loop.time()
        awaited = [pending for pending in self._pending if not pending[2].done()]
        overdue = [pending for pending in awaited if pending[3] <= now]
        for _, _, answer, _, timeout_ms in overdue:
            answer.set_exception(OutcomeUnknownError(f"{self._name}: no answer within {timeout_ms} ms"))
        idle_at = (now if self._pending else self._used_at) + self._max_idle_s
        silent_at = self._silent_at()
        if overdue or silent_at <= now:
            self.drop("closed, since an earlier answer is overdue")
        elif idle_at <= now:
            self.drop("closed, since it was idle")
        else:
            self._check_later(min((pending[3] for pending in awaited), default=min(idle_at, silent_at)))

    def _silent_at(self) -> float:
        """When the most patient of all would have given up the oldest answer. It counts although nobody awaits that one
        any more: where callers always give up before their deadline, a connection that has fallen silent would be
        kept for ever.
        """
        if not self._pending:
            return inf
        _, _, _, deadline, timeout_ms = self._pending[0]
        return deadline + (max(pending[4] for pending in self._pending) - timeout_ms) / 1000
