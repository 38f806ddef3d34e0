"""The rows of one table that its records should have made. Kafka is read once: Spark keeps digests of what it has read
(in memory, the rest on its local disks) until the table is done with, so that a difference costs a look at what is kept
and not another reading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from pyspark import StorageLevel
from pyspark.sql import functions as F  # noqa: N812

from spark_jobs.cut import waits
from spark_jobs.database import Bucket, Checksum
from spark_jobs.encoding import HALF_BITS
from spark_jobs.sources import letter_records, source_records
from spark_jobs.transforms.checksums import bucket_sums, latest
from spark_jobs.transforms.expected import expected_rows

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pyspark.sql import DataFrame

    from spark_jobs.compare import Run
    from spark_jobs.cut import SourceCut
    from spark_jobs.targets import Table

COMPRESSED = "spark.sql.inMemoryColumnarStorage.compressed"
ROWS = "source int, offset bigint, timestamp timestamp, key_text string, digest bigint, is_delete boolean"
RECORD = {"topic": "string", "partition": "int", "key": "binary", "value": "binary"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    by_bucket: Mapping[Bucket, Checksum]
    deletes: int
    untold: int  # records whose key cannot be told here; known of the newest of each key only

    @property
    def rows(self) -> int:
        return sum(each.count for each in self.by_bucket.values())


class Expectation:
    """Use as a context manager: what is kept is let go at the end."""

    def __init__(self, run: Run, table: Table, sources: Sequence[SourceCut]) -> None:
        self._run = run
        self._table = table
        self._sources = sources
        self._kept: dict[bool, DataFrame] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for frame in self._kept.values():
            frame.unpersist()

    def rows(self, *, is_latest: bool) -> DataFrame:
        """One row per record; `is_latest`: per key, that of its newest record."""
        if is_latest not in self._kept:
            plain = self._kept.get(False)
            if plain is None:
                plain = expected_frame(self._run, self._table, self._sources)
            made = latest(plain, waits(self._sources)) if is_latest else plain
            self._kept[is_latest] = _kept(made)
        return self._kept[is_latest]

    def deleted(self) -> DataFrame:
        """The keys whose newest record is a delete, as `key_text`."""
        return self.rows(is_latest=True).filter(F.col("is_delete") & F.col("key_text").isNotNull()).select("key_text")

    def sums(self, width: int, *, is_latest: bool) -> Sums:
        rows = bucket_sums(self.rows(is_latest=is_latest), width, is_guarded=self._table.first.guard).collect()
        by_bucket = {
            (row.source, row.bucket): Checksum(
                count=row.rows, sum=((row.sum_high or 0) << HALF_BITS) + (row.sum_low or 0), xor=row.xor or 0
            )
            for row in rows
            if row.rows
        }
        untold = sum(row.untold or 0 for row in rows)
        return Sums(by_bucket=by_bucket, deletes=sum(row.deletes for row in rows), untold=untold)


def _kept(frame: DataFrame) -> DataFrame:
    """As it is: digests and keys do not compress, and Spark would look for repetitions in them for long."""
    spark = frame.sparkSession
    before = spark.conf.get(COMPRESSED, "true")
    spark.conf.set(COMPRESSED, "false")
    try:
        return frame.persist(StorageLevel.MEMORY_AND_DISK)
    finally:
        spark.conf.set(COMPRESSED, before or "true")


def expected_frame(
    run: Run,
    table: Table,
    sources: Sequence[SourceCut],
    *,
    with_records: bool = False,
    letters: Collection[tuple[int, int]] = (),
) -> DataFrame:
    """Of the records inside the cut that say something of rows; dead letters count as they were replayed, if ever.
    `with_records`: each with its record beside it. `letters`: places of dead letters outside of it that count, too.
    """
    also = RECORD if with_records else {}
    aside = {(each.source, each.offset) for each in run.cut.dead_letters} | run.cut.replayed.keys()
    rows: DataFrame | None = None
    for target in table.targets:
        of_target = [source for source in sources if source.position.topic == target.topic]
        parts = (
            source_records(run.spark, run.kafka, of_target, without=aside),
            letter_records(run.spark, of_target, run.cut.replayed, also=letters),
        )
        for records in parts:
            if records is not None:
                made = expected_rows(records, target, tuple(also))
                rows = made if rows is None else rows.unionByName(made)
    if rows is None:
        return run.spark.createDataFrame([], ", ".join([ROWS, *(f"{name} {kind}" for name, kind in also.items())]))
    return rows.filter(~F.col("is_void")).drop("is_void")
