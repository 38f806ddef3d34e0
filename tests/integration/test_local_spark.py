"""Spark reads what the other parts hold: the committed records of a topic, and the rows of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
from confluent_kafka import Producer
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as T  # noqa: N812

if TYPE_CHECKING:
    from oncebox.local import LocalKafka, LocalPostgres
    from tests.support.kafka import TopicFactory


def test_committed_records_of_a_topic(spark: Any, kafka: LocalKafka, new_topic: TopicFactory):
    topic = new_topic()
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": topic})
    producer.init_transactions(60)
    for value, end in ((b"aborted", producer.abort_transaction), (b"committed", producer.commit_transaction)):
        producer.begin_transaction()
        producer.produce(topic, value)
        producer.flush(60)
        end(60)
    # A commit is answered before its marker is written; a successor is not let in before that.
    Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": topic}).init_transactions(60)
    records = (
        spark.read.format("kafka")
        .option("kafka.bootstrap.servers", kafka.bootstrap_servers)
        .option("kafka.isolation.level", "read_committed")
        .option("subscribe", topic)
        .load()
    )
    assert [bytes(row.value) for row in records.select("value").collect()] == [b"committed"]


def test_rows_of_a_table(spark: Any, postgres: LocalPostgres, database: str):
    with psycopg.connect(database) as connection:
        connection.execute("CREATE TABLE fruit AS SELECT * FROM (VALUES (1, 'apple'), (2, 'pear')) AS v (id, name)")
        name = connection.info.dbname
    rows = (
        spark.read.format("jdbc")
        .option("driver", "org.postgresql.Driver")
        .option("url", f"jdbc:postgresql://{postgres.host}:{postgres.port}/{name}")
        .option("user", postgres.user)
        .option("password", postgres.password)
        .option("dbtable", "fruit")
        .load()
    )
    assert sorted((row.id, row.name) for row in rows.collect()) == [(1, "apple"), (2, "pear")]


def test_workers_do_not_read_sparks_zip_files_before_each_task(spark: Any):
    def patched(_: Any) -> str:
        import zipimport

        return zipimport.zipimporter.invalidate_caches.__name__

    found = spark.range(2).select(F.udf(patched, T.StringType(), useArrow=False)("id").alias("name")).collect()
    assert {row.name for row in found} == {"keep"}
