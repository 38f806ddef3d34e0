"""Expected rows and actual rows → those that are not the same, each with a first opinion of what is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MISSING, EXTRA, DIFFERS, OLDER, AHEAD, DUPLICATE, MOVED = (
    "missing",
    "extra",
    "differs",
    "older",
    "ahead",
    "duplicate",
    "moved",
)


COLUMNS = (
    "key_text",
    "e_source",
    "e_offset",
    "a_source",
    "a_offset",
    "a_sum",
    "e_digest",
    "e_delete",
    "copies",
    "opinion",
)


def by_place(expected: DataFrame, actual: DataFrame) -> DataFrame:
    """The same as differences() where each record is one row and each row names its record: one join of numbers. Where
    that is not so, some opinion is another than DIFFERS, or the two sides have not as many rows.
    """
    places = ["source", "offset"]
    wanted = expected.select(*places, F.col("key_text").alias("e_key"), F.col("digest").alias("e_digest"))
    found = actual.select(*places, "key_text", "digest")
    opinion = (
        F.when(F.col("key_text").isNull(), F.lit(MISSING))
        .when(~F.col("key_text").eqNullSafe(F.col("e_key")), F.lit(EXTRA))
        .when(~F.col("digest").eqNullSafe(F.col("e_digest")), F.lit(DIFFERS))
    )
    return (
        wanted.join(found, places, "full_outer")
        .withColumn("opinion", opinion)
        .filter(F.col("opinion").isNotNull())
        .select(
            "key_text",
            F.col("source").alias("e_source"),
            F.col("offset").alias("e_offset"),
            F.col("source").alias("a_source"),
            F.col("offset").alias("a_offset"),
            F.col("digest").cast("decimal(38,0)").alias("a_sum"),
            "e_digest",
            F.lit(False).alias("e_delete"),
            F.lit(1).cast("bigint").alias("copies"),
            "opinion",
        )
    )


def differences(expected: DataFrame, actual: DataFrame, *, is_keyed: bool, is_guarded: bool) -> DataFrame:
    """One row per row that is not as it should be: `e_` is what is expected, `a_` what is there. Records whose key
    cannot be told are left out.
    """
    identity = ["key_text"] if is_keyed or not is_guarded else ["source", "offset"]
    wanted = expected.select(
        *(F.col(name).alias(f"i_{name}") for name in identity),
        F.col("key_text").alias("e_key"),
        F.col("source").alias("e_source"),
        F.col("offset").alias("e_offset"),
        F.col("digest").alias("e_digest"),
        F.col("is_delete").alias("e_delete"),
    )
    found = actual.groupBy(*(F.col(name).alias(f"i_{name}") for name in identity)).agg(
        F.count(F.lit(1)).alias("copies"),
        F.first("key_text").alias("a_key"),
        F.first("source").alias("a_source"),
        F.first("offset").alias("a_offset"),
        F.first("digest").alias("a_digest"),
        F.sum(F.col("digest").cast("decimal(38,0)")).alias("a_sum"),
    )
    keys = [f"i_{name}" for name in identity]
    wanted = wanted.filter(F.col("e_key").isNotNull()) if is_keyed else wanted
    joined = wanted.join(found, keys, "full_outer")
    is_expected = F.col("e_delete").isNotNull() & ~F.coalesce(F.col("e_delete"), F.lit(False))
    is_there = F.col("copies").isNotNull()
    same_source = F.col("a_source").eqNullSafe(F.col("e_source")) if is_guarded else F.lit(True)
    same_place = same_source & (F.col("a_offset").eqNullSafe(F.col("e_offset")) if is_guarded else F.lit(True))
    is_older = same_source & (F.col("a_offset") < F.col("e_offset")) if is_guarded else F.lit(False)
    opinion = (
        F.when(is_expected & ~is_there, F.lit(MISSING))
        .when(F.col("e_delete") & is_there, F.when(is_older, F.lit(OLDER)).otherwise(F.lit(EXTRA)))
        .when(is_there & F.col("e_delete").isNull(), F.lit(EXTRA))
        .when(is_there & (F.col("copies") > 1), F.lit(DUPLICATE))
        .when(is_expected & is_there & is_older, F.lit(OLDER))
        .when(is_expected & is_there & ~same_source, F.lit(MOVED))
        .when(is_expected & is_there & ~same_place, F.lit(AHEAD))
        .when(is_expected & is_there & ~F.col("a_digest").eqNullSafe(F.col("e_digest")), F.lit(DIFFERS))
    )
    return (
        joined.withColumn("opinion", opinion)
        .filter(F.col("opinion").isNotNull())
        .withColumn("key_text", F.coalesce(F.col("a_key"), F.col("e_key")))
        .select(*COLUMNS)
    )
