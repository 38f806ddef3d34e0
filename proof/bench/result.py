"""What a bench finds: the figures of every round, and what follows from them. Pure data and arithmetic.
A ratio is always "higher is better for us", also where the figure itself (a latency) should be low.
"""

from dataclasses import dataclass
from statistics import median
from typing import Literal

Better = Literal["higher", "lower"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Where there is no peer, `peer` holds the figure to reach in every round, and `peer_name` is "target"."""

    name: str  # coordinator/32-producers
    unit: str
    better: Better
    ours: tuple[float, ...]
    peer: tuple[float, ...]
    ours_name: str
    peer_name: str
    target: float | None  # the ratio to reach; None: a figure to know, not to reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    low: float
    median: float
    high: float


def spread(values: tuple[float, ...]) -> Spread:
    return Spread(low=min(values), median=median(values), high=max(values))


def ratio(result: Result) -> Spread:
    """The medians' ratio, so that a reader can divide what the table says; low and high are those of single rounds,
    each divided by its neighbour in time.
    """
    rounds = [_divide(result.better, ours, peer) for ours, peer in zip(result.ours, result.peer, strict=True)]
    middle = _divide(result.better, median(result.ours), median(result.peer))
    return Spread(low=min(rounds), median=middle, high=max(rounds))


def reached(result: Result) -> bool | None:
    """Whether the target is reached; None where there is none."""
    return None if result.target is None else ratio(result).median >= result.target


def to_json(result: Result) -> dict[str, object]:
    ours, peer, ratios = spread(result.ours), spread(result.peer), ratio(result)
    return {
        "name": result.name,
        "ours": ours.median,
        "peer": peer.median,
        "ratio": ratios.median,
        "unit": result.unit,
        "better": result.better,
        "target": result.target,
        "rounds": len(result.ours),
        "ours_name": result.ours_name,
        "peer_name": result.peer_name,
        "ours_spread": [ours.low, ours.high],
        "peer_spread": [peer.low, peer.high],
        "ratio_spread": [ratios.low, ratios.high],
    }


def _divide(better: Better, ours: float, peer: float) -> float:
    return ours / peer if better == "higher" else peer / ours
