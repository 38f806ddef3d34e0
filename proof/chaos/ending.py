"""After the faults: everybody commits again, open questions are asked, all is read to its end. Each with a limit; what
does not come in its time is written down as stuck.
"""

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import psycopg
from aiokafka.errors import KafkaError as WireKafkaError
from confluent_kafka import OFFSET_BEGINNING, Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]
from psycopg import sql

from oncebox.errors import OnceboxError, OutcomeExpiredError
from oncebox.producer import Producer
from oncebox.v1 import transaction_pb2
from proof.chaos.book import Book, Operation
from proof.chaos.checks_outcomes import PROGRESS_S
from proof.chaos.client import SETTINGS
from proof.chaos.history import (
    ABORTED,
    COMMITTED,
    UNKNOWN,
    Commit,
    FinalCopies,
    FinalLog,
    FinalMarkers,
    FinalRecords,
    FinalRows,
    HeldBack,
    Invoke,
    Placed,
    Recorder,
    Row,
    Stuck,
    Told,
    decode,
    now_ns,
)
from proof.chaos.markers import endings
from proof.chaos.parts import LOG, Parts, until
from proof.chaos.watch import placed
from proof.chaos.workload import CIRCLE, COPIES, LISTS, PARTITIONS, TOPICS
from proof.faults.process import ProcessError

QUIET_S = 120.0
# Until all that is still to be copied and published has been.
STABLE_S = 5 * QUIET_S
STOP_S = 60.0
CHUNK = 500
# Of each transactional.id the newest ones are asked for once more, whether known or not.
ASKED_AGAIN = 100

T = TypeVar("T")


def await_commits(parts: Parts) -> None:
    """Every client commits something that it begins from here on; the checks tell who does not."""
    paths = {seat.name: parts.histories / f"{seat.name}.{seat.incarnation}.jsonl" for seat in parts.clients}
    waiting = {name: (path, path.stat().st_size if path.exists() else 0) for name, path in paths.items()}

    def all_commit() -> bool:
        for name, (path, start) in list(waiting.items()):
            if _commits_after(path, start):
                del waiting[name]
        return not waiting

    until(all_commit, PROGRESS_S)


