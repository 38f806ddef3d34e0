"""Rows below the mark, which an incremental run does not sum. Compared with their records again: those that were
written since, and those that a record has deleted since.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING

from psycopg import sql
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from spark_jobs.collect import Found, collected
from spark_jobs.cut import merge, waits
from spark_jobs.database import NO_ROW, OFFSET, SOURCE, at_places, keys_condition, written_since
from spark_jobs.expectation import expected_frame
from spark_jobs.sources import table_rows
from spark_jobs.transforms import difference
from spark_jobs.transforms.checksums import latest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from spark_jobs.compare import Run
    from spark_jobs.cut import SourceCut
    from spark_jobs.database import Classes, Scan
    from spark_jobs.targets import Table

Place = tuple[int, int]  # source, offset
# So many deleted keys are looked up one by one; with more of them all older rows are read.
KEYS_MAX = 10_000


def older_rows(
    run: Run, table: Table, sources: Sequence[SourceCut], actual: Scan, classes: Classes, deleted: DataFrame | None
) -> Found:
    """`deleted`: the keys whose newest record of those compared is a delete, as `key_text`."""
    low = {source: lowest for source, (_, lowest) in actual.touched.items()}
    parts = []
    if low:
        total = sum(count for count, _ in actual.touched.values())
        run.progress(f"{table.name}: {total} older rows were written since the last run; comparing them")
        parts.append(table_rows(run.spark, run.snapshot, table, classes.touched))
    if deleted is not None:
        rows, lowest = _standing(run, table, classes, deleted)
        if lowest:
            run.progress(f"{table.name}: older rows are there that were deleted since the last run; comparing them")
            parts.append(rows())
            low |= {source: min(low.get(source, first), first) for source, first in lowest.items()}
    if not parts:
        return Found([], Counter())
    # Of what is past retention there are the dead letters, which are kept in the database.
    letters = replayed_in(run.cut.replayed, verified_and_lost(sources))
    expected = expected_frame(run, table, [*map(partial(since_touched, low=low), sources)], letters=letters)
    expected = latest(expected, waits(sources)) if table.first.is_keyed else expected
    found = difference.differences(
        expected, reduce(DataFrame.unionByName, parts), is_keyed=table.first.is_keyed, is_guarded=True
    )
    return collected(run, found.filter(F.col("opinion") != difference.MISSING))


def _standing(
    run: Run, table: Table, classes: Classes, deleted: DataFrame
) -> tuple[Callable[[], DataFrame], dict[int, int]]:
    """Rows that nobody has written since the last run, of keys that were deleted since; and their lowest offsets."""
    keys = [row.key_text for row in deleted.limit(KEYS_MAX + 1).collect()]
    if len(keys) > KEYS_MAX:
        rows = table_rows(run.spark, run.snapshot, table, classes.older).join(deleted, "key_text", "left_semi")
        lowest = rows.groupBy("source").agg(F.min("offset").alias("lowest")).collect()
        return lambda: rows, {row.source: row.lowest for row in lowest}
    condition = sql.SQL("({}) AND {}").format(classes.older, keys_condition(table, keys))
    statement = sql.SQL("SELECT {source}, min({offset}) FROM {table} WHERE {condition} GROUP BY 1").format(
        source=sql.Identifier(SOURCE),
        offset=sql.Identifier(OFFSET),
        table=sql.Identifier(table.schema, table.table),
        condition=condition,
    )
    found = run.snapshot.execute(statement)
    return lambda: table_rows(run.spark, run.snapshot, table, condition), dict(found)


def verified_and_lost(sources: Sequence[SourceCut]) -> list[SourceCut]:
    """With what a run has found clean and retention has removed since."""
    lost = []
    for source in sources:
        first, last = source.position.start, min(source.facts.log_start, source.verified) if source.facts else 0
        if first < last:
            lost.append(replace(source, ranges=((first, last),)))
    return lost


def replayed_in(replayed: Collection[Place], sources: Sequence[SourceCut]) -> set[Place]:
    ranges = {source.position.source: source.ranges for source in sources}
    return {
        (number, offset)
        for number, offset in replayed
        if any(first <= offset < last for first, last in ranges.get(number, ()))
    }


def past_retention(run: Run, table: Table, sources: Sequence[SourceCut]) -> tuple[sql.Composable, sql.Composable]:
    """Rows that were found clean and have been written since, and whose records retention has removed: those of which
    nobody can say what they should be, and those that a replayed dead letter has made.
    """
    lost = verified_and_lost(sources)
    if run.since is None or not lost:
        return NO_ROW, NO_ROW
    written = written_since(table, lost, run.since.xmin)
    letters = at_places(replayed_in(run.cut.replayed, lost))
    return (
        sql.SQL("({}) AND NOT ({})").format(written, letters),
        sql.SQL("({}) AND ({})").format(written, letters),
    )


def since_touched(source: SourceCut, low: Mapping[int, int]) -> SourceCut:
    """With all that can have written the touched rows: their own records, and newer ones of their keys anywhere."""
    if source.facts is None:
        return source
    first = max(low.get(source.position.source, 0), source.position.start, source.facts.log_start)
    verified = [(first, source.verified)] if first < source.verified else []
    return replace(source, ranges=merge([*verified, *source.ranges]))
