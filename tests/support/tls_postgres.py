"""PostgreSQL over TLS: the server of the tests is built without it, so TLS ends in front of it, as with a pooler.

Speaks what libpq speaks: the request for TLS, the handshake, and then bytes both ways. Who does not ask is cut off.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tests.support.listening import listening, pass_on

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.certificates import Pair

TLS_REQUEST = struct.pack("!II", 8, 80877103)


@asynccontextmanager
async def tls_in_front(dsn: str, server: Pair, ca: Path) -> AsyncIterator[str]:
    """The DSN of the same database by way of TLS, checked in full."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(server.certificate, server.key)
    parts = urlsplit(dsn)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readexactly(len(TLS_REQUEST)) == TLS_REQUEST:
            writer.write(b"S")
            await writer.drain()
            await writer.start_tls(context)
            behind_reader, behind_writer = await asyncio.open_connection(parts.hostname, parts.port)
            await asyncio.gather(pass_on(reader, behind_writer), pass_on(behind_reader, writer))

    credentials = parts.netloc.rpartition("@")[0]
    async with listening(serve) as port:
        yield f"postgresql://{credentials}@127.0.0.1:{port}{parts.path}?sslmode=verify-full&sslrootcert={ca}"
