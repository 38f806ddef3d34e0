"""Whole committed transactions for code without asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from oncebox.errors import ClosedError
from oncebox.loop_thread import THREAD
from oncebox.reader.reader import FEED_TOPIC
from oncebox.reader.reader import read_transactions as _read_transactions

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine, Mapping

    from oncebox.reader.reader import TransactionReader as _Reader
    from oncebox.reader.types import CommittedTransaction, Position
    from oncebox.wire import KafkaSettings, TopicPartition

Result = TypeVar("Result")


def read_transactions(
    topics: Collection[str] | str,
    kafka: KafkaSettings | str,
    *,
    start: Position | Literal["earliest", "latest"] = "earliest",
    until_end: bool = False,
    feed_topic: str = FEED_TOPIC,
    buffer_bytes: int = 64 * 1024 * 1024,
    held_back: Mapping[TopicPartition, Mapping[TopicPartition, int]] | None = None,
) -> TransactionReader:
    """A reader to be used as context manager and iterator. See oncebox.read_transactions."""
    return TransactionReader(
        _read_transactions(
            topics,
            kafka,
            start=start,
            until_end=until_end,
            feed_topic=feed_topic,
            buffer_bytes=buffer_bytes,
            held_back=held_back,
        )
    )


class TransactionReader:
    def __init__(self, inner: _Reader) -> None:
        self._inner = inner
        self._is_open = False

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        THREAD.enter()
        try:
            THREAD.run(self._inner.open())
        except BaseException:
            THREAD.leave()
            raise
        self._is_open = True

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            try:
                THREAD.run(self._inner.close())
            finally:
                THREAD.leave()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> CommittedTransaction:
        async def following() -> CommittedTransaction | None:
            return await anext(self._inner, None)

        if (found := self._run(following())) is None:
            raise StopIteration
        return found

    def position(self) -> Position:
        """Behind the transaction that was handed out last: store it together with what became of that."""

        async def position() -> Position:
            return self._inner.position()

        return self._run(position())

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        if not self._is_open:
            work.close()
            raise ClosedError("the reader is not open")
        return THREAD.run(work)
