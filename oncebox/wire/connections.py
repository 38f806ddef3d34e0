"""Connections to brokers, one per broker and lane.

One request, one answer, one deadline: nothing is sent twice. Every way of getting no answer is an OutcomeUnknownError.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any

from aiokafka.errors import IllegalSaslStateError, KafkaError, SaslAuthenticationFailed, UnsupportedSaslMechanismError

from oncebox.wire.connection import Connection, dial
from oncebox.wire.errors import AuthenticationError, OutcomeUnknownError
from oncebox.wire.settings import KafkaSettings, aiokafka_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oncebox.wire.requests import Call
    from oncebox.wire.types import Broker


class _Lane:
    __slots__ = ("connection", "name", "opening", "turn", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.connection: Connection | None = None
        self.opening: asyncio.Task[None] | None = None
        self.turn = asyncio.Lock()  # fair: requests that wait for the connection leave in call order
        self.waiting = 0  # how many they are: as long as there is one, all others queue behind it


class Connections:
    def __init__(self, settings: KafkaSettings) -> None:
        self._options = aiokafka_options(settings)
        self._max_idle_ms = settings.connections_max_idle_ms
        self._setup_timeout_ms = settings.socket_connection_setup_timeout_ms
        self._lanes: dict[tuple[int, str], _Lane] = {}
        self._closed = False
        self.brokers: Mapping[int, Broker] = {}  # where each broker is; whoever reads metadata sets it

    async def close(self) -> None:
        self._closed = True
        opening = [lane.opening for lane in self._lanes.values() if lane.opening is not None]
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        opened = [lane.connection for lane in self._lanes.values() if lane.connection is not None]
        await asyncio.gather(*(connection.drop("closed") for connection in opened))

    async def send(self, node_id: int, lane_name: str, call: Call, timeout_ms: int) -> Any:
        lane = self._lanes.get((node_id, lane_name))
        if lane is None:
            lane = self._lanes[node_id, lane_name] = _Lane(f"broker {node_id} ({lane_name})")
        connection = lane.connection
        if connection is None or lane.waiting or not connection.is_open():
            return await (await self._send_when_open(node_id, lane, call, timeout_ms))
        return await connection.send(call, timeout_ms)

    def send_now(self, node_id: int, lane_name: str, call: Call, timeout_ms: int) -> asyncio.Future[Any]:
        """Where the connection is open the request is written before this returns, without a task of its own."""
        lane = self._lanes.get((node_id, lane_name))
        if lane is None or lane.connection is None or lane.waiting or not lane.connection.is_open():
            return asyncio.ensure_future(self.send(node_id, lane_name, call, timeout_ms))
        return lane.connection.send(call, timeout_ms)

    async def _send_when_open(self, node_id: int, lane: _Lane, call: Call, timeout_ms: int) -> asyncio.Future[Any]:
        """Returns when the request is written."""
        deadline = asyncio.get_running_loop().time() + timeout_ms / 1000
        lane.waiting += 1
        try:
            async with asyncio.timeout_at(deadline), lane.turn:
                while lane.connection is None or not lane.connection.is_open():
                    await self._open(node_id, lane)
                return lane.connection.send(call, timeout_ms, deadline)
        except TimeoutError as error:
            raise OutcomeUnknownError(f"{lane.name}: no answer within {timeout_ms} ms") from error
        finally:
            lane.waiting -= 1

    async def ask_address(self, host: str, port: int, call: Call, timeout_ms: int) -> Any:
        """For the first request of all, when no broker is known by its id."""
        if self._closed:
            raise OutcomeUnknownError("the connections are closed; nothing was sent")
        name = f"{host}:{port}"
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                connection = await self._dial(host, port, name)
                try:
                    return await connection.send(call, timeout_ms)
                finally:
                    await connection.drop("closed")
        except TimeoutError as error:
            raise OutcomeUnknownError(f"{name}: no answer within {timeout_ms} ms") from error

    async def _open(self, node_id: int, lane: _Lane) -> None:
        """The attempt outlives a caller whose deadline passes: a slow handshake is not begun anew for each."""
        if self._closed:
            raise OutcomeUnknownError("the connections are closed; nothing was sent")
        if lane.opening is None:
            broker = self.brokers.get(node_id)
            if broker is None:
                raise OutcomeUnknownError(f"broker {node_id} is not in the metadata; nothing was sent")
            lane.opening = asyncio.create_task(self._dial_for(lane, broker))
            # Nobody may be left to hear of a failure; that is no error of its own.
            lane.opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        opening = lane.opening
        await asyncio.wait((opening,))
        if opening.cancelled():
            raise OutcomeUnknownError("the connections were closed; nothing was sent")
        opening.result()

    async def _dial_for(self, lane: _Lane, broker: Broker) -> None:
        try:
            lane.connection = await self._dial(broker.host, broker.port, lane.name)
        finally:
            lane.opening = None

    async def _dial(self, host: str, port: int, name: str) -> Connection:
        try:
            async with asyncio.timeout(self._setup_timeout_ms / 1000):
                return await dial(host, port, name=name, max_idle_ms=self._max_idle_ms, options=self._options)
        except TimeoutError as error:
            raise OutcomeUnknownError(f"{host}:{port}: no connection within {self._setup_timeout_ms} ms") from error
        except (SaslAuthenticationFailed, UnsupportedSaslMechanismError, IllegalSaslStateError) as error:
            raise AuthenticationError(f"{host}:{port}: {error}") from error
        except ssl.SSLEOFError as error:  # the broker went away during the handshake
            raise OutcomeUnknownError(f"{host}:{port}: {error!r}") from error
        except ssl.SSLError as error:
            raise AuthenticationError(f"{host}:{port}: {error}") from error
        # uvloop raises RuntimeError for a transport that closed a moment ago, before aiokafka has noticed.
        except (OSError, KafkaError, RuntimeError) as error:
            raise OutcomeUnknownError(f"{host}:{port}: {error!r}") from error
