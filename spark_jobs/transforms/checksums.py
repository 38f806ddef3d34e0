"""Rows → sums per bucket of offsets. What both sides of the comparison are reduced to before any row is looked at."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from spark_jobs.encoding import HALF_BITS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import Column, DataFrame


NOTHING: Mapping[int, Mapping[int, int]] = MappingProxyType({})


def bucket_of(width: int) -> Column:
    """`width` is a power of two."""
    return F.shiftright("offset", width.bit_length() - 1)


def bucket_sums(rows: DataFrame, width: int, *, is_guarded: bool) -> DataFrame:
    """`rows` that say something, as expected_rows() or latest() makes them. The sum is in two halves: as one it would
    overflow.
    """
    untold = F.col("untold") if "untold" in rows.columns else F.lit(None).cast("bigint")
    digest = F.when(~F.col("is_delete") & untold.isNull(), F.coalesce(F.col("digest"), F.lit(0)))
    source, bucket = (F.col("source"), bucket_of(width)) if is_guarded else (F.lit(0), F.lit(0).cast("bigint"))
    return (
        rows.groupBy(source.alias("source"), bucket.alias("bucket"))
        .agg(
            F.count(digest).alias("rows"),
            F.sum(F.shiftright(digest, HALF_BITS)).alias("sum_high"),
            F.sum(digest.bitwiseAND(F.lit((1 << HALF_BITS) - 1))).alias("sum_low"),
            F.bit_xor(digest).alias("xor"),
            F.count_if(F.col("is_delete") & untold.isNull()).alias("deletes"),
            F.sum(untold).alias("untold"),
        )
        .select("source", "bucket", "rows", "sum_high", "sum_low", "xor", "deletes", "untold")
    )


def latest_of_source(rows: DataFrame, also: Sequence[str] = ()) -> DataFrame:
    """The last record of each key in each source, as the struct `of_source`; and how many `records` it has there."""
    newest = F.max_by(F.struct("offset", "timestamp", "digest", "is_delete", *also), F.col("offset"))
    return rows.groupBy("key_text", "source").agg(newest.alias("of_source"), F.count(F.lit(1)).alias("records"))


def latest(rows: DataFrame, waits: Mapping[int, Mapping[int, int]] = NOTHING) -> DataFrame:
    """The last record of each key. Within a source the highest offset counts; a key that moved to another partition
    (partitions were added) is where its newest record is: in that which waited for the others (`waits`, see
    spark_jobs.cut), behind that by the records' times. Of two of the same time nobody can tell; a delete is taken
    then, so that what is left is a row with a record of its own, which tells of the tie.

    Records whose key cannot be told have one row for all of them, without a key and with their number as `untold`.
    """
    by_source = latest_of_source(rows)
    order = F.struct("of_source.timestamp", "of_source.is_delete", "source")
    chosen = F.max_by(F.struct("source", "of_source"), order) if not waits else _newest_behind(waits)
    return (
        by_source.groupBy("key_text")
        .agg(chosen.alias("chosen"), F.sum("records").alias("records"))
        .select(
            "key_text",
            F.col("chosen.source").alias("source"),
            F.col("chosen.of_source.offset").alias("offset"),
            F.col("chosen.of_source.timestamp").alias("timestamp"),
            F.col("chosen.of_source.digest").alias("digest"),
            F.col("chosen.of_source.is_delete").alias("is_delete"),
            F.when(F.col("key_text").isNull(), F.col("records")).alias("untold"),
        )
    )


def _newest_behind(waits: Mapping[int, Mapping[int, int]]) -> Column:
    """Of a key's records, one of each source: without those that a source waited for in which the key occurs, too."""
    ends = F.from_json(F.lit(json.dumps(waits)), "map<string, map<string, bigint>>")

    def is_before(one: Column, other: Column) -> Column:
        waited_for = F.try_element_at(ends, other["source"].cast("string"))
        end = F.try_element_at(waited_for, one["source"].cast("string"))
        return F.coalesce(one["of_source"]["offset"] < end, F.lit(False))

    def ordered(one: Column) -> Column:
        record = one["of_source"]
        return F.struct(
            record["timestamp"].alias("timestamp"),
            record["is_delete"].alias("is_delete"),
            one["source"].alias("source"),
            record.alias("of_source"),
        )

    each = F.collect_list(F.struct("source", "of_source"))
    left = F.filter(each, lambda one: ~F.exists(each, lambda other: is_before(one, other)))
    return F.array_max(F.transform(left, ordered))
