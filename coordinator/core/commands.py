"""What can be asked of a transactional id, and what can be answered.

A refusal is a value, not an exception: it says who is at fault by its code and what to do by its text.
"""

from collections.abc import Mapping
from enum import Enum, IntEnum
from types import MappingProxyType

from msgspec import Struct

from coordinator.core.records import (
    NOTHING,
    Contents,
    Grant,
    GroupPartition,
    Outcome,
    Owner,
    Record,
    Result,
    TopicPartition,
    Transaction,
)


class ErrorCode(IntEnum):
    """Kafka's names and numbers."""

    UNKNOWN_SERVER_ERROR = -1
    UNKNOWN_TOPIC_OR_PARTITION = 3
    REQUEST_TIMED_OUT = 7
    MESSAGE_TOO_LARGE = 10
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC_EXCEPTION = 17
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    INVALID_REQUEST = 42
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    SASL_AUTHENTICATION_FAILED = 58
    THROTTLING_QUOTA_EXCEEDED = 89
    PRODUCER_FENCED = 90
    TRANSACTION_ABORTABLE = 120
    OUTCOME_EXPIRED = 10001


# --- commands -------------------------------------------------------------------------------------------------------


# The ids of topics that a command names, as the cluster told them last; without one, nothing is known of that topic.
TopicIds = Mapping[str, bytes]
NO_TOPIC_IDS: TopicIds = MappingProxyType({})


class InitProducer(Struct, frozen=True, kw_only=True):
    transactional_id: str
    instance: str
    address: str
    transaction_timeout_ms: int
    grant: Grant | None = None
    without_waiting: bool = False
    keep_prepared: bool = False
    slots_max: int = 2


class Register(Struct, frozen=True, kw_only=True):
    """AddPartitions and AddOffsets."""

    transactional_id: str
    grant: Grant
    partitions: frozenset[TopicPartition] = frozenset()
    groups: frozenset[GroupPartition] = frozenset()
    # How long ago the owner began the transaction; None: not begun.
    begun_ms_ago: int | None = None
    topic_ids: TopicIds = NO_TOPIC_IDS


class Prepare(Struct, frozen=True, kw_only=True):
    transactional_id: str
    grant: Grant
    contents: Contents
    topic_ids: TopicIds = NO_TOPIC_IDS


class End(Struct, frozen=True, kw_only=True):
    transactional_id: str
    grant: Grant
    result: Result
    contents: Contents = NOTHING
    # Answer once the decision is durable; else once every marker is written.
    decided_is_enough: bool = False
    next_partitions: frozenset[TopicPartition] = frozenset()
    next_groups: frozenset[GroupPartition] = frozenset()
    topic_ids: TopicIds = NO_TOPIC_IDS


class Heartbeat(Struct, frozen=True, kw_only=True):
    transactional_id: str
    grant: Grant
    begun_ms_ago: int | None = None
    extend: bool = False


class GetOutcome(Struct, frozen=True, kw_only=True):
    transactional_id: str
    number: int


class Abort(Struct, frozen=True, kw_only=True):
    """By an administrator."""

    transactional_id: str
    number: int


class ForceFence(Struct, frozen=True, kw_only=True):
    """By an administrator: the owner's claim ends."""

    transactional_id: str
    administrator: str
    abort_prepared: bool = False


class Timeout(Struct, frozen=True, kw_only=True):
    """By the clock: the transaction outlived its timeout."""

    transactional_id: str
    number: int


class Complete(Struct, frozen=True, kw_only=True):
    """By ourselves: all that these transactions owed is paid (the context says which)."""

    transactional_id: str


class Expire(Struct, frozen=True, kw_only=True):
    """By the sweep: the id has been idle for longer than ids are kept."""

    transactional_id: str
    idle_since_before_ms: int


Command = (
    InitProducer | Register | Prepare | End | Heartbeat | GetOutcome | Abort | ForceFence | Timeout | Complete | Expire
)

# --- replies --------------------------------------------------------------------------------------------------------


class Granted(Struct, frozen=True, kw_only=True):
    """To InitProducer."""

    grant: Grant
    resume_token: bytes
    outcome: Outcome | None = None
    prepared: Transaction | None = None


class Registered(Struct, frozen=True, kw_only=True):
    """To Register and Heartbeat: the grant to use from here on."""

    grant: Grant


class Prepared(Struct, frozen=True, kw_only=True):
    transaction: Transaction


class Ended(Struct, frozen=True, kw_only=True):
    outcome: Outcome
    # None: the caller is not the owner any more.
    next_grant: Grant | None
    next_registered: bool = False


class OutcomeKnown(Struct, frozen=True, kw_only=True):
    outcome: Outcome


class Undecided(Struct, frozen=True, kw_only=True):
    grant: Grant
    transaction: Transaction | None


class OutcomeForgotten(Struct, frozen=True, kw_only=True):
    """Not among the id's last outcomes: the feed may still know a commit."""

    number: int


class Done(Struct, frozen=True, kw_only=True):
    """To our own commands."""


Reply = Granted | Registered | Prepared | Ended | OutcomeKnown | Undecided | OutcomeForgotten | Done


class Wait(Enum):
    """What must have happened, after the append, before the reply may leave."""

    NOTHING = 0
    # The number that was ended owes nothing more (bounded: then the reply says what is owed).
    ENDED_IS_PAID = 1
    # No number below the new grant owes anything.
    ALL_IS_PAID = 2


# --- decisions ------------------------------------------------------------------------------------------------------


class Accepted(Struct, frozen=True, kw_only=True):
    reply: Reply
    # To be appended as one batch; empty: the reply still waits for an append begun after the call arrived.
    records: tuple[Record, ...] = ()
    wait: Wait = Wait.NOTHING
    # How many of the fresh producer ids it used.
    producer_ids_used: int = 0


class Refused(Struct, frozen=True, kw_only=True):
    code: ErrorCode
    message: str
    retriable: bool = False
    owner: Owner | None = None
    outcome: Outcome | None = None
    # With NOT_COORDINATOR: where to go, if known.
    leader_address: str = ""


class Blocked(Struct, frozen=True, kw_only=True):
    """Not now: ask again when a debt of the id is paid, at the latest then; past the deadline it is this refusal."""

    again_at_ms: int
    refusal: Refused


class NeedsProducerId(Struct, frozen=True, kw_only=True):
    """Ask again with more fresh producer ids."""


Decision = Accepted | Refused | Blocked | NeedsProducerId
