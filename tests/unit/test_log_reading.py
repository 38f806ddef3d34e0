"""Reading the log with consumers that stall, or are given up while a thread reads with them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from coordinator import feed
from coordinator.log import reading
from coordinator.log.consumer import ReadError, StalledError
from coordinator.log.kafka import KafkaStore
from coordinator.log.port import Kind, Stored
from oncebox.v1 import manifest_pb2
from oncebox.wire import KafkaSettings


class Consumer:
    """Knows whether it was closed, and whether somebody was reading then."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.reading = threading.Lock()
        self.closed = threading.Event()
        self.closed_while_reading = False

    def close(self) -> None:
        self.closed_while_reading = self.reading.locked()
        self.closed.set()


@pytest.fixture
def consumers(monkeypatch: pytest.MonkeyPatch) -> list[Consumer]:
    opened: list[Consumer] = []

    def open_consumer(_config: object, _topic: str, _partition: int, offset_first: int) -> Consumer:
        opened.append(Consumer(offset_first))
        return opened[-1]

    monkeypatch.setattr(reading, "open_consumer", open_consumer)
    return opened


@pytest.fixture
def store() -> Iterator[KafkaStore]:
    unused: Any = None
    store = KafkaStore(unused, KafkaSettings(bootstrap_servers="nowhere:1"), log_topic="log", feed_topic="feed")
    yield store
    asyncio.run(store.close())


async def read(store: KafkaStore, offset_first: int, offset_next: int | None) -> list[int]:
    chunks = store.read(Kind.LOG, 0, offset_first, offset_next)
    return [entry.offset async for chunk in chunks for entry in chunk]


async def test_a_stalled_consumer_is_replaced_where_it_was(
    store: KafkaStore, consumers: list[Consumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_chunk(consumer: Consumer, position: int, _end: int, _timeout_s: float) -> tuple[int, list[Stored]]:
        if consumer.position == 0 and position == 2:
            raise StalledError("nothing came")
        return position + 1, [Stored(position, b"k", b"v")]

    monkeypatch.setattr(reading, "read_chunk", read_chunk)
    assert await read(store, 0, 5) == [0, 1, 2, 3, 4]
    assert [consumer.position for consumer in consumers] == [0, 2]
    assert all(consumer.closed.wait(60) for consumer in consumers)


async def test_a_log_that_stays_silent_is_an_error(
    store: KafkaStore, consumers: list[Consumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_chunk(*_: object) -> None:
        raise StalledError("nothing came")

    monkeypatch.setattr(reading, "read_chunk", read_chunk)
    with pytest.raises(StalledError):
        await read(store, 0, 5)
    assert len(consumers) == reading.STALLS_MAX


async def test_what_was_cut_off_before_it_was_acknowledged_is_not_waited_for(
    store: KafkaStore, consumers: list[Consumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_chunk(_consumer: Consumer, position: int, _end: int, _timeout_s: float) -> tuple[int, list[Stored]]:
        if position == 3:
            raise StalledError("nothing came")
        return position + 1, [Stored(position, b"k", b"v")]

    ends = iter([{0: 5}, {0: 4}, {0: 3}])

    async def ends_of(*_: object) -> dict[int, int]:
        return next(ends)

    monkeypatch.setattr(reading, "read_chunk", read_chunk)
    monkeypatch.setattr(reading, "ends_of", ends_of)
    assert await read(store, 0, None) == [0, 1, 2]
    assert len(consumers) == 2


async def test_an_end_that_too_few_brokers_tell_is_an_error(store: KafkaStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ends_of(*_: object) -> None:
        return None

    monkeypatch.setattr(reading, "ends_of", ends_of)
    with pytest.raises(ReadError, match="too few of its brokers answer"):
        await read(store, 0, None)


async def test_who_gives_up_does_not_close_what_is_being_read(
    store: KafkaStore, consumers: list[Consumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def read_chunk(consumer: Consumer, position: int, _end: int, _timeout_s: float) -> tuple[int, list[Stored]]:
        with consumer.reading:
            begun.set()
            go_on.wait(60)
        return position + 1, []

    monkeypatch.setattr(reading, "read_chunk", read_chunk)
    task = asyncio.create_task(read(store, 0, 5))
    await asyncio.to_thread(begun.wait, 60)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not consumers[0].closed.is_set()
    go_on.set()
    assert await asyncio.to_thread(consumers[0].closed.wait, 60)
    assert not consumers[0].closed_while_reading


async def test_who_looks_something_up_does_not_keep_a_take_over_from_reading(
    store: KafkaStore, consumers: list[Consumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def read_chunk(_consumer: Consumer, position: int, end: int, _timeout_s: float) -> tuple[int, list[Stored]]:
        if end == 1:
            go_on.wait(30)
        return position + 1, [Stored(position, b"k", b"v")]

    async def ends_of(*_: object) -> dict[int, int]:
        return {0: 1}

    monkeypatch.setattr(reading, "read_chunk", read_chunk)
    monkeypatch.setattr(reading, "ends_of", ends_of)
    unused: Any = None
    settings = KafkaSettings(bootstrap_servers="nowhere:1")
    reader = reading.KafkaReader(unused, settings, {Kind.LOG: "log", Kind.FEED: "feed"}, threads=2)
    lookups = feed.Lookups(reader, 1)
    asked = [asyncio.ensure_future(lookups.find_outcome(0, "id", 1)) for _ in range(20)]
    async with asyncio.timeout(60):
        while len(consumers) < 2:  # noqa: ASYNC110 - threads open them
            await asyncio.sleep(0.001)
        assert await read(store, 0, 5) == [0, 1, 2, 3, 4]
    # However many ask, few consumers are open.
    assert len(consumers) <= 1 + feed.LOOKUPS_MAX
    go_on.set()
    assert await asyncio.gather(*asked) == [None] * 20
    reader.close()


class Feed:
    """Manifests of one id, each in a chunk of its own."""

    def __init__(self, *numbers: int) -> None:
        manifests = [manifest_pb2.Manifest(transactional_id="id", number=number) for number in numbers]
        self._values = [manifest_pb2.FeedRecord(version=1, manifest=each).SerializeToString() for each in manifests]
        self.read_count = 0

    async def read(self, *_: object) -> AsyncIterator[list[Stored]]:
        for offset, value in enumerate(self._values):
            self.read_count += 1
            yield [Stored(offset, b"other", value), Stored(offset, b"id", value)]


async def test_a_lookup_reads_no_further_than_it_must() -> None:
    stored = Feed(1, 3, 4, 6, 7, 8)
    lookups = feed.Lookups(stored, 1)
    found = await lookups.find_outcome(0, "id", 3)
    assert found is not None
    assert (found.grant.number, stored.read_count) == (3, 2)
    assert await lookups.find_outcome(0, "id", 5) is None
    assert stored.read_count == 2 + 4
    assert await lookups.find_outcome(0, "id", 9) is None
