"""What every call of our services goes through first: who may not make it is stopped, undecodable messages and
unexpected exceptions become errors with a name, and the calls under way are counted so that a stop can wait for them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from time import perf_counter
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from coordinator.api.auth import METHODS, Gate, set_current
from coordinator.api.errors import UNDECODABLE, abort, abort_as, code_told, unexpected
from coordinator.api.replies import error_of
from coordinator.core.commands import Refused
from coordinator.telemetry import Telemetry
from oncebox.v1.transaction_pb2 import COMMITTED

OUR_SERVICES = "/oncebox."


class Undecodable:
    """Stands for a message that cannot be decoded, as a request of its own."""


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    def __init__(self, gate: Gate, telemetry: Telemetry) -> None:
        self._gate = gate
        self._telemetry = telemetry
        self._handlers: dict[str, Any] = {}
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        method: str = details.method
        if not method.startswith(OUR_SERVICES):
            return await continuation(details)
        handler = self._handlers.get(method)
        if handler is None:
            handler = await continuation(details)
            if handler is not None:
                self._handlers[method] = handler = self._guarded(method, handler)
        return handler

    async def wait_idle(self) -> None:
        """Returns when no call is under way."""
        await self._idle.wait()

    def _guarded(self, method: str, handler: Any) -> Any:
        # Which of the four is set says what kind of call it is.
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        kind = next(name for name in kinds if getattr(handler, name) is not None)
        wrapped = {kind: self._watched(method, getattr(handler, kind))}
        return handler._replace(request_deserializer=_tolerant(handler.request_deserializer), **wrapped)

    def _watched(
        self, method: str, behaviour: Callable[[Any, Any], Awaitable[Any]]
    ) -> Callable[[Any, Any], Coroutine[Any, Any, Any]]:
        name = method.rpartition("/")[2]

        async def watched(request: Any, context: Any) -> Any:
            began_s = perf_counter()
            self._active += 1
            self._idle.clear()
            try:
                admitted = self._gate.admit(context)
                if isinstance(admitted, Refused):
                    await abort(context, admitted)
                if isinstance(request, Undecodable):
                    await abort(context, UNDECODABLE)
                access = admitted.access
                refused = access.crowded() or access.refusal(METHODS, method, request)
                if refused is not None:
                    await abort(context, refused)
                set_current(admitted)
                with access.counted():
                    return await behaviour(request, context)
            except grpc.aio.BaseError:
                # Aborted by us, or the client is gone: gRPC's own business.
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, a stranger must not read it
                await abort_as(grpc.StatusCode.INTERNAL, context, error_of(unexpected(error, method)))
            finally:
                is_commit = name == "End" and getattr(request, "result", 0) == COMMITTED
                code = code_told(context)
                self._telemetry.answered(name, code, perf_counter() - began_s, is_commit=is_commit)
                self._active -= 1
                if not self._active:
                    self._idle.set()

        return watched


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def tolerant(message: bytes) -> Any:
        try:
            return deserialize(message)
        except DecodeError:
            return Undecodable()

    return tolerant


class Streams:
    """The calls that never end by themselves. Each ends with its client, or all of them when we go down."""

    def __init__(self) -> None:
        self._endless: set[asyncio.Task[None]] = set()
        self._draining = False

    async def run(self, endless: Coroutine[Any, Any, None]) -> bool:
        """Runs it; says whether it came to its own end."""
        task = asyncio.create_task(endless)
        self._endless.add(task)
        if self._draining:
            task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            if not (self._draining and task.cancelled()):
                raise
            return False
        finally:
            self._endless.discard(task)
        return True

    def drain(self) -> None:
        self._draining = True
        for task in self._endless:
            task.cancel()
