"""The consumer groups' offsets of one transaction: what was stored under its grant, and what is still on its way there.

Once offsets may have been stored that the transaction does not know of, it can only be aborted.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from oncebox.errors import AbortedError, OffsetsRefusedError, OnceboxError
from oncebox.group_offsets import GroupMetadata, GroupOffsetsSender, TransactionEndedError, as_messages

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from oncebox.v1 import transaction_pb2
    from oncebox.wire import CommittedOffset, TopicPartition
    from oncebox.writer import Writer


class TransactionOffsets:
    def __init__(self, sender: GroupOffsetsSender, writer: Writer) -> None:
        self._sender = sender
        self._writer = writer
        self._stored: dict[str, dict[TopicPartition, CommittedOffset]] = {}
        self._under_way: set[asyncio.Future[None]] = set()
        # When the first were sent.
        self.began_at: float | None = None

    @property
    def groups(self) -> frozenset[str]:
        return frozenset(self._stored)

    def messages(self) -> list[transaction_pb2.GroupOffsets]:
        return as_messages(self._stored)

    async def send(
        self,
        offsets: Mapping[TopicPartition, CommittedOffset],
        metadata: GroupMetadata,
        explain: Callable[[OnceboxError], Awaitable[OnceboxError]],
    ) -> None:
        """What goes wrong is the writer's error from then on. `explain` as the writer's."""
        loop = asyncio.get_running_loop()
        if self.began_at is None:
            self.began_at = loop.time()
        under_way = loop.create_future()
        self._under_way.add(under_way)
        try:
            await self._sender.send(offsets, metadata, self._writer.identity)
            self._stored.setdefault(metadata.group_id, {}).update(offsets)
        except TransactionEndedError:
            self._writer.fail(await explain(OffsetsRefusedError("a broker refuses our epoch")))
        except OnceboxError as error:
            self._writer.fail(error)
        except BaseException:
            # Some of them may have been stored: what is left of the transaction must not be committed.
            self._writer.fail(AbortedError("sending offsets was cancelled"))
            raise
        finally:
            self._under_way.discard(under_way)
            under_way.set_result(None)

    async def answered(self) -> bool:
        """Waits for those that other tasks send; False: there were none."""
        waited = bool(self._under_way)
        while self._under_way:
            await asyncio.wait(self._under_way)
        return waited
