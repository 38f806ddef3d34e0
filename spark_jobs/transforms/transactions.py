"""Manifests, cut, visible records → transactions that are half applied, and manifests that the topics contradict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from spark_jobs.transforms.checksums import bucket_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

NAME = ("transactional_id", "number")
STRETCH_BITS = 10


def runs(manifests: DataFrame) -> DataFrame:
    """One row per run of offsets, of each manifest part once."""
    return (
        manifests.filter(~F.col("is_unreadable"))
        .dropDuplicates([*NAME, "part"])
        .select(*NAME, "producer_id", "epoch", F.explode("runs").alias("run"))
        .select(*NAME, "producer_id", "epoch", "run.*")
    )


def half_applied(all_runs: DataFrame, applied: DataFrame) -> DataFrame:
    """`applied`: topic_id, partition, start, ranges (array of first, next) of each source of the relay. A transaction
    of which some offsets are inside and others are not: transactional_id, number, applied, wanted.
    """
    inside = F.aggregate(
        "ranges",
        F.lit(0).cast("bigint"),
        lambda total, each: (
            total
            + F.greatest(
                F.least(F.col("next"), each["next"]) - F.greatest(F.col("first"), each["first"]),
                F.lit(0).cast("bigint"),
            )
        ),
    )
    # What lies below the relay's start was never its to apply.
    wanted = F.greatest(F.col("next") - F.greatest(F.col("first"), F.col("start")), F.lit(0).cast("bigint"))
    return (
        all_runs.join(F.broadcast(applied), ["topic_id", "partition"])
        .withColumn("inside", inside)
        .withColumn("wanted", wanted)
        .groupBy(*NAME)
        .agg(F.sum("inside").alias("applied"), F.sum("wanted").alias("wanted"))
        .filter((F.col("applied") > 0) & (F.col("applied") < F.col("wanted")))
    )


def written_by(all_runs: DataFrame, places: DataFrame) -> DataFrame:
    """`places`: topic_id, partition, source, offset, few. With the transaction that claims each: joined by stretches of
    offsets, or every run of a partition would be held against every place in it.
    """
    stretches = F.sequence(F.shiftright("first", STRETCH_BITS), F.shiftright(F.col("next") - 1, STRETCH_BITS))
    return (
        all_runs.filter(F.col("first") < F.col("next"))
        .withColumn("stretch", F.explode(stretches))
        .join(
            F.broadcast(places.withColumn("stretch", F.shiftright("offset", STRETCH_BITS))),
            ["topic_id", "partition", "stretch"],
        )
        .filter((F.col("offset") >= F.col("first")) & (F.col("offset") < F.col("next")))
        .select("source", "offset", *NAME)
    )


def beyond_end(all_runs: DataFrame, ends: DataFrame) -> DataFrame:
    """`ends`: topic_id, partition, source, high. Transactions whose manifests claim offsets that the partition does not
    have, as contradicted() tells them.
    """
    return (
        all_runs.join(F.broadcast(ends), ["topic_id", "partition"])
        .filter(F.col("next") > F.col("high"))
        .withColumn("offset", F.greatest("first", "high"))
        .groupBy(*NAME)
        .agg(
            F.min(F.struct("source", "offset")).alias("begin"), F.sum(F.col("next") - F.col("offset")).alias("offsets")
        )
        .select(*NAME, "begin.*", "offsets")
    )


def claimed_offsets(all_runs: DataFrame, readable: DataFrame) -> DataFrame:
    """`readable`: topic_id, partition, source, first, next. Each offset inside it that a manifest claims."""
    low = F.greatest(F.col("first"), F.col("low"))
    high = F.least(F.col("next"), F.col("high"))
    return (
        all_runs.join(
            F.broadcast(readable.withColumnsRenamed({"first": "low", "next": "high"})), ["topic_id", "partition"]
        )
        .filter(low < high)
        .select(*NAME, "source", F.explode(F.sequence(low, high - 1)).alias("offset"))
    )


def offset_sums(offsets: DataFrame, width: int) -> DataFrame:
    """Both sides are Spark's, so that Spark's own quick hash will do."""
    mixed = F.xxhash64("source", "offset")
    return offsets.groupBy("source", bucket_of(width).alias("bucket")).agg(
        F.count(F.lit(1)).alias("offsets"),
        F.sum(F.shiftright(mixed, 32)).alias("high"),
        F.bit_xor(mixed).alias("xor"),
    )


def contradicted(claimed: DataFrame, visible: DataFrame) -> DataFrame:
    """Transactions whose manifests claim offsets that no reader sees: transactional_id, number, one of the offsets (as
    source, offset), and how many there are (offsets).
    """
    return (
        claimed.join(visible.select("source", "offset"), ["source", "offset"], "left_anti")
        .groupBy(*NAME)
        .agg(F.min(F.struct("source", "offset")).alias("first"), F.count(F.lit(1)).alias("offsets"))
        .select(*NAME, "first.*", "offsets")
    )
