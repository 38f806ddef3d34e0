"""The producer and the reader for code without asyncio: the same names, each call returns when it is done.

All of a process share one background thread with an event loop, which ends with the last of them. A producer may be
used by several threads, a transaction or a reader by one.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from oncebox import producer as _asynchronous
from oncebox.blocking_reader import TransactionReader, read_transactions
from oncebox.claim import ProducerSettings
from oncebox.errors import ClosedError, OnceboxError
from oncebox.loop_thread import THREAD
from oncebox.session import OpenChannel, open_plain_channel

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from oncebox import bulk as _bulk
    from oncebox.bulk import Outgoing
    from oncebox.group_offsets import GroupMetadata
    from oncebox.partition_queue import RecordMetadata
    from oncebox.partitioner import Partitioner
    from oncebox.transaction import State, TransactionName
    from oncebox.v1 import transaction_pb2
    from oncebox.wire import CommittedOffset, GroupMember, KafkaSettings, TopicPartition

__all__ = ["Producer", "ProducerSettings", "Transaction", "TransactionReader", "read_transactions"]

Result = TypeVar("Result")


class Producer:
    """Use as a context manager, or call start() and stop(). See oncebox.Producer."""

    def __init__(
        self,
        kafka: KafkaSettings | str,
        coordinators: Sequence[str] | str = (),
        *,
        transactional_id: str | None = None,
        settings: ProducerSettings | None = None,
        partitioner: Partitioner | None = None,
        open_channel: OpenChannel = open_plain_channel,
    ) -> None:
        self._inner = _asynchronous.Producer(
            kafka,
            coordinators,
            transactional_id=transactional_id,
            settings=settings,
            partitioner=partitioner,
            open_channel=open_channel,
        )
        self._is_running = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        THREAD.enter()
        try:
            THREAD.run(self._inner.start())
        except BaseException:
            THREAD.leave()
            raise
        self._is_running = True

    def stop(self) -> None:
        if self._is_running:
            self._is_running = False
            try:
                THREAD.run(self._inner.stop())
            finally:
                THREAD.leave()

    @contextmanager
    def transaction(
        self, *, metadata: bytes = b"", wait: Literal["complete", "decided"] = "complete"
    ) -> Iterator[Transaction]:
        """Commits on leaving, aborts on an exception; what has been prepared stays so on an exception."""
        transaction = self.begin()
        transaction.metadata = metadata
        try:
            yield transaction
            if transaction.is_open:
                transaction.commit(wait=wait)
        except BaseException:
            if transaction.is_unprepared:
                with suppress(OnceboxError):
                    transaction.abort()
            raise

    def begin(self) -> Transaction:
        return Transaction(self._run(self._inner.begin()), self._run)

    def outcome_of(self, number: int) -> transaction_pb2.Outcome:
        return self._run(self._inner.outcome_of(number))

    @property
    def prepared(self) -> Transaction | None:
        inner = self._inner.prepared
        return None if inner is None else Transaction(inner, self._run)

    @property
    def resume_token(self) -> bytes:
        return self._inner.resume_token

    @property
    def transactional_id(self) -> str | None:
        return self._inner.transactional_id

    @property
    def instance(self) -> str:
        return self._inner.instance

    def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> TopicPartition:
        return self._run(
            self._inner.send(topic, value, key=key, headers=headers, partition=partition, timestamp_ms=timestamp_ms)
        )

    def send_and_wait(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> RecordMetadata:
        return self._run(
            self._inner.send_and_wait(
                topic, value, key=key, headers=headers, partition=partition, timestamp_ms=timestamp_ms
            )
        )

    def flush(self) -> None:
        self._run(self._inner.flush())

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        if not self._is_running:
            work.close()
            raise ClosedError("the producer is not running")
        return THREAD.run(work)


class Receipt:
    """See oncebox.bulk.Receipt."""

    def __init__(self, inner: _bulk.Receipt, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self.places = inner.places
        self._inner = inner
        self._run = run

    def metadata(self) -> list[RecordMetadata]:
        found: list[RecordMetadata] = self._run(self._inner.metadata())
        return found

    def offsets(self) -> list[RecordMetadata]:
        return self._inner.offsets()


class Transaction:
    """Made by Producer.begin() and Producer.transaction(). See oncebox.Transaction."""

    def __init__(self, inner: _asynchronous.Transaction, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._inner = inner
        self._run = run

    @property
    def number(self) -> int:
        return self._inner.number

    @property
    def name(self) -> TransactionName:
        return self._inner.name

    @property
    def state(self) -> State:
        return self._inner.state

    @property
    def is_open(self) -> bool:
        return self._inner.is_open

    @property
    def is_unprepared(self) -> bool:
        return self._inner.is_unprepared

    @property
    def is_empty(self) -> bool:
        return self._inner.is_empty

    @property
    def metadata(self) -> bytes:
        return self._inner.metadata

    @metadata.setter
    def metadata(self, metadata: bytes) -> None:
        self._inner.metadata = metadata

    def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> TopicPartition:
        where: TopicPartition = self._run(
            self._inner.send(topic, value, key=key, headers=headers, partition=partition, timestamp_ms=timestamp_ms)
        )
        return where

    def send_and_wait(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> RecordMetadata:
        written: RecordMetadata = self._run(
            self._inner.send_and_wait(
                topic, value, key=key, headers=headers, partition=partition, timestamp_ms=timestamp_ms
            )
        )
        return written

    def send_offsets(
        self,
        offsets: Mapping[TopicPartition, int | CommittedOffset],
        group: GroupMetadata | bytes | str,
        member: GroupMember | None = None,
    ) -> None:
        self._run(self._inner.send_offsets(offsets, group, member))

    def send_many(self, records: Sequence[Outgoing], *, wait_for_room: bool = True) -> Receipt:
        return Receipt(self._run(self._inner.send_many(records, wait_for_room=wait_for_room)), self._run)

    def flush(self) -> None:
        self._run(self._inner.flush())

    def prepare(self, *, metadata: bytes | None = None) -> TransactionName:
        name: TransactionName = self._run(self._inner.prepare(metadata=metadata))
        return name

    def commit(
        self, *, metadata: bytes | None = None, wait: Literal["complete", "decided"] = "complete"
    ) -> transaction_pb2.Outcome | None:
        outcome: transaction_pb2.Outcome | None = self._run(self._inner.commit(metadata=metadata, wait=wait))
        return outcome

    def commit_soon(
        self, *, metadata: bytes | None = None, wait: Literal["complete", "decided"] = "decided"
    ) -> Future[transaction_pb2.Outcome | None]:
        """Commits while the next transaction is begun and filled: ask for the result() before the one after that."""

        async def begin() -> asyncio.Task[transaction_pb2.Outcome | None]:
            return self._inner.commit_soon(metadata=metadata, wait=wait)

        async def end() -> transaction_pb2.Outcome | None:
            return await committing

        committing: asyncio.Task[transaction_pb2.Outcome | None] = self._run(begin())
        return THREAD.start(end())

    def abort(self) -> transaction_pb2.Outcome | None:
        outcome: transaction_pb2.Outcome | None = self._run(self._inner.abort())
        return outcome

    def outcome(self) -> transaction_pb2.Outcome:
        outcome: transaction_pb2.Outcome = self._run(self._inner.outcome())
        return outcome
