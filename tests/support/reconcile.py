"""A database as a relay leaves it, written by hand: so that a test can spoil one thing, and no relay mends it."""

from __future__ import annotations

import json
import uuid
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from pydantic import SecretStr

from oncebox import blocking
from oncebox.settings import KafkaSection, PostgresSection
from spark_jobs.config import ReconcileSettings
from spark_jobs.facts import read_facts
from tests.support.coordinator import read_committed
from tests.support.kafka import create_topic

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from tests.support.coordinator import Coordinators

COLUMNS = {
    "id": "bigint",
    "name": "text",
    "balance": "numeric(12,2)",
    "changed": "timestamp with time zone",
}
RELAY = "test"


def mapping(columns: dict[str, str], key: Sequence[str], **more: Any) -> dict[str, Any]:
    return {
        "format": "json",
        "insert_mode": "upsert",
        "guard": True,
        "delete_on_tombstone": True,
        "key": list(key),
        "columns": [
            {"name": name, "type": kind, "path": [name], "from": "value", "unit": None}
            for name, kind in columns.items()
        ],
    } | more


class World:
    """One topic in one table, and a second topic in another: `accounts` and `journal`."""

    def __init__(
        self,
        coordinators: Coordinators,
        dsn: str,
        folder: Path,
        *,
        partitions: int = 2,
        config: Mapping[str, str] | None = None,
    ) -> None:
        """`config`: of the accounts' topic."""
        self.coordinators = coordinators
        self.servers = coordinators.bootstrap_servers
        self.dsn = dsn
        self.folder = folder
        self.partitions = partitions
        suffix = uuid.uuid4().hex[:8]
        self.topics = {
            name: create_topic(self.servers, f"{name}-{suffix}", partitions=partitions, config=given)
            for name, given in (("accounts", config), ("journal", None))
        }
        self.producer = blocking.Producer(self.servers, coordinators.addresses, transactional_id=f"world-{suffix}")
        self.producer.start()
        self._make_tables()
        self.sources: dict[tuple[str, int], int] = {}
        self.register()

    def close(self) -> None:
        self.producer.stop()

    def run(self, statement: Any, parameters: Any = None) -> list[Any]:
        with psycopg.connect(self.dsn, autocommit=True, options="-c search_path=public") as connection:
            cursor = connection.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []

    def settings(self, **more: Any) -> ReconcileSettings:
        given: dict[str, Any] = {
            "log_topic": self.coordinators.log_topic,
            "feed_topic": self.coordinators.feed_topic,
            "report_folder": self.folder / "reports",
            "database_connections": 2,
            "kafka": KafkaSection(bootstrap_servers=self.servers),
            "postgres": PostgresSection(dsn=SecretStr(self.dsn)),
            **more,
        }
        return ReconcileSettings(**given)

    def transfer(self, *ids: int, commit: bool = True, version: int = 0) -> None:
        """One transaction: an account row for each id, and an entry in the journal."""
        transaction = self.producer.begin()
        for each in ids:
            account = {
                "id": each,
                "name": f"né {each}.{version}",
                "balance": each + version / 100,
                "changed": "2026-01-02T03:04:05.678Z",
            }
            transaction.send(self.topics["accounts"], json.dumps(account).encode(), key=str(each).encode())
            entry = {"id": each * 1000 + version, "account": each}
            transaction.send(self.topics["journal"], json.dumps(entry).encode(), key=str(each).encode())
        if commit:
            transaction.commit()
        else:
            transaction.abort()

    def delete(self, account: int) -> None:
        transaction = self.producer.begin()
        transaction.send(self.topics["accounts"], None, key=str(account).encode())
        transaction.commit()

    def next_offset(self, account: int) -> int:
        """Of the next record of an account that has a row."""
        topic = self.topics["accounts"]
        ((source,),) = self.run("SELECT oncebox_source FROM accounts WHERE id = %s", [account])
        partition = next(each for (name, each), number in self.sources.items() if (name, number) == (topic, source))
        return read_facts(_settings(self.servers), [topic])[topic][partition].high

    def apply(self) -> None:
        """What the relay would do with all that is committed."""
        with psycopg.connect(self.dsn, options="-c search_path=public") as connection:
            for table, topic in self.topics.items():
                messages = sorted(
                    read_committed(self.servers, topic), key=lambda each: (each.partition(), each.offset())
                )
                for message in messages:
                    self._write(connection, table, topic, message)
            self._advance(connection, self.topics)

    def advance(self, *tables: str) -> None:
        """Only the positions, to the end."""
        with psycopg.connect(self.dsn) as connection:
            self._advance(connection, tables)

    def _advance(self, connection: psycopg.Connection[Any], tables: Iterable[str]) -> None:
        facts = read_facts(_settings(self.servers), [self.topics[table] for table in tables])
        for topic, partitions in facts.items():
            for partition, each in partitions.items():
                connection.execute(
                    "UPDATE oncebox.position SET next_offset = %s, high_offset = %s WHERE source = %s",
                    [each.stable, each.stable, self.sources[topic, partition]],
                )

    def _write(self, connection: psycopg.Connection[Any], table: str, topic: str, message: Any) -> None:
        source, offset = self.sources[topic, message.partition()], message.offset()
        if message.value() is None:
            connection.execute(
                sql.SQL("DELETE FROM {} WHERE id = %s AND oncebox_offset < %s").format(sql.Identifier(table)),
                [int(message.key()), offset],
            )
            return
        document = json.loads(message.value())
        names = [*document, "oncebox_source", "oncebox_offset"]
        connection.execute(
            sql.SQL(
                "INSERT INTO {table} AS t ({names}) VALUES ({values}) ON CONFLICT (id) "
                "DO UPDATE SET ({names}) = ROW({new}) "
                "WHERE t.oncebox_offset < EXCLUDED.oncebox_offset"
            ).format(
                table=sql.Identifier(table),
                names=sql.SQL(", ").join(map(sql.Identifier, names)),
                values=sql.SQL(", ").join(sql.Placeholder() * len(names)),
                new=sql.SQL(", ").join(sql.SQL("EXCLUDED.{}").format(sql.Identifier(name)) for name in names),
            ),
            [*document.values(), source, offset],
        )

    def _make_tables(self) -> None:
        self.run((files("relay") / "sql" / "schema.sql").read_text())
        self.run("INSERT INTO oncebox.relay (relay, mode) VALUES (%s, 'transaction')", [RELAY])
        for table, columns in (("accounts", COLUMNS), ("journal", {"id": "bigint", "account": "integer"})):
            defined = ", ".join(f"{name} {kind}" for name, kind in columns.items())
            self.run(
                f"CREATE TABLE {table} ({defined}, oncebox_source integer, oncebox_offset bigint, PRIMARY KEY (id))"
            )
            self.run(
                "INSERT INTO oncebox.target (relay, topic, table_schema, table_name, mapping) "
                "VALUES (%s, %s, 'public', %s, %s)",
                [RELAY, self.topics[table], table, json.dumps(mapping(columns, ["id"]))],
            )

    def register(self) -> None:
        """Gives each partition that has none a source and a position."""
        facts = read_facts(_settings(self.servers), list(self.topics.values()))
        for topic, partitions in facts.items():
            for partition, each in sorted(partitions.items()):
                if (topic, partition) in self.sources:
                    continue
                ((source,),) = self.run(
                    "INSERT INTO oncebox.source (topic, topic_id, partition) VALUES (%s, %s, %s) RETURNING source",
                    [topic, uuid.UUID(each.topic_id), partition],
                )
                self.sources[topic, partition] = source
                self.run(
                    "INSERT INTO oncebox.position (relay, source, start_offset, next_offset, high_offset) "
                    "VALUES (%s, %s, 0, 0, 0)",
                    [RELAY, source],
                )


def _settings(servers: str) -> Any:
    from oncebox.wire import KafkaSettings

    return KafkaSettings(bootstrap_servers=servers)
