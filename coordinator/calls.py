"""What the API asks of the rest of the coordinator: the seam between gRPC and the shards.

A call either gets an Answer, or a Refused whose code and text say what to do. It never raises for what can be expected.
"""

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Protocol

from msgspec import Struct

from coordinator.core.commands import Command, Refused, Reply
from coordinator.core.records import Cause, IdState, TopicPartition, Transaction
from coordinator.core.state import TransactionState


class Answer(Struct, frozen=True, kw_only=True):
    reply: Reply
    # Of the transaction whose outcome the reply tells: partitions whose marker is not acknowledged yet.
    owed: frozenset[TopicPartition] = frozenset()
    # Whether nothing of it is owed any more (partitions, or the manifest).
    complete: bool = True
    # Of a grant: the same of all the id's transactions.
    owed_in_all: frozenset[TopicPartition] = frozenset()


class Change(Struct, frozen=True, kw_only=True):
    """A transaction reached a state. Seen by watchers after it is durable."""

    transactional_id: str
    log_partition: int
    transaction: Transaction
    state: TransactionState
    cause: Cause
    at_ms: int


class Led(Struct, frozen=True, kw_only=True):
    """A log partition, as the instance that leads it (or hears of it) sees it."""

    log_partition: int
    instance: str
    address: str
    coordinator_epoch: int
    # serving, loading, failed
    state: str
    transactional_ids: int = 0
    debts: int = 0


# Called when somebody else has taken an id: (transactional id, the refusal that its former owner gets from now on).
Fenced = Callable[[str, Refused], None]


# Called once with what became of a call.
Told = Callable[[Answer | Refused], None]


class WatchOverrunError(Exception):
    """Changes came faster than the watcher took them; those that it has not seen are lost to it."""


class Calls(Protocol):
    """Implemented by coordinator.router.Router."""

    instance: str
    partition_count: int

    def partition_of(self, transactional_id: str) -> int: ...

    async def call(self, command: Command, timeout_ms: int) -> Answer | Refused:
        """Routes to the shard; NOT_COORDINATOR, COORDINATOR_LOAD_IN_PROGRESS or REQUEST_TIMED_OUT where it must."""

    def ask(self, command: Command, timeout_ms: int, told: Told) -> None:
        """The same without a coroutine, for the many calls of a session. `told` must not raise."""

    def leader_of(self, log_partition: int) -> Led | None:
        """Who leads it, here or at a peer; None: nobody known just now."""

    def leaders(self) -> list[Led]: ...

    def describe(self, transactional_id: str) -> IdState | Refused:
        """The id's state as this leader knows it (for people; no append behind it)."""

    def page(self, prefix: str, after: str, limit: int) -> Iterable[IdState]:
        """Ids of the partitions led here, in order, after the given one."""

    def watch(self, prefix: str) -> AsyncIterator[Change]:
        """Each change from now on. Raises WatchOverrunError where they are not taken as fast as they come."""

    def listen(self, transactional_id: str, fenced: Fenced) -> Callable[[], None]:
        """Pushes fencing of the id whenever this instance leads it; call the result to stop listening."""
