"""The lag of the relay, without one: a table that keeps up, and one that stands still."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from proof.bench import relay

ROWS_PER_S = 100.0


class Machine:
    """Time goes by in sleeps; the table's highest row is what `highest` makes of how many were sent."""

    def __init__(self, highest: Callable[[int], int | None]) -> None:
        self.now_s = 0.0
        self.sent = 0
        self._highest = highest

    def connect(self, *_: object, **__: object) -> object:
        def execute(_query: str) -> object:
            return SimpleNamespace(fetchone=lambda: (self._highest(self.sent),))

        return nullcontext(SimpleNamespace(execute=execute))

    def producer(self, _config: object) -> object:
        return SimpleNamespace(produce=self._produce, poll=lambda _: None, flush=lambda _: None)

    def _produce(self, *_: object, **__: object) -> None:
        self.sent += 1

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def lags(monkeypatch):
    def measure(highest, duration_s=1.0):
        machine = Machine(highest)
        monkeypatch.setattr(relay, "StockProducer", machine.producer)
        monkeypatch.setattr(relay, "psycopg", SimpleNamespace(connect=machine.connect))
        monkeypatch.setattr(relay, "time", SimpleNamespace(monotonic=lambda: machine.now_s, sleep=machine.sleep))
        return relay._lags("servers", "dsn", "topic", duration_s, ROWS_PER_S)

    return measure


def test_a_table_that_keeps_up_is_measured_to_the_end(lags):
    found = lags(lambda sent: sent - 1 if sent else None)
    assert len(found) == 100
    assert max(found) < 5


def test_rows_that_never_come_count_with_the_time_until_the_end(lags):
    found = lags(lambda sent: min(sent - 1, 49) if sent else None)
    assert len(found) == 100
    assert max(found[:50]) < 5
    assert min(found[50:]) > 2_000
    assert max(found[50:]) == pytest.approx(2_500, abs=20)


def test_a_relay_that_writes_nothing_has_the_lag_of_the_whole_measurement(lags):
    found = lags(lambda _sent: None)
    assert len(found) == 100
    assert max(found) == pytest.approx(3_000, abs=20)
