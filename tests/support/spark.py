"""Real Spark: `spark`, a local session with the connectors for Kafka and PostgreSQL, started once per run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from oncebox.local.jars import cache_folder
from oncebox.local.java import find_java
from oncebox.local.kafka import QUICK_START
from spark_jobs.session import PACKAGES, start_with

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    folder = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("JAVA_HOME", find_java())
        environment.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        environment.setenv("PYSPARK_PYTHON", sys.executable)
        builder = (
            SparkSession.builder.master("local[2]")
            .appName("oncebox tests")
            .config("spark.jars.ivy", str(cache_folder() / "ivy"))
            .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
            .config("spark.local.dir", str(folder / "local"))
            .config("spark.driver.extraJavaOptions", f"{QUICK_START} -XX:-UsePerfData -Djava.io.tmpdir={folder}")
            .config("spark.python.daemon.module", "spark_jobs.daemon")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.session.timeZone", "UTC")
        )
        session = start_with(",".join(PACKAGES), builder)
        try:
            yield session
        finally:
            session.stop()
