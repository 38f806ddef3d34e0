"""The benches of ids, fail-over, idleness and operating on real parts, in small: that they measure, not what."""

import sys

import pytest

from proof.bench import coordinator, failover, idle, ids, operate, started
from proof.bench.context import Context


@pytest.fixture
def small(kafka, monkeypatch):
    monkeypatch.setenv("ONCEBOX_BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    with Context(quick=True, rounds=1, duration_s=0.3, progress=lambda _: None) as context:
        yield context


def test_commits_of_many_records(small, monkeypatch):
    monkeypatch.setattr(coordinator, "QUICK", ())
    monkeypatch.setattr(coordinator, "RECORDS_MANY", 500)
    (result,) = coordinator.bench(small)
    assert (result.name, result.ours_name, result.peer_name) == ("coordinator/flat", "500 records", "10 records")
    assert min(result.ours + result.peer) > 0


def test_ids(small, monkeypatch):
    monkeypatch.setattr(ids, "IDS_QUICK", 2_000)
    monkeypatch.setattr(ids, "SETTLE_S", 0.1)
    monkeypatch.setattr(small, "duration_s", 2.0)  # a busy machine does few commits in less
    results = {result.name: result for result in ids.bench(small)}
    assert set(results) == {"ids/memory", "ids/load", "ids/load-slowdown", "ids/load-p99"}
    assert 30 < results["ids/memory"].ours[0] < 300
    assert all(min(result.ours + result.peer) > 0 for result in results.values())


def test_failover(small, monkeypatch):
    monkeypatch.setattr(failover, "TROUBLES", failover.TROUBLES[:1])
    results = {result.name: result.ours for result in failover.bench(small)}
    assert set(results) == {"failover/kill", "failover/kill-median"}
    assert 0 < results["failover/kill-median"][0] <= results["failover/kill"][0]


def test_idle(small, monkeypatch):
    monkeypatch.setattr(idle, "SESSIONS", 5)
    monkeypatch.setattr(idle, "SETTLE_S", 0.1)
    monkeypatch.setattr(idle, "DURATION_QUICK_S", 0.5)
    results = {result.name: result for result in idle.bench(small)}
    assert set(results) == {"idle/cpu", "idle/sessions-1000"}
    assert all(result.ours[0] > 0 for result in results.values())


def test_operate(small, monkeypatch):
    monkeypatch.setattr(operate, "IDS", 1_500)
    monkeypatch.setattr(operate, "HELP_STARTS", 1)
    monkeypatch.setattr(operate, "ROUNDS_MORE", 1)
    monkeypatch.setattr(operate, "WARM_UP_TURNS", 0)
    results = {result.name: result for result in operate.bench(small)}
    listing = {f"operate/list-100000{what}" for what in ("", "-all", "-memory")}
    assert set(results) == {"operate/help", "operate/metrics-cost", *listing}
    assert all(min(result.ours + result.peer) > 0 for result in results.values())


def test_a_command_that_fails_is_no_figure(capfd):
    with pytest.raises(RuntimeError, match="exit code 2"):
        operate._run("txn", "list", "--limit", "0")
    assert "limit" in capfd.readouterr().err


def test_the_memory_of_a_command_is_its_own():
    """And not that of who starts it, which Linux counts in."""
    mine = bytearray(b"x") * (200 << 20)
    little = started.run(sys.executable, "-c", "pass").memory_mb
    more = started.run(sys.executable, "-c", "kept = bytearray(b'x') * (50 << 20)").memory_mb
    assert little < 100 < len(mine) >> 20
    assert 45 < more - little < 60
