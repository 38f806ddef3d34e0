"""What a relay tells Prometheus. Names begin with oncebox_outbox_."""

from prometheus_client import CollectorRegistry, Counter, Enum, Gauge

from relay.outbox.publisher import Counters

STATES = ["STARTING", "STANDBY", "RUNNING", "PAUSED", "WAITING", "STOPPED"]


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._rows = self._counter("rows", "Rows published.")
        self._transactions = self._counter("transactions", "Database transactions published.")
        self._kafka = self._counter("kafka_transactions", "Kafka transactions committed.")
        self._parked = self._counter("parked_rows", "Rows put aside as bad, or behind a bad one.")
        self._kept = self._gauge("slot_bytes", "Bytes of the write-ahead log that the slot keeps.")
        self._age = self._gauge("slot_age_transactions", "For how many transactions the slot keeps old catalogue rows.")
        self._writer = self._gauge("oldest_writer_seconds", "Age of the oldest open transaction that has written.")
        self._time = self._gauge("published_commit_time_seconds", "Commit time of the newest published transaction.")
        self._state = Enum("oncebox_outbox_state", "What it is doing.", states=STATES, registry=self.registry)
        self._seen = Counters()

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"oncebox_outbox_{name}", text, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"oncebox_outbox_{name}", text, registry=self.registry)

    def state(self, state: str) -> None:
        if state == "STARTING":
            self._seen = Counters()
        self._state.state(state)

    def published(self, counters: Counters) -> None:
        seen = self._seen
        self._rows.inc(counters.rows - seen.rows)
        self._transactions.inc(counters.transactions - seen.transactions)
        self._kafka.inc(counters.kafka_transactions - seen.kafka_transactions)
        self._parked.inc(counters.parked_rows - seen.parked_rows)
        if counters.commit_time_us:
            self._time.set(counters.commit_time_us / 1_000_000)
        self._seen = Counters(
            rows=counters.rows,
            transactions=counters.transactions,
            kafka_transactions=counters.kafka_transactions,
            parked_rows=counters.parked_rows,
        )

    def source(self, *, kept_bytes: int, age_transactions: int, writer_age_s: float) -> None:
        self._kept.set(kept_bytes)
        self._age.set(age_transactions)
        self._writer.set(writer_age_s)
