"""What clients have to do, and how they go about it. Plain data."""

from dataclasses import dataclass

from coordinator.core.records import TopicPartition


@dataclass(slots=True)
class Job:
    """What is to be done under one transactional id, by whoever owns it."""

    transactional_id: str
    items: int
    # Without a resume token every attempt is a message of its own, and the id may expire.
    resumable: bool
    # Some of its transactions decide together with a database.
    two_phase: bool = False
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    slots_max: int = 2
    chains: bool = True
    decided_is_enough: bool = False
    without_waiting: bool = False
    commits_offsets: bool = False
    # Fenced, it takes the id back.
    stubborn: bool = True
    # Between transactions, and inside them.
    pause_max_s: float = 0.5
    dwell_max_s: float = 0.05
    # How late the database's COMMIT is behind the preparation, and what follows behind the COMMIT.
    commit_late_max_s: float = 0.0
    aborts: float = 0.15
    partitions: tuple[TopicPartition, ...] = ()
