"""Results as a table for the terminal, as JSON, as a plot and as the page docs/bench.md. Measures nothing."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from proof.bench.result import Result, Spread, ratio, reached, spread, to_json

# Told apart also by those who do not see red and green as two colours.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#888888"


def number(value: float, digits: int = 3) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def table(results: Sequence[Result], rounds: int) -> Table:
    """Median, and below it the lowest and highest round; 80 columns are enough. `rounds`: how many were asked for."""
    shown = Table(box=SIMPLE_HEAD)
    shown.add_column("bench", min_width=max((len(result.name) for result in results), default=0))
    for title in ("ours", "peer", "ratio", "target"):
        shown.add_column(title, justify="right")
    for result in results:
        shown.add_row(
            f"{result.name}\n{result.unit}, {_sides(result)}{_figures(result, rounds)}",
            _told(spread(result.ours), "\n"),
            _told(spread(result.peer), "\n"),
            _told(ratio(result), "\n", 2),
            _target(result, "\n"),
            style="yellow" if reached(result) is False else "",
        )
    return shown


def write_json(results: Sequence[Result], path: Path) -> None:
    path.write_text(json.dumps([to_json(result) for result in results], indent=2) + "\n")


def write_plot(results: Sequence[Result], path: Path) -> None:
    """A bar for each ratio with its spread, a mark where its target is, a line at 1 where we equal the peer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.6 + 0.45 * len(results)), layout="constrained")
    axes = figure.subplots()
    ratios = [ratio(result) for result in results]
    colours = [{True: BLUE, False: ORANGE, None: GREY}[reached(result)] for result in results]
    rows = range(len(results))
    middles = [each.median for each in ratios]
    # Against the peer's noise a single round can lie on one side of the medians' ratio altogether.
    below = [max(0.0, each.median - each.low) for each in ratios]
    above = [max(0.0, each.high - each.median) for each in ratios]
    axes.barh(rows, middles, xerr=[below, above], color=colours, height=0.6, error_kw={"elinewidth": 1})
    axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
    for row, result in enumerate(results):
        if result.target is not None:
            axes.plot([result.target] * 2, [row - 0.4, row + 0.4], color="black", linewidth=2.5)
        told = f" {number(middles[row], 2)} times ({number(spread(result.ours).median)} {result.unit})"
        axes.text(max(ratios[row].high, result.target or 0), row, told, va="center", fontsize=9)
    axes.set_yticks(rows, [f"{result.name}\n{_sides(result)}" for result in results], fontsize=9)
    axes.invert_yaxis()
    if max(middles) > 20 * min(middles):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.25)
    axes.set_xlabel("ratio, higher is better; dashed: equal to the peer; thick mark: target")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def write_markdown(
    results: Sequence[Result],
    path: Path,
    *,
    explained: Mapping[str, str],
    why: Mapping[str, str],
    machine: Mapping[str, str],
    command: str,
    rounds: int,
    plot: Path | None = None,
) -> None:
    """`explained` says what each bench (the part of a name before the slash) measures; `why`, by the whole name, what
    keeps some from their target, where they miss it. `rounds`: how many were asked for.
    """
    lines = [
        "# Bench",
        "",
        f"Written by `{command}`, never by hand; the same command repeats it. Ours and the peer run in turn on the",
        f"same machine and parts. Shown is the median of {rounds} rounds, or of as many figures as a row says, then",
        "their lowest and highest. A higher ratio is always better for us.",
        "",
        *(f"- {name}: {value}" for name, value in machine.items()),
        "",
    ]
    if plot:
        lines += [f"![The ratios]({os.path.relpath(plot, path.parent)})", ""]
    for bench in dict.fromkeys(_bench(result) for result in results):
        lines += [f"## {bench}", "", explained[bench], ""]
        lines += ["| bench | compared | ours | peer | unit | ratio | target |"]
        lines += ["| --- | --- | ---: | ---: | --- | ---: | ---: |"]
        mine = [result for result in results if _bench(result) == bench]
        lines += [*(_row(result, rounds) for result in mine), ""]
        missed = [result.name for result in mine if reached(result) is False and result.name in why]
        lines += [line for name in missed for line in (f"Why {name} is missed: {why[name]}", "")]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))


def _row(result: Result, rounds: int) -> str:
    compared = _sides(result) + _figures(result, rounds)
    ours, peer = _told(spread(result.ours), " "), _told(spread(result.peer), " ")
    cells = (result.name, compared, ours, peer, result.unit, _told(ratio(result), " ", 2), _target(result, " "))
    return f"| {' | '.join(cells)} |"


def _told(values: Spread, between: str, digits: int = 3) -> str:
    middle = number(values.median, digits)
    if values.low == values.high:
        return middle
    return f"{middle}{between}({number(values.low, digits)}..{number(values.high, digits)})"


def _sides(result: Result) -> str:
    return f"{result.ours_name} against {result.peer_name}"


def _figures(result: Result, rounds: int) -> str:
    """Where there are not as many as rounds were asked for."""
    count = len(result.ours)
    return "" if count == rounds else f", {count} figure{'s' if count > 1 else ''}"


def _target(result: Result, between: str) -> str:
    if result.target is None:
        return ""
    return number(result.target, 2) if reached(result) else f"{number(result.target, 2)}{between}missed"


def _bench(result: Result) -> str:
    return result.name.partition("/")[0]
