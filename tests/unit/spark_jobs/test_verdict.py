"""Never a false "clean": findings first, then what was left out, then lag."""

import pytest

from spark_jobs.findings import BLAME, Finding, Kind
from spark_jobs.verdict import EXIT_CODES, Verdict, judge

ONE = Finding(kind=Kind.ROW_MISSING, where="public.t", count=3)


@pytest.mark.parametrize(
    ("findings", "unchecked", "lag", "verdict", "code"),
    [
        ([], [], 0, Verdict.CLEAN, 0),
        ([], [], 10, Verdict.CLEAN, 0),
        ([], [], 11, Verdict.LAGGING, 3),
        ([], ["the topic t does not exist"], 0, Verdict.INCOMPLETE, 2),
        ([], ["the topic t does not exist"], 11, Verdict.INCOMPLETE, 2),
        ([ONE], ["the topic t does not exist"], 11, Verdict.FINDINGS, 1),
    ],
)
def test_verdicts(findings, unchecked, lag, verdict, code):
    judged = judge(findings, unchecked, rows=5, lag=lag, lag_max=10, since=None)
    assert (judged.verdict, EXIT_CODES[judged.verdict]) == (verdict, code)
    for note in unchecked:
        assert findings or note in judged.sentence


def test_an_incremental_run_says_what_it_covers():
    assert "new since run 7" in judge([], [], rows=5, lag=0, lag_max=0, since="run 7").sentence
    assert "all that the relay has applied" in judge([], [], rows=5, lag=0, lag_max=0, since=None).sentence


def test_a_number_that_was_not_counted_says_so():
    some = Finding(kind=Kind.ROW_EXTRA, where="public.t", count=9, how="at least")
    judged = judge([ONE, some], [], rows=5, lag=0, lag_max=0, since=None)
    assert judged.sentence == "at least 12 findings: 3 row missing, at least 9 row extra"


def test_every_kind_says_who_why_and_what_to_do():
    assert BLAME.keys() == set(Kind)
    assert all(all(texts) for texts in BLAME.values())
