"""The staging table of a backfill: the newest record of each key in each partition, its values as texts, written by
Spark's workers. What a run that was killed has left there is dropped by the next one.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
from psycopg import sql
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as T  # noqa: N812

from spark_jobs.errors import ReconcileError
from spark_jobs.expectation import RECORD, expected_frame
from spark_jobs.queries import query
from spark_jobs.records import row_texts
from spark_jobs.snapshot import jdbc_place
from spark_jobs.transforms.checksums import latest_of_source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spark_jobs.compare import Run
    from spark_jobs.cut import SourceCut
    from spark_jobs.targets import Table

Connection = psycopg.Connection[Any]
SCHEMA = "oncebox"
PREFIX = "backfill_staged_"
LOCK = 0x6F6E6365_626B66
BATCH_ROWS = 10_000


class Staging:
    """Use as a context manager, on a connection in autocommit that is kept to the end: as long as its session lives no
    other backfill can begin, so whatever else has such a name is left over.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        # A name of its own: workers of a run that was killed may still be writing, into what is theirs.
        self._name = f"{PREFIX}{uuid4().hex[:12]}"
        self.relation = sql.Identifier(SCHEMA, self._name)

    def __enter__(self) -> Staging:  # noqa: PYI034
        if self._connection.execute("SELECT pg_try_advisory_lock(%s)", [LOCK]).fetchone() != (True,):
            raise ReconcileError("another backfill is under way in this database: wait for its end")
        left_over = self._connection.execute(query("staged"), {"schema": SCHEMA, "prefix": PREFIX}).fetchall()
        for (name,) in left_over:
            self._connection.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(SCHEMA, name)))
        # What a crash of the server takes with it is not missed: it ends our session, and so the run.
        self._connection.execute(
            sql.SQL(
                'CREATE UNLOGGED TABLE {} (key_text text COLLATE "C", source integer, record_offset bigint, '
                "record_ms bigint, is_delete boolean, texts text[])"
            ).format(self.relation)
        )
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(psycopg.OperationalError):  # the session is gone, and its lock with it: the next run drops it
            self.drop()
            self._connection.execute("SELECT pg_advisory_unlock(%s)", [LOCK])

    def drop(self) -> None:
        self._connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(self.relation))

    def add(self, run: Run, table: Table, sources: Sequence[SourceCut]) -> None:
        """What the records of these sources' ranges say, in parallel. A task that Spark repeats may add a row twice."""
        rows = expected_frame(run, table, sources, with_records=True)
        if table.first.is_keyed:
            newest = latest_of_source(rows, tuple(RECORD))
            rows = newest.select("key_text", "source", "of_source.*")
        else:
            place = F.concat(F.col("source").cast("string"), F.lit(";"), F.col("offset").cast("string"), F.lit(";"))
            rows = rows.withColumn("key_text", place)
        targets = {target.topic: target for target in table.targets}
        made = F.udf(partial(row_texts, targets), T.ArrayType(T.StringType()), useArrow=False)
        record_ms = F.unix_millis("timestamp")
        texts = made("topic", "partition", "offset", record_ms, "key", "value")
        options = jdbc_place(self._connection)
        url = options.pop("url")
        rows.select(
            "key_text",
            "source",
            F.col("offset").alias("record_offset"),
            record_ms.alias("record_ms"),
            "is_delete",
            texts.alias("texts"),
        ).write.option("batchsize", BATCH_ROWS).jdbc(
            url, f"{SCHEMA}.{self._name}", mode="append", properties=options | {"reWriteBatchedInserts": "true"}
        )
