"""spark-submit --py-files oncebox.zip spark_jobs/jobs/backfill.py TABLE [--config FILE] [--apply]: topics → table.

Settings come from the file and from ONCEBOX_* variables, as for `oncebox reconcile backfill`. Without --apply all of it
is done and rolled back.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from spark_jobs.errors import CannotCheckError, unforeseen
from spark_jobs.verdict import EXIT_CODES, EXIT_ERROR, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import SparkSession

    from spark_jobs.config import ReconcileSettings
    from spark_jobs.swap import Changes


def run(
    settings: ReconcileSettings,
    table: str,
    progress: Callable[[str], None],
    *,
    is_dry: bool,
    session: SparkSession | None = None,
) -> Changes:
    """With a session of its own unless one is given."""
    from spark_jobs.backfill import backfill
    from spark_jobs.session import used_session
    from spark_jobs.size import reads_little

    is_little = session is None and reads_little(settings.model_copy(update={"full": True}))
    with used_session(settings, session, is_little=is_little) as spark:
        return backfill(spark, settings, table, progress, is_dry=is_dry)


def told(table: str, changes: Changes, *, is_dry: bool) -> str:
    counts = f"{changes.deleted} deleted, {changes.changed} changed, {changes.inserted} inserted"
    if is_dry:
        return f"{table}: would have {changes.rows} rows: {counts}; rolled back, --apply does it"
    return f"{table}: has {changes.rows} rows: {counts}; the relay goes on from where it was"


def main(arguments: Sequence[str] | None = None) -> int:
    from oncebox.settings import SettingsError, load
    from spark_jobs.config import ReconcileSettings
    from spark_jobs.errors import ReconcileError
    from spark_jobs.session import submitted_session

    parser = argparse.ArgumentParser(description="Rebuild a table from its topics, at the point where the relay is.")
    parser.add_argument("table", help="schema.name")
    parser.add_argument("--config", type=Path, help="a YAML file with settings")
    parser.add_argument("--apply", action="store_true", help="do it; otherwise it is rolled back")
    try:
        given = parser.parse_args(arguments)
    except SystemExit as error:
        return EXIT_ERROR if error.code else 0  # its own 2 would say that nothing could be concluded
    try:
        settings = load(ReconcileSettings, file=given.config, flags={})
        changes = run(settings, given.table, tell, is_dry=not given.apply, session=submitted_session())
    except CannotCheckError as error:
        tell(f"nothing is changed: {error}")
        return EXIT_CODES[Verdict.INCOMPLETE]
    except (ReconcileError, SettingsError, OSError) as error:
        tell(str(error))
        return EXIT_ERROR
    except Exception as error:  # noqa: BLE001 - whatever it is, 1 would mean findings
        tell(unforeseen(error))
        return EXIT_ERROR
    tell(told(given.table, changes, is_dry=not given.apply))
    return 0


def tell(text: str) -> None:
    print(f"oncebox reconcile backfill: {text}", file=sys.stderr, flush=True)  # noqa: T201 - a command prints


if __name__ == "__main__":
    sys.exit(main())
