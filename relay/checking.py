"""`oncebox relay check`: the configuration against the live topics and tables. Changes nothing. Blocking.

Sample records are read first; then all runs in one short database transaction that is rolled back: what would be
created is created there, and the samples go through the same code as in a running relay.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from confluent_kafka import KafkaException

from oncebox.access.identity import KeysError
from oncebox.access.permissions import PolicyError
from oncebox.certificates import ServerCertificates, TlsError
from oncebox.reader.source import record_of
from oncebox.settings import kafka_settings
from oncebox.wire import librdkafka_config
from relay.access import Gate
from relay.database import Connection, check_ordering, connect, ensure_sources, migrate, resolve, table_order
from relay.kafka import EARLIEST, LATEST, KafkaAdmin, Topics, explained
from relay.mapping import RowMapper
from relay.plan import StopError, Unit, make_plan, planner
from relay.queries import query
from relay.schema_changes import create_missing
from relay.sink import Sink
from relay.splitting import MissingReferenceError
from relay.types import RelayError, SchemaChangeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from oncebox.reader import Record
    from relay.config import RelaySettings

POLL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    is_ok: bool
    text: str


class _UndoError(Exception):
    pass


def check(settings: RelaySettings, *, records: int) -> list[Finding]:
    """One finding for each thing that was looked at."""
    findings: list[Finding] = list(_check_access(settings))
    try:
        admin = KafkaAdmin(kafka_settings(settings.kafka, client_id="oncebox-relay-check"))
        topics = admin.topics(settings.topics)
        findings += _check_topics(settings, admin, topics)
        # Before the transaction: while it is open, running relays wait for its locks.
        samples = list(_samples(settings, admin, topics, records))
        with connect(settings, "check") as connection, connection.transaction():
            findings += _check_tables(connection, settings, topics, samples)
            raise _UndoError
    except _UndoError:
        return findings
    except (RelayError, psycopg.Error) as error:
        return [*findings, Finding(is_ok=False, text=str(error).strip())]
    except (KafkaException, TimeoutError) as error:
        return [*findings, Finding(is_ok=False, text=explained(error, settings.kafka.bootstrap_servers))]


def _check_access(settings: RelaySettings) -> Iterator[Finding]:
    """Nothing of a relay that listens on this machine alone, as it comes."""
    try:
        if settings.tls:
            ServerCertificates(settings.tls)
        Gate(settings)
    except (TlsError, PolicyError, KeysError) as error:
        yield Finding(is_ok=False, text=f"who may call it: {error}")
        return
    if settings.rules_location:
        yield Finding(is_ok=True, text="who may call it: certificates, keys of tokens and rules can be used")


def _check_topics(settings: RelaySettings, admin: KafkaAdmin, topics: Topics) -> Iterator[Finding]:
    for topic in settings.topics:
        count = sum(name == topic for name, _ in topics.partitions)
        yield Finding(is_ok=True, text=f"topic {topic}: {count} partitions")
    if settings.mode == "transaction":
        feed = admin.topics([settings.feed_topic])
        yield Finding(is_ok=True, text=f"feed {settings.feed_topic}: {len(feed.partitions)} partitions")


def _check_tables(
    connection: Connection, settings: RelaySettings, topics: Topics, samples: Sequence[Record]
) -> Iterator[Finding]:
    migrate(connection)
    create_missing(connection, settings)
    targets = []
    for section in settings.tables:
        try:
            with connection.transaction():
                targets.append(resolve(connection, section))
        except (RelayError, psycopg.Error) as error:
            yield Finding(is_ok=False, text=f"{section.topic} → {section.target()}: {str(error).strip()}")
        else:
            columns = ", ".join(f"{column.name} {column.type}" for column in targets[-1].columns)
            yield Finding(is_ok=True, text=f"{section.topic} → {section.target()}: {columns}")
            if section.auto_evolve and section.columns:
                yield Finding(
                    is_ok=True,
                    text=f"{section.target()}: `columns` says what is taken, so that auto_evolve adds nothing for new "
                    "fields and widens nothing; it adds the relay's own columns alone",
                )
    if len(targets) < len(settings.tables):
        return
    check_ordering(connection, settings, targets)
    connection.execute(
        "INSERT INTO oncebox.relay (relay, mode) VALUES (%s, %s) ON CONFLICT DO NOTHING", [settings.name, settings.mode]
    )
    sources = ensure_sources(connection, dict(topics.ids), topics.partitions)
    mappers = [RowMapper(target, record_bytes_max=settings.limits.record_bytes) for target in targets]
    strict = planner(settings.model_copy(update={"on_error": "stop"}), mappers, sources, {})
    sink = Sink(connection, settings.name, targets, table_order(connection, targets), letters_max=1)
    tables = {"tables": [str(target.table) for target in targets]}
    if settings.mode == "transaction" and connection.execute(query("foreign_keys"), tables).fetchall():
        sink.waits_from = 0
    bad = waiting = 0
    changes: set[str] = set()
    for record in samples:
        units = [Unit((record,))]
        try:
            sink.apply(strict, units, make_plan(strict, units, frozenset()), frozenset(), lambda *_: None)
        except StopError as error:
            bad += 1
            yield Finding(is_ok=False, text=str(error))
        except MissingReferenceError:
            waiting += 1
        except SchemaChangeError as change:
            changes.add(str(change))
    for each in sorted(changes):
        yield Finding(is_ok=True, text=f"{each}: auto_evolve would see to it")
    if waiting:
        yield Finding(
            is_ok=True,
            text=f"{waiting} sample records refer to rows that are not there, or are referred to: a relay that runs "
            "waits for what was committed with them or before",
        )
    if not bad:
        yield Finding(is_ok=True, text=f"{len(samples) - waiting} sample records fit")


def _samples(settings: RelaySettings, admin: KafkaAdmin, topics: Topics, count: int) -> Iterator[Record]:
    """The last records of each partition."""
    from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

    config: dict[str, Any] = librdkafka_config(kafka_settings(settings.kafka)) | {
        "group.id": f"oncebox-relay-check-{secrets.token_hex(4)}",
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "earliest",
    }
    firsts, ends = admin.offsets(topics.partitions, EARLIEST), admin.offsets(topics.partitions, LATEST)
    consumer = Consumer(config)
    try:
        consumer.assign(
            [TopicPartition(*place, max(firsts[place], ends[place] - count)) for place in topics.partitions]
        )
        left = len(topics.partitions)
        while left:
            message = consumer.poll(POLL_S)
            if message is None:
                return
            error = message.error()
            if error is None:
                yield record_of(message)
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the library's name for it
                left -= 1
            else:
                raise KafkaException(error)
    finally:
        consumer.close()
