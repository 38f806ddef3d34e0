"""datacompy's comparison of the same two sides on the same Spark: the records parsed into columns, and the table."""

from typing import Any
from urllib.parse import unquote, urlsplit

from proof.bench.reconcile_data import COLUMNS, PARTITIONS, Place


def sides(spark: Any, place: Place) -> tuple[Any, Any]:
    from pyspark.sql import functions as F  # noqa: N812

    schema = "id bigint, name string, amount decimal(12,2), at timestamp, is_open boolean"
    records = (
        spark.read.format("kafka")
        .option("kafka.bootstrap.servers", place.servers)
        .option("subscribe", place.topic)
        .option("kafka.isolation.level", "read_committed")
        .option("minPartitions", str(PARTITIONS))
        .load()
        .select(F.from_json(F.col("value").cast("string"), schema).alias("row"))
        .select("row.*")
    )
    address = urlsplit(place.dsn)
    rows = (
        spark.read.format("jdbc")
        .option("driver", "org.postgresql.Driver")
        .option("url", f"jdbc:postgresql://{address.hostname}:{address.port}{address.path}")
        .option("user", address.username)
        .option("password", unquote(address.password or ""))
        .option("fetchsize", "10000")
        .option("dbtable", "public.rows")
        .option("partitionColumn", "id")
        .option("lowerBound", "0")
        .option("upperBound", str(_highest(place)))
        .option("numPartitions", "8")
        .load()
        .select(*COLUMNS)
    )
    return records, rows


def _highest(place: Place) -> int:
    import psycopg

    with psycopg.connect(place.dsn) as connection:
        row = connection.execute("SELECT max(id) FROM public.rows").fetchone()
    return int(row[0]) if row else 0


def compare(spark: Any, place: Place) -> bool:
    """Both sides are kept after they were read once, as its users do: otherwise it would read them several times."""
    from datacompy.spark import SparkSQLCompare
    from pyspark import StorageLevel

    records, rows = (side.persist(StorageLevel.MEMORY_AND_DISK) for side in sides(spark, place))
    try:
        comparison = SparkSQLCompare(spark, records, rows, join_columns=["id"], df1_name="topic", df2_name="table")
        return bool(comparison.matches())
    finally:
        spark.catalog.clearCache()
