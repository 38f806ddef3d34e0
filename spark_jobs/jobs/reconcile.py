"""spark-submit --py-files oncebox.zip spark_jobs/jobs/reconcile.py [--config FILE] [--full]: read → compare → publish.

Settings come from the file and from ONCEBOX_* variables, as for `oncebox reconcile run`. The exit code is the verdict.
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
    from spark_jobs.result import Result


def run(
    settings: ReconcileSettings, progress: Callable[[str], None], *, session: SparkSession | None = None
) -> tuple[Result, dict[str, Path]]:
    """With a session of its own unless one is given."""
    from spark_jobs.publish import check_folders, store, trend, write_files
    from spark_jobs.reconcile import reconcile
    from spark_jobs.session import used_session
    from spark_jobs.size import reads_little

    check_folders(settings)
    with used_session(settings, session, is_little=session is None and reads_little(settings)) as spark:
        result, cut, _ = reconcile(spark, settings, progress)
    result = store(settings, result, cut)
    return result, write_files(settings, result, trend(settings, result))


def main(arguments: Sequence[str] | None = None) -> int:
    from oncebox.settings import SettingsError, load
    from spark_jobs.config import ReconcileSettings
    from spark_jobs.errors import ReconcileError
    from spark_jobs.publish import check_folders
    from spark_jobs.session import submitted_session

    parser = argparse.ArgumentParser(description="Reconcile PostgreSQL with the committed topics.")
    parser.add_argument("--config", type=Path, help="a YAML file with settings")
    parser.add_argument("--full", action="store_true", default=None, help="compare everything anew")
    try:
        given = parser.parse_args(arguments)
    except SystemExit as error:
        return EXIT_ERROR if error.code else 0  # its own 2 would say that something was not checked
    try:
        settings = load(ReconcileSettings, file=given.config, flags={"full": given.full})
        check_folders(settings)
        result, files = run(settings, tell, session=submitted_session())
    except CannotCheckError as error:
        tell(f"nothing could be concluded: {error}")
        return EXIT_CODES[Verdict.INCOMPLETE]
    except (ReconcileError, SettingsError, OSError) as error:
        tell(str(error))
        return EXIT_ERROR
    except Exception as error:  # noqa: BLE001 - whatever it is, 1 would mean findings
        tell(unforeseen(error))
        return EXIT_ERROR
    tell(result.sentence)
    tell(f"report: {files['html']}")
    return result.exit_code


def tell(text: str) -> None:
    print(f"oncebox reconcile: {text}", file=sys.stderr, flush=True)  # noqa: T201 - a command prints


if __name__ == "__main__":
    sys.exit(main())
