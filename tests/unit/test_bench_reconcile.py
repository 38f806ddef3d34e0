"""The bench of the reconciliation without Spark: who runs when, and what is compared with what."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from proof.bench import peer_datacompy, reconcile
from proof.bench.context import Context
from proof.bench.result import ratio


@pytest.fixture
def ran(monkeypatch):
    """Who ran on how many rows, in order; a run takes as many seconds as there are hundred thousand rows."""
    ran: list[tuple[str, int]] = []
    clock = SimpleNamespace(now_s=0.0)

    def take(name: str, rows: int) -> None:
        ran.append((name, rows))
        clock.now_s += rows / 100_000

    def run(_spark, place, _context, *, full, expected, store=False):
        assert expected == place.spoilt
        take("full" if full else "incremental", place.rows)

    def compare(_spark, place):
        take("datacompy", place.rows)
        return not place.spoilt

    monkeypatch.setattr(reconcile, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(reconcile, "_place", lambda _context, rows: SimpleNamespace(rows=rows, spoilt=0))
    monkeypatch.setattr(reconcile, "add_rows", lambda place, first, last, progress: None)
    monkeypatch.setattr(reconcile, "spoil", lambda place, every: setattr(place, "spoilt", 1))
    monkeypatch.setattr(reconcile, "_command", lambda _context, place: (1.0, 1.0))
    monkeypatch.setattr(reconcile, "_session", lambda heap: SimpleNamespace(stop=lambda: None))
    monkeypatch.setattr(reconcile, "_run", run)
    monkeypatch.setattr(peer_datacompy, "compare", compare)
    return ran


@contextmanager
def context(*, quick):
    with Context(quick=quick, rounds=3, duration_s=1, progress=lambda _: None) as given:
        yield given


def test_ours_and_datacompy_take_turns_and_warm_up_alike(ran):
    with context(quick=False) as given:
        list(reconcile.bench(given))
    clean = [name for name, _ in ran[:6]]
    assert clean == ["full", "datacompy"] * 3  # the first of each is not counted
    assert [name for name, _ in ran[-4:]] == ["full", "datacompy"] * 2


@pytest.mark.parametrize(
    ("quick", "growths"),
    [
        (True, {"reconcile/growth-1000000": [100_000, 1_000_000]}),
        (
            False,
            {
                "reconcile/growth-1000000": [100_000, 1_000_000],
                "reconcile/growth-10000000": [1_000_000, 10_000_000],
            },
        ),
    ],
)
def test_growth_is_against_ten_times_the_time_for_a_tenth(ran, quick, growths):
    with context(quick=quick) as given:
        found = {result.name: result for result in reconcile.bench(given) if "growth" in result.name}
    assert found.keys() == growths.keys()
    for name, (few, many) in growths.items():
        assert found[name].ours[0] == many / 100_000
        assert found[name].peer_name == f"10 times {few:,} rows"
        assert ratio(found[name]).median == pytest.approx(1.0)  # what grows with the rows alone just reaches it
        assert found[name].target == 1.0
