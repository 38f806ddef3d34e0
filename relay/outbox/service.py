"""Runs a relay as a process: metrics over HTTP, a clean end at SIGINT or SIGTERM, settings read anew at SIGHUP."""

import asyncio
import gc
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack

from prometheus_client import start_http_server

from oncebox import logs
from oncebox.settings import SettingsError
from relay.outbox.config import OutboxSettings
from relay.outbox.publisher import Step, no_step
from relay.outbox.relay import OutboxRelay

ReadSettings = Callable[[], OutboxSettings]


async def run(settings: OutboxSettings, read: ReadSettings, *, on_step: Step = no_step) -> None:
    relay = OutboxRelay(settings, on_step=on_step)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, relay.stop)
    loop.add_signal_handler(signal.SIGHUP, logs.reload, settings, read)
    with ExitStack() as leaving:
        told = ""
        if settings.http_port is not None:
            try:
                server, thread = start_http_server(settings.http_port, settings.http_host, relay.metrics.registry)
            except OSError as error:
                raise SettingsError(
                    f"cannot listen on {settings.http_host}:{settings.http_port} for metrics ({error.strerror}): "
                    "set http_port to another, or to 0 for any free one"
                ) from error
            leaving.callback(thread.join)
            leaving.callback(server.server_close)
            leaving.callback(server.shutdown)
            told = f", metrics at {settings.http_host}:{server.server_port}"
        # For people and for whoever started us.
        sys.stdout.write(f"outbox relay {settings.name} runs as {settings.transactional_id}{told}\n")
        sys.stdout.flush()
        await relay.run()


def serve(read: ReadSettings, *, on_step: Step = no_step) -> None:
    settings = read()
    # Rows make many small objects that die young and in no cycle.
    gc.set_threshold(10_000, 50, 1_000)
    # What is loaded now stays, and need not be looked through.
    gc.freeze()
    logs.set_up(settings)
    try:
        import uvloop
    except ImportError:
        asyncio.run(run(settings, read, on_step=on_step))
    else:
        uvloop.run(run(settings, read, on_step=on_step))
