"""Writes records to Kafka under one grant: batches them by partition, keeps several requests in flight, keeps order.

Every batch is built once and its bytes are sent until they are acknowledged or refused, or its delivery timeout has
passed; the first failure ends the writer. Until the first batch on a partition is acknowledged only one is under way
there, because a new epoch must begin with sequence 0.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from operator import itemgetter
from typing import Any

from oncebox.delivery_errors import not_written, overdue, refused
from oncebox.errors import OnceboxError, RecordTooLargeError, UsageError
from oncebox.partition_queue import Batch, Identity, PartitionQueue, RecordMetadata
from oncebox.under_way import LOOK_S, Answer, UnderWay
from oncebox.v1 import transaction_pb2
from oncebox.wire import (
    Appended,
    ErrorCode,
    OutcomeUnknownError,
    TopicPartition,
    Wire,
    WireError,
    batch_builder,
)
from oncebox.writer_settings import WriterSettings

Headers = list[tuple[str, bytes | None]]

RETRY_FIRST_S = 0.02
RETRY_MAX_S = 1.0
METADATA_TIMEOUT_MS = 5_000
EARLY_S = 0.0005  # uvloop's timers and clock count whole milliseconds, whose sums are not exact
# The broker knows of a newer holder of our producer id.
FENCED = frozenset({ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.PRODUCER_FENCED})


class Writer:
    """The writes of one identity, with sequences from 0."""

    def __init__(
        self,
        wire: Wire,
        settings: WriterSettings,
        identity: Identity,
        *,
        register: Callable[[TopicPartition], None] | None = None,
        registered: frozenset[TopicPartition] = frozenset(),
        explain: Callable[[OnceboxError], Awaitable[OnceboxError]] | None = None,
    ) -> None:
        """`register` is told of each partition that is not among `registered`; nothing is written to it before
        registered() says so. `explain` finds the better word for being refused as fenced.
        """
        self._wire = wire
        self._settings = settings
        self._buffer_bytes = settings.buffer_bytes
        self.identity = identity
        self._register = register
        self._registered = registered
        self._explain = explain
        self._partitions: dict[TopicPartition, PartitionQueue] = {}
        # Those with something to send, in the order of their turns.
        self._active: dict[PartitionQueue, None] = {}
        self._under_way = UnderWay(wire)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stale: set[str] = set()
        self._buffered = 0
        self._loop = asyncio.get_running_loop()
        self._pump_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._flushing = 0
        self._refused = False
        self.error: OnceboxError | None = None
        # When the first record was buffered.
        self.began_at: float | None = None
        # Something may have reached a broker under this identity.
        self.has_sent = False

    # --- filling ----------------------------------------------------------------------------------------------------

    def append(
        self, where: TopicPartition, value: bytes | None, key: bytes | None, headers: Headers, timestamp_ms: int | None
    ) -> bool:
        """Buffers a record. True: the caller should wait for room() before the next."""
        if timestamp_ms is not None and timestamp_ms < 0:
            raise UsageError(f"a timestamp of {timestamp_ms} ms is not possible")
        partition = self._partitions.get(where)
        if partition is not None and (batch := partition.open) is not None:
            appended = batch.builder.append(batch.count, timestamp_ms, key, value, headers)
            if appended is not None:
                batch.count += 1
                self._buffered += appended.size
                return self._buffered > self._buffer_bytes
        return self._append_to_new(where, partition, value, key, headers, timestamp_ms)

    def _append_to_new(
        self,
        where: TopicPartition,
        partition: PartitionQueue | None,
        value: bytes | None,
        key: bytes | None,
        headers: Headers,
        timestamp_ms: int | None,
    ) -> bool:
        settings = self._settings
        builder = batch_builder(
            transactional=self.identity.transactional_id is not None,
            max_bytes=settings.batch_bytes,
            compression=settings.compression,
        )
        # Raises for what is no record; nothing has changed then.
        builder.append(0, timestamp_ms, key, value, headers)
        if builder.size() > settings.request_bytes:
            raise RecordTooLargeError(
                f"the record needs {builder.size()} bytes, a request holds {settings.request_bytes}"
            )
        if partition is None:
            partition = self._add(where)
        full = partition.open is not None
        partition.close_open()
        now = self._loop.time()
        partition.open = Batch(builder, now + settings.delivery_timeout_ms / 1000)
        partition.opened_at = now
        self._active[partition] = None
        self._buffered += builder.size()
        if self.began_at is None:
            self.began_at = now
        if self._timer is None:
            self._look_later(now, partition.open.deadline)
        if full or not settings.linger_ms:
            self._schedule_pump()
        else:
            self._loop.call_later(settings.linger_ms / 1000, self._schedule_pump)
        return full or self._buffered > self._buffer_bytes

    def _add(self, where: TopicPartition) -> PartitionQueue:
        registered = self._register is None or where in self._registered
        transactional = self.identity.transactional_id is not None
        partition = self._partitions[where] = PartitionQueue(where, registered=registered, keeps_runs=transactional)
        if not registered and self._register is not None:
            self._register(where)
        return partition

    def future_of_last(self, where: TopicPartition) -> "asyncio.Future[RecordMetadata]":
        """Resolved when the record that has just been appended to this partition is acknowledged."""
        batch = self._partitions[where].open
        if batch is None:
            raise RuntimeError("nothing has just been appended")
        future: asyncio.Future[RecordMetadata] = self._loop.create_future()
        batch.waiting.append((batch.count - 1, future))
        return future

    @property
    def buffered_bytes(self) -> int:
        return self._buffered

    @property
    def record_bytes_max(self) -> int:
        return self._settings.request_bytes

    def count(self, where: TopicPartition) -> int:
        """How many records have been appended to this partition."""
        partition = self._partitions.get(where)
        return partition.count() if partition is not None else 0

    def offsets(self, where: TopicPartition, first: int) -> Iterator[int]:
        """See PartitionQueue.offsets()."""
        return self._partitions[where].offsets(first)

    async def written_up_to(self, where: TopicPartition, count: int) -> None:
        """Until so many records of this partition, from the first on, are acknowledged."""
        partition = self._partitions[where]
        while partition.written_count() < count:
            if self.error is not None:
                raise self.error
            await self._change()

    async def room(self) -> None:
        """Lets full batches leave, and waits while more is buffered than allowed."""
        await asyncio.sleep(0)
        while self._buffered > self._buffer_bytes and self.error is None:
            self._schedule_pump()
            await self._change()
        if self.error is not None:
            raise self.error

    def registered(self, partitions: frozenset[TopicPartition]) -> None:
        for where in partitions:
            if where in self._partitions:
                self._partitions[where].registered = True
        self._schedule_pump()

    def move(self, identity: Identity, registered: frozenset[TopicPartition] = frozenset()) -> None:
        """To another grant, before anything was sent under this one: partitions not `registered` there have to be."""
        self.identity = identity
        self._registered = registered
        for where, partition in self._partitions.items():
            partition.registered = self._register is None or where in registered
            if self._register is not None and not partition.registered:
                self._register(where)
        self._schedule_pump()

    # --- sending ----------------------------------------------------------------------------------------------------

    def _schedule_pump(self) -> None:
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Sends what can be sent: one batch per partition and request, a few requests per broker."""
        self._pump_scheduled = False
        while self.error is None and not self._refused:
            requests: dict[int, dict[PartitionQueue, Batch]] = {}
            sizes: dict[int, int] = {}
            for partition in list(self._active):
                node_id = self._sendable(partition)
                if node_id is None:
                    continue
                size = sizes.get(node_id, 0) + partition.next_size()
                if node_id in requests and size > self._settings.request_bytes:
                    continue
                sizes[node_id] = size
                requests.setdefault(node_id, {})[partition] = partition.take()
                # Behind the others, so that each gets its turn.
                del self._active[partition]
                if partition.is_waiting:
                    self._active[partition] = None
            if not requests:
                return
            self.has_sent = True
            for node_id, batches in requests.items():
                self._send(node_id, batches)

    def _sendable(self, partition: PartitionQueue) -> int | None:
        """The broker that its next batch can be sent to now."""
        settings = self._settings
        if not partition.registered or not partition.may_fly(settings.in_flight_max):
            return None
        if not partition.ready and not self._is_due(partition):
            return None
        if partition.retry_at and partition.retry_at > self._loop.time() + EARLY_S:
            return None
        node_id = self._wire.leader_id(partition.where)
        if node_id is None:
            partition.problem = "it has no leader"
            self._retry_later(partition)
            return None
        if self._under_way.count(node_id) >= settings.in_flight_max:
            return None
        return node_id

    def _is_due(self, partition: PartitionQueue) -> bool:
        settings = self._settings
        if self._flushing or not settings.linger_ms or self._buffered > self._buffer_bytes:
            return True
        return self._loop.time() - partition.opened_at >= settings.linger_ms / 1000 - EARLY_S

    def _send(self, node_id: int, batches: dict[PartitionQueue, Batch]) -> None:
        """Written at once where that is possible: the broker works while others of this process fill their batches."""
        identity = self.identity
        try:
            sent = asyncio.ensure_future(
                self._wire.produce(
                    node_id,
                    {partition.where: partition.build(batch, identity) for partition, batch in batches.items()},
                    transactional_id=identity.transactional_id,
                    timeout_ms=self._settings.request_timeout_ms,
                    acks=self._settings.acks,
                )
            )
        except Exception as error:  # noqa: BLE001 - as in _received
            sent = self._loop.create_future()
            sent.set_exception(error)
        self._under_way.add(sent, node_id, batches, self._loop.time())
        sent.add_done_callback(self._received)

    def _received(self, received: Answer) -> None:
        sent = self._under_way.take(received)
        if sent is None or received.cancelled():
            return
        answer: dict[TopicPartition, Appended] = {}
        problem = ""
        try:
            answer = received.result()
        except OutcomeUnknownError as error:
            problem = str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody must wait for these batches for ever
            self.fail(not_written(repr(error), error))
        self._under_way.learn(sent, answer)
        for partition, batch in sent.batches.items():
            self._answered(partition, batch, answer.get(partition.where), problem)
        self._changed.set()
        self._schedule_pump()

    def _answered(self, partition: PartitionQueue, batch: Batch, appended: Appended | None, problem: str) -> None:
        if appended is not None and appended.error is ErrorCode.NONE:
            partition.landed(batch, appended.base_offset)
            self._buffered -= batch.size
        elif self.error is not None:
            partition.came_back(batch)
        elif appended is None or self._is_temporary(partition, batch, appended.error):
            partition.came_back(batch)
            partition.problem = problem if appended is None else appended.error.name
            self._active[partition] = None
            self._retry_later(partition)
        else:
            partition.came_back(batch)
            self._refuse(partition.where, batch, appended)

    def _is_temporary(self, partition: PartitionQueue, batch: Batch, error: ErrorCode) -> bool:
        if error is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER:
            return partition.is_behind_another(batch)
        return error.retriable

    def _retry_later(self, partition: PartitionQueue) -> None:
        """After a pause, at whichever broker leads the partition then."""
        partition.pause_s = min(max(partition.pause_s * 2, RETRY_FIRST_S), RETRY_MAX_S)
        partition.retry_at = self._loop.time() + partition.pause_s
        self._loop.call_later(partition.pause_s, self._schedule_pump)
        self._ask_who_leads([partition])

    def _ask_who_leads(self, partitions: Iterable[PartitionQueue]) -> None:
        refreshing = bool(self._stale)
        self._stale.update(partition.where.topic for partition in partitions)
        if not refreshing:
            self._start(self._refresh())

    async def _refresh(self) -> None:
        while self._stale:
            topics = frozenset(self._stale)
            try:
                # Also of other topics: whatever has happened to one leader, the next transaction may write there.
                await self._wire.metadata(topics | self._wire.topics, timeout_ms=METADATA_TIMEOUT_MS)
                for node_id, batches, _ in self._under_way.give_up_moved(self._loop.time()):
                    for partition, batch in batches.items():
                        self._answered(partition, batch, None, f"broker {node_id} does not answer")
            except OutcomeUnknownError:
                await asyncio.sleep(RETRY_MAX_S)
            except WireError as error:
                self.fail(not_written(str(error), error))
            self._stale -= topics
        self._schedule_pump()

    def _refuse(self, where: TopicPartition, batch: Batch, appended: Appended) -> None:
        error = refused(where, appended, len(batch.data or b""))
        if appended.error in FENCED and self._explain is not None:
            if not self._refused:
                self._refused = True
                self._start(self._fail_explained(error, self._explain))
        else:
            self.fail(error)

    async def _fail_explained(
        self, error: OnceboxError, explain: Callable[[OnceboxError], Awaitable[OnceboxError]]
    ) -> None:
        with suppress(OnceboxError):
            error = await explain(error)
        self.fail(error)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- ending -----------------------------------------------------------------------------------------------------

    def fail(self, error: OnceboxError) -> None:
        """Nothing more can be written; whoever waits is told."""
        if self.error is None:
            self.error = error
            if self.identity.transactional_id is not None:
                error.about(self.identity.transactional_id, self.identity.number)
            for partition in self._partitions.values():
                for batch in partition.outstanding():
                    batch.fail(error)
            self._changed.set()

    def _look_later(self, now: float, deadline: float) -> None:
        """For what has waited too long, and for answers that are overdue."""
        self._timer = self._loop.call_at(min(deadline, now + LOOK_S), self._look)

    def _look(self) -> None:
        self._timer = None
        waiting = [
            (batch.deadline, partition) for partition in self._partitions.values() for batch in partition.outstanding()
        ]
        if not waiting or self.error is not None:
            return
        deadline, partition = min(waiting, key=itemgetter(0))
        if deadline > (now := self._loop.time()):
            if silent := self._under_way.doubt_overdue(now):
                self._ask_who_leads(silent)
            self._look_later(now, deadline)
            return
        problem = partition.problem
        if not problem:
            problem = "no answer" if partition.registered else "the coordinator has not registered the partition"
        self.fail(overdue(partition.where, self._settings.delivery_timeout_ms, problem))

    async def flush(self) -> None:
        """Until every record is acknowledged, or the error that prevents it."""
        self._flushing += 1
        try:
            self._pump()
            while self.error is None and not all(partition.is_idle for partition in self._partitions.values()):
                await self._change()
        finally:
            self._flushing -= 1
        if self.error is not None:
            raise self.error

    async def close(self, error: OnceboxError) -> None:
        """Drops what is buffered and gives up what is under way: brokers refuse what arrives after the marker."""
        self.fail(error)
        self.release()
        waiting = [*self._tasks, *self._under_way]
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    def release(self) -> None:
        """After a flush: nothing will be written any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def let_go(self) -> None:
        """Its transaction has ended and hears of nothing any more: else the two would keep each other in memory until
        a search for garbage, which costs a busy process more than a commit does.
        """
        self._register, self._explain = _unheard, None

    def written(self) -> list[transaction_pb2.Written]:
        return [partition.written() for partition in self._partitions.values() if partition.runs]

    @property
    def partitions(self) -> frozenset[TopicPartition]:
        return frozenset(self._partitions)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def _unheard(_where: TopicPartition) -> None:
    """Nothing is registered for a transaction that has ended, so nothing more is sent."""
