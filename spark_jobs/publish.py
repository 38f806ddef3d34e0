"""A result to where people look for it: a row in the database, a JSON file, an HTML page, metrics."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.types.json import Jsonb

from spark_jobs.errors import ReconcileError
from spark_jobs.queries import query, schema
from spark_jobs.report import render
from spark_jobs.result import Result, to_json
from spark_jobs.verdict import Verdict

if TYPE_CHECKING:
    from pathlib import Path

    from spark_jobs.config import ReconcileSettings
    from spark_jobs.cut import Cut

HISTORY = 50


def store(settings: ReconcileSettings, result: Result, cut: Cut) -> Result:
    """In one transaction: the run, and (where nothing is wrong) how far it is now known to be clean. Where the database
    does not take it, the result stands by itself, says so, and leaves no mark.
    """
    try:
        with psycopg.connect(settings.postgres.dsn.get_secret_value()) as connection:
            connection.execute("SELECT pg_advisory_xact_lock(hashtext('oncebox reconcile'))")
            connection.execute(schema())
            row = connection.execute(
                query("insert_run"),
                {
                    "relay": result.relay,
                    "kind": result.kind,
                    "verdict": str(result.verdict),
                    "started_at": datetime.fromtimestamp(result.started_at_ms / 1000, UTC),
                    "rows_checked": result.rows,
                    "findings": sum(finding.count for finding in result.findings),
                    "lag": result.lag,
                    "snapshot_xmin": result.xmin,
                    "lsn": result.lsn,
                    "config_hash": result.config_hash,
                    "result": Jsonb(to_json(result)),
                },
            ).fetchone()
            run = row[0] if row else 0
            # Verified is only what was: a run with something left out does not move the mark.
            if result.verdict in {Verdict.CLEAN, Verdict.LAGGING}:
                for source in cut.sources:
                    if source.facts is not None:
                        connection.execute(
                            query("set_verified"),
                            {
                                "relay": result.relay,
                                "fence": cut.fence,
                                "source": source.position.source,
                                "next_offset": source.position.next,
                                "feed_positions": Jsonb(feed_from(cut)),
                                "snapshot_xmin": result.xmin,
                                "system_identifier": cut.system,
                                "config_hash": result.config_hash,
                                "run": run,
                            },
                        )
            connection.execute(query("forget_runs"), {"relay": result.relay, "run": run, "kept": settings.runs_kept})
    except psycopg.Error as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        note = f"the result could not be stored in the database, and leaves no mark: {why}"
        return replace(result, told=(*result.told, note), sentence=f"{result.sentence}; {note}")
    return replace(result, run=run)


def feed_from(cut: Cut) -> dict[str, int]:
    """Where the next run begins to read manifests: behind what was read, but not behind what is not applied yet. Their
    records are not compared with what they claim before they are.
    """
    if cut.mode == "transaction":
        # Whatever the lag is: a relay may have applied all that is stable, and not what is decided.
        return {
            str(partition): min(last, max(first, cut.feed_applied.get(partition, first)))
            for partition, (first, last) in cut.feed.items()
        }
    is_behind = any(source.lag or (source.facts and source.facts.stable < source.facts.high) for source in cut.sources)
    return {str(partition): first if is_behind else last for partition, (first, last) in cut.feed.items()}


def trend(settings: ReconcileSettings, result: Result) -> list[dict[str, Any]]:
    """For the page, which does without where the database does not tell."""
    try:
        return history(settings.postgres.dsn.get_secret_value(), result.relay)
    except psycopg.Error:
        return []


def history(dsn: str, relay: str, limit: int = HISTORY) -> list[dict[str, Any]]:
    """Newest first; empty where nothing was stored yet."""
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT to_regclass('oncebox.reconciliation_runs') IS NOT NULL").fetchone()
        if row is None or not row[0]:
            return []
        rows = connection.execute(query("history"), {"relay": relay, "limit": limit}).fetchall()
    names = ("run", "kind", "verdict", "started_at", "finished_at", "rows", "findings", "lag")
    return [dict(zip(names, each, strict=True)) for each in rows]


def check_folders(settings: ReconcileSettings) -> None:
    """Before the work is done, not after."""
    for folder in {settings.report_folder, *([settings.metrics_file.parent] if settings.metrics_file else [])}:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ReconcileError(f"the folder {folder} cannot be made: {error.strerror}") from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ReconcileError(f"the folder {folder} cannot be written to: name another, or change its rights")


def write_files(settings: ReconcileSettings, result: Result, earlier: list[dict[str, Any]]) -> dict[str, Path]:
    """A result that was not stored has no number: its files are named by the time."""
    folder = settings.report_folder
    at = datetime.fromtimestamp(result.started_at_ms / 1000, UTC)
    name = f"run-{at:%Y%m%dT%H%M%SZ}" if result.run is None else f"run-{result.run}"
    written = {"json": folder / f"{name}.json", "html": folder / f"{name}.html"}
    _replace(written["json"], json.dumps(to_json(result), indent=2, default=str))
    page = render(result, earlier)
    _replace(written["html"], page)
    _replace(folder / "latest.html", page)
    if settings.metrics_file is not None:
        written["metrics"] = settings.metrics_file
        _replace(settings.metrics_file, metrics_text(result))
    return written


def _replace(path: Path, text: str) -> None:
    """A reader sees the old file or the new one, never half of one."""
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.rename(path)
    except OSError as error:
        raise ReconcileError(f"{path} cannot be written: {error.strerror}") from error


def metrics_text(result: Result) -> str:
    """In Prometheus's text format."""
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    from spark_jobs.findings import Kind

    registry = CollectorRegistry()

    def gauge(name: str, text: str, *labels: str) -> Any:
        return Gauge(f"oncebox_reconcile_{name}", text, ["relay", *labels], registry=registry)

    gauge("verdict", "0 clean, 1 findings, 2 incomplete, 3 lagging.").labels(result.relay).set(result.exit_code)
    gauge("finished_seconds", "When the last run ended, seconds since 1970.").labels(result.relay).set(
        (result.started_at_ms + result.duration_ms) / 1000
    )
    gauge("duration_seconds", "How long it took.").labels(result.relay).set(result.duration_ms / 1000)
    gauge("lag_records", "Offsets not applied yet.").labels(result.relay).set(result.lag)
    gauge("unchecked", "What could not be checked.").labels(result.relay).set(len(result.unchecked))
    rows = gauge("rows", "Rows compared.", "table")
    for table in result.tables:
        rows.labels(result.relay, table.table).set(table.rows_found)
    findings = gauge("findings", "Findings by kind.", "kind")
    for kind in Kind:
        count = sum(finding.count for finding in result.findings if finding.kind is kind)
        findings.labels(result.relay, kind.value).set(count)
    text: bytes = generate_latest(registry)
    return text.decode()
