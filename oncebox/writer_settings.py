"""How records are batched, sent and given up: what Kafka's own producers have, with the unit in each name."""

from dataclasses import dataclass

from oncebox.wire import Compression

# Brokers remember as many batches of a producer on a partition.
IN_FLIGHT_MAX = 5
ACKS_ALL = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSettings:
    """How a producer batches records, sends them and gives them up."""

    batch_bytes: int = 256 * 1024
    # A request holds batches of several partitions up to this size; a record larger than this is refused.
    request_bytes: int = 1024 * 1024
    # A batch waits this long for more records; 0: it leaves as soon as its broker has room for a request.
    linger_ms: int = 0
    compression: Compression = Compression.NONE
    # Records that are buffered or under way; beyond it, send() waits.
    buffer_bytes: int = 32 * 1024 * 1024
    request_timeout_ms: int = 30_000
    delivery_timeout_ms: int = 120_000
    in_flight_max: int = IN_FLIGHT_MAX
    # All in-sync replicas; 1, the leader alone, only without transactions.
    acks: int = ACKS_ALL

    def __post_init__(self) -> None:
        if not 1 <= self.in_flight_max <= IN_FLIGHT_MAX:
            raise ValueError(f"in_flight_max is 1 to {IN_FLIGHT_MAX}: brokers tell no more repeats apart")
        if not 0 < self.batch_bytes <= self.request_bytes <= self.buffer_bytes:
            raise ValueError("batch_bytes, request_bytes and buffer_bytes must not be the smaller the later they stand")
        if self.acks not in {ACKS_ALL, 1}:
            raise ValueError("acks is -1 (all in-sync replicas) or 1 (the leader)")
        if not 0 < self.request_timeout_ms <= self.delivery_timeout_ms:
            raise ValueError("request_timeout_ms must not be above delivery_timeout_ms")
