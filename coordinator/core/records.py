"""What the log remembers: the state of one transactional id and all that it is made of.

A record in the log *is* the id's full state after a step, so compaction keeps all that matters.
Plain data: frozen, without behaviour; structs because every step copies some (docs/decisions/0007).
"""

from enum import IntEnum
from typing import NamedTuple

from msgspec import Struct

from coordinator.core.state import TransactionState

OFFSETS_TOPIC = "__consumer_offsets"
# Of a slot's topic_changes: its producer id may be used on no topic any more.
NOWHERE = -1


class TopicPartition(NamedTuple):
    topic: str
    partition: int


class GroupPartition(NamedTuple):
    """A consumer group and the partition of __consumer_offsets that holds its offsets."""

    group_id: str
    partition: int


class Run(NamedTuple):
    """Consecutive offsets of one transaction: offset_first <= offset < offset_next."""

    offset_first: int
    offset_next: int


class Result(IntEnum):
    UNDECIDED = 0
    COMMITTED = 1
    ABORTED = 2


class Cause(IntEnum):
    """Why a transaction was aborted, or an owner fenced."""

    # Of a number that was passed over unused, because its slot could not be had.
    UNSPECIFIED = 0
    OWNER = 1
    TIMEOUT = 2
    NEWER_INSTANCE = 3
    ADMINISTRATOR = 4


class Origin(IntEnum):
    """How the newest grant came to be."""

    INIT = 0
    END = 1


class Grant(Struct, frozen=True, kw_only=True):
    """The right to write one transaction; (producer_id, epoch) stands for no other."""

    number: int
    producer_id: int
    epoch: int


class Slot(Struct, frozen=True, kw_only=True):
    """One producer id with the epoch of its newest grant."""

    producer_id: int
    epoch: int
    since_ms: int
    # How many changes of topics the log partition had counted when the producer id was taken. NOWHERE: a marker of it
    # was given up, so it may be open somewhere.
    topic_changes: int = 0


class Written(Struct, frozen=True, kw_only=True):
    """What a transaction wrote to one partition: its own offsets exactly, never a span."""

    topic: str
    partition: int
    record_count: int
    runs: tuple[Run, ...]
    topic_id: bytes = b""


class GroupOffset(Struct, frozen=True, kw_only=True):
    topic: str
    partition: int
    offset_next: int
    metadata: str = ""


class GroupOffsets(Struct, frozen=True, kw_only=True):
    group_id: str
    offsets: tuple[GroupOffset, ...]


class Contents(Struct, frozen=True, kw_only=True):
    """What a transaction holds when it is about to end."""

    written: tuple[Written, ...] = ()
    group_offsets: tuple[GroupOffsets, ...] = ()
    metadata: bytes = b""


NOTHING = Contents()


class Owner(Struct, frozen=True, kw_only=True):
    instance: str
    address: str
    since_ms: int
    # All lower numbers belonged to somebody else. While a PREPARED transaction waits it may be the next one.
    number_first: int
    cause: Cause


class Transaction(Struct, frozen=True, kw_only=True):
    """One that is not complete: ONGOING, PREPARED, PREPARE_COMMIT or PREPARE_ABORT."""

    grant: Grant
    state: TransactionState
    partitions: frozenset[TopicPartition]
    groups: frozenset[GroupPartition]
    started_at_ms: int
    contents: Contents = NOTHING
    # From PREPARE_* on.
    decided_at_ms: int = 0
    cause: Cause = Cause.UNSPECIFIED
    # Orders the decisions of a log partition, and so the manifests in the feed.
    decision: int = 0
    # The feed's end as known at the decision: the manifest, if written, stands at or after it.
    feed_offset_first: int = 0
    # Of a commit whose markers take long: its manifest stands below this offset. Whoever takes over need not look for
    # it, and it will not be there for ever. 0: not noted.
    feed_offset_next: int = 0


class Outcome(Struct, frozen=True, kw_only=True):
    """A decided number."""

    grant: Grant
    result: Result
    cause: Cause
    decided_at_ms: int


class IdState(Struct, frozen=True, kw_only=True):
    transactional_id: str
    slots: tuple[Slot, ...]
    # The newest grant: its number, and the index of the slot it may be written in.
    number: int
    slot: int
    origin: Origin
    # INIT: the number that the Init named; 0 = none. END: the last number that the owner is known to have held; it may
    # not have heard of those that others ended since.
    origin_number: int
    owner: Owner
    transaction_timeout_ms: int
    slots_max: int
    transactions: tuple[Transaction, ...]
    outcomes: tuple[Outcome, ...]
    resume_token: bytes
    updated_at_ms: int


class Tombstone(Struct, frozen=True, kw_only=True):
    """An id that expired."""

    transactional_id: str


class NumberFloor(Struct, frozen=True, kw_only=True):
    """No number up to this one is ever granted (again) in this log partition."""

    number_floor: int


class TopicState(Struct, frozen=True, kw_only=True):
    """Which topic of this name was last registered: deleted and created again it is another, with an id of its own."""

    topic: str
    topic_id: bytes
    # Which of the log partition's changes of topics brought it; 0: it is the first of its name that was registered.
    change: int


Record = IdState | Tombstone | NumberFloor | TopicState


def grant_of(state: IdState) -> Grant:
    """The newest grant."""
    slot = state.slots[state.slot]
    return Grant(number=state.number, producer_id=slot.producer_id, epoch=slot.epoch)


def newest_transaction(state: IdState) -> Transaction | None:
    """The transaction with the newest number, if one is ONGOING or PREPARED."""
    if state.transactions and state.transactions[-1].grant.number == state.number:
        return state.transactions[-1]
    return None
