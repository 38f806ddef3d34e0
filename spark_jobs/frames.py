"""Small frames from what the driver knows: buckets, places. As a literal of the plan: Spark's own way would start
Python workers for them, which takes longer than what the frame is for.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyspark.sql import DataFrame, SparkSession


def literal_frame(
    spark: SparkSession, columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[int | str | None]]
) -> DataFrame:
    """`columns`: names with Spark's types; numbers, truth values and texts only, for they travel as JSON."""
    names = [name for name, _ in columns]
    text = json.dumps([dict(zip(names, row, strict=True)) for row in rows])
    struct = ", ".join(f"{name}: {kind}" for name, kind in columns)
    return spark.range(1, numPartitions=1).select(F.inline(F.from_json(F.lit(text), f"array<struct<{struct}>>")))
