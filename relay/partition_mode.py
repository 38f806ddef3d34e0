"""Partition mode: each partition in offset order, shared among processes by a consumer group.

The group only says who should read what; who may write is decided by each position's fence. Kafka is read and rows are
made in this thread, while the database works on the batch before in another. Blocking.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from oncebox.reader.source import record_of
from oncebox.settings import kafka_settings
from oncebox.wire import FETCH_BACKOFF_MS, librdkafka_config
from relay.database import check_same
from relay.kafka import KafkaAdmin, Place, Topics
from relay.plan import Singles
from relay.positions import PRUNE_S, OwnPartitions, begin, freed, overtaken_by_retention, prune
from relay.queries import query
from relay.types import FencedError, RelayError
from relay.writer import Writer

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from oncebox.reader import Record
    from relay.config import RelaySettings
    from relay.status import Status
    from relay.writer import Prepared

POLL_S = 0.1
CONSUME_MAX = 5_000
LOOK_S = 1.0
# Positions alone (nothing but markers was read) are not worth a commit each.
IDLE_COMMIT_S = 1.0
QUEUE_KBYTES = 16 * 1024
# So long at most until partitions that were added are found.
METADATA_REFRESH_MS = 30_000

# The next offset, and the newest record's timestamp.
Ends = dict[Place, tuple[int, int | None]]

log = logging.getLogger(__name__)


class PartitionSession:
    """From one connection to its end. Whatever happens, the next session goes on from what the database says."""

    def __init__(self, settings: RelaySettings, instance: str, status: Status, stop: threading.Event) -> None:
        self._settings = settings
        self._status = status
        self._stop = stop
        self._kafka = kafka_settings(settings.kafka, client_id=f"oncebox-relay-{settings.name}")
        self._own = OwnPartitions(settings.name, instance)
        self._writer = Writer(settings, instance, status)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="relay-writer")
        self._writing: Future[None] | None = None
        self._records: list[Record] = []
        self._bytes = 0
        self._ends: Ends = {}
        self._lost = self._is_over = False
        # Assigned since the last look at messages.
        self._fresh: set[Place] = set()
        self._pruned_at = self._told_at = 0.0
        self._paused: set[Place] = set()
        self._looked_at = 0.0
        self._committed_at = 0.0

    def run(self) -> None:
        settings = self._settings
        admin = KafkaAdmin(self._kafka)
        self._topics = admin.topics(settings.topics)
        self._sources = begin(self._writer.connection, settings, admin, self._topics)
        self._admin = admin
        self._writer.begin(self._sources, self._own.high_offsets)
        config: dict[str, Any] = librdkafka_config(self._kafka) | {
            "group.id": f"oncebox-relay-{settings.name}",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": settings.session_ms,
            "heartbeat.interval.ms": settings.session_ms // 4,
            "max.poll.interval.ms": max(settings.session_ms, settings.statement_timeout_ms) + 60_000,
            "queued.max.messages.kbytes": QUEUE_KBYTES,
            "fetch.queue.backoff.ms": FETCH_BACKOFF_MS,
            "topic.metadata.refresh.interval.ms": METADATA_REFRESH_MS,
            "allow.auto.create.topics": False,
        }
        self._consumer = Consumer(config, logger=log)
        try:
            # Before partitions come: nothing is read of them where somebody has paused the relay.
            self._status.turn("PAUSED" if self._is_paused() else "RUNNING")
            self._consumer.subscribe(
                settings.topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._were_lost
            )
            while not self._stop.is_set():
                self._step()
            self._drop()
            self._finish()
            self._own.release(self._writer.connection, list(self._own.held))
        finally:
            self._is_over = True
            self._stop_writing()
            self._consumer.close()
            self._executor.shutdown()
            self._writer.close()

    # --- one step ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._read()
        if self._lost:
            raise FencedError("the group has given this process's partitions to others")
        limits = self._settings.limits
        is_full = len(self._records) >= limits.batch_rows or self._bytes >= limits.batch_bytes
        if self._writing is not None and self._writing.done():
            self._finish()
        if self._writing is not None:
            if is_full:
                # Rows are made while the batch before is still being written.
                batch = self._prepare()
                self._finish()
                # While the database is what we wait for, the writer is idle only now.
                self._look_now_and_then()
                self._write(*batch)
        else:
            self._look_now_and_then()
            if self._records or (self._ends and time.monotonic() > self._committed_at + IDLE_COMMIT_S):
                self._write(*self._prepare())

    def _read(self) -> None:
        consumer = self._consumer
        first = consumer.poll(POLL_S if not self._records and self._writing is None else 0.005)
        if first is None:
            return
        self._fresh.clear()
        messages = [first, *consumer.consume(CONSUME_MAX, timeout=0)]
        if self._fresh:
            # Assigned while we were reading: what we hold of them may be from before. They are read again.
            messages = [each for each in messages if (each.topic(), each.partition()) not in self._fresh]
            self._read_again(self._fresh)
        records = [record_of(message) for message in messages if message.error() is None]
        lasts = {(record.topic, record.partition): record for record in records}
        if not lasts.keys() <= self._own.held.keys():
            records = [record for record in records if (record.topic, record.partition) in self._own.held]
        self._records += records
        self._bytes += sum([len(record.value or b"") for record in records])
        for place in lasts.keys() & self._own.held.keys():
            self._ends[place] = (lasts[place].offset + 1, lasts[place].timestamp_ms)
        for message in messages:
            error = message.error()
            if error is not None:
                self._read_event(message, error)

    def _read_again(self, places: set[Place]) -> None:
        self._consumer.incremental_unassign(_native(places))
        again = _native(places)
        for each in again:
            each.offset = self._own.held[each.topic, each.partition].next_offset
        self._consumer.incremental_assign(again)
        self._paused -= places
        self._looked_at = 0.0

    def _read_event(self, message: Any, error: Any) -> None:
        place = (message.topic(), message.partition())
        if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the library's name for it
            held = self._own.held.get(place)
            # Past markers and what was aborted.
            at, timestamp_ms = self._ends.get(place, (held.next_offset if held else 0, None))
            if held is not None and message.offset() > at:
                self._ends[place] = (message.offset(), timestamp_ms)
            return
        if error.code() == KafkaError._AUTO_OFFSET_RESET:  # noqa: SLF001
            # (Or it is another topic of that name, which is shorter.)
            check_same(self._topics.ids, self._admin.topics(self._settings.topics).ids)
            raise overtaken_by_retention(place, error.str())
        if error.code() in {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED}:
            raise RelayError(f"Kafka refuses: {error.str()}")
        if error.fatal() or not error.retriable():
            raise KafkaException(error)
        log.warning("%s", error.str())

    def _prepare(self) -> tuple[Prepared, Ends, Callable[[], Topics]]:
        records, ends = self._records, self._ends
        self._drop()
        asked = self._admin.ask_topics(self._settings.topics)
        return self._writer.prepare(Singles(records)), ends, asked

    def _write(self, prepared: Prepared, ends: Ends, asked: Callable[[], Topics]) -> None:
        """Begins to. No other batch is being written."""

        def write() -> None:
            check_same(self._topics.ids, asked().ids)
            if prepared.units:
                self._writer.write(prepared, lambda connection: self._own.save(connection, ends))
            else:
                with self._writer.connection.transaction():
                    self._own.save(self._writer.connection, ends)
            self._own.saved(ends)

        self._committed_at = time.monotonic()
        self._writing = self._executor.submit(write)

    def _drop(self) -> None:
        self._records, self._bytes, self._ends = [], 0, {}

    def _finish(self) -> None:
        """Waits for the batch that is being written; its failure is ours."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
            self._tell_group()

    def _tell_group(self) -> None:
        """For tools that show lag; nobody here reads it back."""
        now = time.monotonic()
        if self._own.held and now > self._told_at + LOOK_S:
            self._told_at = now
            offsets = _native(set(self._own.held))
            for each in offsets:
                each.offset = self._own.held[each.topic, each.partition].next_offset
            with suppress(KafkaException):
                self._consumer.commit(offsets=offsets, asynchronous=True)

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.exception()

    # --- now and then -----------------------------------------------------------------------------------------------

    def _look_now_and_then(self) -> None:
        if time.monotonic() > self._looked_at + LOOK_S:
            self._looked_at = time.monotonic()
            self._look()

    def _is_paused(self) -> bool:
        row = self._writer.connection.execute(query("is_paused"), {"relay": self._settings.name}).fetchone()
        return row is not None and bool(row[0])

    def _look(self) -> None:
        """Pause and resume, partitions that wait, letters to settle. The writer is idle."""
        connection = self._writer.connection
        self._own.check(connection)
        is_paused = self._is_paused()
        if is_paused != (self._status.state == "PAUSED"):
            self._status.turn("PAUSED" if is_paused else "RUNNING")
        waits = {held.source: held.waits_for for held in self._own.held.values() if held.waits_for}
        over = freed(connection, self._settings.name, waits)
        for held in self._own.held.values():
            if held.source in over:
                held.waits_for = {}
        if not is_paused:
            # After that: what others have parked of those before has to be known when a partition waits no longer.
            self._writer.settle({held.source for held in self._own.held.values()}, self._own.bind)
        waiting = {place for place, held in self._own.held.items() if held.waits_for}
        self._hold_back(set(self._own.held) if is_paused else waiting)
        if time.monotonic() > self._pruned_at + PRUNE_S:
            self._pruned_at = time.monotonic()
            prune(connection, self._admin, {place: held.source for place, held in self._own.held.items()})

    def _hold_back(self, places: set[Place]) -> None:
        if places - self._paused:
            self._consumer.pause(_native(places - self._paused))
        if (self._paused - places) & self._own.held.keys():
            self._consumer.resume(_native((self._paused - places) & self._own.held.keys()))
        self._paused = places & self._own.held.keys()

    # --- what the group says ----------------------------------------------------------------------------------------

    def _assigned(self, consumer: Any, partitions: Sequence[Any]) -> None:
        places = [(each.topic, each.partition) for each in partitions]
        self._finish()
        connection = self._writer.connection
        if any(place not in self._sources for place in places):
            found = self._admin.topics(self._settings.topics)
            check_same(self._topics.ids, found.ids)
            self._topics = found
            self._sources |= begin(connection, self._settings, self._admin, self._topics)
        self._own.take(connection, self._sources, places)
        self._writer.load_holds()
        self._writer.load_letters_read_again()
        for each in partitions:
            each.offset = self._own.held[each.topic, each.partition].next_offset
        consumer.incremental_assign(partitions)
        self._fresh |= set(places)
        self._looked_at = 0.0
        self._hold_back(self._paused | {place for place in places if self._own.held[place].waits_for})
        if self._status.state == "PAUSED":
            self._hold_back(set(self._own.held))
        log.info("took over %s", ", ".join(f"{topic}:{partition}" for topic, partition in places) or "nothing")

    def _revoked(self, consumer: Any, partitions: Sequence[Any]) -> None:
        if self._is_over:
            return
        places = [(each.topic, each.partition) for each in partitions]
        self._finish()
        if (self._records or self._ends) and not self._stop.is_set():
            self._write(*self._prepare())
            self._finish()
        self._own.release(self._writer.connection, places)
        self._paused -= set(places)
        consumer.incremental_unassign(partitions)

    def _were_lost(self, _consumer: Any, _partitions: Sequence[Any]) -> None:
        self._lost = True


def _native(places: set[Place]) -> list[Any]:
    return [TopicPartition(topic, partition) for topic, partition in places]
