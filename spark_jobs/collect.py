"""What a comparison does not like, collected: some of each sort, and the number of all."""

from __future__ import annotations

from collections import Counter
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from spark_jobs.findings import Suspect

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spark_jobs.compare import Run


class Found(NamedTuple):
    """Suspects up to the limit, and the number of all by opinion."""

    suspects: list[Suspect]
    counts: Counter[str]


def collected(run: Run, found: DataFrame) -> Found:
    """Of each opinion some, so that a rare one is not lost behind many of another."""
    found = found.persist()
    try:
        counts = Counter({row.opinion: row["count"] for row in found.groupBy("opinion").count().collect()})
        chosen = found
        if counts.total() > run.settings.suspects_max:
            wanted = shares(counts, run.settings.suspects_max)
            parts = [found.filter(F.col("opinion") == opinion).limit(share) for opinion, share in wanted.items()]
            chosen = reduce(DataFrame.unionAll, parts)
        suspects = [suspect(row) for row in chosen.collect()] if counts else []
    finally:
        found.unpersist()
    return Found(suspects, counts)


def shares(counts: Mapping[str, int], room: int) -> dict[str, int]:
    """How many of each: the same for all, where there are as many, and the rest to those that have more."""
    given: dict[str, int] = {}
    for opinion, count in sorted(counts.items(), key=lambda each: each[1]):
        given[opinion] = min(count, max(room // (len(counts) - len(given)), 1))
        room -= given[opinion]
    return given


def suspect(row: Any) -> Suspect:
    """Of a row with difference.COLUMNS. In one piece: by name each value would be looked for."""
    key_text, e_source, e_offset, a_source, a_offset, a_sum, e_digest, e_delete, copies, opinion = row
    return Suspect(
        key_text=key_text or "",
        expected=None if e_source is None else (e_source, e_offset),
        found=None if copies is None else (a_source, a_offset),
        copies=copies or 0,
        opinion=opinion,
        digest=None if a_sum is None else int(a_sum),
        expected_digest=e_digest,
        is_delete=bool(e_delete),
    )
