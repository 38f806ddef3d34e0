"""Figures → one verdict and one exit code. Pure. What was not checked is never called clean."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spark_jobs.findings import Finding


class Verdict(StrEnum):
    CLEAN = "clean"
    FINDINGS = "findings"
    INCOMPLETE = "incomplete"
    LAGGING = "lagging"


EXIT_CODES = {Verdict.CLEAN: 0, Verdict.FINDINGS: 1, Verdict.INCOMPLETE: 2, Verdict.LAGGING: 3}
EXIT_ERROR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    verdict: Verdict
    sentence: str


def judge(
    findings: Sequence[Finding],
    unchecked: Sequence[str],
    *,
    rows: int,
    lag: int,
    lag_max: int,
    since: str | None,
    told: Sequence[str] = (),
) -> Judgement:
    """`since`: the run that an incremental one builds on. Findings come first, then what was left out, then lag. `told`
    changes no verdict, and stands beside one that says that all is right.
    """
    count = sum(finding.count for finding in findings)
    scope = f"of what is new since {since}" if since else "of all that the relay has applied"
    if count:
        kinds = ", ".join(f"{finding.amount} {finding.kind.value}" for finding in findings)
        how = next((f"{finding.how} " for finding in findings if finding.how), "")
        return Judgement(verdict=Verdict.FINDINGS, sentence=f"{how}{count} findings: {kinds}")
    if unchecked:
        return Judgement(
            verdict=Verdict.INCOMPLETE,
            sentence=f"{rows} rows are right, but not everything could be checked: {'; '.join(unchecked)}",
        )
    if lag > lag_max:
        return Judgement(
            verdict=Verdict.LAGGING,
            sentence=f"{rows} rows are right; the relay is {lag} records behind (limit {lag_max})",
        )
    words = "".join(f"; {each}" for each in told)
    return Judgement(verdict=Verdict.CLEAN, sentence=f"clean: {rows} rows {scope} equal their committed records{words}")
