"""The result as one HTML page without anything from elsewhere: styles and plots (SVG) stand inside. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from spark_jobs.findings import BLAME
from spark_jobs.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jinja2 import Template

    from spark_jobs.result import Coverage, Result

TITLES = {
    Verdict.CLEAN: "Clean",
    Verdict.FINDINGS: "Findings",
    Verdict.INCOMPLETE: "Not everything was checked",
    Verdict.LAGGING: "Behind",
}
WIDTH = 720
TREND_WIDTH, TREND_HEIGHT = 720, 120
PARTITIONS_SHOWN = 64


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["thousands"] = lambda number: f"{number:,}".replace(",", "\u202f")
    environment.filters["sentence"] = lambda text: text[:1].upper() + text[1:]
    return environment.from_string((files("spark_jobs") / "report.html.j2").read_text())


def render(result: Result, trend: Sequence[Mapping[str, Any]]) -> str:
    """`trend`: earlier runs, newest first, as spark_jobs.publish.history gives them."""
    return _template().render(
        result=result,
        title=TITLES[result.verdict],
        started=datetime.fromtimestamp(result.started_at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        seconds=f"{result.duration_ms / 1000:.1f}",
        blame=BLAME,
        coverage=coverage_bars(result.coverage[:PARTITIONS_SHOWN]),
        coverage_hidden=max(len(result.coverage) - PARTITIONS_SHOWN, 0),
        kinds=kind_bars(result),
        trend=trend_bars(list(reversed(trend))),
        trend_width=TREND_WIDTH,
        trend_height=TREND_HEIGHT,
        width=WIDTH,
        findings_count=sum(finding.count for finding in result.findings),
    )


def coverage_bars(coverage: Sequence[Coverage]) -> list[dict[str, Any]]:
    """For each partition the parts of its log, from its first offset to its end, in pixels."""
    bars = []
    for each in coverage:
        low = min(each.start, each.log_start)
        span = max(each.high, each.next) - low
        scale = WIDTH / span if span else 0

        def part(first: int, last: int, low: int = low, scale: float = scale) -> tuple[float, float]:
            return round((first - low) * scale, 1), round(max(last - first, 0) * scale, 1)

        checked_from = max(each.start, each.log_start, each.verified)
        bars.append(
            {
                "name": f"{each.topic}:{each.partition}",
                "expired": part(low, max(each.log_start, low)),
                "verified": part(max(each.start, each.log_start), max(each.verified, each.start, each.log_start)),
                "compared": part(checked_from, max(min(each.next, each.stable), checked_from)),
                "lag": part(min(each.next, each.stable), each.stable),
                "held": part(each.stable, each.high),
                "text": f"{each.compared:,} offsets".replace(",", "\u202f"),
                "next": each.next,
                "stable": each.stable,
                "high": each.high,
            }
        )
    return bars


def kind_bars(result: Result) -> list[dict[str, Any]]:
    totals: dict[str, int] = {}
    for finding in result.findings:
        totals[finding.kind.value] = totals.get(finding.kind.value, 0) + finding.count
    top = max(totals.values(), default=1)
    return [
        {"name": name, "count": count, "width": max(round(count / top * 420, 1), 2)}
        for name, count in sorted(totals.items(), key=lambda item: -item[1])
    ]


def trend_bars(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Oldest first: one bar per run, as high as it took long, in the colour of its verdict."""
    if not runs:
        return []
    seconds = [max((each["finished_at"] - each["started_at"]).total_seconds(), 0.1) for each in runs]
    top, step = max(seconds), TREND_WIDTH / max(len(runs), 12)
    return [
        {
            "x": round(at * step, 1),
            "width": round(step * 0.7, 1),
            "height": round(length / top * (TREND_HEIGHT - 24), 1),
            "verdict": each["verdict"],
            "text": f"run {each['run']}: {each['verdict']}, {each['kind']}, {each['rows']:,} rows in {length:.1f} s",
            "run": each["run"],
        }
        for at, (each, length) in enumerate(zip(runs, seconds, strict=True))
    ]
