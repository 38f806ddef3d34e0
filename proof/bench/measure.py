"""Runs ours and the peer in turn, so that a machine that slows down slows both. The first turns only warm up
(connections, caches, and above all the broker's JIT) and are not counted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from proof.bench.result import Better, Result

WARM_UP_TURNS = 12
STEADY = 0.1  # a side is warm when its turns better its best by less than this part,
STEADY_TURNS = 2  # and that so often in a row: one turn may be slow for other reasons

Figures = Mapping[str, float]
Run = Callable[[], Figures]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure of what a run returns, by its key; a result of its own."""

    key: str
    name: str
    unit: str
    better: Better
    target: float | None = None  # the ratio to reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    name: str
    run: Run


def interleave(
    metrics: Sequence[Metric],
    *,
    ours: Side,
    peer: Side,
    rounds: int,
    progress: Callable[[str], None],
    warm_up_turns: int = WARM_UP_TURNS,
) -> list[Result]:
    """`warm_up_turns` is the most there may be; they end when neither side gets better any more in the first metric."""
    progress(f"warming up {ours.name} and {peer.name}")
    _warm_up(metrics[0], (ours, peer), warm_up_turns)
    measured: dict[str, list[Figures]] = {"ours": [], "peer": []}
    for number in range(1, rounds + 1):
        for which, side in (("ours", ours), ("peer", peer)):
            figures = side.run()
            measured[which].append(figures)
            told = ", ".join(f"{figures[metric.key]:,.4g} {metric.unit}" for metric in metrics)
            progress(f"round {number} of {rounds}, {side.name}: {told}")
    return [
        Result(
            name=metric.name,
            unit=metric.unit,
            better=metric.better,
            ours=tuple(figures[metric.key] for figures in measured["ours"]),
            peer=tuple(figures[metric.key] for figures in measured["peer"]),
            ours_name=ours.name,
            peer_name=peer.name,
            target=metric.target,
        )
        for metric in metrics
    ]


def _warm_up(metric: Metric, sides: Sequence[Side], turns: int) -> None:
    best: dict[str, float] = {}
    steady = 0
    for _ in range(turns):
        gains = []
        for side in sides:
            figure = side.run()[metric.key]
            figure = figure if metric.better == "higher" else -figure
            gains.append(side.name not in best or figure > best[side.name] + abs(best[side.name]) * STEADY)
            best[side.name] = max(figure, best.get(side.name, figure))
        steady = 0 if any(gains) else steady + 1
        if steady == STEADY_TURNS:
            return


def fixed(figures: Figures) -> Side:
    """The peer of what has none: the figures to reach."""
    return Side(name="target", run=lambda: figures)
