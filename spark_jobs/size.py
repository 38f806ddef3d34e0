"""How much a run will have to read, asked before Spark is started: its JVM is set up for little or for much.

A guess that changes no result, only how long a run takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg

from spark_jobs.queries import query

if TYPE_CHECKING:
    from spark_jobs.config import ReconcileSettings

# Java's second compiler takes some 12 s of processor time to make Spark's code fast, and saves as much on 10⁶ records.
LITTLE_MAX = 500_000


def reads_little(settings: ReconcileSettings) -> bool:
    """False where nobody knows: a database that does not answer is told when the run needs it."""
    try:
        with psycopg.connect(settings.postgres.dsn.get_secret_value(), connect_timeout=5) as connection:
            row = connection.execute("SELECT to_regclass('oncebox.reconciliation_verified') IS NOT NULL").fetchone()
            is_again = not settings.full and row is not None and row[0]
            name = "records_unverified" if is_again else "records_applied"
            found = connection.execute(query(name), {"relay": settings.relay}).fetchone()
    except psycopg.Error:
        return False
    return found is not None and found[0] <= LITTLE_MAX
