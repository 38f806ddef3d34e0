"""After a restore, a fail-over or a lost slot: compares the ids that are published with the rows of the table, and
makes the relay go on from there. What is published is never published again; what is missing comes from the table.

The order of commits before this point is gone with the slot: missing rows are published in the order of `created_at`.
Rows that were deleted from the table cannot be compared.
"""

import asyncio
import time
import uuid
from collections.abc import Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition
from psycopg import sql

from oncebox.producer import Producer
from oncebox.settings import kafka_settings
from oncebox.wire import librdkafka_config
from relay.kafka import LATEST, KafkaAdmin, Place
from relay.outbox.commit_seq import row_columns
from relay.outbox.config import OutboxSettings
from relay.outbox.database import SQL, Database, Identity, Noted, table_of
from relay.outbox.logical import BUSY_PAUSE_S, BUSY_S, CHANGES_MAX, LogicalSource
from relay.outbox.mapping import BadRowError, Mapping
from relay.outbox.plan import Row
from relay.outbox.token import COMMIT_SEQ, RESYNC_BEGUN, StopError, Token, decode, encode

ROWS_MAX = 5_000_000
READ_TIMEOUT_S = 30.0
FLUSH_POLL_S = 0.01
LEAD_S = 10.0  # the session of a relay that was just stopped takes a moment to end
LEAD_POLL_S = 0.05
# Of brokers that are away: the consumer asks them again.
GOES_BY_ITSELF = (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)  # noqa: SLF001 - they have no other names


@dataclass(kw_only=True)
class Report:
    rows: int = 0
    published: int = 0
    # Will come from the source, as always.
    coming: int = 0
    # Wait for an operator, as before.
    parked: int = 0
    # Were parked, and are found to be published, as after a retry that a restored database knows nothing of.
    settled: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    report: Report
    missing: list[Row]
    # Parked transactions that are published.
    settled: list[int]


async def resync(settings: OutboxSettings, *, apply: bool) -> Report:
    """Without `apply` it only looks, and is right only while nobody writes."""
    database = await Database.open(settings)
    try:
        await _lead(settings, database)
        async with database.beating():
            if apply:
                return await _apply(settings, database)
            return (await _compared(settings, database, None)).report
    finally:
        await database.close()


async def _lead(settings: OutboxSettings, database: Database) -> None:
    """The server lets go of a session's lead a moment after whoever had it has ended."""
    deadline_s = time.monotonic() + LEAD_S
    while not await database.lead():
        if time.monotonic() > deadline_s:
            raise StopError(f"the relay {settings.name} is running: stop it first")
        await asyncio.sleep(LEAD_POLL_S)
    await database.take_source()


async def _apply(settings: OutboxSettings, database: Database) -> Report:
    """Whatever ends it on the way: no relay starts before it was run again and came to its end."""
    producer = Producer(
        kafka_settings(settings.kafka, client_id=settings.transactional_id),
        settings.coordinators,
        transactional_id=settings.transactional_id,
        open_channel=settings.opens_channels(),
    )
    async with producer:
        before = decode(producer.resume_token)
        noted = await database.raise_fence("resync")
        await database.keep_from_starting(RESYNC_BEGUN)
        start = await _new_source(settings, database, noted, before)
        found = await _compared(settings, database, start)
        await _publish(settings, producer, found.missing, replace(start, retried=before.retried if before else ""))
        await _restart(settings, database, start, found.settled)
        return found.report


async def _compared(settings: OutboxSettings, database: Database, start: Token | None) -> Compared:
    rows = await _table(settings, database)
    coming = await _coming(settings, database, start)
    parked = await database.parked_rows()
    return await asyncio.to_thread(_compare, settings, rows, coming, parked)