def _commits_after(path: Path, start: int) -> bool:
    """Whether an operation is begun and committed in what the file has gained since it had `start` bytes."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        file.seek(start)
        lines = file.readlines()[1:]  # the first may be cut, and so may the last
    events = [decode(line.decode()) for line in lines if line.endswith(b"\n")]
    begun = {event.op for event in events if isinstance(event, Invoke)}
    return any(isinstance(event, Told) and event.outcome == COMMITTED and event.op in begun for event in events)


def stop_clients(parts: Parts, recorder: Recorder) -> None:
    for seat in parts.clients:
        try:
            code = seat.process.stop(timeout_s=STOP_S)
        except ProcessError as error:
            recorder.add(Stuck(at_ns=now_ns(), what=f"{seat.name} does not stop: {error}"))
            continue
        if code != 0:
            what = f"{seat.name} ended with {code}: {seat.process.log_tail(3)}"
            recorder.add(Stuck(at_ns=now_ns(), what=what))


def ask(parts: Parts, book: Book, recorder: Recorder) -> None:
    asyncio.run(_ask(parts, book, recorder))


async def _ask(parts: Parts, book: Book, recorder: Recorder) -> None:
    """What became of each transaction whose client could not tell, and once more of the newest."""
    by_id: dict[str, list[Operation]] = {}
    for operation in book.operations.values():
        if not _is_of_database(operation) and not any(told.unnumbered for _, told in operation.told):
            by_id.setdefault(operation.invoke.transactional_id, []).append(operation)
    for transactional_id, operations in by_id.items():
        wanted = {each.op: each for each in operations if each.outcome == UNKNOWN}
        wanted |= {each.op: each for each in operations[-ASKED_AGAIN:]}
        try:
            async with Producer(
                parts.servers, parts.addresses, transactional_id=transactional_id, settings=SETTINGS
            ) as producer:
                for operation in wanted.values():
                    await _ask_one(producer, operation, recorder)
        except OnceboxError as error:
            what = f"{transactional_id} cannot be asked for its outcomes: {error}"
            recorder.add(Stuck(at_ns=now_ns(), what=what))


async def _ask_one(producer: Producer, operation: Operation, recorder: Recorder) -> None:
    # The number may have changed between begin and commit: then the first one was never used.
    commit = operation.commit.event if operation.commit else None
    number = commit.number if isinstance(commit, Commit) else operation.invoke.number
    try:
        outcome = await producer.outcome_of(number)
    except OutcomeExpiredError:
        return  # an abort of long ago is in neither the log nor the feed: nothing more to learn
    results = {transaction_pb2.COMMITTED: COMMITTED, transaction_pb2.ABORTED: ABORTED}
    result = results.get(outcome.result, UNKNOWN)
    recorder.add(Told(at_ns=now_ns(), op=operation.op, outcome=result, by="whoever asked in the end"))


def ask_database(parts: Parts, book: Book, recorder: Recorder) -> int:
    """What became of the transactions of the outbox: those that were committed have left their rows; how many."""
    with psycopg.connect(parts.source_dsn) as connection:
        there = {row[0] for row in connection.execute("SELECT payload->>'op' FROM outbox")}
    for operation in filter(_is_of_database, book.operations.values()):
        outcome = COMMITTED if operation.op in there else ABORTED
        recorder.add(Told(at_ns=now_ns(), op=operation.op, outcome=outcome, by="the outbox in the end"))
    return len(there) * len(CIRCLE)


def _is_of_database(operation: Operation) -> bool:
    return operation.invoke.writes[0].topic in CIRCLE


def await_stable(parts: Parts, recorder: Recorder) -> None:
    """No transaction is open on any partition: the last stable offset is the end. Copiers and outbox relays may still
    have much to do, one transaction after the other: held back is what stands at one offset.
    """
    admin = AdminClient({"bootstrap.servers": parts.servers})
    # What is open, and since when its partition has stood there.
    held: dict[str, tuple[HeldBack, float]] = {}

    def is_over() -> bool:
        try:
            stable = _ends(admin, IsolationLevel.READ_COMMITTED)
            newest = _ends(admin, IsolationLevel.READ_UNCOMMITTED)
        except KafkaException:
            return False  # nobody answers just now
        now_s = time.monotonic()
        for name, at in stable.items():
            event = HeldBack(at_ns=now_ns(), partition=name, offset_stable=at, offset_next=newest[name])
            before = held.pop(name, None)
            if at != newest[name]:
                held[name] = (event, before[1] if before and before[0].offset_stable == at else now_s)
        return not held or any(now_s > since_s + QUIET_S for _, since_s in held.values())

    is_in_time = until(is_over, STABLE_S)
    if not is_in_time and not held:
        recorder.add(Stuck(at_ns=now_ns(), what=f"no broker told the ends of all partitions in {STABLE_S:.0f} s"))
    for event, since_s in held.values():
        if not is_in_time or time.monotonic() > since_s + QUIET_S:
            recorder.add(event)


def _ends(admin: AdminClient, isolation: IsolationLevel) -> dict[str, int]:
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    wanted = {TopicPartition(topic, number): latest for topic in (*TOPICS, COPIES) for number in range(PARTITIONS)}
    answers = admin.list_offsets(wanted, isolation_level=isolation, request_timeout=10)
    return {f"{where.topic}-{where.partition}": future.result().offset for where, future in answers.items()}


def read_topics(parts: Parts, wanted: int, recorder: Recorder) -> int:
    """Every committed record of every topic, by a stock consumer; how many items there are without the copies. Once
    `wanted` records of the outbox and a copy of each of the lists are there; else, when the time is up, what there is.
    """
    found: dict[str, list[Placed]] = {topic: [] for topic in (*TOPICS, COPIES)}
    ended: set[tuple[str | None, int | None]] = set()

    def is_all() -> bool:
        published = sum(len(found[topic]) for topic in CIRCLE)
        return len(ended) == len(places) and published >= wanted and len(found[COPIES]) >= len(found[LISTS])

    places = [TopicPartition(topic, number, OFFSET_BEGINNING) for topic in found for number in range(PARTITIONS)]
    deadline_s = time.monotonic() + QUIET_S
    consumer = _consumer(parts, "read_committed")
    try:
        consumer.assign(places)
        while not is_all() and time.monotonic() < deadline_s:
            for message in consumer.consume(CHUNK, 1.0):
                error = message.error()
                if error is None:
                    found[message.topic() or ""].append(placed(message))
                elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - librdkafka's name
                    ended.add((message.topic(), message.partition()))
    finally:
        consumer.close()
    if len(ended) < len(places):
        recorder.add(Stuck(at_ns=now_ns(), what=f"the topics were not read to their end in {QUIET_S:.0f} s"))
    copies = found.pop(COPIES)
    for chunk in _chunks([record for records in found.values() for record in records]):
        recorder.add(FinalRecords(at_ns=now_ns(), records=tuple(chunk)))
    for chunk in _chunks(copies):
        recorder.add(FinalCopies(at_ns=now_ns(), records=tuple(chunk)))
    # A table may have no more rows than there are items: one that came twice must not be waited for.
    return len({record.item for records in found.values() for record in records})


def _consumer(parts: Parts, isolation: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": parts.servers,
            "group.id": "final",
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )


def read_log(parts: Parts, recorder: Recorder) -> None:
    """What its compaction has left of the coordinators' log."""
    consumer = _consumer(parts, "read_uncommitted")
    left, ends = 0, dict[int, int]()
    deadline_s = time.monotonic() + QUIET_S
    try:
        partitions = consumer.list_topics(LOG, timeout=QUIET_S).topics[LOG].partitions
        consumer.assign([TopicPartition(LOG, number, OFFSET_BEGINNING) for number in partitions])
        while len(ends) < len(partitions) and time.monotonic() < deadline_s:
            for message in consumer.consume(CHUNK, 1.0):
                error = message.error()
                if error is None:
                    left += 1
                elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - librdkafka's name
                    ends[message.partition() or 0] = message.offset() or 0
    except KafkaException as error:
        recorder.add(Stuck(at_ns=now_ns(), what=f"the log was not read: {error}"))
        return
    finally:
        consumer.close()
    if len(ends) < len(partitions):
        recorder.add(Stuck(at_ns=now_ns(), what=f"the log was not read to its end in {QUIET_S:.0f} s"))
        return
    recorder.add(FinalLog(at_ns=now_ns(), left=left, written=sum(ends.values())))


