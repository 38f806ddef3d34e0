"""The producer: `async with producer.transaction() as transaction: await transaction.send(...)`.

Begin is local to the client; commit ends one transaction and brings the grant for the next. Without a transactional id
there are no transactions and no coordinator: `await producer.send(...)`, each record stored once and in order.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Literal, Self

from oncebox.batch_token import resume_token_of
from oncebox.claim import Claim, ProducerSettings, Registered
from oncebox.errors import (
    AbortedError,
    BrokersUnavailableError,
    ClosedError,
    CoordinatorError,
    OnceboxError,
    RetriableError,
    UsageError,
    error_from,
)
from oncebox.group_offsets import GroupOffsetsSender
from oncebox.idempotent import IdempotentWriters
from oncebox.partition_queue import RecordMetadata
from oncebox.partitioner import Partitioner, sticky
from oncebox.placement import Placement
from oncebox.session import OpenChannel, Session, open_plain_channel, shared_session
from oncebox.transaction import State, Tools, Transaction
from oncebox.transaction_tools import outcome_of, still_open
from oncebox.v1 import coordinator_pb2, transaction_pb2
from oncebox.wire import KafkaSettings, TopicPartition, Wire, WireError
from oncebox.writer import Writer
from oncebox.writer_settings import ACKS_ALL

__all__ = ["Producer", "ProducerSettings", "Transaction"]

HEARTBEATS_PER_TIMEOUT = 3


class Producer:
    """Use as an async context manager, or call start() and stop()."""

    def __init__(
        self,
        kafka: KafkaSettings | str,
        coordinators: Sequence[str] | str = (),
        *,
        transactional_id: str | None = None,
        settings: ProducerSettings | None = None,
        partitioner: Partitioner | None = None,
        open_channel: OpenChannel = open_plain_channel,
        session: Session | None = None,
        instance: str = "",
    ) -> None:
        """`session`: calls the coordinators, in place of `coordinators`; closed with this. `instance`: our name."""
        self.transactional_id = transactional_id
        self.settings = settings or ProducerSettings()
        self._addresses = coordinators.split(",") if isinstance(coordinators, str) else list(coordinators)
        self._session = session
        self._instance = instance
        if transactional_id is not None and not self._addresses and session is None:
            raise UsageError("transactions need a coordinator: name at least one as host:port")
        if transactional_id is not None and self.settings.writer.acks != ACKS_ALL:
            raise UsageError(
                "transactions need acks=-1 (all): what only the leader has acknowledged is lost with it, and the "
                "transaction would be committed without"
            )
        self._open_channel = open_channel
        self._kafka = KafkaSettings(bootstrap_servers=kafka) if isinstance(kafka, str) else kafka
        self._partitioner = partitioner or sticky()
        self._reach_anew()
        self._leaving = AsyncExitStack()
        self._is_running = False
        self._is_stopped = False
        self._tools: Tools | None = None
        self._writers: IdempotentWriters | None = None
        self._transaction: Transaction | None = None
        # The one that is being committed, while another may be open.
        self._committing: Transaction | None = None
        self._granting: set[asyncio.Task[None]] = set()
        # Of another who took the id over, while we did so.
        self._heard: transaction_pb2.Error | None = None

    def _reach_anew(self) -> None:
        self._wire = Wire(self._kafka)
        self._placement = Placement(self._wire, self._partitioner)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Takes the transactional id over: a former instance is fenced, what it left open is aborted.

        Where it raises, it may be called again; after stop() make a new producer.
        """
        if self._is_running:
            raise UsageError("the producer is started already")
        if self._is_stopped:
            raise ClosedError("the producer was stopped: make a new one")
        self._leaving.push_async_callback(self._wire.close)
        try:
            await self._wire.metadata(())
            if self.transactional_id is None:
                self._writers = IdempotentWriters(self._wire, self.settings.writer)
                self._leaving.push_async_callback(self._writers.close)
            else:
                await self._claim(self.transactional_id)
        except WireError as error:
            await self._close()
            raise BrokersUnavailableError(str(error)) from error
        except BaseException:
            await self._close()
            raise
        self._is_running = True

    async def _close(self) -> None:
        await self._leaving.aclose()
        # What is closed stays so.
        self._reach_anew()

    async def _claim(self, transactional_id: str) -> None:
        session = self._session
        if session is None:
            sharing = shared_session(self._addresses, self._open_channel)
            session = await self._leaving.enter_async_context(sharing)
        else:
            self._leaving.push_async_callback(session.close)
        claim = Claim(session, transactional_id, self.settings)
        claim.instance = self._instance or claim.instance
        self._leaving.callback(session.listen(transactional_id, self._fenced))
        tools = self._tools = Tools(
            claim=claim,
            settings=self.settings,
            wire=self._wire,
            placement=self._placement,
            offsets=GroupOffsetsSender(self._wire, self.settings.writer.delivery_timeout_ms),
            on_state=self._changed,
        )
        found = await claim.take()
        self._transaction = _prepared(tools, found)
        heard, self._heard = self._heard, None
        # Who else found the same one prepared may have come before us: its number does not tell, our next begin will.
        if heard is not None and (found is None or heard.owner.number_first > found.grant.number + 1):
            self._fenced(heard)
        heartbeat = asyncio.get_running_loop().create_task(self._beat(claim))
        self._leaving.push_async_callback(_cancel, heartbeat)

    async def stop(self) -> None:
        """Aborts what is open, and gives back what was registered ahead; what is prepared stays so.

        Without a transactional id: waits until all that was sent is written.
        """
        running, self._is_running = self._is_running, False
        self._is_stopped = True
        try:
            if running and self._writers is not None:
                await self._writers.flush()
            elif running and self._tools is not None:
                with suppress(OnceboxError):
                    await self._end_open(self._tools.claim)
        finally:
            await self._leaving.aclose()

    async def _end_open(self, claim: Claim) -> None:
        if self._committing is not None and self._committing.committing is not None:
            await asyncio.wait([self._committing.committing])
        if self._transaction is not None and self._transaction.is_unprepared:
            await self._transaction.abort()
        for task in self._granting:
            task.cancel()
        await asyncio.gather(*self._granting, return_exceptions=True)
        if self._transaction is None:
            await claim.give_back()

    # --- transactions -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def transaction(
        self, *, metadata: bytes = b"", wait: Literal["complete", "decided"] = "complete"
    ) -> AsyncIterator[Transaction]:
        """Commits on leaving, aborts on an exception; what has been prepared stays so on an exception."""
        transaction = await self.begin()
        transaction.metadata = metadata
        try:
            yield transaction
            if transaction.is_open:
                await transaction.commit(wait=wait)
        except BaseException:
            if transaction.is_unprepared:
                with suppress(OnceboxError):
                    await transaction.abort()
            raise

    async def begin(self) -> Transaction:
        """Also while the last transaction is being committed (commit_soon): it is filled meanwhile, but nothing of it
        leaves before that one has ended. One is begun ahead in this way; the next begin waits.
        """
        tools = self._running_tools()
        claim = tools.claim
        if claim.error is not None:
            raise claim.error
        last = self._committing
        if last is not None:
            await last.has_grant()
            if last.committing is not None and self._transaction is None:
                return self._begin_ahead(tools, last.committing)
        async with claim.turn:
            if claim.error is not None:
                raise claim.error
            if self._transaction is None:
                # Another instance may have prepared it while this one stood still.
                self._transaction = _prepared(tools, await claim.settle())
            if self._transaction is not None:
                raise still_open(self._transaction)
            self._transaction = Transaction(tools, claim.grant, claim.registered)
            return self._transaction

    def _begin_ahead(self, tools: Tools, last: asyncio.Future[bool]) -> Transaction:
        transaction = self._transaction = Transaction(tools, None, Registered())
        task = asyncio.get_running_loop().create_task(self._grant(transaction, tools, last))
        self._granting.add(task)
        task.add_done_callback(self._granting.discard)
        return transaction

    async def _grant(self, transaction: Transaction, tools: Tools, last: asyncio.Future[bool]) -> None:
        claim = tools.claim
        try:
            if not await last:
                transaction.not_granted(AbortedError("the transaction before it was not committed"))
                return
            async with claim.turn:
                if claim.error is not None:
                    raise claim.error
                found = _prepared(tools, await claim.settle())
                if found is not None:
                    # The next begin finds it again, once this one is aborted.
                    raise still_open(found)
                transaction.granted(claim.grant, claim.registered)
        except OnceboxError as error:
            transaction.not_granted(error)
        except BaseException:
            transaction.not_granted(ClosedError("the producer is closed"))
            raise

    async def outcome_of(self, number: int) -> transaction_pb2.Outcome:
        """What became of a transaction of this id, also of a former instance."""
        return await outcome_of(self._running_tools().claim, number)

    @property
    def next_number(self) -> int:
        """Of the next transaction, as far as is known."""
        return self._tools.claim.grant.number if self._tools is not None else 0

    @property
    def prepared(self) -> Transaction | None:
        """What waits to be committed or aborted before the next can begin: prepared here, perhaps without an answer, or
        by another instance (ProducerSettings.keep_prepared).
        """
        transaction = self._transaction
        is_asked_for = transaction is not None and transaction.state in {State.PREPARING, State.PREPARED}
        return transaction if is_asked_for else None

    @property
    def resume_token(self) -> bytes:
        """The metadata of the newest commit that carried any, also of a former instance."""
        return resume_token_of(self._tools.claim.resume_token) if self._tools is not None else b""

    @property
    def instance(self) -> str:
        """The name of this start, as fenced instances are told."""
        return self._tools.claim.instance if self._tools is not None else ""

    def _running_tools(self) -> Tools:
        if not self._is_running:
            raise ClosedError("the producer is not running")
        if self._tools is None:
            raise UsageError("without a transactional_id there are no transactions: use send() of the producer itself")
        return self._tools

    def _changed(self, transaction: Transaction) -> None:
        if transaction.committing is not None:
            # From here on the next one may be begun.
            self._committing = transaction
            if self._transaction is transaction:
                self._transaction = None
            return
        if self._committing is transaction:
            self._committing = None
        if transaction.is_open:
            # Its end was refused: it is to be aborted before anything else. One without a grant is in nobody's way.
            if transaction.is_granted:
                self._transaction = transaction
        elif self._transaction is transaction:
            self._transaction = None

    def _fenced(self, detail: transaction_pb2.Error) -> None:
        if self._tools is None or detail.owner.instance == self._tools.claim.instance:
            return
        claim = self._tools.claim
        if not claim.is_taken:
            # By somebody before us, or after us: our first number will tell.
            self._heard = detail
            return
        if detail.owner.number_first <= claim.grant.number:
            return
        error = error_from(detail)
        claim.error = error
        for transaction in (self._committing, self._transaction):
            if transaction is not None:
                transaction.fail(error)

    async def _beat(self, claim: Claim) -> None:
        """Keeps what is registered from timing out while it is unused, and tells since when it is used."""
        pause_s = self.settings.transaction_timeout_ms / 1000 / HEARTBEATS_PER_TIMEOUT
        while True:
            await asyncio.sleep(pause_s)
            transaction = self._committing or self._transaction
            registered = transaction.is_registered if transaction is not None else claim.has_registered_ahead
            if not registered or claim.error is not None:
                continue
            asked = transaction.grant if transaction is not None else claim.grant
            begun_ms_ago = transaction.begun_ms_ago() if transaction is not None else None
            try:
                grant = await claim.heartbeat(asked, begun_ms_ago, max(pause_s, 1.0))
            except RetriableError:
                continue
            except CoordinatorError as error:
                # One that is being ended hears of its outcome by its end alone.
                if transaction is not None and transaction.state is State.OPEN:
                    transaction.fail(error)
                continue
            except UsageError:
                # Such as a file of SecureChannel that is just being replaced: the next may find it.
                continue
            if transaction is None:
                if self._transaction is None and asked == claim.grant:
                    claim.renewed(grant)
            elif transaction.state is State.OPEN and asked == transaction.grant:
                transaction.adopt(grant)

    # --- without transactions -----------------------------------------------------------------------------------------

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> TopicPartition:
        """Returns once the record is buffered, with where it will go. Only without a transactional id."""
        where = self._placement.place(topic, key, partition)
        if where is None:
            where = await self._find(topic, key, partition)
        # Taken last: while the topic is looked up, the one of before may fail.
        writer = await self._writer()
        if writer.append(where, value, key, list(headers), timestamp_ms):
            await writer.room()
        return where

    async def send_and_wait(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> RecordMetadata:
        """Returns once the record is written, with its offset. Only without a transactional id."""
        where = self._placement.place(topic, key, partition) or await self._find(topic, key, partition)
        writer = await self._writer()
        writer.append(where, value, key, list(headers), timestamp_ms)
        return await writer.future_of_last(where)

    async def flush(self) -> None:
        """Until all that was sent is written. Only without a transactional id."""
        await self._running_writers().flush()

    async def _find(self, topic: str, key: bytes | None, partition: int | None) -> TopicPartition:
        self._running_writers()
        return await self._placement.find(topic, key, partition)

    async def _writer(self) -> Writer:
        writers = self._running_writers()
        writer = writers.current
        return writer if writer is not None and writer.error is None else await writers.get()

    def _running_writers(self) -> IdempotentWriters:
        if self._writers is None or not self._is_running:
            self._running_tools()
            raise UsageError("send within a transaction: `async with producer.transaction() as transaction`")
        return self._writers


def _prepared(tools: Tools, found: coordinator_pb2.PreparedTransaction | None) -> Transaction | None:
    """What another instance has left for a decision."""
    if found is None:
        return None
    transaction = Transaction(tools, found.grant, Registered(), prepared=True)
    transaction.metadata = found.resume_token
    return transaction


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