async def _new_source(settings: OutboxSettings, database: Database, noted: Noted, before: Token | None) -> Token:
    """A source that begins here and now, or where an earlier run began that has failed; the token that goes with it."""
    connection = database.connection
    identity = await database.identity()
    if settings.source == "logical":
        end = await _unfinished_slot(settings, database, identity, noted, before)
        if end is None:
            await database.note_slot(identity, 0)
            if await database.one("slot", slot=settings.slot) is not None:
                await _drop_slot(settings, database)
            await connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [settings.slot])
            end = int((await database.one("slot", slot=settings.slot))[3])
            await database.note_slot(identity, end)
        # Its first commit may stand exactly there.
        position = end - 1
    else:
        await database.note_slot(identity, 0)
        async with connection.transaction():
            await connection.execute(SQL["commit_seq_lock"])
            (position,) = await database.one("commit_seq_newest")
            await _forget_numbers(settings, database, position)
        end = position
    return Token(
        system_identifier=identity.system_identifier,
        timeline=identity.timeline,
        source=settings.slot if settings.source == "logical" else COMMIT_SEQ,
        position=position,
        end=end,
        fence=noted.fence,
        database=identity.database,
    )


async def _unfinished_slot(
    settings: OutboxSettings, database: Database, identity: Identity, noted: Noted, before: Token | None
) -> int | None:
    """Where the slot of a run that has failed stands: nobody has published from it, and what was deleted since, or was
    never in the table, is nowhere else.
    """
    found = await database.one("slot", slot=settings.slot)
    if noted.source != RESYNC_BEGUN or found is None or (before is not None and before.fence >= noted.fence):
        return None
    is_same = (noted.system_identifier, noted.timeline) == (identity.system_identifier, identity.timeline)
    plugin, is_here, _pid, confirmed, wal_status, *_ = found
    is_usable = plugin == "pgoutput" and is_here and wal_status != "lost"
    return noted.idle_lsn if is_same and is_usable and noted.idle_lsn == int(confirmed) else None


async def _forget_numbers(settings: OutboxSettings, database: Database, position: int) -> None:
    """What is numbered up to here is compared by its ids. It may come from another server, by a dump; here the same ids
    of transactions are given once more, and whatever has them would be without a number, or bring those rows again.
    """
    table, connection = table_of(settings), database.connection
    await connection.execute(SQL["commit_seq_forget"], {"position": position, "table": table.as_string(None)})
    given_elsewhere = sql.SQL(
        "oncebox_transaction >= pg_snapshot_xmin(pg_current_snapshot()) "
        "AND NOT pg_visible_in_snapshot(oncebox_transaction, pg_current_snapshot())"
    )
    look = sql.SQL("SELECT EXISTS (SELECT FROM {table} WHERE {given_elsewhere})")
    found = await connection.execute(look.format(table=table, given_elsewhere=given_elsewhere))
    if await found.fetchone() == (True,):
        # Only then is the right to do so asked for.
        change = sql.SQL("UPDATE {table} SET oncebox_transaction = '0' WHERE {given_elsewhere}")
        await connection.execute(change.format(table=table, given_elsewhere=given_elsewhere))


async def _drop_slot(settings: OutboxSettings, database: Database) -> None:
    """A relay that was killed while it read is reading until the server notices."""
    deadline_s = time.monotonic() + BUSY_S
    while True:
        try:
            await database.connection.execute("SELECT pg_drop_replication_slot(%s)", [settings.slot])
        except psycopg.errors.ObjectInUse:
            if time.monotonic() > deadline_s:
                raise
            await asyncio.sleep(BUSY_PAUSE_S)
        else:
            return


async def _restart(settings: OutboxSettings, database: Database, start: Token, settled: list[int]) -> None:
    """From here on a relay may start."""
    async with database.connection.transaction():
        await database.forget_settled(settled)
        restarted = await database.one(
            "restart",
            source=start.source,
            system_identifier=start.system_identifier,
            timeline=start.timeline,
            lsn=start.end if settings.source == "logical" else 0,
            fence=start.fence,
        )
        if restarted is None:
            raise StopError("somebody else has taken over meanwhile: stop all relays, and run it again")


