"""The benches of producer, transform and gateway on real parts, in small: that they measure, not what."""

from dataclasses import replace

import pytest

from proof.bench import gateway, producer, transform
from proof.bench.context import Context


@pytest.fixture
def small(kafka, monkeypatch):
    monkeypatch.setenv("ONCEBOX_BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    with Context(quick=True, rounds=1, duration_s=0.2, progress=lambda _: None) as context:
        yield context


def test_producer(small):
    results = {result.name: result for result in producer.bench(small)}
    assert set(results) == {"producer/vs-confluent", "producer/txn-vs-ordered", "producer/txn-vs-unordered"}
    assert all(min(result.ours + result.peer) > 0 for result in results.values())


def test_transform(small, monkeypatch):
    rows = [replace(row, record_count=200_000 if row.is_long else 2_000) for row in transform.ROWS]
    monkeypatch.setattr(transform, "ROWS", rows)
    monkeypatch.setattr(transform, "LONG_S", 0.5)
    results = {result.name: result for result in transform.bench(small)}
    assert set(results) == {"transform/100ms-1KB", "transform/100ms-100B", "transform/30s-1KB"}
    assert all(min(result.ours + result.peer) > 0 for result in results.values())


def test_gateway(small):
    results = {result.name: result for result in gateway.bench(small)}
    assert set(results) == {"gateway/throughput", "gateway/wall"}
    assert min(results["gateway/throughput"].ours) > 0
