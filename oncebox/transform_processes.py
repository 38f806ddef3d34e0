"""transform_in_processes(): the same transform in several processes, which share the group's partitions.

One that is killed is started again in its place; one that raises stops all. SIGTERM and SIGINT stop in good order:
each process commits what it has handled.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import socket
import threading
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import connection
from typing import TYPE_CHECKING

from oncebox.errors import FatalError, UsageError
from oncebox.session import open_plain_channel
from oncebox.transform_loop import TransformSettings, transform

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from multiprocessing.context import SpawnProcess

    from oncebox.partitioner import Partitioner
    from oncebox.session import OpenChannel
    from oncebox.transform_loop import Handler
    from oncebox.wire import KafkaSettings

LOOK_S = 0.2
# How often one process may be killed before something is taken to be wrong with it.
RESTARTS_MAX = 10


class ProcessFailedError(FatalError):
    """One of the processes ended with an error, which it has told on its standard error."""


def transform_in_processes(
    count: int,
    source_topics: Collection[str] | str,
    group: str,
    handler: Handler,
    *,
    kafka: KafkaSettings | str,
    coordinators: Sequence[str] | str,
    name: str = "",
    stop: threading.Event | None = None,
    settings: TransformSettings | None = None,
    partitioner: Partitioner | None = None,
    open_channel: OpenChannel = open_plain_channel,
) -> None:
    """Blocks until it is stopped. The handler is a function of a module: the processes import it. What else is given is
    pickled; a SecureChannel can be.

    `name` tells the machines of one group apart (default: the host's name). Each process has a transactional id and a
    place in the group that are its own for ever, so that one that dies is replaced without a rebalance.
    """
    if count < 1:
        raise UsageError("at least one process is needed")
    stop = stop or threading.Event()
    chosen = settings or TransformSettings()
    given = (source_topics, group, handler, kafka, coordinators, chosen, partitioner, open_channel)
    prefix = f"{group}-{name or socket.gethostname()}"
    workers = [_Worker(f"{prefix}-{index}", given) for index in range(count)]
    with _told_to_stop(stop):
        try:
            for worker in workers:
                worker.start()
            while not stop.wait(0):
                connection.wait([worker.process.sentinel for worker in workers], timeout=LOOK_S)
                for worker in workers:
                    worker.look(stop)
        finally:
            for worker in workers:
                worker.stop()
    for worker in workers:
        worker.check()


class _Worker:
    def __init__(self, name: str, given: tuple[object, ...]) -> None:
        self.name = name
        self.process: SpawnProcess
        self._given = given
        self._restarts = 0
        self._is_started = False

    def start(self) -> None:
        # Not forked: neither an event loop nor librdkafka's threads live on in a copy.
        self.process = multiprocessing.get_context("spawn").Process(
            target=_work, args=(self.name, *self._given), name=self.name, daemon=True
        )
        self.process.start()
        self._is_started = True

    def look(self, stop: threading.Event) -> None:
        code = self.process.exitcode
        if code is None or stop.is_set():
            return
        self.check()
        self._restarts += 1
        if self._restarts > RESTARTS_MAX:
            raise ProcessFailedError(f"{self.name} was killed {self._restarts} times, last by signal {-code}")
        self.start()

    def check(self) -> None:
        code = self.process.exitcode
        if code is not None and code > 0:
            raise ProcessFailedError(f"{self.name} ended with an error; it is told on standard error")

    def stop(self) -> None:
        if self._is_started:
            self.process.terminate()
            self.process.join()


def _work(
    name: str,
    source_topics: Collection[str] | str,
    group: str,
    handler: Handler,
    kafka: KafkaSettings | str,
    coordinators: Sequence[str] | str,
    settings: TransformSettings,
    partitioner: Partitioner | None,
    open_channel: OpenChannel,
) -> None:
    async def run() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await transform(
            source_topics,
            group,
            handler,
            kafka=kafka,
            coordinators=coordinators,
            transactional_id=name,
            stop=stop,
            settings=replace(settings, consumer={"group.instance.id": name, **settings.consumer}),
            partitioner=partitioner,
            open_channel=open_channel,
        )

    asyncio.run(run())


@contextmanager
def _told_to_stop(stop: threading.Event) -> Iterator[None]:
    """Signals set it, where that is ours to say: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