def read_markers(parts: Parts, recorder: Recorder) -> None:
    places = [(topic, number) for topic in (*TOPICS, COPIES) for number in range(PARTITIONS)]
    try:
        found = endings(parts.servers, places, limit_s=QUIET_S)
    except (TimeoutError, WireKafkaError) as error:
        what = f"the markers were not read to their end in {QUIET_S:.0f} s: {error!r}"
        recorder.add(Stuck(at_ns=now_ns(), what=what))
        return
    for chunk in _chunks(found):
        recorder.add(FinalMarkers(at_ns=now_ns(), endings=tuple(chunk)))


def read_tables(parts: Parts, wanted: int, recorder: Recorder) -> None:
    """Once there are as many rows as items; else, when the time is up, what there is."""
    with psycopg.connect(parts.dsn, autocommit=True) as connection:

        def rows() -> int:
            counts = [
                connection.execute(sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(table))).fetchone()
                for table in TOPICS
            ]
            return sum(count[0] for count in counts if count)

        until(lambda: rows() >= wanted, QUIET_S)
        for table in TOPICS:
            query = sql.SQL("SELECT item, amount FROM {}").format(sql.Identifier(table))
            for chunk in _chunks([Row(table, *row) for row in connection.execute(query)]):
                recorder.add(FinalRows(at_ns=now_ns(), rows=tuple(chunk)))


def _chunks(items: list[T]) -> Iterable[list[T]]:
    """At least one: that nothing was found is written down, too."""
    for first in range(0, max(len(items), 1), CHUNK):
        yield items[first : first + CHUNK]
