"""Records outside of transactions, each stored once and in order whatever is repeated: a producer id without a name.

The first record that cannot be written ends that producer id, for what follows it would be out of order: what is
buffered is dropped, and all who wait and the next send() or flush() are told. After that a new producer id goes on.
"""

import asyncio
from contextlib import suppress

from oncebox.errors import BrokersUnavailableError, ClosedError, OnceboxError
from oncebox.partition_queue import Identity
from oncebox.wire import ErrorCode, OutcomeUnknownError, Wire, WireError
from oncebox.writer import Writer
from oncebox.writer_settings import WriterSettings

RETRY_S = 0.1
METADATA_TIMEOUT_MS = 5_000


class IdempotentWriters:
    """The writer of now, and the next after a failure."""

    def __init__(self, wire: Wire, settings: WriterSettings) -> None:
        self.current: Writer | None = None
        self._wire = wire
        self._settings = settings
        self._turn = asyncio.Lock()
        self._is_closed = False

    async def get(self) -> Writer:
        async with self._turn:
            if self.current is None:
                self.current = Writer(self._wire, self._settings, await self._new_identity())
            writer = self.current
            if writer.error is not None:
                self.current = None
                await writer.close(writer.error)
                raise writer.error
            return writer

    async def _new_identity(self) -> Identity:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.delivery_timeout_ms / 1000
        while not self._is_closed:
            may_help = True
            try:
                answer = await self._wire.init_producer_id(timeout_ms=self._settings.request_timeout_ms)
                if answer.error is ErrorCode.NONE:
                    return Identity(producer_id=answer.producer_id, epoch=answer.producer_epoch, transactional_id=None)
                problem, may_help = answer.error.name, answer.error.retriable
            except OutcomeUnknownError as error:
                problem = str(error)
            except WireError as error:
                problem, may_help = str(error), False
            if not may_help or loop.time() > deadline:
                raise BrokersUnavailableError(f"no producer id can be had: {problem}")
            await asyncio.sleep(RETRY_S)
            with suppress(WireError):
                # The broker that was asked may be gone.
                await self._wire.metadata((), timeout_ms=METADATA_TIMEOUT_MS)
        raise ClosedError("the producer is closed")

    async def flush(self) -> None:
        if self.current is None:
            return
        writer = await self.get()
        try:
            await writer.flush()
        except OnceboxError as error:
            if self.current is writer:
                self.current = None
            await writer.close(error)
            raise

    async def close(self) -> None:
        self._is_closed = True
        if self.current is not None:
            await self.current.close(ClosedError("the producer is closed"))
