"""One table against its topics, cheap first: sums per bucket on both sides, then rows of the buckets that differ."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from psycopg import sql
from pyspark.sql import functions as F  # noqa: N812

from spark_jobs import database
from spark_jobs.collect import Found, collected
from spark_jobs.cut import cut_source, width_of
from spark_jobs.database import OFFSET, SOURCE, Checksum, Classes
from spark_jobs.expectation import Expectation
from spark_jobs.findings import Suspect, TableResult
from spark_jobs.frames import literal_frame
from spark_jobs.older import older_rows, past_retention
from spark_jobs.settle import BEFORE, COMPACTED, LETTER, REWOUND, SUPERSEDED, TIED, UNTOLD, Settler, one_each
from spark_jobs.snapshot import as_mapping
from spark_jobs.sources import table_rows
from spark_jobs.transforms import difference
from spark_jobs.transforms.checksums import bucket_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from oncebox.wire import KafkaSettings
    from spark_jobs.config import ReconcileSettings
    from spark_jobs.cut import Cut, SourceCut
    from spark_jobs.database import Bucket, Scan
    from spark_jobs.expectation import Sums
    from spark_jobs.findings import Settled
    from spark_jobs.snapshot import Mark, Snapshot
    from spark_jobs.targets import Table

# With fewer rows than this part of the records, some were replaced: the last of each key has to be found.
DISTINCT_MIN = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What all steps of a run share."""

    spark: SparkSession
    settings: ReconcileSettings
    kafka: KafkaSettings
    snapshot: Snapshot
    cut: Cut
    since: Mark | None  # None: a full run
    progress: Callable[[str], None]


def compare_table(run: Run, table: Table) -> TableResult:
    sources = compared_sources(table, run.cut)
    obstacle = unguarded_obstacle(table, sources)
    if obstacle:
        return TableResult(table=table.name, notes=(obstacle,))
    width = width_of(sources, run.settings.buckets)
    classes = _classes(run, table, sources)
    with Expectation(run, table, sources) as expectation:
        with ThreadPoolExecutor(1) as pool:
            scanned = pool.submit(
                database.scan,
                run.snapshot,
                table,
                classes,
                width,
                connections=run.settings.database_connections,
                progress=run.progress,
            )
            is_latest = _is_replacing(run, table, sources)
            expected = expectation.sums(width, is_latest=is_latest)
            actual = scanned.result()
        run.snapshot.check_alive()
        comparison = Comparison(run, table, sources, expectation, actual, width)
        expected, differing, (suspects, counts) = comparison.compare(expected, is_latest=is_latest)
        deleted = expectation.deleted() if expected.deletes and table.first.guard and run.since else None
        older, untold_late = older_rows(run, table, sources, actual, classes, deleted)
    outside_suspects, notes, is_more = _outside(run, table, actual.outside, classes)
    counts.update(older.counts)
    counts.update(each.opinion for each in outside_suspects)
    suspects = _each_row_once(run, table, [*suspects, *older.suspects, *outside_suspects], counts)
    if not run.snapshot.has_storage_of(table.schema, table.table):
        note = f"{table.name}: was emptied or rewritten while it was compared; it is not checked: run again"
        return TableResult(table=table.name, notes=(note,))
    untold = expected.untold + untold_late
    settled = Settler(run.spark, run.kafka, run.snapshot, run.cut).settle(table, suspects, untold=untold)
    unseen = (counts - Counter(each.suspect.opinion for each in settled)).total()
    notes += _left_out(run, table, settled, expired=actual.expired, untold=untold, unseen=unseen)
    return TableResult(
        table=table.name,
        rows_expected=expected.rows,
        rows_found=actual.rows,
        buckets=len(expected.by_bucket.keys() | actual.by_bucket.keys()),
        buckets_differing=len(differing),
        settled=tuple(settled),
        counts=dict(counts),
        is_more_outside=is_more,
        notes=tuple(notes),
        superseded=sum(each.detail == SUPERSEDED for each in settled),
        touched=sum(count for count, _ in actual.touched.values()),
    )


def _left_out(
    run: Run, table: Table, settled: Sequence[Settled], *, expired: int, untold: int, unseen: int
) -> list[str]:
    """What of the table was not checked, in words."""
    details = Counter(each.detail for each in settled)
    since = f"written since run {run.since.run}" if run.since else ""
    told = (
        (expired, f"rows {since} name records that are past retention: not checked"),
        (details[COMPACTED], "rows name records that are gone from a compacted topic: not checked"),
        (max(untold, details[UNTOLD]), "records have keys that cannot be told here: not checked"),
        (details[TIED], "keys have records of the same time in two partitions: not checked"),
        (details[REWOUND], "rows are not there, and a record that is to be applied again may delete them: not checked"),
        (details[BEFORE], "rows name no record, and may be from before the relay's start: not checked"),
        (details[LETTER], "rows are of records with dead letters that were not read: not checked"),
        # Some that were looked at may be right after all, and so may these; or not.
        (unseen, "more rows do not seem to be right, and were not looked at one by one"),
    )
    return [f"{table.name}: {count} {what}" for count, what in told if count]


