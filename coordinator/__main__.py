"""`python -m coordinator`: runs one instance until it is told to stop."""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable
from functools import partial

from coordinator.api.server import PortTakenError
from coordinator.cluster import ClusterError
from coordinator.config import CoordinatorSettings
from coordinator.instance import Instance
from oncebox import logs
from oncebox.access.identity import KeysError
from oncebox.access.permissions import PolicyError
from oncebox.certificates import TlsError
from oncebox.settings import SettingsError, load

logger = logging.getLogger("coordinator")

ReadSettings = Callable[[], CoordinatorSettings]


async def run(settings: CoordinatorSettings, read_again: ReadSettings) -> None:
    """Until SIGINT or SIGTERM; then hands over in good order. On SIGHUP reads anew what it can."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    # A start may wait long for the brokers, and files may have been read before they changed.
    changed = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, changed.set)
    instance = Instance(settings)
    await instance.start()
    loop.add_signal_handler(signal.SIGHUP, _reload, instance, read_again)
    if changed.is_set():
        _reload(instance, read_again)
    # For people and for whoever started us: the one line that says where to call.
    sys.stdout.write(f"coordinator {instance.instance} serves at {instance.address}, health {instance.http_port}\n")
    sys.stdout.flush()
    await stop.wait()
    logger.info("stopping")
    await instance.stop()


def _reload(instance: Instance, read_again: ReadSettings) -> None:
    if logs.reload(instance.settings, read_again):
        instance.reload()


def serve(read: ReadSettings) -> None:
    settings = read()
    # Each call makes many small objects that die young and in no cycle: looking for cycles as often as by default costs
    # seven percent.
    gc.set_threshold(10_000, 50, 1_000)
    logs.set_up(settings)
    try:
        import uvloop
    except ImportError:
        asyncio.run(run(settings, read))
    else:
        uvloop.run(run(settings, read))


def main() -> None:
    try:
        serve(partial(load, CoordinatorSettings))
    except (SettingsError, ClusterError, PortTakenError, TlsError, PolicyError, KeysError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
