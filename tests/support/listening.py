"""A server in a test's own event loop that leaves nothing behind: connections that are open when the loop is closed are
garbage that warns, and a warning is an error in whatever test comes next.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(handle: Handler) -> AsyncIterator[int]:
    """Its port on loopback. A connection is closed when its handler has ended, and waits for no peer."""
    handling: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):  # the peer has gone
            await handle(reader, writer)
            writer.close()
            await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        handling.add(task)
        # Also of one that was cancelled before it has begun.
        task.add_done_callback(lambda _: writer.transport.abort())

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in handling:
            task.cancel()
        await asyncio.gather(*handling, return_exceptions=True)
        # The loop closes what was aborted in its next round.
        await asyncio.sleep(0)


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, delay_s: float = 0.0) -> None:
    """Until the end, which is passed on too."""
    try:
        while data := await reader.read(65_536):
            await asyncio.sleep(delay_s)
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # either end has gone
    finally:
        writer.close()
