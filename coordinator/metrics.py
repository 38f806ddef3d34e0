"""The metrics page: what was counted, and what is looked at when it is asked for, in Prometheus' text format.

A look over all open transactions is kept for a few seconds, so that being asked often costs nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

import oncebox
from coordinator.api.auth import Gate
from coordinator.api.needs import PERMISSIONS
from coordinator.api.pages import Page
from coordinator.core.records import Cause, Result
from coordinator.core.state import TransactionState
from coordinator.markers.writer import MarkerStatus
from coordinator.shard import Shard, ShardState
from coordinator.telemetry import CATALOGUE, PREFIX, Histogram, Telemetry
from oncebox.v1 import transaction_pb2

LOOK_KEPT_S = 5.0
_OPEN = (
    TransactionState.ONGOING,
    TransactionState.PREPARED,
    TransactionState.PREPARE_COMMIT,
    TransactionState.PREPARE_ABORT,
)
_KINDS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}

# Label values with the number, or the histogram, that stands there.
Samples = Iterable[tuple[tuple[str, ...], Any]]


class Metrics(Collector):
    def __init__(
        self,
        telemetry: Telemetry,
        *,
        gate: Gate,
        shards: Callable[[], Iterable[Shard]],
        markers: Callable[[], MarkerStatus],
        certificate_expires_at_s: Callable[[], float],
        now_s: Callable[[], float],
    ) -> None:
        self._telemetry = telemetry
        self._gate = gate
        self._shards = shards
        self._marker_status = markers
        self._certificate_expires_at_s = certificate_expires_at_s
        self._now_s = now_s
        self._looked_at_s = 0.0
        self._open: Counter[TransactionState] = Counter()
        self._oldest_s: dict[TransactionState, float] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def page(self) -> Page:
        return Page(HTTPStatus.OK, generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4)

    def collect(self) -> Iterator[Any]:
        for metric in CATALOGUE:
            family = _KINDS[metric.kind](PREFIX + metric.name, metric.help, labels=metric.labels)
            for labels, value in getattr(self, f"_{metric.name}")():
                if isinstance(value, Histogram):
                    family.add_metric(labels, buckets=_buckets(value), sum_value=value.total)
                else:
                    family.add_metric(labels, value)
            yield family

    # --- one method per row of the catalogue ------------------------------------------------------------------------

    def _requests(self) -> Samples:
        codes = transaction_pb2.ErrorCode.values()
        for (method, code), count in self._telemetry.requests.items():
            name = transaction_pb2.ErrorCode.Name(code) if code in codes else str(code)
            yield (method, name), count

    def _request_duration_seconds(self) -> Samples:
        return [((method,), histogram) for method, histogram in self._telemetry.durations.items()]

    def _commit_duration_seconds(self) -> Samples:
        return [((), self._telemetry.commits)]

    def _transactions(self) -> Samples:
        for result, causes in ((Result.COMMITTED, (Cause.OWNER,)), (Result.ABORTED, tuple(Cause))):
            for cause in causes:
                kinds = (cause, Cause.UNSPECIFIED) if result is Result.COMMITTED else (cause,)
                yield (result.name, cause.name), sum(self._telemetry.decided[result, kind] for kind in kinds)

    def _fenced(self) -> Samples:
        return [((cause.name,), self._telemetry.fenced[cause]) for cause in (Cause.NEWER_INSTANCE, Cause.ADMINISTRATOR)]

    def _open_transactions(self) -> Samples:
        self._look()
        return [((state.name,), self._open[state]) for state in _OPEN]

    def _oldest_transaction_age_seconds(self) -> Samples:
        self._look()
        return [((state.name,), self._oldest_s.get(state, 0.0)) for state in _OPEN]

    def _transactional_ids(self) -> Samples:
        return [((), sum(len(shard.ids) for shard in self._shards()))]

    def _debts(self) -> Samples:
        return [((), sum(shard.debts for shard in self._shards()))]

    def _markers(self) -> Samples:
        status = self._marker_status()
        return [((name,), getattr(status, name)) for name in ("waiting", "in_flight", "retrying")]

    def _marker_oldest_retry_seconds(self) -> Samples:
        return [((), self._marker_status().oldest_retrying_s)]

    def _append_duration_seconds(self) -> Samples:
        return [((topic,), histogram) for topic, histogram in self._telemetry.appends.items()]

    def _appended_records(self) -> Samples:
        return [((topic,), count) for topic, count in self._telemetry.appended.items()]

    def _append_failures(self) -> Samples:
        return list(self._telemetry.append_failures.items())

    def _replay_duration_seconds(self) -> Samples:
        return [((), self._telemetry.replays)]

    def _partitions(self) -> Samples:
        counted = Counter(shard.state for shard in self._shards())
        return [((state.value,), counted[state]) for state in ShardState if state is not ShardState.RESIGNED]

    def _sessions(self) -> Samples:
        return [((), self._telemetry.sessions)]

    def _authentication_failures(self) -> Samples:
        return [((), self._gate.unidentified)]

    def _authorization_denials(self) -> Samples:
        return [((permission.name,), self._gate.denied[permission]) for permission in PERMISSIONS]

    def _throttled(self) -> Samples:
        return [((), self._gate.throttled)]

    def _hanging_transactions(self) -> Samples:
        return [((), self._telemetry.hanging)]

    def _certificate_expiry_timestamp_seconds(self) -> Samples:
        return [((), self._certificate_expires_at_s())]

    def _build_info(self) -> Samples:
        return [((oncebox.__version__,), 1)]

    def _look(self) -> None:
        now_s = self._now_s()
        if now_s - self._looked_at_s < LOOK_KEPT_S:
            return
        self._looked_at_s = now_s
        counted: Counter[TransactionState] = Counter()
        since_ms: dict[TransactionState, int] = {}
        for shard in self._shards():
            for state in shard.ids.active.values():
                for transaction in state.transactions:
                    kind = transaction.state
                    counted[kind] += 1
                    since_ms[kind] = min(since_ms.get(kind, transaction.started_at_ms), transaction.started_at_ms)
        self._open = counted
        self._oldest_s = {state: max(now_s - started_ms / 1_000, 0.0) for state, started_ms in since_ms.items()}


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    buckets, below = [], 0
    for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
        below += count
        buckets.append((str(bound), float(below)))
    return buckets