def compared_sources(table: Table, cut: Cut) -> tuple[SourceCut, ...]:
    """Without the guard's columns the whole table is compared each time, and so are all records."""
    sources = cut.of_topics(table.topics)
    if table.first.guard:
        return sources
    return tuple(cut_source(each.position, each.facts, verified=0) for each in sources)


def unguarded_obstacle(table: Table, sources: Sequence[SourceCut]) -> str | None:
    """Why rows that do not say which record they are of cannot be told from extra ones."""
    if table.first.guard or all(source.is_whole for source in sources):
        return None
    where = ", ".join(f"{each.position.topic}:{each.position.partition}" for each in sources if not each.is_whole)
    return (
        f"{table.name}: has no guard columns, and not every record that was applied can be read ({where}): "
        "it is not checked"
    )


def _classes(run: Run, table: Table, sources: Sequence[SourceCut]) -> Classes:
    """Rows inside of what is compared; rows that name a record outside of what was applied; rows that were found clean
    before and have been written since, with and without a record that can be read; all others, which were applied and
    are not compared.
    """
    if not table.first.guard:
        none = database.NO_ROW
        return Classes(cut=database.EACH_ROW, outside=none, touched=none, expired=none, older=none)
    applied = database.in_cut(table, [replace(source, ranges=source.position.applied) for source in sources])
    before = [
        replace(source, ranges=((max(source.position.start, source.facts.log_start), source.verified),))
        for source in sources
        if source.facts is not None and source.verified > max(source.position.start, source.facts.log_start)
    ]
    cut = database.in_cut(table, sources)
    touched = database.written_since(table, before, run.since.xmin) if run.since and before else database.NO_ROW
    expired, kept = past_retention(run, table, sources)
    touched = sql.SQL("({}) OR ({})").format(touched, kept)
    return Classes(
        cut=cut,
        outside=sql.SQL("({}) IS NOT TRUE").format(applied),
        touched=touched,
        expired=expired,
        older=sql.SQL("({}) AND ({}) IS NOT TRUE AND ({}) IS NOT TRUE").format(applied, cut, touched),
    )


def _is_replacing(run: Run, table: Table, sources: Sequence[SourceCut]) -> bool:
    """Whether the newest record of each key has to be found from the start."""
    if not table.first.is_keyed:
        return False
    if not database.keeps_apart(run.snapshot, table):
        return True  # rows that were replaced may stand beside those that replaced them
    name = sql.Identifier(table.schema, table.table).as_string(None)
    span = sum(last - first for source in sources for first, last in source.ranges)
    ((estimate,),) = run.snapshot.execute(
        "SELECT coalesce(sum(greatest(c.reltuples, 0)), 0)::bigint FROM pg_class AS c WHERE c.oid = to_regclass(%s) "
        "OR c.oid IN (SELECT relid FROM pg_partition_tree(to_regclass(%s)))",
        [name] * 2,
    )
    return int(estimate) < span * DISTINCT_MIN


class Comparison:
    """Both sides of one table, from sums to rows."""

    def __init__(
        self,
        run: Run,
        table: Table,
        sources: Sequence[SourceCut],
        expectation: Expectation,
        actual: Scan,
        width: int,
    ) -> None:
        self._run = run
        self._table = table
        self._sources = sources
        self._expectation = expectation
        self._actual = actual
        self._width = width

    def compare(self, expected: Sums, *, is_latest: bool) -> tuple[Sums, list[Bucket], Found]:
        """The sums that hold in the end, the buckets in which they differ, and the rows."""
        run, table = self._run, self._table
        differing = self._differing(expected)
        # Sums of all records tell nothing of deletes: a row that one of them should have removed is among both sides'.
        if not differing and (is_latest or not expected.deletes):
            return expected, [], Found([], Counter())
        is_one_to_one = not is_latest and not expected.deletes and expected.rows == self._actual.rows
        if is_one_to_one and table.first.guard:
            found = self._rows(differing, is_latest=False, is_by_place=True)
            # As many rows as records, each where its record says: there are no copies, and none was replaced.
            if not found.counts.keys() - {difference.DIFFERS}:
                return expected, differing, found
        if table.first.is_keyed and not is_latest:
            is_latest = True
            run.progress(f"{table.name}: records may have replaced others; looking for the newest of each key")
            expected = self._expectation.sums(self._width, is_latest=True)
            differing = self._differing(expected)
        found = self._rows(differing, is_latest=is_latest) if differing else Found([], Counter())
        return expected, differing, found

    def _differing(self, expected: Sums) -> list[Bucket]:
        nothing = Checksum()
        wanted, there = expected.by_bucket, self._actual.by_bucket
        return sorted(
            bucket
            for bucket in wanted.keys() | there.keys()
            if wanted.get(bucket, nothing) != there.get(bucket, nothing)
        )

    def _rows(self, differing: Sequence[Bucket], *, is_latest: bool, is_by_place: bool = False) -> Found:
        run, table = self._run, self._table
        run.progress(f"{table.name}: {len(differing)} buckets differ; comparing rows")
        expected = self._expectation.rows(is_latest=is_latest)
        condition = database.in_cut(table, self._sources)
        if table.first.guard and self._actual.by_bucket.keys() - differing:  # there are others to leave out
            condition = sql.SQL("({}) AND {}").format(condition, _in_buckets(differing, self._width))
            expected = _of_buckets(run, expected, differing, self._width)
        actual = table_rows(run.spark, run.snapshot, table, condition)
        if is_by_place:
            found = difference.by_place(expected, actual)
        else:
            first = table.first
            found = difference.differences(expected, actual, is_keyed=first.is_keyed, is_guarded=first.guard)
        return collected(run, found)


