"""What an instance counts about itself, and the catalogue of its metrics. No locks, no I/O: one event loop.

Counting is on the way of every commit, so it is a dictionary and a bisection; everything that can be looked at when
somebody asks is looked at then (coordinator.metrics).
"""

import logging
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from coordinator.core.records import Cause, IdState, Outcome, Result

logger = logging.getLogger(__name__)

PREFIX = "oncebox_coordinator_"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LONG_SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metric(NamedTuple):
    """A row of the catalogue; the name is without its prefix and, for a counter, without `_total`."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


CATALOGUE = (
    Metric("requests", "counter", ("method", "code"), "Calls and messages of sessions answered, by error name (NONE)."),
    Metric("request_duration_seconds", "histogram", ("method",), "From a call's arrival to its answer."),
    Metric("commit_duration_seconds", "histogram", (), "Of End(commit) alone: until decided, or complete if so asked."),
    Metric("transactions", "counter", ("result", "cause"), "Transactions decided; a commit's cause is OWNER."),
    Metric("fenced", "counter", ("cause",), "Owners whose claim to a transactional id was ended by somebody else."),
    Metric("open_transactions", "gauge", ("state",), "Transactions that are not complete, of partitions led here."),
    Metric("oldest_transaction_age_seconds", "gauge", ("state",), "Age of the oldest one in this state."),
    Metric("transactional_ids", "gauge", (), "Ids known, idle ones included, of partitions led here."),
    Metric("debts", "gauge", (), "Decided transactions whose manifest or markers are not all written."),
    Metric("markers", "gauge", ("state",), "Markers owed: waiting, in_flight, retrying."),
    Metric("marker_oldest_retry_seconds", "gauge", (), "Since the oldest marker that is being retried is owed."),
    Metric("append_duration_seconds", "histogram", ("topic",), "One append to the log or the feed, acknowledged."),
    Metric("appended_records", "counter", ("topic",), "Records in these appends."),
    Metric("append_failures", "counter", ("topic", "error"), "Appends that were refused or not answered."),
    Metric("replay_duration_seconds", "histogram", (), "Reading a log partition when it is taken over."),
    Metric("partitions", "gauge", ("state",), "Log partitions of this instance: loading, serving, failed."),
    Metric("sessions", "gauge", (), "Session streams that are open."),
    Metric("authentication_failures", "counter", (), "Calls refused because nobody known made them."),
    Metric("authorization_denials", "counter", ("permission",), "Calls refused because no rule allows them."),
    Metric("throttled", "counter", (), "Calls refused because their principal makes too many."),
    Metric("hanging_transactions", "gauge", (), "Found hanging by the last background search."),
    Metric("certificate_expiry_timestamp_seconds", "gauge", (), "When the server's certificate ends; 0 without TLS."),
    Metric("build_info", "gauge", ("version",), "1, with the version as a label."),
)


class Histogram:
    """Counts by upper bound; the last count is of what lies above all."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Telemetry:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.durations: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.commits = Histogram()
        self.decided: Counter[tuple[Result, Cause]] = Counter()
        self.fenced: Counter[Cause] = Counter()
        self.appends: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.appended: Counter[str] = Counter()
        self.append_failures: Counter[tuple[str, str]] = Counter()
        self.replays = Histogram(LONG_SECONDS)
        self.sessions = 0
        self.hanging = 0

    def answered(self, method: str, code: int, seconds: float, *, is_commit: bool = False) -> None:
        self.requests[method, code] += 1
        self.durations[method].observe(seconds)
        if is_commit and not code:
            self.commits.observe(seconds)

    def applied(self, before: IdState | None, after: IdState) -> None:
        """A step of an id is durable."""
        if before is not None and before.owner.number_first != after.owner.number_first:
            self._fenced(before, after)
        if not after.outcomes:
            return
        known = before.outcomes[-1].grant.number if before is not None and before.outcomes else 0
        for outcome in reversed(after.outcomes):
            if outcome.grant.number <= known:
                break
            self.decided[outcome.result, outcome.cause] += 1
            if outcome.result is Result.ABORTED and outcome.cause > Cause.OWNER:
                _log_abort(after, outcome)

    def _fenced(self, before: IdState, after: IdState) -> None:
        self.fenced[after.owner.cause] += 1
        logger.info(
            "owner %s at %s is fenced (%s): the id belongs to %s at %s",
            before.owner.instance,
            before.owner.address,
            after.owner.cause.name,
            after.owner.instance,
            after.owner.address,
            extra={"transactional_id": after.transactional_id, "number": after.number},
        )


def _log_abort(state: IdState, outcome: Outcome) -> None:
    logger.info(
        "transaction aborted: %s",
        outcome.cause.name,
        extra={
            "transactional_id": state.transactional_id,
            "number": outcome.grant.number,
            "producer_id": outcome.grant.producer_id,
            "epoch": outcome.grant.epoch,
        },
    )
