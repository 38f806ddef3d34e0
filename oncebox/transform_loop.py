"""transform(): consume, handle, send, and the consumer's offsets in the same transaction, again and again.

Each record is handled in exactly one committed transaction, whoever dies when. A transaction that cannot be committed
is aborted, and its records are read again from what the group has committed. For more speed run more processes.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter, deque
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from oncebox.errors import (
    FatalError,
    GroupAuthorizationFailedError,
    GroupFencedError,
    InvalidRequestError,
    InvalidTopicError,
    MessageTooLargeError,
    OffsetsRefusedError,
    OnceboxError,
    PoisonRecordError,
    RecordsRefusedError,
    RecordTooLargeError,
    RetriableError,
    TopicAuthorizationFailedError,
    TransactionTimedOutError,
    UnknownTopicError,
    UnknownTopicOrPartitionError,
    UsageError,
)
from oncebox.group_consumer import NAME, STRATEGY, TWO_ROUNDS, GroupConsumer
from oncebox.producer import Producer, ProducerSettings
from oncebox.reader.source import topics_of
from oncebox.session import OpenChannel, open_plain_channel
from oncebox.wire import KafkaSettings, TopicPartition, Wire

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

    from oncebox.partitioner import Partitioner
    from oncebox.reader.types import Record
    from oncebox.transaction import Transaction

    Handler = Callable[[Record, Transaction], Awaitable[None]]

GATHER_MAX = 1_000
IDLE_S = 0.2
REVOKE_TIMEOUT_S = 60.0
RETRY_FIRST_S = 0.05
RETRY_MAX_S = 2.0
# For the last record's handler and the commit.
TIMEOUT_SLACK_MS = 10_000

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformSettings:
    # A transaction ends when it is that old, or has that many records.
    transaction_ms: int = 100
    transaction_records: int = 10_000
    # A record whose handling fails that often is poison.
    attempts: int = 3
    # What becomes of it: all stops; it is left out; or it goes to another topic, in the transaction of its neighbours.
    poison: Literal["stop", "skip", "dead-letter"] = "stop"
    dead_letter_topic: str = ""
    # Default: a timeout of transaction_ms and 10 s. Should a process die for good, its last transaction blocks its
    # partitions for so long.
    producer: ProducerSettings | None = None
    # More for the consumer, by librdkafka's names.
    consumer: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.poison == "dead-letter") != bool(self.dead_letter_topic):
            raise UsageError('poison="dead-letter" and dead_letter_topic need each other')
        if NAME in self.consumer and TWO_ROUNDS in self.consumer.get(STRATEGY, ""):
            raise UsageError(
                f"with {NAME}, {TWO_ROUNDS} loses partitions when a member dies at a bad moment: leave "
                f"{STRATEGY} out (it is roundrobin then)"
            )
        if self.slack_ms <= 0:
            raise UsageError(
                f"transactions of {self.transaction_ms} ms would be aborted by producer.transaction_timeout_ms of "
                f"{self.producer_settings.transaction_timeout_ms}: raise that, or set producer.extend_transactions"
            )

    @property
    def producer_settings(self) -> ProducerSettings:
        return self.producer or ProducerSettings(transaction_timeout_ms=self.transaction_ms + TIMEOUT_SLACK_MS)

    @property
    def slack_ms(self) -> int:
        """How long one record, the last of a transaction, may take."""
        producer = self.producer_settings
        return producer.transaction_timeout_ms - (0 if producer.extend_transactions else self.transaction_ms)


# Refusals for what was asked: the same transaction again will be refused again.
LASTING = (
    RecordsRefusedError,
    TopicAuthorizationFailedError,
    GroupAuthorizationFailedError,
    InvalidTopicError,
    UnknownTopicOrPartitionError,
    MessageTooLargeError,
    InvalidRequestError,
)


def _is_lasting(error: OnceboxError) -> bool:
    if isinstance(error, OffsetsRefusedError):
        # Without a name nobody refused: no answer came in time.
        return bool(error.code) and not isinstance(error, GroupFencedError)
    return isinstance(error, LASTING)


class _HandlerError(Exception):
    """Inside the loop only."""

    def __init__(self, record: Record, cause: Exception) -> None:
        super().__init__()
        self.record = record
        self.cause = cause


async def transform(
    source_topics: Collection[str] | str,
    group: str,
    handler: Handler,
    *,
    kafka: KafkaSettings | str,
    coordinators: Sequence[str] | str,
    transactional_id: str | None = None,
    stop: asyncio.Event | None = None,
    settings: TransformSettings | None = None,
    partitioner: Partitioner | None = None,
    open_channel: OpenChannel = open_plain_channel,
) -> None:
    """Runs until `stop` is set, which commits what has been handled, or until it is cancelled, which aborts it.

    `await handler(record, transaction)` sends what follows from the record. With a transactional id of its own, which
    must differ from process to process, a process that starts again ends at once what it left open when it died.
    """
    topics = [source_topics] if isinstance(source_topics, str) else list(source_topics)
    reached = KafkaSettings(bootstrap_servers=kafka) if isinstance(kafka, str) else kafka
    loop = _Loop(handler, stop or asyncio.Event(), settings or TransformSettings())
    dead_letters = [loop.settings.dead_letter_topic] if loop.settings.dead_letter_topic else []
    wire = Wire(reached)
    try:
        await topics_of(wire, [*topics, *dead_letters])
    finally:
        await wire.close()
    await loop.run(
        Producer(
            reached,
            coordinators,
            transactional_id=transactional_id or f"{group}-{uuid.uuid4().hex[:12]}",
            settings=loop.settings.producer_settings,
            partitioner=partitioner,
            open_channel=open_channel,
        ),
        GroupConsumer(
            reached,
            topics,
            group,
            config=loop.settings.consumer,
            revoked=loop.revoked,
        ),
    )


class _Loop:
    def __init__(self, handler: Handler, stop: asyncio.Event, settings: TransformSettings) -> None:
        self.settings = settings
        self._handler = handler
        self._stop = stop
        self._running = asyncio.get_running_loop()
        self._producer: Producer
        self._consumer: GroupConsumer
        self._transaction: Transaction | None = None
        self._ends_at = 0.0
        self._handled = 0
        # The last record of this transaction whose handler took so long that it may be why the transaction times out.
        self._slow: Record | None = None
        self._slow_s = settings.slack_ms / 2000
        self._member = b""
        # Held while what was handled of partitions that go is committed.
        self._leaving = asyncio.Lock()
        # Read and not handled yet.
        self._polled: deque[Record] = deque()
        # Of the open transaction: where each partition's records begin, and the offset after those handled.
        # By plain (topic, partition): one is made for every record.
        self._firsts: dict[tuple[str, int], int] = {}
        self._nexts: dict[tuple[str, int], int] = {}
        self._failures: Counter[tuple[str, int, int]] = Counter()
        self._poison: dict[tuple[str, int, int], Exception] = {}
        self._timeouts: Counter[tuple[str, int, int]] = Counter()
        self._refusals = 0
        self._pause_s = RETRY_FIRST_S

    async def run(self, producer: Producer, consumer: GroupConsumer) -> None:
        self._producer, self._consumer = producer, consumer
        async with AsyncExitStack() as leaving:
            await leaving.enter_async_context(producer)
            leaving.push_async_callback(consumer.close)
            await consumer.open()
            try:
                while not self._stop.is_set():
                    await self._guarded(self._turn)
                await self._guarded(self._commit)
            finally:
                # Before the consumer leaves its group, which would commit it.
                await self._give_up()

    async def _guarded(self, step: Callable[[], Awaitable[None]]) -> None:
        """What fails is aborted, and read again."""
        try:
            await step()
            return
        except FatalError:
            raise
        except _HandlerError as error:
            self._judge(error)
        except TransactionTimedOutError as error:
            log.warning("the transaction has timed out, and its records are read again: %s", error)
            self._judge_timeout(error)
        except OnceboxError as error:
            log.warning("the transaction is aborted, and its records are read again: %s", error)
            self._refusals = self._refusals + 1 if _is_lasting(error) else 0
            if self._refusals >= self.settings.attempts:
                raise
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 2, RETRY_MAX_S)
        await self._rewind()

    async def _turn(self) -> None:
        settings, polled = self.settings, self._polled
        if not polled:
            left_s = self._ends_at - self._running.time() if self._nexts else IDLE_S
            wanted = min(GATHER_MAX, settings.transaction_records - self._handled)
            records, member = await self._consumer.gather(wanted, max(min(left_s, IDLE_S), 0.0))
            # The consumer does not wait for ever: nothing more goes into what is still being committed.
            async with self._leaving:
                self._member = member
                polled.extend(records)
                self._begins_with(records)
        await self._handle_polled()
        if self._handled >= settings.transaction_records or self._running.time() >= self._ends_at:
            await self._commit()

    def _begins_with(self, records: Iterable[Record]) -> None:
        for record in records:
            self._firsts.setdefault(record[:2], record.offset)

    async def _handle_polled(self) -> None:
        """Until the transaction is full, or due: a slow handler must not make it outlive its timeout."""
        polled, clock, handler = self._polled, self._running.time, self._handler
        slow_s, begun_at = self._slow_s, clock()
        while polled and self._handled < self.settings.transaction_records and not self._stop.is_set():
            record = polled.popleft()
            transaction = self._transaction
            if transaction is None:
                transaction = self._transaction = await self._producer.begin()
                begun_at = clock()
                self._ends_at = begun_at + self.settings.transaction_ms / 1000
            poison = self._poison.get(record[:3]) if self._poison else None
            if poison is None:
                try:
                    await handler(record, transaction)
                except Exception as error:
                    self._slow = record if clock() - begun_at > slow_s else self._slow
                    if isinstance(error, OnceboxError) and not isinstance(error, UsageError):
                        raise
                    raise _HandlerError(record, error) from error
            elif self.settings.poison == "dead-letter":
                await self._bury(record, poison, transaction)
            self._nexts[record[:2]] = record.offset + 1
            self._handled += 1
            now = clock()
            if now - begun_at > slow_s:
                self._slow = record
            begun_at = now
            if now >= self._ends_at:
                return

    async def _bury(self, record: Record, error: Exception, transaction: Transaction) -> None:
        headers = [
            *record.headers,
            ("oncebox.source", f"{record.topic}:{record.partition}:{record.offset}".encode()),
            ("oncebox.error", f"{type(error).__name__}: {error}".encode()),
        ]
        try:
            await transaction.send(
                self.settings.dead_letter_topic,
                record.value,
                key=record.key,
                headers=headers,
                timestamp_ms=max(record.timestamp_ms, 0),
            )
        except (RecordTooLargeError, UnknownTopicError) as refused:
            raise PoisonRecordError(record, f"can neither be handled nor be buried: {refused}") from error

    def _judge(self, failed: _HandlerError) -> None:
        record, key = failed.record, failed.record[:3]
        self._failures[key] += 1
        if self._failures[key] < self.settings.attempts:
            return
        if self.settings.poison == "stop":
            raise PoisonRecordError(record) from failed.cause
        self._poison[key] = failed.cause
        self._pause_s = RETRY_FIRST_S

    def _judge_timeout(self, error: TransactionTimedOutError) -> None:
        """A record that is handled too slowly will not fit into the next transaction either. It stops the loop
        whatever is done with poison: a handler that waits for slow brokers looks the same, and that is no reason to
        leave a record out.
        """
        record = self._slow
        if record is None:
            return
        timeout_ms = self.settings.producer_settings.transaction_timeout_ms
        self._timeouts[record[:3]] += 1
        if self._timeouts[record[:3]] >= self.settings.attempts:
            raise PoisonRecordError(
                record,
                f"takes longer than a transaction may last, {self.settings.attempts} times: raise "
                f"producer.transaction_timeout_ms ({timeout_ms}), or set producer.extend_transactions",
            ) from error

    async def _commit(self) -> None:
        if self._transaction is None:
            return
        if self._nexts:
            nexts = {TopicPartition(*where): offset for where, offset in self._nexts.items()}
            await self._transaction.send_offsets(nexts, self._member)
        await self._transaction.commit(wait="decided")
        self._forget()
        self._failures.clear()
        self._poison.clear()
        self._timeouts.clear()
        self._refusals = 0
        self._pause_s = RETRY_FIRST_S

    def _forget(self) -> None:
        self._transaction = None
        self._firsts, self._nexts = {}, {}
        self._begins_with(self._polled)
        self._handled = 0
        self._slow = None

    async def _rewind(self) -> None:
        """Ends the transaction, whatever has become of it, and goes back to what the group has committed."""
        while True:
            try:
                if self._transaction is not None and self._transaction.is_open:
                    await self._transaction.abort()
                # Settles what is in doubt: only then the group's offsets are sure.
                await (await self._producer.begin()).commit()
                await self._consumer.rewind({TopicPartition(*where): first for where, first in self._firsts.items()})
                break
            except RetriableError as error:
                log.warning("going back to what the group has committed: %s", error)
                if self._stop.is_set():
                    break  # nothing more is read, and whoever starts next settles it
                await asyncio.sleep(RETRY_MAX_S)
        self._polled.clear()
        self._forget()

    async def _give_up(self) -> None:
        if self._transaction is not None and self._transaction.is_open:
            with suppress(OnceboxError):
                await self._transaction.abort()
        self._forget()

    # --- called in the consumer's thread ------------------------------------------------------------------------------

    def revoked(self, partitions: frozenset[TopicPartition], lost: bool, member: bytes) -> None:
        """What has been handled of them is committed before they go; of those that have gone already, nothing is."""
        if not partitions & self._firsts.keys():
            return
        ending = asyncio.run_coroutine_threadsafe(self._leave(partitions, lost, member), self._running)
        with suppress(Exception):
            ending.result(REVOKE_TIMEOUT_S)

    async def _leave(self, partitions: frozenset[TopicPartition], lost: bool, member: bytes) -> None:
        async with self._leaving:
            try:
                if not lost:
                    # The group has a new generation by now: under the old one the offsets would be refused.
                    self._member = member
                    await self._commit()
                    return
            except OnceboxError as error:
                log.warning("what was handled of partitions that go to another is not committed: %s", error)
            if self._transaction is not None:
                # Whatever the loop does next fails, aborts, and reads again what is still ours.
                self._transaction.fail(GroupFencedError(f"the group has taken {len(partitions)} partitions away"))
