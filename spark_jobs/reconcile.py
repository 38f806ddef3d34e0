"""A run from the cut to the verdict. Reads Kafka and the database, writes nothing; see spark_jobs.publish for that."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from oncebox.settings import kafka_settings
from spark_jobs.alarm import RIGHT_NOW, looked_at_again, table_findings
from spark_jobs.compare import Run, compare_table
from spark_jobs.hanging import find_hanging
from spark_jobs.log_state import LogCheck, check_log
from spark_jobs.result import Coverage, Result, TableFigures
from spark_jobs.snapshot import Mark, Snapshot, read_mark, take_cut
from spark_jobs.verdict import judge
from spark_jobs.whole import Transactions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import SparkSession

    from spark_jobs.config import ReconcileSettings
    from spark_jobs.cut import Cut
    from spark_jobs.findings import Finding, TableResult


class Stopwatch:
    def __init__(self) -> None:
        self.steps_ms: dict[str, int] = {}
        self._since_s = time.monotonic()

    def lap(self, step: str) -> None:
        now_s = time.monotonic()
        self.steps_ms[step] = self.steps_ms.get(step, 0) + round((now_s - self._since_s) * 1000)
        self._since_s = now_s


def reconcile(
    spark: SparkSession, settings: ReconcileSettings, progress: Callable[[str], None]
) -> tuple[Result, Cut, list[TableResult]]:
    started_at_ms, watch = time.time_ns() // 1_000_000, Stopwatch()
    begun_s = time.monotonic()
    kafka = kafka_settings(settings.kafka, client_id="oncebox-reconcile")
    with Snapshot(settings.postgres.dsn.get_secret_value()) as snapshot:
        cut = take_cut(snapshot, kafka, relay=settings.relay, feed_topic=settings.feed_topic, is_full=settings.full)
        is_new = not any(source.verified for source in cut.sources)
        since = None if settings.full or is_new else read_mark(snapshot, cut)
        progress(_told(cut, since))
        run = Run(
            spark=spark, settings=settings, kafka=kafka, snapshot=snapshot, cut=cut, since=since, progress=progress
        )
        watch.lap("cut")
        compared = [compare_table(run, table) for table in cut.tables]
        watch.lap("tables")
        feed = Transactions(run)
        try:
            findings = feed.check()
            watch.lap("transactions")
            tables = [_alarmed(run, each, feed) for each in compared]
            log = LogCheck() if feed.unchecked else check_log(run, feed.manifests, feed.oldest_ms)
            findings += [*log.findings, *find_hanging(run)]
            watch.lap("log")
        finally:
            feed.close()
        snapshot.check_alive()
    unchecked = [*cut.notes, *(note for table in tables for note in table.notes), feed.unchecked, log.unchecked]
    told = [*cut.told, *feed.told, log.told, *map(_second_look, tables)]
    return (
        _result(
            cut,
            settings,
            tables,
            [*(finding for table in tables for finding in table.findings), *findings],
            unchecked=[each for each in unchecked if each],
            told=[each for each in told if each],
            transactions=feed.count,
            since=since,
            started_at_ms=started_at_ms,
            duration_ms=round((time.monotonic() - begun_s) * 1000),
            steps_ms=watch.steps_ms,
        ),
        cut,
        tables,
    )


def _told(cut: Cut, since: Mark | None) -> str:
    offsets = sum(last - first for source in cut.sources for first, last in source.ranges)
    kind = f"what is new since run {since.run}" if since else "everything"
    return (
        f"relay {cut.relay} ({cut.mode} mode), {kind}: {len(cut.tables)} tables, {len(cut.sources)} partitions, "
        f"{offsets:,} offsets at LSN {cut.lsn}"
    )


def _alarmed(run: Run, result: TableResult, feed: Transactions) -> TableResult:
    if not any(each.kind for each in result.settled):
        return result
    table = next(table for table in run.cut.tables if table.name == result.table)
    settled = looked_at_again(run, table, feed.attribute(result.settled))
    findings = table_findings(run, table, settled, result.counts, is_more_outside=result.is_more_outside)
    return replace(result, settled=tuple(settled), findings=tuple(findings))


def _second_look(table: TableResult) -> str:
    count = sum(each.detail == RIGHT_NOW for each in table.settled)
    return f"{table.table}: {count} rows were wrong at the cut and {RIGHT_NOW}" if count else ""


def _result(
    cut: Cut,
    settings: ReconcileSettings,
    tables: Sequence[TableResult],
    findings: Sequence[Finding],
    *,
    unchecked: Sequence[str],
    told: Sequence[str],
    transactions: int,
    since: Mark | None,
    started_at_ms: int,
    duration_ms: int,
    steps_ms: dict[str, int],
) -> Result:
    judgement = judge(
        findings,
        unchecked,
        rows=sum(table.rows_found for table in tables),
        lag=cut.lag,
        lag_max=settings.lag_records_max,
        since=f"run {since.run}" if since else None,
        told=told,
    )
    return Result(
        verdict=judgement.verdict,
        sentence=judgement.sentence,
        kind="incremental" if since else "full",
        since_run=since.run if since else None,
        relay=cut.relay,
        mode=cut.mode,
        started_at_ms=started_at_ms,
        duration_ms=duration_ms,
        snapshot=cut.snapshot_text,
        xmin=cut.xmin,
        lsn=cut.lsn,
        config_hash=cut.config_hash,
        feed={str(partition): each for partition, each in cut.feed.items()},
        findings=tuple(findings),
        unchecked=tuple(unchecked),
        told=tuple(told),
        parked=dict(Counter(letter.state for letter in cut.dead_letters)),
        lag=cut.lag,
        transactions=transactions,
        tables=tuple(
            TableFigures(
                table=table.table,
                rows_expected=table.rows_expected,
                rows_found=table.rows_found,
                buckets=table.buckets,
                buckets_differing=table.buckets_differing,
                superseded=table.superseded,
                touched=table.touched,
            )
            for table in tables
        ),
        coverage=tuple(
            Coverage(
                topic=source.position.topic,
                partition=source.position.partition,
                source=source.position.source,
                log_start=source.facts.log_start if source.facts else 0,
                start=source.position.start,
                verified=source.verified,
                next=source.position.next,
                stable=source.facts.stable if source.facts else 0,
                high=source.facts.high if source.facts else 0,
                compared=sum(last - first for first, last in source.ranges),
            )
            for source in cut.sources
        ),
        steps_ms=steps_ms,
    )
