"""Spark's own client and ours get in by the same settings where Kafka wants TLS and a password."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from confluent_kafka import Producer

from oncebox.local import LocalKafka
from oncebox.local.kafka import QUICK_START
from oncebox.wire import KafkaSettings
from spark_jobs.facts import read_compacted, read_facts
from spark_jobs.sources import topic_records
from tests.support.kafka import create_topic

if TYPE_CHECKING:
    from pathlib import Path


def test_read_over_tls_with_a_password(spark: Any, tmp_path: Path):
    with LocalKafka(tmp_path / "kafka", secure=True, jvm_options=[QUICK_START]) as kafka:
        topic = create_topic(kafka.bootstrap_servers, config={"cleanup.policy": "compact,delete"})
        producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
        producer.produce(topic, b"value", key=b"key")
        producer.flush(30)
        settings = KafkaSettings(
            bootstrap_servers=kafka.secure_servers,
            security_protocol="SASL_SSL",
            sasl_mechanism="SCRAM-SHA-256",
            sasl_username=kafka.username,
            sasl_password=kafka.password,
            ssl_ca_location=str(kafka.ca_path),
        )
        assert read_facts(settings, [topic])[topic][0].high == 1
        assert read_compacted(settings, [topic]) == (frozenset({topic}), [])
        records = topic_records(spark, settings, {topic: {0: (0, 1)}})
        assert records is not None
        assert [bytes(row.value) for row in records.collect()] == [b"value"]