async def _table(settings: OutboxSettings, database: Database) -> dict[bytes, Row]:
    found = await database.connection.execute(sql.SQL("SELECT * FROM {table} LIMIT 0").format(table=table_of(settings)))
    present = {column.name: column.type_code for column in found.description or ()}
    order = [name for name in ("created_at", "oncebox_number") if name in present]
    statement = sql.SQL("SELECT {columns} FROM {table} ORDER BY {order} LIMIT {limit}").format(
        columns=sql.SQL(", ").join(row_columns(settings, present)),
        table=table_of(settings),
        order=sql.SQL(", ").join(map(sql.Identifier, [*order, settings.columns.id])),
        limit=sql.Literal(ROWS_MAX + 1),
    )
    rows = [Row._make(fields) for fields in await (await database.connection.execute(statement)).fetchall()]
    if len(rows) > ROWS_MAX:
        raise StopError(f"the table has more than {ROWS_MAX} rows: delete what is surely published, then try again")
    return {row.id: row for row in rows if row.id is not None}


async def _coming(settings: OutboxSettings, database: Database, start: Token | None) -> set[bytes]:
    """Ids that the new source brings by itself: they committed after it was made."""
    if start is None:
        return set()
    if settings.source == "commit_seq":
        found = await database.connection.execute(
            sql.SQL(
                "SELECT convert_to({id}::text, 'UTF8') FROM {table} JOIN oncebox.outbox_commit "
                "ON transaction_id = oncebox_transaction WHERE commit_seq > %s"
            ).format(id=sql.Identifier(settings.columns.id), table=table_of(settings)),
            [start.position],
        )
        return {row_id for (row_id,) in await found.fetchall()}
    # All that the table showed has its commit record before this place, though perhaps not on disk yet.
    (wanted,) = await database.one("insert_lsn")
    while (await database.one("flush_lsn"))[0] < wanted:  # noqa: ASYNC110 - the server tells nobody
        await asyncio.sleep(FLUSH_POLL_S)
    source = LogicalSource(settings.model_copy(update={"changes_max": CHANGES_MAX}), database)
    try:
        async with aclosing(source.peek(start.position, start.position)) as pieces:
            return {row.id async for piece in pieces for row in piece.rows if row.id is not None}
    except Exception:
        # As where the table was another for a while: the next run is not to meet the same.
        with suppress(psycopg.Error):
            await database.note_slot(await database.identity(), 0)
        raise
    finally:
        await source.close()


def _compare(
    settings: OutboxSettings, rows: dict[bytes, Row], coming: set[bytes], parked: dict[int, list[Row]]
) -> Compared:
    report = Report(rows=len(rows))
    mapping = Mapping(settings.mapping)
    topics = set()
    parked_rows = [row for transaction in parked.values() for row in transaction]
    parked_ids = _known_ids(parked_rows)
    parked_in_table = {row_id for row_id in parked_ids if rows.pop(row_id, None) is not None}
    for row in parked_rows:
        # What is bad of it may have been mended before it was published: the database that knew of it is gone.
        with suppress(BadRowError):
            topics.add(mapping.topic(row))
    for row_id, row in list(rows.items()):
        if row_id in coming:
            report.coming += 1
            del rows[row_id]
            continue
        try:
            topics.add(mapping.record(row).topic)
        except BadRowError as error:
            report.bad.append(str(error))
            del rows[row_id]
    published_parked = set()
    for topic in sorted(topics):
        for row_id in _published_ids(settings, topic):
            if rows.pop(row_id, None) is not None:
                report.published += 1
            elif row_id in parked_ids:
                published_parked.add(row_id)
    report.published += len(parked_in_table & published_parked)
    report.parked = len(parked_in_table - published_parked)
    report.settled = _texts(row.id for row in parked_rows if row.id in published_parked)
    report.missing = _texts(rows)
    return Compared(report=report, missing=list(rows.values()), settled=_settled(parked, published_parked))


def _settled(parked: dict[int, list[Row]], published: set[bytes]) -> list[int]:
    """Parked transactions that are published; whole, as the relay publishes them."""
    found = []
    for position, rows in parked.items():
        ids = _known_ids(rows)
        if ids & published and ids - published:
            raise StopError(
                f"the parked transaction at {position} is published in part: {', '.join(_texts(ids & published)[:20])} "
                f"can be read in Kafka, {', '.join(_texts(ids - published)[:20])} cannot. DELETE the former from "
                "oncebox.outbox_parked, or all of it if records are gone from the topic, then run again"
            )
        if ids & published:
            found.append(position)
    return found


