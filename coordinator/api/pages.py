"""A few fixed pages over HTTP/1.1, for orchestrators and scrapers: GET, one answer, connection closed.

Reads no bodies, keeps no state; a client that is slow or sends too much is dropped.
"""

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple

REQUEST_MAX_BYTES = 8 * 1024
REQUEST_TIMEOUT_S = 5.0


class Page(NamedTuple):
    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Pages = Mapping[str, Callable[[], Page]]


async def serve_pages(host: str, port: int, pages: Pages) -> asyncio.Server:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(_answer(head, pages))
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError, TimeoutError):
            pass
        finally:
            writer.close()

    return await asyncio.start_server(serve, host, port, limit=REQUEST_MAX_BYTES)


def _answer(head: bytes, pages: Pages) -> bytes:
    method, _, rest = head.split(b"\r\n", 1)[0].partition(b" ")
    path = rest.split(b" ")[0].split(b"?")[0].decode("latin-1")
    if method not in {b"GET", b"HEAD"}:
        page = Page(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET\n")
    elif path not in pages:
        page = Page(HTTPStatus.NOT_FOUND, b"known are " + ", ".join(pages).encode() + b"\n")
    else:
        page = pages[path]()
    headers = (
        f"HTTP/1.1 {page.status.value} {page.status.phrase}\r\nContent-Type: {page.content_type}\r\n"
        f"Content-Length: {len(page.body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return headers.encode() + (b"" if method == b"HEAD" else page.body)
