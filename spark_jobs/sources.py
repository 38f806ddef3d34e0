"""DataFrames of what is compared: records by explicit offsets, rows of a table under the snapshot, manifests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from psycopg import sql
from pyspark.sql import functions as F  # noqa: N812

from spark_jobs.database import row_select
from spark_jobs.queries import query

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

    from oncebox.wire import KafkaSettings
    from spark_jobs.cut import Range, SourceCut
    from spark_jobs.records import Record
    from spark_jobs.snapshot import Snapshot
    from spark_jobs.targets import Table

RANGES_INLINE_MAX = 50
PARTITION_ROWS = 500_000
# Kafka's defaults are for a consumer that shares its work with many: 500 records a time, a megabyte a request. Not for
# a few records: 10,000 of four partitions took 0.7 s longer so.
FETCHING = {"kafka.max.poll.records": "10000", "kafka.max.partition.fetch.bytes": str(8 << 20)}
# A broker answers one request of a connection after the other. Beyond the last record the consumer's next fetch waits
# there for more, half a second by default, and what Spark asks for meanwhile (ends, the next range) waits behind it.
FETCH_WAIT_MS = 10


def kafka_options(settings: KafkaSettings) -> dict[str, str]:
    """The same connection for Kafka's Java client inside Spark."""
    options = {"kafka.bootstrap.servers": settings.bootstrap_servers}
    if settings.security_protocol != "PLAINTEXT":
        options["kafka.security.protocol"] = settings.security_protocol
    if settings.security_protocol.startswith("SASL"):
        module = "plain.PlainLoginModule" if settings.sasl_mechanism == "PLAIN" else "scram.ScramLoginModule"
        quoted = [json.dumps(each or "") for each in (settings.sasl_username, settings.sasl_password)]
        options["kafka.sasl.mechanism"] = settings.sasl_mechanism
        options["kafka.sasl.jaas.config"] = (
            f"org.apache.kafka.common.security.{module} required username={quoted[0]} password={quoted[1]};"
        )
    if settings.security_protocol.endswith("SSL"):
        options |= _tls_options(settings)
    return options


def _tls_options(settings: KafkaSettings) -> dict[str, str]:
    """Certificates as texts: Spark's workers have no files of the driver's. Without an authority Java's own count."""
    options = {}
    if settings.ssl_ca_location:
        options["kafka.ssl.truststore.type"] = "PEM"
        options["kafka.ssl.truststore.certificates"] = Path(settings.ssl_ca_location).read_text()
    if settings.ssl_certificate_location and settings.ssl_key_location:
        options["kafka.ssl.keystore.type"] = "PEM"
        options["kafka.ssl.keystore.certificate.chain"] = Path(settings.ssl_certificate_location).read_text()
        options["kafka.ssl.keystore.key"] = Path(settings.ssl_key_location).read_text()
        if settings.ssl_key_password:
            options["kafka.ssl.key.password"] = settings.ssl_key_password
    if settings.ssl_endpoint_identification_algorithm == "none":
        options["kafka.ssl.endpoint.identification.algorithm"] = ""
    return options


