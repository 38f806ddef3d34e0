"""What hangs is the same transaction at two looks, and has not just begun: clients date their records as they like."""

from types import SimpleNamespace
from typing import Any

import pytest

from spark_jobs import hanging
from spark_jobs.cut import OpenTransaction, cut_source
from spark_jobs.hanging import Owner, find_hanging
from tests.unit.spark_jobs.test_cut import cut, facts, position

HOUR_MS = 3_600_000
OLD = OpenTransaction(producer_id=7, epoch=2, offset_first=50, age_ms=9 * HOUR_MS)


def found(monkeypatch: pytest.MonkeyPatch, *, now: tuple[OpenTransaction, ...], owners: dict[int, Owner]) -> list[int]:
    """Offsets where those begin that are called hanging; OLD is open when the run begins."""
    given = cut(cut_source(position(), facts(open=(OLD,)), verified=0))
    run: Any = SimpleNamespace(
        cut=given, kafka=None, settings=SimpleNamespace(hanging_age_ms=HOUR_MS), progress=lambda _: None
    )
    told: list[int] = []

    def tell(*given: Any) -> str:
        told.append(given[3].offset_first)
        return ""

    monkeypatch.setattr(hanging, "read_facts", lambda *_: {"t": {0: facts(open=now)}})
    monkeypatch.setattr(hanging, "_owners", lambda *_: owners)
    monkeypatch.setattr(hanging, "told", tell)
    findings = find_hanging(run)
    assert [finding.count for finding in findings] == ([len(told)] if told else [])
    return told


def test_one_that_is_still_open(monkeypatch: pytest.MonkeyPatch):
    assert found(monkeypatch, now=(OLD,), owners={}) == [50]


@pytest.mark.parametrize("other", [{"producer_id": 8}, {"epoch": 4}, {"offset_first": 90}])
def test_another_one_of_a_producer_that_gives_old_times(other: dict[str, int], monkeypatch: pytest.MonkeyPatch):
    fields = {"producer_id": 7, "epoch": 2, "offset_first": 50, "age_ms": 9 * HOUR_MS}
    later = OpenTransaction(**(fields | other))
    assert found(monkeypatch, now=(later,), owners={}) == []
    assert found(monkeypatch, now=(OLD, later), owners={}) == [50]


@pytest.mark.parametrize(("age_ms", "offsets"), [(5_000, []), (2 * HOUR_MS, [50])])
def test_one_of_which_the_log_says_when_it_began(age_ms: int, offsets: list[int], monkeypatch: pytest.MonkeyPatch):
    owner = Owner("a", 3, "ONGOING", OLD.epoch, age_ms)
    assert found(monkeypatch, now=(OLD,), owners={7: owner}) == offsets
    # Of a later one with the same producer id it says nothing.
    assert found(monkeypatch, now=(OLD,), owners={7: owner._replace(epoch=4)}) == [50]
