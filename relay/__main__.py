"""`python -m relay FILE`: runs one relay until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from oncebox import logs
from oncebox.access.identity import KeysError
from oncebox.access.permissions import PolicyError
from oncebox.certificates import TlsError
from oncebox.settings import SettingsError, load
from relay.config import RelaySettings
from relay.server import RelayServer
from relay.service import Relay
from relay.types import RelayError

if TYPE_CHECKING:
    from asyncio import Task
    from collections.abc import Callable


async def run(settings: RelaySettings, read: Callable[[], RelaySettings]) -> None:
    """Until SIGINT, SIGTERM, or an error that waiting does not mend. On SIGHUP reads anew what it can."""
    relay = Relay(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, relay.stop)
    server = RelayServer(relay)

    def reload() -> None:
        if logs.reload(settings, read):
            server.gate.reload()

    loop.add_signal_handler(signal.SIGHUP, reload)
    await server.start()
    sys.stdout.write(
        f"relay {settings.name} ({relay.status.instance}) serves at {server.address}, http {server.http_port}\n"
    )
    sys.stdout.flush()
    try:
        task: Task[None] = loop.create_task(relay.run())
        await task
    finally:
        await server.stop()


def serve(read: Callable[[], RelaySettings]) -> None:
    settings = read()
    # Records live as long as their batch and stand in no cycle: looking for cycles as often as by default is wasted.
    gc.set_threshold(100_000, 50, 1_000)
    # The thread that writes needs the interpreter for a moment after each piece it has sent; by default the thread that
    # makes rows would keep it waiting for 5 ms each time.
    sys.setswitchinterval(0.000_5)
    logs.set_up(settings)
    asyncio.run(run(settings, read))


def main() -> None:
    try:
        serve(partial(load, RelaySettings, file=Path(sys.argv[1]) if len(sys.argv) > 1 else None))
    except (SettingsError, RelayError, TlsError, PolicyError, KeysError) as error:
        sys.exit(f"relay: {error}")


if __name__ == "__main__":
    main()