def _in_buckets(buckets: Sequence[Bucket], width: int) -> sql.Composable:
    """As VALUES, which PostgreSQL hashes: a list it would go through for each row."""
    pairs = sql.SQL(", ").join(sql.SQL("({}, {}::bigint)").format(source, bucket) for source, bucket in buckets)
    return sql.SQL("({}, {} / {}) IN (VALUES {})").format(sql.Identifier(SOURCE), sql.Identifier(OFFSET), width, pairs)


def _of_buckets(run: Run, rows: DataFrame, buckets: Sequence[Bucket], width: int) -> DataFrame:
    """Rows of these buckets, and all deletes: what they have removed may stand in any bucket."""
    columns = (("source", "int"), ("bucket", "bigint"))
    chosen = literal_frame(run.spark, columns, buckets).withColumn("is_chosen", F.lit(True))
    return (
        rows.withColumn("bucket", bucket_of(width))
        .join(F.broadcast(chosen), ["source", "bucket"], "left")
        .filter(F.col("is_delete") | F.col("is_chosen"))
    )


def _outside(run: Run, table: Table, count: int, classes: Classes) -> tuple[list[Suspect], list[str], bool]:
    """Rows that name a record outside of the cut: too new for the position, too old for Kafka, or none at all. And
    whether there are more of them.
    """
    if not count:
        return [], [], False
    rows = database.outside(run.snapshot, table, classes.outside, run.settings.suspects_max)
    suspects = []
    unchecked: Counter[str] = Counter()
    for key_text, number, offset, copies, digest in rows:
        why = _unchecked(run.cut, (number, offset))
        if why:
            unchecked[why] += copies
            continue
        suspects.append(
            Suspect(
                key_text=key_text,
                expected=None,
                found=(number, offset),
                copies=copies,
                opinion=difference.EXTRA,
                digest=digest,
            )
        )
    notes = [f"{table.name}: {number} rows come from {why}; they are not checked" for why, number in unchecked.items()]
    looked_at = sum(row[3] for row in rows)
    if count > looked_at:
        notes.append(f"{table.name}: {count} rows are outside of the cut, {looked_at} of them were looked at")
    return suspects, notes, count > looked_at


def _unchecked(cut: Cut, place: tuple[int | None, int | None]) -> str | None:
    """Why nothing can be said of a row that names this record."""
    number, offset = place
    if number is None or offset is None:
        return None
    source = as_mapping(cut.sources).get(number)
    if source is None or source.facts is None:
        return "a topic that is gone"
    position = source.position
    is_left_over = position.is_rewound and offset < position.high and not position.has_applied(offset)
    if offset < position.start or is_left_over:
        return "before the relay's start or its rewind"
    return None


def _each_row_once(run: Run, table: Table, suspects: list[Suspect], counts: Counter[str]) -> list[Suspect]:
    """What is missing inside of the cut may stand outside of it: looked up by its key."""
    missing = {each.key_text for each in suspects if each.opinion == difference.MISSING}
    if not missing or not table.first.is_keyed:
        return suspects
    states = {
        key: state for key, state in database.row_states(run.snapshot, table, missing).items() if isinstance(key, str)
    }
    merged = one_each(suspects, states, lambda place: _unchecked(run.cut, place) is not None)
    counts.update(each.opinion for each in merged)
    counts.subtract(each.opinion for each in suspects)
    return merged
