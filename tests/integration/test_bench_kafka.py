"""The baseline bench on a real broker, in small."""

import pytest
from confluent_kafka import KafkaException

from proof.bench.context import Context
from proof.bench.kafka import bench
from proof.bench.peer_confluent import Workload, flushes, transactions


@pytest.fixture
def small(kafka, monkeypatch):
    monkeypatch.setenv("ONCEBOX_BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    with Context(quick=True, rounds=2, duration_s=0.05, progress=lambda _: None) as context:
        yield context


def test_the_baseline(small):
    results = {result.name: result for result in bench(small)}
    assert set(results) == {"kafka/1-producer", "kafka/1-producer-p50", "kafka/1-producer-p99"}
    for result in results.values():
        assert len(result.ours) == len(result.peer) == 2
        assert min(result.ours + result.peer) > 0


@pytest.mark.parametrize("run", [transactions, flushes])
def test_several_producers_at_once(kafka, new_topic, run):
    topic = new_topic(partitions=2)
    found = run(kafka.bootstrap_servers, topic, Workload(producers=4, duration_s=0.2))
    assert found.units_per_s > 0
    assert 0 < found.p50_ms <= found.p99_ms


def test_a_record_that_is_refused_fails_the_run(kafka, new_topic):
    topic = new_topic(partitions=2, config={"max.message.bytes": "200"})
    with pytest.raises(KafkaException):
        flushes(kafka.bootstrap_servers, topic, Workload(record_bytes=1000, duration_s=0.2))
