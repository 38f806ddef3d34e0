"""Rows below the mark, which an incremental run does not sum. Compared with their records again: those that were
written since, and whatever they may be copies of; those that a record has deleted since; and those of dead letters that
were replayed since, whether they are there or not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING, NamedTuple

from psycopg import sql
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from spark_jobs.collect import Found, collected
from spark_jobs.cut import merge, waits
from spark_jobs.database import (
    NO_ROW,
    OFFSET,
    SOURCE,
    at_places,
    identities_condition,
    keeps_apart,
    written_since,
)
from spark_jobs.expectation import expected_frame
from spark_jobs.frames import literal_frame
from spark_jobs.sources import table_rows
from spark_jobs.transforms import difference
from spark_jobs.transforms.checksums import latest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from pyspark.sql import Row

    from spark_jobs.compare import Run
    from spark_jobs.cut import SourceCut
    from spark_jobs.database import Classes, Identity, Scan
    from spark_jobs.targets import Table

Place = tuple[int, int]  # source, offset
Late = tuple[int, int, str | None]  # source, offset, key_text
# So many keys (or places) are looked up one by one; with more of them all older rows are read.
KEYS_MAX = 10_000


class Older(NamedTuple):
    found: Found
    untold: int  # dead letters that were replayed since, and whose key Spark cannot tell


def older_rows(
    run: Run, table: Table, sources: Sequence[SourceCut], actual: Scan, classes: Classes, deleted: DataFrame | None
) -> Older:
    """`deleted`: the keys whose newest record of those compared is a delete, as `key_text`."""
    identity = _identity(table)
    low = {source: lowest for source, (_, lowest) in actual.touched.items()}
    parts, also = [], []
    if low:
        total = sum(count for count, _ in actual.touched.values())
        run.progress(f"{table.name}: {total} older rows were written since the last run; comparing them")
        touched = table_rows(run.spark, run.snapshot, table, classes.touched)
        parts.append(touched)
        if not keeps_apart(run.snapshot, table):  # what was written may be a copy, beside the row that it is one of
            also.append(touched.select(*identity))
    if deleted is not None:
        also.append(deleted)
    late, untold = _late(run, table, sources)
    if late:
        run.progress(f"{table.name}: {len(late)} dead letters were replayed since the last run; comparing their rows")
        also.append(_late_frame(run, late).select(*identity))
        for source, offset, _ in late:
            low[source] = min(low.get(source, offset), offset)
    if also:
        rows, lowest = _standing(run, table, classes, reduce(DataFrame.unionByName, also).distinct())
        if lowest or (late and not parts):
            parts.append(rows())
        low |= {source: min(low.get(source, first), first) for source, first in lowest.items()}
    if not low:
        return Older(Found([], Counter()), untold)
    # Of what is past retention there are the dead letters, which are kept in the database.
    letters = replayed_in(run.cut.replayed, verified_and_lost(sources))
    expected = expected_frame(run, table, [*map(partial(since_touched, low=low), sources)], letters=letters)
    expected = latest(expected, waits(sources)) if table.first.is_keyed else expected
    found = difference.differences(
        expected, reduce(DataFrame.unionByName, parts), is_keyed=table.first.is_keyed, is_guarded=True
    )
    wrong = found.filter(F.col("opinion") != difference.MISSING)
    if late:
        wrong = wrong.unionByName(_missing_of_late(run, table, sources, found, late))
    return Older(collected(run, wrong), untold)


def _identity(table: Table) -> list[str]:
    return ["key_text"] if table.first.is_keyed else ["source", "offset"]


def _late(run: Run, table: Table, sources: Sequence[SourceCut]) -> tuple[list[Late], int]:
    """What dead letters say that stood aside when the last run compared their records, and were replayed since. And how
    many have keys that cannot be told.
    """
    numbers = {source.position.source for source in sources if source.facts is not None}
    places = (
        {place for place in run.since.replayed if place[0] in numbers} if run.since and table.first.guard else set()
    )
    if not places:
        return [], 0
    frame = expected_frame(run, table, [replace(source, ranges=()) for source in sources], letters=places)
    rows = [(row.source, row.offset, row.key_text) for row in frame.select("source", "offset", "key_text").collect()]
    told = [row for row in rows if row[2] is not None or not table.first.is_keyed]
    return told, len(rows) - len(told)


def _late_frame(run: Run, late: Sequence[Late]) -> DataFrame:
    return literal_frame(run.spark, (("source", "int"), ("offset", "bigint"), ("key_text", "string")), late)


def _missing_of_late(
    run: Run, table: Table, sources: Sequence[SourceCut], found: DataFrame, late: Sequence[Late]
) -> DataFrame:
    """Rows that dead letters should have made. Where a record above the mark has come since, it is that record's row,
    which is compared with all that is new.
    """
    is_below = reduce(
        Column.__or__,
        ((F.col("e_source") == source.position.source) & (F.col("e_offset") < source.verified) for source in sources),
        F.lit(False),
    )
    names = ["key_text"] if table.first.is_keyed else ["e_source", "e_offset"]
    places = _late_frame(run, late).withColumnsRenamed({"source": "e_source", "offset": "e_offset"})
    missing = found.filter((F.col("opinion") == difference.MISSING) & is_below)
    return missing.join(F.broadcast(places.select(*names).distinct()), names, "left_semi").select(*found.columns)


def _standing(
    run: Run, table: Table, classes: Classes, wanted: DataFrame
) -> tuple[Callable[[], DataFrame], dict[int, int]]:
    """Rows that nobody has written since the last run, of `wanted` keys (or places); and their lowest offsets."""
    keys = [_read_identity(row) for row in wanted.limit(KEYS_MAX + 1).collect()]
    if len(keys) > KEYS_MAX:
        rows = table_rows(run.spark, run.snapshot, table, classes.older).join(wanted, wanted.columns, "left_semi")
        lowest = rows.groupBy("source").agg(F.min("offset").alias("lowest")).collect()
        return lambda: rows, {row.source: row.lowest for row in lowest}
    wanted_rows = identities_condition(table, keys) if keys else NO_ROW
    condition = sql.SQL("({}) AND {}").format(classes.older, wanted_rows)
    statement = sql.SQL("SELECT {source}, min({offset}) FROM {table} WHERE {condition} GROUP BY 1").format(
        source=sql.Identifier(SOURCE),
        offset=sql.Identifier(OFFSET),
        table=sql.Identifier(table.schema, table.table),
        condition=condition,
    )
    found = run.snapshot.execute(statement)
    return lambda: table_rows(run.spark, run.snapshot, table, condition), dict(found)


def _read_identity(row: Row) -> Identity:
    return row.key_text if "key_text" in row else (row.source, row.offset)


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
