"""What can be asked of a relay from outside, through its tables: status, pause, rewind, rebuild, letters. Blocking.

Works whether the relay runs or not. Whatever moves a position raises its fence: a batch that is under way is undone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from psycopg import sql
from psycopg.errors import FeatureNotSupported, InsufficientPrivilege

from oncebox.settings import kafka_settings
from relay.database import RETRY_AT_ONCE, connect, migrate
from relay.kafka import EARLIEST, LATEST, KafkaAdmin, Place, first_times
from relay.positions import begin
from relay.queries import query
from relay.types import RelayError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from relay.config import RelaySettings
    from relay.database import Connection
    from relay.types import TableName

STATES = ("parked", "held", "queued", "replayed", "skipped", "discarded")
TRIES = 5  # each ends after the second or so that PostgreSQL takes to find a deadlock


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStatus:
    topic: str
    partition: int
    next_offset: int
    end_offset: int
    lag_records: int
    # The age of the oldest record that is not applied; 0: there is none (only markers, or what was aborted).
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
    # Applied, markers included; null: not measured.
    offsets_per_second: float | None
    partitions: Sequence[PartitionStatus]


class Control:
    def __init__(self, settings: RelaySettings) -> None:
        self._settings = settings
        self._relay = {"relay": settings.name}
        self.connection: Connection = connect(settings, "control")
        migrate(self.connection)
        self._kafka = kafka_settings(settings.kafka, client_id="oncebox-relay-control")
        self._admin = KafkaAdmin(self._kafka)

    def __enter__(self) -> Control:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    # --- status -----------------------------------------------------------------------------------------------------

    def status(self, *, measure_s: float = 0) -> RelayStatus:
        """`measure_s`: for so long it looks how fast the relay is."""
        row = self.connection.execute(query("relay_status"), self._relay).fetchone()
        if row is None:
            raise RelayError(f"there is no relay {self._settings.name!r} in this database: it has never run")
        mode, owner, fence, is_paused, letters = row
        rows = self.connection.execute(query("partition_status"), self._relay).fetchall()
        topics = self._admin.topics(self._settings.topics)
        ends: Any = self._admin.offsets(topics.partitions, LATEST, read_committed=True)
        behind = {
            (topic, partition): next_offset
            for topic, partition, next_offset, _ in rows
            if ends.get((topic, partition), 0) > next_offset
        }
        oldest_ms = first_times(self._kafka, behind)
        now_ms = time.time() * 1000
        partitions = [
            PartitionStatus(
                topic=topic,
                partition=partition,
                next_offset=next_offset,
                end_offset=ends.get((topic, partition), next_offset),
                lag_records=max(ends.get((topic, partition), next_offset) - next_offset, 0),
                lag_ms=max(int(now_ms - oldest_ms.get((topic, partition), now_ms)), 0),
                owner=whose,
            )
            for topic, partition, next_offset, whose in rows
        ]
        return RelayStatus(
            relay=self._settings.name,
            mode=mode,
            owner=owner,
            fence=fence,
            is_paused=is_paused,
            open_letters=letters,
            offsets_per_second=self._measure(measure_s) if measure_s else None,
            partitions=partitions,
        )

    def _measure(self, for_s: float) -> float:
        def count() -> int:
            (found,) = self.connection.execute(query("applied_count"), self._relay).fetchone() or (0,)
            return int(found)

        before, begun_at_s = count(), time.monotonic()
        time.sleep(for_s)
        # (Somebody may have rewound it.)
        return max(count() - before, 0) / (time.monotonic() - begun_at_s)

    def set_paused(self, *, paused: bool) -> None:
        if self.connection.execute(query("set_paused"), self._relay | {"paused": paused}).rowcount != 1:
            raise RelayError(f"there is no relay {self._settings.name!r} in this database: it has never run")

    # --- positions --------------------------------------------------------------------------------------------------

    def rewind(self, *topics: str, to: int | datetime, partition: int | None = None) -> dict[Place, int]:
        """Records are applied again from there; rows that are newer stay as they are (the guard sees to it). Forward,
        what lies between is never applied.
        """
        self._check_topics(topics)
        found = self._admin.topics(topics)
        places = [place for place in found.partitions if partition in {None, place[1]}]
        if not places:
            raise RelayError(f"{', '.join(topics)} has no partition {partition}")
        firsts, ends = self._admin.offsets(places, EARLIEST), self._admin.offsets(places, LATEST)
        is_offset = isinstance(to, int) and to >= 0
        targets: dict[Place, Any] = dict.fromkeys(places, to) if is_offset else dict(self._admin.offsets(places, to))
        for place, offset in targets.items():
            if not firsts[place] <= offset <= ends[place]:
                raise RelayError(
                    f"{place[0]} partition {place[1]} has offsets from {firsts[place]} to {ends[place]}, not {offset}"
                )

        def go_back() -> None:
            # As the relay does: its row, then positions, then the feed. So none waits for the other in a circle.
            self._fence()
            self._move(list(found.ids.values()), targets)
            self._forget_verified()
            self._forget_feed()

        self._all_or_nothing(go_back)
        return targets

    def rebuild(self, *topics: str) -> dict[Place, int]:
        """Empties the topics' tables, in one step for readers, and begins with what the topics have: rows come back
        as the relay reads on. So do topics that feed the same rows.
        """
        self._check_topics(topics)
        names = self._fed_together(topics)
        tables = list(dict.fromkeys(section.target() for section in self._settings.tables if section.topic in names))
        found = self._admin.topics(names)
        targets = self._admin.offsets(found.partitions, EARLIEST)

        def begin_anew() -> None:
            # As the relay does: letters that it replays, tables, its row, positions, the feed. What it is about to
            # commit is there then, and is undone with the rest.
            self.connection.execute(query("hold_letters"), self._relay)
            self._empty(tables)
            self._fence()
            known = {"topics": names, "topic_ids": list(found.ids.values())}
            self.connection.execute(query("forget_topics"), self._relay | known)
            # A partition that nobody has seen yet waits for the others as one that a running relay finds.
            sources = begin(self.connection, self._settings, self._admin, found, start="earliest")
            for source, offset in sorted((sources[place], offset) for place, offset in targets.items()):
                given = {"source": source, "offset": offset}
                self.connection.execute(query("reset_position"), self._relay | given)
            self._forget_verified()
            self._forget_feed()

        self._all_or_nothing(begin_anew)
        return targets

    def _all_or_nothing(self, step: Callable[[], None]) -> None:
        """Again where it met others' locks in a circle: who writes several tables does so in an order of its own."""
        for tries_left in reversed(range(TRIES)):
            try:
                with self.connection.transaction():
                    step()
                return
            except RETRY_AT_ONCE:
                if not tries_left:
                    raise

    def _empty(self, tables: Sequence[TableName]) -> None:
        names = sql.SQL(", ").join(sql.Identifier(table.schema, table.name) for table in tables)
        try:
            self.connection.execute(sql.SQL("TRUNCATE {}").format(names))
        except FeatureNotSupported as error:
            raise RelayError(
                f"{error.diag.message_detail or error} Both are emptied or neither is: rebuild its topic in the same "
                "command (--topic once more); a table that no topic fills stands in the way as long as its foreign key "
                "does"
            ) from error
        for table in tables:
            self.connection.execute(query("forget_table"), {"table": str(table)})

    def _fed_together(self, topics: Sequence[str]) -> list[str]:
        """They and all that share tables with an ordering column with them, directly or by way of others."""
        names = list(dict.fromkeys(topics))
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

    def _check_topics(self, topics: Sequence[str]) -> None:
        for topic in topics:
            if topic not in self._settings.topics:
                raise RelayError(f"the relay {self._settings.name!r} has no topic {topic!r}")

    def _move(self, topic_ids: Sequence[str], targets: dict[Place, int]) -> None:
        rows = self.connection.execute(query("take_positions"), self._relay | {"topic_ids": topic_ids}).fetchall()
        moves = {}
        for topic, partition, source, next_offset, beyond in rows:
            target = targets.get((topic, partition))
            if target is not None and target < next_offset:
                self._check_doubles(topic, partition, next_offset)
                moves[source] = (target, "{}")
            elif target is not None:
                moves[source] = _forward(target, beyond)
        if len(moves) != len(targets):
            raise RelayError(f"only {len(moves)} of {len(targets)} partitions have a position: has the relay ever run?")
        values = {
            "sources": list(moves),
            "nexts": [target for target, _ in moves.values()],
            "beyonds": [beyond for _, beyond in moves.values()],
        }
        self.connection.execute(query("move_positions"), self._relay | values)

    def _check_doubles(self, topic: str, partition: int, next_offset: int) -> None:
        for section in self._settings.tables:
            if section.topic == topic and section.insert_mode == "insert":
                raise RelayError(
                    f"{section.target()} takes plain inserts: to go back in {topic} partition {partition}, which is "
                    f"applied up to {next_offset}, would double rows. Forward it may go (--partition names one); "
                    "rebuild empties the table and fills it with what the topic still has"
                )

    def _fence(self) -> None:
        """Transaction mode: the active process starts anew."""
        self.connection.execute(query("fence_relay"), self._relay)

    def _forget_feed(self) -> None:
        """Transaction mode: the feed is read from its begin."""
        self.connection.execute(query("forget_feed"), self._relay)

    def _forget_verified(self) -> None:
        """What a reconciliation has found clean is written anew now, or for the first time (a rewind may go back beyond
        the relay's start): below its mark the next run would miss no row. Without a mark it compares everything.
        """
        row = self.connection.execute("SELECT to_regclass('oncebox.reconciliation_verified') IS NOT NULL").fetchone()
        if row is None or not row[0]:
            return
        self.connection.execute(query("await_reconciliation"))
        try:
            self.connection.execute(query("forget_verified"), self._relay)
        except InsufficientPrivilege as error:
            raise RelayError(
                "the mark of the reconciliation's last run cannot be deleted, and would call lost rows clean: grant "
                "this role DELETE and SELECT on oncebox.reconciliation_verified"
            ) from error

    # --- dead letters -----------------------------------------------------------------------------------------------

    def letters(
        self, *, states: Sequence[str] = ("parked", "held", "queued"), limit: int = 100
    ) -> list[dict[str, Any]]:
        cursor = self.connection.execute(query("list_letters"), self._relay | {"states": list(states), "limit": limit})
        names = [column.name for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def replay(self, letter: int | None) -> int:
        """Queues it (None: all that are parked); the relay applies it, and then what is held behind it. How many."""
        queued = self.connection.execute(query("queue_letters"), self._relay | {"id": letter}).rowcount
        if letter is not None and not queued:
            raise RelayError(f"there is no parked dead letter {letter}")
        return queued

    def fix(self, letter: int, value: bytes) -> None:
        """Another value for a parked record; it is still to be replayed."""
        if self.connection.execute(query("fix_letter"), self._relay | {"id": letter, "value": value}).rowcount != 1:
            raise RelayError(f"there is no parked dead letter {letter}")

    def discard(self, letter: int) -> int:
        """Gives up a parked record, with its whole transaction; what is held behind it is applied."""
        discarded = self.connection.execute(query("discard_letter"), self._relay | {"id": letter}).rowcount
        if not discarded:
            raise RelayError(f"there is no dead letter {letter} that is to be settled")
        return discarded


def _forward(target: int, beyond: Sequence[Sequence[int]]) -> tuple[int, str]:
    """Where the position is then, and what is applied beyond it still."""
    for first, after in beyond:
        if first <= target < after:
            target = after
    left = [f"[{first},{after})" for first, after in beyond if first > target]
    return target, "{" + ",".join(left) + "}"
