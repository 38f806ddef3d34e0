"""Ends a run for which a cluster has no worker any more: Spark itself would wait for one for ever, and say nothing."""

from __future__ import annotations

import time
from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING

from spark_jobs.errors import CannotCheckError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

LOOK_S = 1.0


class _Watcher:
    def __init__(self, spark: SparkSession, wait_ms: int) -> None:
        self._context = spark.sparkContext
        self._wait_ms = wait_ms
        self._ended = Event()
        self._thread = Thread(target=self._watch, name="workers", daemon=True)
        self.has_given_up = False

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        alone_since_s: float | None = None
        while not self._ended.wait(LOOK_S):
            if not self._is_stuck():
                alone_since_s = None
                continue
            now_s = time.monotonic()
            alone_since_s = now_s if alone_since_s is None else alone_since_s
            if (now_s - alone_since_s) * 1000 >= self._wait_ms:
                self.has_given_up = True
                self._context.cancelAllJobs()  # again at each look: the next step would begin another job

    def _is_stuck(self) -> bool:
        """Work, and nobody to do it. Without work a cluster may lawfully have taken its workers away."""
        if not self._context.statusTracker().getActiveJobsIds():
            return False
        executors = self._context._jsc.sc().statusTracker().getExecutorInfos()  # noqa: SLF001 - Python's has no such call
        return len(executors) <= 1  # the driver is one of them


@contextmanager
def watched(spark: SparkSession, wait_ms: int) -> Iterator[None]:
    """What fails inside because there was no worker for so long is told as that."""
    if (spark.sparkContext.master or "").startswith("local"):
        yield
        return
    watcher = _Watcher(spark, wait_ms)
    watcher.start()
    try:
        yield
    except Exception as error:
        if not watcher.has_given_up:
            raise
        raise CannotCheckError(
            f"the cluster has had no worker for {wait_ms / 1000:g} s: run again when it has some "
            "(or let it wait longer: workers_wait_ms)"
        ) from error
    finally:
        watcher.end()
