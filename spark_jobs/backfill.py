"""Rebuilds a table from its topics, at the very point where the relay is: so the relay goes on without a gap, and no
position is moved.

Most of it is staged while the relay runs. Then the table is locked and the relay's fence raised, what the relay has
applied since is staged too, and the rows are replaced: in one transaction, after which the relay takes its partitions
again. What ends that transaction before its commit leaves everything as it was, the fence included.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from psycopg.errors import LockNotAvailable

from oncebox.settings import kafka_settings
from spark_jobs.compare import Run
from spark_jobs.cut import beyond
from spark_jobs.errors import CannotCheckError, ReconcileError
from spark_jobs.repair import LOCK_WAIT_MS, raise_fence
from spark_jobs.snapshot import DEAD_LETTERS_MAX, REPLAYED_MAX, Snapshot, existing_tables, take_cut
from spark_jobs.staging import Staging
from spark_jobs.swap import Swap
from spark_jobs.targets import by_table, read_target
from spark_jobs.values import AS_THE_RELAY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pyspark.sql import SparkSession

    from spark_jobs.config import ReconcileSettings
    from spark_jobs.cut import Cut, Range, SourceCut
    from spark_jobs.swap import Changes
    from spark_jobs.targets import Table

OWNER = "oncebox reconcile backfill"
# What the relay has applied meanwhile is staged without holding it, as long as it is more than this.
HELD_OFFSETS_MAX = 100_000
ROUNDS_MAX = 10
KEEPALIVE: dict[str, Any] = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The relay's positions at one instant, and what they say of the table."""

    cut: Cut
    table: Table
    sources: tuple[SourceCut, ...]


def backfill(
    spark: SparkSession,
    settings: ReconcileSettings,
    table: str,
    progress: Callable[[str], None],
    *,
    is_dry: bool,
) -> Changes:
    """`table`: schema.name, or the name of one in public. A dry run does all of it, and rolls back."""
    dsn = settings.postgres.dsn.get_secret_value()
    with psycopg.connect(dsn, autocommit=True, application_name=OWNER, **KEEPALIVE) as connection:
        # What is staged while the lock is held has to be seen.
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        return _Backfill(spark, settings, table, progress, connection).run(is_dry=is_dry)


