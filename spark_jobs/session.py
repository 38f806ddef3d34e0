"""The Spark session. Where one runs already (spark-submit, a notebook) its settings win."""

from __future__ import annotations

import hashlib
import os
import sys
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from spark_jobs.errors import CannotCheckError, ReconcileError
from spark_jobs.workers import watched

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from spark_jobs.config import ReconcileSettings

PACKAGES = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.0",
    "org.postgresql:postgresql:42.7.14",
)


# For throughput: nobody waits for a pause. With the first compiler alone Java starts in half the time and stays slow.
JAVA_OPTIONS = "-XX:+UseParallelGC"
JAVA_OPTIONS_LITTLE = f"{JAVA_OPTIONS} -XX:TieredStopAtLevel=1"


def new_session(
    *, master: str, driver_memory: str, packages: str | None = None, is_little: bool = False
) -> SparkSession:
    """`packages` "" where the jars are on the class path already; `is_little`: there is not much to read."""
    from pyspark.sql import SparkSession

    from oncebox.local.jars import cache_folder
    from oncebox.local.java import JavaMissingError, find_java

    try:
        os.environ["JAVA_HOME"] = find_java()  # the one that is set, where it is fit
    except JavaMissingError as error:
        raise ReconcileError(str(error)) from error
    if "PYSPARK_PYTHON" not in os.environ and master.startswith("local"):
        os.environ["PYSPARK_PYTHON"] = sys.executable  # not whatever python3 is first in the path
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = (
        SparkSession.builder.master(master)
        .appName("oncebox reconcile")
        .config("spark.driver.memory", driver_memory)
        .config("spark.driver.defaultJavaOptions", JAVA_OPTIONS_LITTLE if is_little else JAVA_OPTIONS)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "8")
        .config("spark.jars.ivy", str(cache_folder() / "ivy"))
    )
    if master.startswith("local"):
        builder = builder.config("spark.python.daemon.module", "spark_jobs.daemon")
    wanted = ",".join(PACKAGES) if packages is None else packages
    return prepared(start_with(wanted, builder))


def start_with(packages: str, builder: Any) -> SparkSession:
    """A session that has these packages."""
    resolved = Resolved(packages)
    with resolved.turn():
        for name, value in resolved.options().items():
            builder = builder.config(name, value)
        session: SparkSession = _started(builder)
        resolved.remember(session.sparkContext.getConf().get("spark.jars", ""))
    return session


class Resolved:
    """The jars that Spark's Ivy has made of packages at an earlier start: asking it again costs seconds. Where one of
    them is gone it is asked again.
    """

    def __init__(self, packages: str) -> None:
        from oncebox.local.jars import cache_folder

        self._packages = packages
        self._file = cache_folder() / f"spark-{hashlib.sha256(packages.encode()).hexdigest()[:16]}.jars"

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Ivy's cache is not safe against another that fills it: where it has to be asked, one after the other."""
        from oncebox.local.jars import locked

        with ExitStack() as held:
            if "spark.jars.packages" in self.options():
                with suppress(OSError):  # a folder that cannot be written, of which Ivy tells better than we
                    self._file.parent.mkdir(parents=True, exist_ok=True)
                    held.enter_context(locked(self._file.with_suffix(".lock")))
            yield

    def options(self) -> dict[str, str]:
        """Spark's own."""
        if not self._packages:
            return {}
        try:
            jars = self._file.read_text().splitlines()
        except OSError:
            jars = []
        is_whole = jars and all(Path(jar).is_file() for jar in jars)
        return {"spark.jars": ",".join(jars)} if is_whole else {"spark.jars.packages": self._packages}

    def remember(self, jars: str) -> None:
        """`jars`: spark.jars of a session that was started with our options."""
        paths = [unquote(urlsplit(each).path) for each in jars.split(",") if each]
        if not self._packages or not paths:
            return
        partial = self._file.with_name(f"{self._file.name}.partial-{os.getpid()}")
        try:
            partial.write_text("\n".join(paths))
            partial.rename(self._file)
        except OSError:
            return  # the next start takes as long as this one


def submitted_session() -> SparkSession:
    """What spark-submit has set up."""
    from pyspark.sql import SparkSession

    session: SparkSession = _started(SparkSession.builder.appName("oncebox reconcile"))
    session.sparkContext.setLogLevel("ERROR")
    return session


def _started(builder: Any) -> Any:
    try:
        return builder.getOrCreate()
    except Exception as error:  # of many classes, and none of them says more than that Java did not start
        raise ReconcileError(f"Spark does not start: {_line(error)}") from error


@contextmanager
def used_session(
    settings: ReconcileSettings, given: SparkSession | None, *, is_little: bool = False
) -> Iterator[SparkSession]:
    """The given one, or one of its own that ends with its use. What fails in it is told in one sentence."""
    try:
        with _given_or_own(settings, given, is_little=is_little) as spark, watched(spark, settings.workers_wait_ms):
            yield prepared(spark)
    except Exception as error:
        if _was_interrupted(error):
            raise KeyboardInterrupt from error
        raise translated(error) from error


@contextmanager
def _given_or_own(
    settings: ReconcileSettings, given: SparkSession | None, *, is_little: bool
) -> Iterator[SparkSession]:
    if given is not None:
        yield given
        return
    spark = new_session(master=settings.master, driver_memory=settings.driver_memory, is_little=is_little)
    try:
        yield spark
    finally:
        spark.stop()


def _was_interrupted(error: BaseException) -> bool:
    """An interrupt cuts the connection to Java: what tidies up on the way out fails in its turn, and would be taken for
    the answer.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def translated(error: Exception) -> Exception:
    """What went wrong inside Spark, as one sentence: its own errors are pages of Java."""
    from psycopg import Error as DatabaseError
    from pyspark.errors import PySparkException

    if isinstance(error, ReconcileError):
        return error
    if isinstance(error, DatabaseError):
        return CannotCheckError(f"the database failed during the run: {_line(error)}; nothing is concluded, run again")
    if isinstance(error, PySparkException) or type(error).__module__.startswith("py4j"):
        return CannotCheckError(f"Spark failed during the run: {_line(error)}; nothing is concluded, run again")
    return error


def _line(error: Exception) -> str:
    """The cause is in the last "Caused by", where there is one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line.partition(": ")[2] for line in lines if line.startswith("Caused by:")]
    return (causes or lines or [type(error).__name__])[-1 if causes else 0][:300]


def prepared(session: SparkSession) -> SparkSession:
    """Times are compared as UTC, whatever the machine thinks. Fields that differ only in case are two, as in JSON."""
    session.conf.set("spark.sql.session.timeZone", "UTC")
    session.conf.set("spark.sql.caseSensitive", "true")
    return session