def _known_ids(rows: Iterable[Row]) -> set[bytes]:
    return {row.id for row in rows if row.id is not None}


def _texts(ids: Iterable[bytes | None]) -> list[str]:
    return [row_id.decode(errors="replace") for row_id in ids if row_id is not None]


def _published_ids(settings: OutboxSettings, topic: str) -> Iterable[bytes]:
    consumer = Consumer(
        librdkafka_config(kafka_settings(settings.kafka))
        | {
            "group.id": f"oncebox-outbox-resync-{uuid.uuid4().hex[:8]}",
            "isolation.level": "read_committed",
            # Where retention is faster than we are, all that is left counts.
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    try:
        found = consumer.list_topics(topic, timeout=READ_TIMEOUT_S).topics[topic]
        if found.error is not None:
            if found.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                return
            raise StopError(f"what is published in {topic} cannot be read: {found.error.str()}")
        yield from _read_to(settings, consumer, _ends(settings, topic, found.partitions))
    finally:
        consumer.close()


def _ends(settings: OutboxSettings, topic: str, partitions: Iterable[int]) -> dict[Place, int]:
    """Where each partition ends now, whatever is still open in it: all that the relay has committed is before that."""
    places = [(topic, partition) for partition in partitions]
    return KafkaAdmin(kafka_settings(settings.kafka)).offsets(places, LATEST)


def _read_to(settings: OutboxSettings, consumer: Consumer, left: dict[Place, int]) -> Iterable[bytes]:
    """All committed ids before these offsets. A reader of committed records is told of an end where the first open
    transaction begins, and of another each time that this place moves: only one that is far enough counts.
    """
    consumer.assign([TopicPartition(*place, OFFSET_BEGINNING) for place in left])
    stopped_at: set[Place] = set()
    deadline_s = time.monotonic() + READ_TIMEOUT_S
    while left:
        message = consumer.poll(max(deadline_s - time.monotonic(), 0))
        if message is None:
            raise StopError(_held_back(left, stopped_at))
        place, error = (str(message.topic()), int(message.partition() or 0)), message.error()
        offset_next = int(message.offset() or 0)
        if error is None:
            yield from _ids(message.headers(), settings.id_header)
            offset_next += 1
        elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - confluent-kafka has no other name for it
            stopped_at.add(place)
        elif error.code() not in GOES_BY_ITSELF:
            raise StopError(f"what is published in {message.topic()} cannot be read: {error.str()}")
        else:
            continue
        deadline_s = time.monotonic() + READ_TIMEOUT_S
        if place in left and offset_next >= left[place]:
            del left[place]
            # What comes behind is not waited for.
            consumer.pause([TopicPartition(*place)])


def _held_back(left: Iterable[Place], stopped_at: set[Place]) -> str:
    open_ones = sorted(f"{topic}:{partition}" for topic, partition in left if (topic, partition) in stopped_at)
    if open_ones:
        return (
            f"{', '.join(open_ones)} could not be read to the end within {READ_TIMEOUT_S:g} s: an open transaction "
            "holds it back; end it (oncebox partition who-blocks) and run again"
        )
    unread = ", ".join(sorted(f"{topic}:{partition}" for topic, partition in left))
    return f"{unread} could not be read to the end within {READ_TIMEOUT_S:g} s: run again once all brokers answer"


def _ids(headers: Any, name: str) -> Iterable[bytes]:
    return (value for key, value in headers or () if key == name and value is not None)


async def _publish(settings: OutboxSettings, producer: Producer, missing: list[Row], token: Token) -> None:
    """The new token goes with the last of them: only then is all before it published."""
    mapping, before, size = Mapping(settings.mapping), producer.resume_token, settings.group_rows_max
    for first in range(0, max(len(missing), 1), size):
        is_last = first + size >= len(missing)
        async with producer.transaction(metadata=encode(token) if is_last else before) as transaction:
            for row in missing[first : first + size]:
                record = mapping.record(row)
                await transaction.send(record.topic, record.value, key=record.key, headers=record.headers)
