"""More dead letters than a run takes in: their records are not compared, and nothing is called wrong for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_jobs import snapshot
from spark_jobs.findings import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from spark_jobs.result import Result
    from tests.support.reconcile import World


def test_more_than_are_read(world: World, check: Callable[..., Result], monkeypatch: pytest.MonkeyPatch):
    world.transfer(*range(1, 7))
    world.apply()
    world.run(
        "INSERT INTO oncebox.dead_letter (relay, source, record_offset, record_at, unit, error, state) "
        "SELECT 'test', oncebox_source, oncebox_offset, now(), oncebox_offset, 'no', 'skipped' "
        "FROM accounts WHERE id < 4"
    )
    world.run("DELETE FROM accounts WHERE id < 4")
    result = check()
    assert (result.findings, result.exit_code) == ((), 0)
    monkeypatch.setattr(snapshot, "DEAD_LETTERS_MAX", 1)
    result = check()
    assert (result.findings, result.exit_code) == ((), 2)
    assert (
        "public.accounts: 2 rows are of records with dead letters that were not read: not checked" in result.unchecked
    )
    world.run("DELETE FROM accounts WHERE id = 5")
    (finding,) = check().findings
    assert (finding.kind, finding.count, finding.samples[0].key) == (Kind.ROW_MISSING, 1, {"id": "5"})
