"""How long a row waits for another one that it refers to, in transaction mode: for all commits of that time.

Which these are is not known before the feed has been read as far as it went when the row was met: until then what the
row refers to may stand in a part of the feed that is read late.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from oncebox.reader.ends import ENDS_VALID_S
from oncebox.reader.ranges import lower_ends

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oncebox.reader import TransactionReader


# Whoever waits looks now and then whether it is told to stop.
ASK_S = 5.0


class Coming:
    """To be made when the row is met."""

    def __init__(self, reader: TransactionReader) -> None:
        self._reader = reader
        self._ends: Mapping[int, int] | None = None
        self._asked_at = 0.0
        self._mark: int | None = None

    async def is_open(self) -> bool:
        """Whether a commit of that time is not handed out, as far as is known."""
        if self._mark is None:
            loop = asyncio.get_running_loop()
            if self._ends is None or loop.time() > self._asked_at + ENDS_VALID_S:
                self._asked_at = loop.time()
                ends = await self._feed_ends()
                self._ends = self._ends if ends is None else lower_ends(self._ends, ends)
            if self._ends is None or not self._reader.has_read_feed(self._ends):
                return True
            self._mark = self._reader.mark()
        return self._reader.is_pending(self._mark)

    async def _feed_ends(self) -> Mapping[int, int] | None:
        try:
            async with asyncio.timeout(ASK_S):
                return await self._reader.feed_ends()
        except TimeoutError:
            return None
