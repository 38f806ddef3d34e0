"""All transactions of all instances in order of id, a page of each instance in memory at a time."""

from collections.abc import AsyncIterator
from typing import Any

from oncebox.cli.line import CALL_TIMEOUT_S, Line
from oncebox.v1 import admin_pb2
from oncebox.v1.admin_pb2_grpc import AdminStub


async def listed(line: Line, request: admin_pb2.ListRequest) -> AsyncIterator[Any]:
    """Merges what the leaders list; each id belongs to one of them."""
    addresses = sorted({leader.address for leader in await line.leaders()})
    streams = [_of_one(line, address, request) for address in addresses]
    heads = [(await anext(stream, None), stream) for stream in streams]
    waiting = [(head, stream) for head, stream in heads if head is not None]
    while waiting:
        waiting.sort(key=lambda each: (each[0].transactional_id, each[0].number))
        head, stream = waiting[0]
        yield head
        following = await anext(stream, None)
        waiting[:1] = [] if following is None else [(following, stream)]


async def _of_one(line: Line, address: str, request: admin_pb2.ListRequest) -> AsyncIterator[Any]:
    asked = admin_pb2.ListRequest()
    asked.CopyFrom(request)
    async with line.channel(address) as channel:
        while True:
            page = await line.made(address, AdminStub(channel).List(asked, timeout=CALL_TIMEOUT_S))
            for summary in page.transactions:
                yield summary
            if not page.next_page_token:
                return
            asked.page_token = page.next_page_token