def topic_records(
    spark: SparkSession,
    kafka: KafkaSettings,
    offsets: Mapping[str, Mapping[int, Range]],
    *,
    is_committed: bool = True,
) -> DataFrame | None:
    """Every partition is listed with its first and next offset; None where there is nothing to read."""
    wanted = {
        topic: {partition: each for partition, each in partitions.items() if each[0] < each[1]}
        for topic, partitions in offsets.items()
    }
    wanted = {topic: partitions for topic, partitions in wanted.items() if partitions}
    if not wanted:
        return None
    total = sum(last - first for partitions in wanted.values() for first, last in partitions.values())
    count = sum(len(partitions) for partitions in wanted.values())
    reader = spark.read.format("kafka").options(**kafka_options(kafka))
    return (
        reader.option("assign", json.dumps({topic: sorted(partitions) for topic, partitions in wanted.items()}))
        .option("startingOffsets", json.dumps(_side(wanted, 0)))
        .option("endingOffsets", json.dumps(_side(wanted, 1)))
        .option("kafka.isolation.level", "read_committed" if is_committed else "read_uncommitted")
        .option("kafka.fetch.max.wait.ms", str(FETCH_WAIT_MS))
        .option("failOnDataLoss", "true")
        .options(**(FETCHING if total > PARTITION_ROWS else {}))
        .option("minPartitions", str(max(count, spark.sparkContext.defaultParallelism, total // PARTITION_ROWS)))
        .load()
        .select("topic", "partition", "offset", "timestamp", "key", "value")
    )


def _side(offsets: Mapping[str, Mapping[int, Range]], side: int) -> dict[str, dict[str, int]]:
    return {
        topic: {str(partition): each[side] for partition, each in partitions.items()}
        for topic, partitions in offsets.items()
    }


def source_records(
    spark: SparkSession,
    kafka: KafkaSettings,
    sources: Sequence[SourceCut],
    *,
    low: Mapping[int, int] | None = None,
    without: Collection[tuple[int, int]] = (),
) -> DataFrame | None:
    """The committed records inside the cut, with the relay's number of their source; `without` some (dead letters)."""
    offsets: dict[str, dict[int, Range]] = {}
    number = F.lit(None).cast("int")
    gaps = F.lit(False)
    for source in sources:
        if source.ranges:
            position = source.position
            first = max(source.ranges[0][0], (low or {}).get(position.source, 0))
            offsets.setdefault(position.topic, {})[position.partition] = (first, source.end)
            here = (F.col("topic") == position.topic) & (F.col("partition") == position.partition)
            number = F.when(here, F.lit(position.source)).otherwise(number)
            if len(source.ranges) > 1:  # one range is just what is read
                gaps |= here & ~within(source.ranges)
    records = topic_records(spark, kafka, offsets)
    if records is None:
        return None
    records = records.withColumn("source", number).filter(~gaps)
    if without:
        absent = spark.createDataFrame(list(without), "source int, offset bigint")
        records = records.join(F.broadcast(absent), ["source", "offset"], "left_anti")
    return records


def letter_records(
    spark: SparkSession,
    sources: Sequence[SourceCut],
    letters: Mapping[tuple[int, int], Record],
    *,
    also: Collection[tuple[int, int]] = (),
) -> DataFrame | None:
    """Dead letters inside the cut, or at one of `also`, that were applied after all, as records."""
    by_number = {source.position.source: source for source in sources}
    rows = [
        (number, offset, each.topic, each.partition, each.timestamp_ms, each.key, each.value)
        for (number, offset), each in letters.items()
        if number in by_number
        and ((number, offset) in also or any(first <= offset < last for first, last in by_number[number].ranges))
    ]
    if not rows:
        return None
    columns = "source int, offset bigint, topic string, partition int, ms bigint, key binary, value binary"
    return spark.createDataFrame(rows, columns).withColumn("timestamp", F.timestamp_millis("ms")).drop("ms")


def within(ranges: Sequence[Range]) -> Column:
    offset = F.col("offset")
    if len(ranges) > RANGES_INLINE_MAX:
        pairs = F.array(*(F.struct(F.lit(first).alias("first"), F.lit(last).alias("last")) for first, last in ranges))
        return F.exists(pairs, lambda each: (offset >= each["first"]) & (offset < each["last"]))
    found = F.lit(False)
    for first, last in ranges:
        found |= (offset >= first) & (offset < last)
    return found


def table_rows(spark: SparkSession, snapshot: Snapshot, table: Table, condition: sql.Composable) -> DataFrame:
    """key_text, source, offset, digest, row_at of the chosen rows; in parts, each in the snapshot."""
    quoted = sql.Identifier(table.schema, table.table).as_string(None)
    parts: DataFrame | None = None
    options = snapshot.jdbc_options()
    url = options.pop("url")
    for leaf, pages in snapshot.execute(query("leaves"), {"table": quoted}):
        inner = row_select(table, sql.SQL(leaf), condition, snapshot.text).as_string(None)
        predicates = [
            f"row_at >= '({first},0)'::tid AND row_at < '({last},0)'::tid"
            for first, last in page_ranges(pages, spark.sparkContext.defaultParallelism * 4)
        ]
        read = spark.read.jdbc(url, f"({inner}) AS t", predicates=predicates, properties=options)
        parts = read if parts is None else parts.unionByName(read)
    if parts is None:
        raise ValueError(f"{table.name} has no storage")
    lost = F.raise_error(F.lit("a database session did not join the snapshot"))
    checked = F.when(F.col("is_cut"), F.col("digest")).otherwise(lost.cast("bigint"))
    return parts.withColumn("digest", checked).drop("is_cut")


def page_ranges(pages: int, parts: int) -> list[Range]:
    """All pages, in at most `parts` ranges; the last is open to what is added meanwhile (the snapshot hides it)."""
    step = max(-(-pages // parts), 128)
    firsts = list(range(0, max(pages, 1), step))
    return [(first, first + step) for first in firsts[:-1]] + [(firsts[-1], 4_294_967_295)]


def feed_manifests(
    spark: SparkSession, kafka: KafkaSettings, topic: str, feed: Mapping[int, Range]
) -> DataFrame | None:
    """One row per manifest part: see spark_jobs.manifests."""
    from spark_jobs.manifests import decode

    records = topic_records(spark, kafka, {topic: feed}, is_committed=False)
    return None if records is None else decode(records)
