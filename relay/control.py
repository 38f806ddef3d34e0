"""What can be asked of a relay from outside, through its tables: status, pause, rewind, rebuild, letters. Blocking.

Works whether the relay runs or not. Whatever moves a position raises its fence: a batch that is under way is undone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from psycopg import sql

from oncebox.settings import kafka_settings
from relay.database import connect, ensure_sources, migrate
from relay.kafka import EARLIEST, LATEST, KafkaAdmin, Place
from relay.queries import query
from relay.types import RelayError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from relay.config import RelaySettings
    from relay.database import Connection

STATES = ("parked", "held", "queued", "replayed", "skipped", "discarded")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStatus:
    topic: str
    partition: int
    next_offset: int
    end_offset: int
    lag_records: int
    lag_ms: int
    owner: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayStatus:
    relay: str
    mode: str
    owner: str | None
    fence: int
    is_paused: bool
    open_letters: int
    partitions: Sequence[PartitionStatus]


class Control:
    def __init__(self, settings: RelaySettings) -> None:
        self._settings = settings
        self._relay = {"relay": settings.name}
        self.connection: Connection = connect(settings, "control")
        migrate(self.connection)
        self._admin = KafkaAdmin(kafka_settings(settings.kafka, client_id="oncebox-relay-control"))

    def __enter__(self) -> Control:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    # --- status -----------------------------------------------------------------------------------------------------

    def status(self) -> RelayStatus:
        row = self.connection.execute(query("relay_status"), self._relay).fetchone()
        if row is None:
            raise RelayError(f"there is no relay {self._settings.name!r} in this database: it has never run")
        mode, owner, fence, is_paused, letters = row
        rows = self.connection.execute(query("partition_status"), self._relay).fetchall()
        topics = self._admin.topics(self._settings.topics)
        ends = self._admin.offsets(topics.partitions, LATEST, read_committed=True)
        partitions = []
        for topic, partition, next_offset, whose, record_age_ms in rows:
            end: Any = ends.get((topic, partition), next_offset)
            lag = max(end - next_offset, 0)
            partitions.append(
                PartitionStatus(
                    topic=topic,
                    partition=partition,
                    next_offset=next_offset,
                    end_offset=end,
                    lag_records=lag,
                    lag_ms=max(int(record_age_ms or 0), 0) if lag else 0,
                    owner=whose,
                )
            )
        return RelayStatus(
            relay=self._settings.name,
            mode=mode,
            owner=owner,
            fence=fence,
            is_paused=is_paused,
            open_letters=letters,
            partitions=partitions,
        )

    def set_paused(self, *, paused: bool) -> None:
        if self.connection.execute(query("set_paused"), self._relay | {"paused": paused}).rowcount != 1:
            raise RelayError(f"there is no relay {self._settings.name!r} in this database: it has never run")

    # --- positions --------------------------------------------------------------------------------------------------

    def rewind(self, topic: str, to: int | datetime, *, partition: int | None = None) -> dict[Place, int]:
        """Records are applied again from there; rows that are newer stay as they are (the guard sees to it)."""
        self._check_topic(topic)
        for section in self._settings.tables:
            if section.topic == topic and section.insert_mode == "insert":
                raise RelayError(f"{section.target()} takes plain inserts: a rewind would double them; use rebuild")
        topics = self._admin.topics([topic])
        places = [place for place in topics.partitions if partition in {None, place[1]}]
        if not places:
            raise RelayError(f"{topic} has no partition {partition}")
        firsts, ends = self._admin.offsets(places, EARLIEST), self._admin.offsets(places, LATEST)
        is_offset = isinstance(to, int) and to >= 0
        targets: dict[Place, Any] = dict.fromkeys(places, to) if is_offset else dict(self._admin.offsets(places, to))
        for place, offset in targets.items():
            if not firsts[place] <= offset <= ends[place]:
                raise RelayError(
                    f"{place[0]} partition {place[1]} has offsets from {firsts[place]} to {ends[place]}, not {offset}"
                )
        with self.connection.transaction():
            self._move(topics.ids[topic], targets)
        return targets

    def rebuild(self, topic: str) -> dict[Place, int]:
        """Empties the topic's tables, in one step for readers, and begins with what the topic has: rows come back
        as the relay reads on. So do topics that feed the same rows.
        """
        self._check_topic(topic)
        names = self._fed_together(topic)
        sections = [section for section in self._settings.tables if section.topic in names]
        topics = self._admin.topics(names)
        targets = self._admin.offsets(topics.partitions, EARLIEST)
        with self.connection.transaction():
            sources = ensure_sources(self.connection, dict(topics.ids), topics.partitions)
            for name in names:
                known = {"topic": name, "topic_id": topics.ids[name]}
                self.connection.execute(query("forget_topic"), self._relay | known)
            for place, offset in targets.items():
                given = {"source": sources[place], "offset": offset, "waits_for": None}
                self.connection.execute(query("ensure_position"), self._relay | given)
                self.connection.execute(query("reset_position"), self._relay | given)
            for table in dict.fromkeys(section.target() for section in sections):
                self.connection.execute(sql.SQL("TRUNCATE {}").format(sql.Identifier(table.schema, table.name)))
                self.connection.execute(query("forget_table"), {"table": str(table)})
            self._fence()
        return targets

    def _fed_together(self, topic: str) -> list[str]:
        """It and all that share tables with an ordering column with it, directly or by way of others."""
        names = [topic]
        for name in names:
            tables = {section.target() for section in self._settings.tables if section.topic == name}
            for section in self._settings.tables:
                if section.target() in tables and section.topic not in names:
                    if section.ordering is None:
                        raise RelayError(
                            f"{section.target()} is fed by {section.topic} too: rebuild would lose its rows"
                        )
                    names.append(section.topic)
        return names

    def _check_topic(self, topic: str) -> None:
        if topic not in self._settings.topics:
            raise RelayError(f"the relay {self._settings.name!r} has no topic {topic!r}")

    def _move(self, topic_id: str, targets: dict[Place, int]) -> None:
        moved = self.connection.execute(
            query("move_positions"),
            self._relay
            | {
                "topic_id": topic_id,
                "partitions": [partition for _, partition in targets],
                "offsets": list(targets.values()),
            },
        ).rowcount
        if moved != len(targets):
            raise RelayError(f"only {moved} of {len(targets)} partitions have a position: has the relay ever run?")
        self._fence()

    def _fence(self) -> None:
        """Transaction mode: the active process starts anew, and reads the feed from its begin."""
        self.connection.execute(query("fence_relay"), self._relay)
        self.connection.execute(query("forget_feed"), self._relay)

    # --- dead letters -----------------------------------------------------------------------------------------------

    def letters(
        self, *, states: Sequence[str] = ("parked", "held", "queued"), limit: int = 100
    ) -> list[dict[str, Any]]:
        cursor = self.connection.execute(query("list_letters"), self._relay | {"states": list(states), "limit": limit})
        names = [column.name for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def replay(self, letter: int | None) -> int:
        """Queues it (None: all that are parked); the relay applies it, and then what is held behind it. How many."""
        return self.connection.execute(query("queue_letters"), self._relay | {"id": letter}).rowcount

    def fix(self, letter: int, value: bytes) -> None:
        """Another value for a parked record; it is still to be replayed."""
        if self.connection.execute(query("fix_letter"), self._relay | {"id": letter, "value": value}).rowcount != 1:
            raise RelayError(f"there is no parked dead letter {letter}")

    def discard(self, letter: int) -> int:
        """Gives up a parked record, with its whole transaction; what is held behind it is applied."""
        return self.connection.execute(query("discard_letter"), self._relay | {"id": letter}).rowcount
