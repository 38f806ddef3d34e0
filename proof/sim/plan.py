"""What a seed stands for: which faults happen in its run, how large the run is and how its clients behave. Pure."""

from dataclasses import dataclass
from enum import Enum
from random import Random


class Fault(Enum):
    # Messages.
    LOST = "messages lost"
    DOUBLED = "messages doubled"
    LATE = "messages delayed past later ones"
    # Coordinator instances.
    CRASH = "instances crash"
    CRASH_AT_STEP = "an instance crashes after a given step, again and again"
    ZOMBIE = "a leader stops and wakes up later"
    RIVALS = "two instances are told to lead the same partition"
    HAND_OVER = "partitions are handed over"
    CLOCKS = "clocks jump"
    # Brokers.
    BROKER_DOWN = "a broker is gone for a while"
    BROKER_SLOW = "a broker is slow"
    ELECTIONS = "partitions change their leader"
    LAG = "replicas lag, and an un-acknowledged suffix is lost"
    LOG_DOWN = "the log takes no appends for a while"
    DATA_DOWN = "a data partition is down for a while"
    DEAD_PARTITION = "a data partition stays down until all others are done"
    MUTE = "marker requests are never, or only partly, answered"
    DELETED = "a topic is deleted and made again"
    COMPACTION = "the log is compacted"
    # Clients.
    CLIENT_CRASH = "clients crash and start anew"
    CLIENT_ZOMBIE = "clients stop and wake up later"
    RIVAL_CLIENTS = "several clients want the same id"
    DAWDLING = "clients outlive their transaction's timeout"
    ADMINISTRATOR = "an administrator aborts and fences"
    # Limits that take years to reach, made small.
    EPOCHS = "epochs run out"
    LEADER_EPOCHS = "leader epochs run out"
    EXPIRY = "idle ids expire"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    seed: int
    faults: frozenset[Fault]
    instances: int
    log_partitions: int
    brokers: int
    # 1: brokers older than 4.2.
    marker_version_max: int
    topics: tuple[tuple[str, int], ...]
    ids: int
    # Of its source, each handled exactly once.
    items_per_id: int
    # How long faults happen.
    safety_s: float
    transaction_timeout_ms: int
    # Of one group commit.
    batch_max_records: int
    # The first leader's last one; 0: none.
    crash_at_step: int = 0

    def has(self, fault: Fault) -> bool:
        return fault in self.faults


def plan(seed: int) -> Plan:
    rng = Random(f"plan/{seed}")
    every = list(Fault)
    faults = frozenset(rng.sample(every, rng.choice((0, 1, 2, 3, 4, 6, 8, 10, 12))))
    return Plan(
        seed=seed,
        faults=faults,
        instances=rng.choice((2, 2, 3)),
        log_partitions=rng.choice((1, 1, 2)),
        brokers=rng.choice((1, 2, 3)),
        marker_version_max=rng.choice((1, 2)),
        topics=rng.choice(((("orders", 2),), (("orders", 1), ("audit", 1)), (("orders", 2), ("audit", 1)))),
        ids=rng.choice((1, 2, 2, 3)),
        items_per_id=rng.randint(6, 18),
        safety_s=rng.choice((6.0, 10.0)),
        transaction_timeout_ms=rng.choice((1_500, 3_000, 6_000)),
        batch_max_records=rng.choice((1, 3, 1_000)),
    )
