"""read_transactions(): an async iterator of whole committed transactions, and of records written without Oncebox.

Transactions of one transactional id come in their order; of two that meet on a partition, the one that is over there
before the other begins comes first, unless it is the other way round elsewhere. A position covers what was handed out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, Self

from google.protobuf.message import DecodeError

from oncebox.errors import RetriableError, UsageError
from oncebox.reader.assembly import Assembly
from oncebox.reader.ends import ENDS_VALID_S, ends_of
from oncebox.reader.express import Express
from oncebox.reader.lanes import Bulk
from oncebox.reader.source import ConsumerThread, by_partition, position_of, records_by_partition, topics_of
from oncebox.reader.starting import Start, starting
from oncebox.reader.types import CommittedTransaction, PartitionPosition, Position, ReadError
from oncebox.v1 import manifest_pb2
from oncebox.wire import KafkaSettings, TopicPartition, Wire

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
    from typing import Any

    from oncebox.reader.gathering import Gathering
    from oncebox.reader.types import Record

FEED_VERSION = 1
FEED_TOPIC = "oncebox.commits"
# Commits known ahead of their records; beyond it the feed is read only as far as records ask for it.
PENDING_MAX = 5_000
TOPICS_QUEUE_KBYTES = 16 * 1024
FEED_QUEUE_KBYTES = 4 * 1024
CHECK_PAUSE_S = 0.01
# The buffer is full, and nothing is taken for so long.
STALL_S = 1.0
# A transaction is worth being unloaded if it has this part of the buffer.
LARGE_SHARE = 4
# Partitions may be added to a topic.
DISCOVER_S = 30.0


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
    """A reader to be used as async context manager and async iterator.

    `until_end`: stop once all that was readable at the start has been handed out. `buffer_bytes` is what may wait for
    the reader; a transaction is held whole, unless parts of it are unloaded. `held_back`: partitions, and up to where
    others come before them.
    """
    settings = KafkaSettings(bootstrap_servers=kafka) if isinstance(kafka, str) else kafka
    names = frozenset({topics} if isinstance(topics, str) else topics)
    if not names or feed_topic in names:
        raise UsageError("name the topics to be read; the feed is not one of them")
    return TransactionReader(
        names,
        settings,
        start=start,
        until_end=until_end,
        feed_topic=feed_topic,
        buffer_bytes=buffer_bytes,
        held_back=held_back or {},
    )


class TransactionReader:
    def __init__(
        self,
        topics: frozenset[str],
        kafka: KafkaSettings,
        *,
        start: Position | Literal["earliest", "latest"],
        until_end: bool,
        feed_topic: str,
        buffer_bytes: int,
        held_back: Mapping[TopicPartition, Mapping[TopicPartition, int]],
    ) -> None:
        self._topics = topics
        self._feed_topic = feed_topic
        self._start_at = start
        self._until_end = until_end
        self._buffer_bytes = buffer_bytes
        self._held_back = held_back
        # To be set before it is opened, for take() alone: that gives many transactions as one then, where it can.
        self.in_bulk = False
        self._kafka = kafka
        self._wire = Wire(kafka)
        self._outbox: deque[tuple[Gathering | Bulk, int]] = deque()
        self._outbox_bytes = 0
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        # Not while a part that was unloaded is on its way to where it is kept.
        self._unloaded = asyncio.Event()
        self._unloaded.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._error: BaseException | None = None
        self._is_open = False
        self._start: Start
        self._assembly: Assembly | Express
        self._records: ConsumerThread
        self._feed: ConsumerThread
        self._paused: set[TopicPartition] = set()
        # A record that the reader's user cannot go on without.
        self._awaited: tuple[TopicPartition, int] | None = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> CommittedTransaction:
        if not self._is_open:
            await self.open()
        while not self._outbox:
            if self._error is not None:
                raise self._error
            if self._is_at_end():
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        item, size = self._outbox.popleft()
        if isinstance(item, Bulk):
            raise UsageError("this reader gives what it has read in bulk: use take()")
        self._handed_out(size)
        self._assembly.done(item)  # type: ignore[arg-type]
        transaction = item.transaction()
        item.forget()
        return transaction

    def _handed_out(self, size: int) -> None:
        self._outbox_bytes -= size
        self._room.set()

    def take(self, *, records_max: int, bytes_max: int) -> list[Gathering | Bulk]:
        """What is there already, without waiting: whole transactions up to about these limits (one at least), as they
        were gathered; to be told forget() when their records are in other hands. Those that only make sense together
        come together.
        """
        taken: list[Gathering | Bulk] = []
        records = size = 0
        while self._outbox:
            item, item_size = self._outbox[0]
            count = sum(map(len, item.records.values()))
            if taken and not item.is_joined and (records + count > records_max or size + item_size > bytes_max):
                break
            records += count
            size += item_size
            self._outbox.popleft()
            self._assembly.done(item)  # type: ignore[arg-type]
            taken.append(item)
        self._handed_out(size)
        if not taken and self._error is not None:
            raise self._error
        return taken

    async def wait(self, timeout_s: float) -> bool:
        """Whether there is something to take()."""
        if not self._outbox and self._error is None:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
        return bool(self._outbox) or self._error is not None

    def waiting(self, where: TopicPartition, below: int) -> Iterator[Record]:
        """Records of this partition that have been read and not handed out: all below this offset, and some above."""
        return self._assembly.waiting(where, below)

    def unload(self) -> CommittedTransaction | None:
        """Where records that wait for the rest of their transactions take too much memory: a part of the largest one,
        which is the caller's to keep from now on. The whole one will be without it, and tell so (`unloaded`). No more
        records are read until it is called again and gives nothing: so call it as long as it gives something.
        """
        part = None
        if sum(self._assembly.buffered_by_partition().values()) > self._buffer_bytes:
            part = self._exactly().unload(self._buffer_bytes // LARGE_SHARE)
        if part is None:
            self._unloaded.set()
        else:
            self._unloaded.clear()
        return part

    def first_unloaded(self, where: TopicPartition, below: int) -> int | None:
        """Where in this partition the first transaction begins that is not handed out and has been unloaded."""
        return None if isinstance(self._assembly, Express) else self._assembly.first_unloaded(where, below)

    async def wait_until_whole(self, where: TopicPartition, offset: int, timeout_s: float) -> bool:
        """Whether what this record belongs to can be taken, after all that comes before it."""
        if self._error is not None:
            raise self._error
        self._awaited = (where, offset)
        if not self._exactly().is_whole(where, offset):
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
        return self._exactly().is_whole(where, offset)

    async def feed_ends(self) -> Mapping[int, int] | None:
        """Of each partition of the feed: commits up to now stand before it. None: too few brokers answer."""
        return await ends_of(self._wire, self._feed_topic, self._start.feed)

    def has_read_feed(self, ends: Mapping[int, int]) -> bool:
        """Whether all commits before these ends are known."""
        return self._exactly().has_read_feed(ends)

    def mark(self) -> int:
        """For is_pending(): the commits that are known by now."""
        return self._exactly().newest_rank

    def is_pending(self, mark: int) -> bool:
        """Whether a commit that was known at the mark is not handed out."""
        return self._exactly().is_pending(mark)

    def position(self) -> Position:
        """Behind the transaction that was handed out last: store it together with what became of that."""
        return Position(
            feed=self._assembly.feed_positions(),
            partitions=self._assembly.positions(),
            topic_ids=self._assembly.topic_ids,
        )

    async def open(self) -> None:
        if self._is_open:
            raise UsageError("this reader is open already")
        try:
            self._start = start = await starting(
                self._wire, self._topics, self._feed_topic, self._start_at, until_end=self._until_end
            )
        except BaseException:
            await self._wire.close()
            raise
        self._is_open = True
        assembly = self._assembly = Assembly(start.partitions, start.feed, start.topic_ids)
        assembly.horizon_ms = start.horizon_ms
        for where, ends in self._held_back.items():
            assembly.hold_back(where, ends)
        self._hurry(assembly)
        self._records = ConsumerThread(self._kafka, queue_kbytes=TOPICS_QUEUE_KBYTES)
        self._feed = ConsumerThread(self._kafka, queue_kbytes=FEED_QUEUE_KBYTES)
        await self._records.assign({where: at.next_offset for where, at in start.partitions.items()})
        await self._feed.assign({TopicPartition(self._feed_topic, index): at for index, at in start.feed.items()})
        self._room.set()
        for work in (self._read_feed, self._read_records, self._check, self._discover):
            self._tasks.append(asyncio.get_running_loop().create_task(self._run(work)))

    async def close(self) -> None:
        if not self._is_open:
            return
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(self._records.close(), self._feed.close(), self._wire.close())
        self._error = self._error or UsageError("this reader is closed")
        self._changed.set()

    async def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the reader's user must hear of it
            self._error = self._error or error
            self._changed.set()

    # --- what is read -----------------------------------------------------------------------------------------------

    async def _read_records(self) -> None:
        is_stalled = False
        while True:
            if not self._room.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(0 if is_stalled else STALL_S):
                        await self._room.wait()
            is_stalled = not self._room.is_set()
            await self._follow()
            if is_stalled:
                exactly = self._exactly()
                needed = exactly.needed_for(*self._awaited) if self._awaited is not None else set()
                # Nothing is taken for long, maybe because something is waited for that is not whole: only that is read.
                await self._hold(set(exactly.partitions()), needed | exactly.needed())
            await self._unloaded.wait()
            messages = await self._records.poll()
            assembly = self._assembly
            for where, records, end in records_by_partition(messages):
                if records:
                    assembly.records(where, records)
                else:
                    assembly.position(where, end)
            self._advance()
            if not is_stalled:
                await self._balance()

    async def _read_feed(self) -> None:
        while True:
            while self._assembly.pending_count > PENDING_MAX and not self._assembly.has_undetermined:  # noqa: ASYNC110 - both change
                await asyncio.sleep(CHECK_PAUSE_S)
            polled = await self._feed.poll()
            assembly = self._assembly
            for where, messages in by_partition(polled):
                end = 0
                for message in messages:
                    at = position_of(message)
                    if at is None:
                        self._read_commit(where, message)
                        at = message.offset() + 1
                    end = max(end, at)
                assembly.feed_position(where.partition, end)
            self._advance()

    def _read_commit(self, where: TopicPartition, message: Any) -> None:
        if where.partition in self._start.cut_feed:
            self._start.cut_feed.discard(where.partition)
            exactly = self._exactly()
            exactly.horizon_ms = max(exactly.horizon_ms or 0, message.timestamp()[1])
        try:
            told = manifest_pb2.FeedRecord.FromString(message.value() or b"")
        except DecodeError as error:
            raise ReadError(f"{where.topic}:{where.partition} offset {message.offset()} cannot be read") from error
        if told.version > FEED_VERSION or not told.version:
            raise ReadError(f"the feed has version {told.version}, this process reads {FEED_VERSION}; upgrade it")
        if told.WhichOneof("record") == "manifest":
            self._assembly.manifest(where.partition, message.offset(), told.manifest)

    async def _check(self) -> None:
        """Settles what no commit covers: the feed's ends are taken after the record came (see assembly.py)."""
        loop = asyncio.get_running_loop()
        asked_at = 0.0
        while True:
            await asyncio.sleep(CHECK_PAUSE_S)
            # (Another that goes on in its place meanwhile asks anew.)
            assembly = self._assembly
            if assembly.wants_check:
                assembly.begin_check()
            elif not assembly.is_checking or loop.time() < asked_at + ENDS_VALID_S:
                continue
            asked_at = loop.time()
            ends = await self.feed_ends()
            if ends is None:
                assembly.drop_check()
            elif assembly.is_checking:
                # Else the ends that were asked for before have been reached meanwhile: these are of no later check.
                assembly.ends_known(ends)
                self._advance()

    async def _discover(self) -> None:
        """Partitions that were added, and topics that were deleted and made again."""
        while True:
            await asyncio.sleep(DISCOVER_S)
            with suppress(RetriableError):
                await self._look_at_topics()

    async def _look_at_topics(self) -> None:
        for topic, found in (await topics_of(self._wire, self._topics)).items():
            if found.topic_id is None or found.topic_id.hex != self._assembly.topic_ids[topic]:
                raise ReadError(f"the topic {topic!r} was deleted and made again: begin anew")
            for index in found.partitions:
                where = TopicPartition(topic, index)
                if not self._assembly.knows(where):
                    self._assembly.add_partition(where, PartitionPosition(next_offset=0))
                    await self._records.assign({where: 0})

    # --- what is whole ----------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        self._release()
        if not isinstance(self._assembly, Express):
            self._hurry(self._assembly)
        elif self._assembly.is_beyond:
            self._exactly()
        if self._outbox_bytes > self._buffer_bytes:
            self._room.clear()
        self._changed.set()

    def _release(self) -> None:
        for item in self._assembly.release():
            size = item.size()
            self._outbox.append((item, size))
            self._outbox_bytes += size

    def _hurry(self, assembly: Assembly) -> None:
        """Goes on the quick way, where nothing speaks against it."""
        if self.in_bulk and not self._outbox and not self._start.cut_feed:
            self._assembly = Express.after(assembly) or assembly

    def _exactly(self) -> Assembly:
        """Goes on one by one from here on. What was released and not taken is so again."""
        if isinstance(self._assembly, Express):
            self._assembly = self._assembly.hand_over()
            self._outbox.clear()
            self._outbox_bytes = 0
            self._release()
        return self._assembly

    async def _hold(self, held: set[TopicPartition], needed: set[TopicPartition]) -> None:
        """Reads no more of these for now, but for what is needed: of that it does again."""
        wanted, held = self._paused & needed, held - needed - self._paused
        if wanted:
            await self._records.resume(wanted)
        if held:
            await self._records.pause(held)
        self._paused = (self._paused | held) - wanted

    async def _follow(self) -> None:
        """What the assembly has learnt of partitions and topics, also of those where something is waited for."""
        assembly = self._assembly
        if assembly.new_partitions:
            new, assembly.new_partitions = assembly.new_partitions, set()
            await self._records.assign(dict.fromkeys(new, 0))
        if assembly.strange_topics:
            with suppress(RetriableError):
                # Commits to what the topic was before it was deleted and made again do not count, unless that is ours.
                await self._look_at_topics()
                assembly.strange_topics.clear()

    async def _balance(self) -> None:
        """Holds partitions back that run ahead of what others are waited for."""
        buffered = self._assembly.buffered_by_partition()
        total = sum(buffered.values())
        if self._paused and total < self._buffer_bytes // 2:
            paused, self._paused = self._paused, set()
            await self._records.resume(paused)
        elif self._paused or total > self._buffer_bytes:
            # What is held already may have become needed: a commit has come since.
            is_full = total > self._buffer_bytes
            ahead = {where for where, size in buffered.items() if is_full and size >= total / len(buffered)}
            await self._hold(ahead, self._exactly().needed())

    def _is_at_end(self) -> bool:
        if self._start.ends is None:
            return False
        positions = self._assembly.positions()
        return all(positions[where].next_offset >= end for where, end in self._start.ends.items())
