"""The reconciliation's settings: one typed model with a default for all but Kafka and the database. Reads nothing."""

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from oncebox.settings import KafkaSection, PostgresSection, ServiceSettings

Count = Annotated[int, Field(gt=0)]
Milliseconds = Annotated[int, Field(gt=0)]
TopicName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]{1,249}$")]
Memory = Annotated[str, Field(pattern=r"^[1-9][0-9]*[mg]$")]


class ReconcileSettings(ServiceSettings):
    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(env_prefix="ONCEBOX_RECONCILE_")

    kafka: KafkaSection
    postgres: PostgresSection

    # Which relay's tables; empty: the only one there is.
    relay: str = ""
    # Of the coordinators.
    log_topic: TopicName = "oncebox.log"
    # Likewise.
    feed_topic: TopicName = "oncebox.commits"
    # Everything anew, instead of what is new since the last run that was clean.
    full: bool = False
    # Of Spark: local[*], or a cluster's address.
    master: str = "local[*]"
    # Of Spark's driver; with a local master all there is.
    driver_memory: Memory = "1g"
    # A cluster that has no worker for so long while there is work ends the run without a verdict (exit code 2).
    workers_wait_ms: Milliseconds = 120_000
    # Where each run leaves its report, as JSON and HTML.
    report_folder: Path = Path("reconcile")
    # For node_exporter's textfile collector.
    metrics_file: Path | None = None
    # More unapplied records than this is a verdict of its own (exit code 3).
    lag_records_max: Annotated[int, Field(ge=0)] = 1_000_000
    # An open transaction is called hanging when its last write is older.
    hanging_age_ms: Milliseconds = 900_000
    # Suspected rows that are looked at one by one; beyond them only counted.
    suspects_max: Annotated[int, Field(ge=1, le=100_000)] = 10_000
    # Rows that a report shows of each finding.
    samples_max: Annotated[int, Field(ge=1, le=1_000)] = 20
    # Checksums are made over this many ranges of offsets in all.
    buckets: Annotated[int, Field(ge=1, le=65_536)] = 4_096
    # Connections that make checksums in the database at the same time.
    database_connections: Annotated[int, Field(ge=1, le=64)] = 2
    # Runs remembered in the database.
    runs_kept: Count = 1_000
