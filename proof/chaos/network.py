"""The network of a run: a proxy before each broker, each coordinator and PostgreSQL, on an event loop of its own.
All that clients and services say to each other goes through it; brokers reach each other directly, from host to host
where they have hosts of their own (proof.faults.hosts).
"""

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from proof.faults.proxy import HOST, Proxy
from proof.faults.requests import RequestFault, client_id

DELAY_S = 0.3
CALL_S = 30.0
# Whose loss, delay or repetition could do harm, with their API keys. Markers are rarer than batches: either comes.
BEFALLEN = {"Produce": 0, "WriteTxnMarkers": 27, "TxnOffsetCommit": 28}
# Who waits for half a minute, as products do: held as long as others wait, a request of theirs is not late.
PATIENT = "outbox-"
# Why a fault of a request has had no effect.
NONE_CAME = "none came"
STILL_AWAITED = "its sender still waited for it"
NOT_SENT = "the broker did not take it"

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

    def reset(self, proxy: Proxy) -> None:
        """All connections that there are; new ones are taken at once."""
        self._call(proxy.cut())
        self._call(proxy.heal())

    def heal(self, proxy: Proxy) -> None:
        self._call(proxy.heal())

    def befall(self, verb: str, proxy: Proxy, request: str, down_s: float, over: threading.Event) -> str:
        """To one request of this kind (BEFALLEN), if any comes within `down_s`; why it had no effect, or nothing."""
        fault = self._call(_arm(verb, proxy, BEFALLEN[request]))
        over.wait(down_s)
        if not self._call(_was_caught(proxy, fault)):
            return NONE_CAME
        return "" if verb == "lost" else self._call(_release(fault))

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CALL_S)


async def _arm(verb: str, proxy: Proxy, api_key: int) -> RequestFault:
    if verb == "late":
        return proxy.hold(api_key, lambda request: not client_id(request).startswith(PATIENT))
    return {"repeat": proxy.copy, "lost": proxy.swallow_reply}[verb](api_key)


async def _was_caught(proxy: Proxy, fault: RequestFault) -> bool:
    """From here on none is. Whatever else is wrong with the proxy is another fault's, and stays."""
    proxy.disarm(fault)
    return fault.request.done()


async def _release(fault: RequestFault) -> str:
    """It is late only if its sender has given up, and with it its connection; and the broker may be away."""
    try:
        await fault.release(CALL_S / 3)
    except (OSError, TimeoutError):
        return NOT_SENT
    return STILL_AWAITED if fault.on_own_connection.result() else ""