class _Backfill:
    def __init__(
        self,
        spark: SparkSession,
        settings: ReconcileSettings,
        table: str,
        progress: Callable[[str], None],
        connection: psycopg.Connection[Any],
    ) -> None:
        self._spark = spark
        self._settings = settings
        self._kafka = kafka_settings(settings.kafka, client_id="oncebox-backfill")
        self._name = table if "." in table else f"public.{table}"
        self._progress = progress
        self._connection = connection
        self._staged: dict[int, tuple[Range, ...]] = {}  # source → what of it is staged

    def run(self, *, is_dry: bool) -> Changes:
        first = look = self._look()
        offsets = _size(look.sources)
        self._progress(
            f"relay {look.cut.relay} ({look.cut.mode} mode), {self._name}: {len(look.sources)} partitions, "
            f"{offsets:,} offsets"
        )
        with Staging(self._connection) as staging:
            left = look.sources
            for _ in range(ROUNDS_MAX):
                self._stage(staging, look, left)
                look, left = self._look_again(look)
                if _size(left) <= HELD_OFFSETS_MAX:
                    break
            with self._one_transaction(is_dry=is_dry):
                self._hold(first)
                look, left = self._look_again(look)
                self._progress(f"{self._name}: the relay is held; it has applied {_size(left):,} offsets since")
                self._stage(staging, look, left)
                swap = Swap(self._connection, look.table, look.sources)
                changes = swap.carry_out(staging.relation, look.cut.compacted, self._progress)
                staging.drop()
        self._progress(f"{self._name}: {'rolled back' if is_dry else 'committed'}")
        return changes

    def _stage(self, staging: Staging, look: Look, sources: Sequence[SourceCut]) -> None:
        run = Run(
            spark=self._spark,
            settings=self._settings,
            kafka=self._kafka,
            snapshot=Snapshot(""),
            cut=look.cut,
            since=None,
            progress=self._progress,
        )
        if any(source.ranges for source in sources):
            staging.add(run, look.table, sources)
            self._progress(f"{self._name}: {_size(sources):,} offsets are staged")
        self._staged = {source.position.source: source.ranges for source in look.sources}

    @contextmanager
    def _one_transaction(self, *, is_dry: bool) -> Iterator[None]:
        """Whoever waits for the table's lock holds up those who come after, and the relay with them: nobody is waited
        for without end.
        """
        try:
            with self._connection.transaction(force_rollback=is_dry):
                self._connection.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(LOCK_WAIT_MS))
                yield
        except LockNotAvailable as error:
            raise CannotCheckError(
                f"somebody else has locked what is to be changed, for {LOCK_WAIT_MS / 1000:g} s by now, and the relay "
                "waits meanwhile: nothing is changed, try again"
            ) from error

    def _hold(self, look: Look) -> None:
        """To the end of the transaction nobody writes the table, and the relay commits nothing. In the order in which
        the relay itself takes locks, so that none waits for the other in a circle.
        """
        self._connection.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        self._connection.execute(AS_THE_RELAY)
        relation = sql.Identifier(look.table.schema, look.table.table)
        self._connection.execute(sql.SQL("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE").format(relation))
        raise_fence(self._connection, look.cut.relay, OWNER)

    # --- where the relay is -------------------------------------------------------------------------------------------

    def _look(self) -> Look:
        with Snapshot(self._settings.postgres.dsn.get_secret_value()) as snapshot:
            cut = take_cut(
                snapshot,
                self._kafka,
                relay=self._settings.relay,
                feed_topic=self._settings.feed_topic,
                is_full=True,
            )
            return self._fit(snapshot, cut)

    def _look_again(self, before: Look) -> tuple[Look, tuple[SourceCut, ...]]:
        """And what of it is not staged yet. What is staged has to be as true now as it was before."""
        look = self._look()
        if look.cut.config_hash != before.cut.config_hash:
            raise CannotCheckError("the relay's mapping has changed meanwhile: run again")
        if letters_in(look.cut, self._staged) != letters_in(before.cut, self._staged):
            raise CannotCheckError("dead letters were settled meanwhile: run again")
        left = []
        for source in look.sources:
            ranges = beyond(source.ranges, self._staged.get(source.position.source, ()))
            if ranges is None:
                raise CannotCheckError(f"the relay was rewound in {source.position.topic} meanwhile: run again")
            left.append(replace(source, ranges=ranges))
        if self._staged.keys() - {source.position.source for source in look.sources}:
            raise CannotCheckError("the relay has given up a partition meanwhile: run again")
        return look, tuple(left)

    def _fit(self, snapshot: Snapshot, cut: Cut) -> Look:
        """Refuses what cannot be rebuilt exactly, with the reason."""
        tables = by_table([read_target(*row) for row in snapshot.rows("targets", relay=cut.relay)])
        table = next((each for each in tables if each.name == self._name), None)
        if table is None:
            names = ", ".join(each.name for each in tables) or "none"
            raise ReconcileError(f"the relay {cut.relay} writes no table {self._name}; its tables: {names}")
        others = snapshot.rows("other_relays", relay=cut.relay, schema=table.schema, table=table.table)
        if others:
            raise ReconcileError(
                f"{table.name} is written by another relay, too ({others[0][0]}): its rows would be lost"
            )
        _, notes = existing_tables(snapshot, [table])
        sources = cut.of_topics(table.topics)
        reasons = notes or obstacles(table, sources, cut.compacted)
        if reasons:
            raise ReconcileError(f"{table.name} cannot be rebuilt exactly: {'; '.join(reasons)}")
        ((parked, replayed),) = snapshot.rows("letters_counted", relay=cut.relay)
        if parked > DEAD_LETTERS_MAX or replayed > REPLAYED_MAX:
            raise ReconcileError(f"the relay {cut.relay} has too many dead letters: {parked} open, {replayed} replayed")
        return Look(cut=cut, table=table, sources=sources)


def obstacles(table: Table, sources: Sequence[SourceCut], compacted: frozenset[str]) -> list[str]:
    """Why not every record that was ever applied can be read, or not every row be told from others."""
    known = {source.position.topic for source in sources}
    found = [f"the relay has no position in the topic {topic} yet" for topic in table.topics if topic not in known]
    if len({tuple(column.unit for column in target.columns) for target in table.targets}) > 1:
        found.append("its topics give times in different units")
    for source in sources:
        position, facts = source.position, source.facts
        where = f"{position.topic}:{position.partition}"
        if facts is None:
            found.append(f"{where}: the topic was deleted (oncebox relay rebuild begins anew with the topic as it is)")
        elif facts.log_start > position.start:
            found.append(f"{where}: retention has removed the offsets {position.start} to {facts.log_start - 1}")
        elif position.is_rewound:
            found.append(f"{where}: the relay was rewound and is not back at {position.high} yet: wait for it")
        elif not source.is_whole:
            found.append(f"{where}: the relay is at {position.next}, readers may read to {facts.stable} only")
        elif not table.first.guard and position.start:
            found.append(
                f"{where}: the relay began at {position.start}, and without the guard nothing tells older rows"
            )
        elif not table.first.guard and position.topic in compacted:
            found.append(f"{where}: the topic is compacted, and without the guard nothing tells what it removed")
    return found


def letters_in(cut: Cut, ranges: Mapping[int, Sequence[Range]]) -> tuple[frozenset[tuple[int, int]], dict[Any, Any]]:
    """Records inside the ranges that count as applied and made no row, and those that did so after all."""

    def is_inside(place: tuple[int, int]) -> bool:
        return any(first <= place[1] < last for first, last in ranges.get(place[0], ()))

    return (
        frozenset(place for each in cut.dead_letters if is_inside(place := (each.source, each.offset))),
        {place: record for place, record in cut.replayed.items() if is_inside(place)},
    )


def _size(sources: Sequence[SourceCut]) -> int:
    return sum(last - first for source in sources for first, last in source.ranges)
