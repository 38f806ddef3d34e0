"""The network of a run: a proxy before each broker, each coordinator and PostgreSQL, on an event loop of its own.
All that clients and services say to each other goes through it; brokers reach each other directly, from host to host
where they have hosts of their own (proof.faults.hosts).
"""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from proof.faults.proxy import HOST, Proxy
from proof.faults.requests import RequestFault

DELAY_S = 0.3
CALL_S = 30.0
# Whose loss, delay or repetition could do harm, with their API keys. Markers are rarer than batches: either comes.
BEFALLEN = {"Produce": 0, "WriteTxnMarkers": 27, "TxnOffsetCommit": 28}

T = TypeVar("T")


class Network:
    """Use as a context manager; its calls block and come from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._proxies: list[Proxy] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for proxy in self._proxies:
            self._call(proxy.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def add(self, *, kafka: bool = False) -> Proxy:
        """It listens at once; whom it leads to is said by `lead`."""
        proxy = Proxy((HOST, 0), kafka=kafka)
        self._proxies.append(proxy)
        self._call(proxy.__aenter__())
        return proxy

    @staticmethod
    def lead(proxy: Proxy, port: int, host: str = HOST) -> None:
        proxy.target = (host, port)

    def cut(self, proxy: Proxy) -> None:
        self._call(proxy.cut())

    def delay(self, proxy: Proxy) -> None:
        self._loop.call_soon_threadsafe(lambda: proxy.delay(to_server_s=DELAY_S, to_client_s=DELAY_S))

    def mute(self, proxy: Proxy) -> None:
        self._loop.call_soon_threadsafe(lambda: proxy.drop(to_client=True))

    def heal(self, proxy: Proxy) -> None:
        self._call(proxy.heal())

    def befall(self, verb: str, proxy: Proxy, request: str, down_s: float, over: threading.Event) -> bool:
        """To one request of this kind (BEFALLEN); whether any came within `down_s`."""
        fault = self._call(_arm(verb, proxy, BEFALLEN[request]))
        over.wait(down_s)
        if not self._call(_was_caught(proxy, fault)):
            return False
        if verb != "lost":
            self._call(_release(fault))
        return True

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CALL_S)


async def _arm(verb: str, proxy: Proxy, api_key: int) -> RequestFault:
    arm = {"late": proxy.hold, "repeat": proxy.copy, "lost": proxy.swallow_reply}[verb]
    return arm(api_key)


async def _was_caught(proxy: Proxy, fault: RequestFault) -> bool:
    """From here on none is. Whatever else is wrong with the proxy is another fault's, and stays."""
    proxy.disarm(fault)
    return fault.request.done()


async def _release(fault: RequestFault) -> None:
    """Its sender has long given up, and the broker may be away: whether it is answered does not matter."""
    with suppress(OSError, TimeoutError):
        await fault.release(CALL_S / 3)
