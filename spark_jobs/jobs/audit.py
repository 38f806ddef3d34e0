"""What transactions have been like: durations, sizes, aborts by cause, hot partitions, from the feed and the log."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from oncebox.settings import kafka_settings
from spark_jobs.errors import CannotCheckError
from spark_jobs.facts import read_facts
from spark_jobs.sources import feed_manifests, topic_records
from spark_jobs.whole import newer_told

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from spark_jobs.config import ReconcileSettings

CAUSES = {0: "unknown", 1: "owner", 2: "timeout", 3: "newer instance", 4: "administrator"}
TOP = 10
MINUTES = 60_000


def audit(settings: ReconcileSettings, *, hours: float, session: SparkSession | None = None) -> dict[str, Any]:
    from spark_jobs.session import used_session

    with used_session(settings, session) as spark:
        return _audit(spark, settings, hours)


def _audit(spark: SparkSession, settings: ReconcileSettings, hours: float) -> dict[str, Any]:
    kafka = kafka_settings(settings.kafka, client_id="oncebox-audit")
    facts = read_facts(kafka, [settings.log_topic, settings.feed_topic])
    for what, name in (("feed", settings.feed_topic), ("log", settings.log_topic)):
        if name not in facts:
            raise CannotCheckError(f"the {what} {name} does not exist, or must not be read: is it the coordinators'?")
    ranges = {
        topic: {partition: (each.log_start, each.stable) for partition, each in partitions.items()}
        for topic, partitions in facts.items()
    }
    since_ms = round(time.time() * 1000 - hours * 60 * MINUTES)
    manifests = feed_manifests(spark, kafka, settings.feed_topic, ranges[settings.feed_topic])
    figures: dict[str, Any] = {"hours": hours, "committed": 0, "aborted_by_cause": {}, "open": []}
    if manifests is not None:
        _refuse_newer(manifests, settings.feed_topic)
        figures |= commits(manifests, since_ms)
    log = topic_records(spark, kafka, {settings.log_topic: ranges[settings.log_topic]}, is_committed=False)
    if log is not None:
        figures |= log_figures(log, settings.log_topic, since_ms)
    return figures


def _refuse_newer(manifests: DataFrame, topic: str) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    row = manifests.agg(F.count("newer").alias("newer"), F.max("newer").alias("version")).first()
    if row and row["newer"]:
        raise CannotCheckError(newer_told(topic, row["newer"], row["version"]))


def commits(manifests: DataFrame, since_ms: int) -> dict[str, Any]:
    from pyspark.sql import functions as F  # noqa: N812

    recent = manifests.filter(~F.col("is_unreadable") & (F.col("decided_at_ms") >= since_ms)).persist()
    first_parts = recent.filter(F.col("part") == 0).withColumn(
        "took_ms", F.col("decided_at_ms") - F.col("started_at_ms")
    )
    row = first_parts.agg(
        F.count(F.lit(1)).alias("committed"),
        F.percentile_approx("took_ms", F.array(F.lit(0.5), F.lit(0.99), F.lit(1.0))).alias("took"),
    ).first()
    sizes = recent.agg(F.sum("claimed").alias("records")).first()
    hot = (
        recent.select("transactional_id", F.explode("runs").alias("run"))
        .groupBy("run.topic", "run.partition")
        .agg(
            F.sum(F.col("run.next") - F.col("run.first")).alias("records"),
            F.countDistinct("transactional_id").alias("ids"),
        )
        .orderBy(F.desc("records"))
        .limit(TOP)
        .collect()
    )
    slow = first_parts.orderBy(F.desc("took_ms")).limit(TOP).select("transactional_id", "number", "took_ms").collect()
    rate = (
        first_parts.groupBy(F.floor(F.col("decided_at_ms") / MINUTES).alias("minute"))
        .count()
        .agg(F.max("count").alias("top"))
    ).first()
    recent.unpersist()
    took = (row["took"] if row else None) or [0, 0, 0]
    return {
        "committed": row["committed"] if row else 0,
        "records": (sizes["records"] if sizes else 0) or 0,
        "commits_per_minute_max": (rate["top"] if rate else 0) or 0,
        "duration_ms": {"p50": took[0], "p99": took[1], "max": took[2]},
        "hot_partitions": [
            {"partition": f"{each.topic}:{each.partition}", "records": each.records, "ids": each.ids} for each in hot
        ],
        "slowest": [
            {"transaction": f"{each.transactional_id} number {each.number}", "duration_ms": each.took_ms}
            for each in slow
        ],
    }


def log_figures(log: DataFrame, topic: str, since_ms: int) -> dict[str, Any]:
    """Aborts by cause among the outcomes that ids still remember, and what is open now with its age."""
    from pyspark.sql import functions as F  # noqa: N812

    from spark_jobs.log_state import ABORTED, NOT_READ, OPEN_STATES, not_read, open_transactions, outcomes

    is_counted = (F.col("result") == ABORTED) & (F.col("decided_at_ms") >= since_ms)
    counted = (
        outcomes(log).filter(is_counted | (F.col("result") == NOT_READ)).groupBy("result", "cause").count().collect()
    )
    aborted = [row for row in counted if row.result == ABORTED]
    if len(aborted) < len(counted):
        raise CannotCheckError(not_read(topic, {row.cause: row["count"] for row in counted if row.result == NOT_READ}))
    rows = open_transactions(log).orderBy("started_at_ms").limit(TOP).collect()
    now_ms = round(time.time() * 1000)
    return {
        "aborted_by_cause": {CAUSES.get(row.cause, str(row.cause)): row["count"] for row in aborted},
        "open": [
            {
                "transaction": f"{row.transactional_id} number {row.number}",
                "state": OPEN_STATES[row.state],
                "age_ms": max(now_ms - row.started_at_ms, 0),
            }
            for row in rows
        ],
    }


def render(figures: dict[str, Any]) -> str:
    lines = [f"transactions of the last {figures['hours']:g} hours"]
    duration = figures.get("duration_ms", {"p50": 0, "p99": 0, "max": 0})
    lines.append(f"  committed {figures['committed']:,}, records {figures.get('records', 0):,}")
    lines.append(f"  duration  p50 {duration['p50']} ms, p99 {duration['p99']} ms, longest {duration['max']} ms")
    aborted = ", ".join(f"{count} by {cause}" for cause, count in sorted(figures["aborted_by_cause"].items())) or "none"
    lines.append(f"  aborted   {aborted} (of those that ids remember)")
    for title, name, text in (
        ("hot partitions", "hot_partitions", "{partition}: {records:,} records of {ids} ids"),
        ("slowest", "slowest", "{transaction}: {duration_ms} ms"),
        ("open now", "open", "{transaction}: {state}, {age_ms} ms old"),
    ):
        if figures.get(name):
            lines.append(f"  {title}")
            lines += [f"    {text.format(**each)}" for each in figures[name]]
    return "\n".join(lines)
