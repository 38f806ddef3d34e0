"""What happened, as plain events in the order in which it happened. Whoever runs a system records them.

`partition` names one incarnation of a partition ("orders-0@1"): deleted and made again, it is another one. A value is
"identity#attempt": two records of one identity are the same message written twice. A transaction is named by
(transactional id, number); its data has an even epoch e, the marker that ends it e + 1.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    INIT = "init"
    REGISTER = "register"
    PREPARE = "prepare"
    END = "end"
    OUTCOME = "outcome"
    FENCE = "fence"
    ABORT = "abort"


class Result(Enum):
    UNDECIDED = "undecided"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Grant(NamedTuple):
    number: int
    producer_id: int
    epoch: int


class Decided(NamedTuple):
    """A number and its outcome."""

    grant: Grant
    result: Result


class Run(NamedTuple):
    partition: str
    offset_first: int
    offset_next: int


# --- what clients see ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    call: int
    client: str
    kind: Kind
    transactional_id: str
    # 0: none was given (InitProducer without a grant).
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A call without an answer is one whose effect is unknown."""

    call: int
    error: str = ""
    # The grant that the caller may use from here on.
    grant: Grant | None = None
    decided: Decided | None = None
    undecided: bool = False
    # The grant is that of a PREPARED transaction, given to whoever asks for it.
    prepared: bool = False
    resume_token: bytes | None = None
    complete: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged:
    """A client was told that its record stands there."""

    client: str
    transactional_id: str
    grant: Grant
    partition: str
    offset: int
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseDecided:
    """The other half of a PREPARED transaction."""

    transactional_id: str
    number: int
    committed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """By a read_committed consumer."""

    reader: str
    partition: str
    offset: int
    value: str


# --- what the parts hold ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A broker appended a batch of records; no values: group offsets."""

    partition: str
    offset: int
    producer_id: int
    epoch: int
    values: tuple[str, ...]
    # It was meant for another topic of this name, which had been deleted.
    stray: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    partition: str
    offset: int
    producer_id: int
    epoch: int
    commit: bool
    # Written by the search for hanging transactions.
    hanging: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A change of leader cut the partition here: what stood at or after the offset was never replicated."""

    partition: str
    offset_next: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleted:
    partition: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """An id's state became durable in the log."""

    log_partition: int
    offset: int
    leader_epoch: int
    transactional_id: str
    grant: Grant
    owner_since_number: int
    decided: tuple[Decided, ...]
    resume_token: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired:
    """An id's tombstone became durable in the log."""

    log_partition: int
    offset: int
    leader_epoch: int
    transactional_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """A (part of a) manifest became durable in the feed."""

    feed_partition: int
    offset: int
    leader_epoch: int
    transactional_id: str
    grant: Grant
    part: int
    part_count: int
    runs: tuple[Run, ...]


# --- what is left at the end --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Everything has healed and had its time; all committed records have been read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A partition whose last stable offset stays behind its end."""

    partition: str
    offset: int
    producer_id: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """Did not come to its end in its time."""

    what: str
    # It waits although nothing it depends on is away.
    by_stranger: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A part stopped by itself: a broken invariant, an error that nobody expected."""

    where: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a fold of the log knows of an id, against what its leader knows in memory."""

    transactional_id: str
    differs: str


Event = (
    Called
    | Answered
    | Acknowledged
    | DatabaseDecided
    | Read
    | Stored
    | Marked
    | Lost
    | Deleted
    | Logged
    | Expired
    | Fed
    | Finished
    | Open
    | Stuck
    | Broken
    | Replayed
)
History = list[Event]
