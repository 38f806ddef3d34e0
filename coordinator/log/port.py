"""What the coordinator asks of a store of partitions. Two implementations: Kafka, and the simulator's.

The store enforces who may write (as a Kafka broker does): per partition and producer id it refuses lower epochs and
gaps in the sequence, and acknowledges a repeated (epoch, sequence) with its first offset without storing it again,
whatever its bytes. So the fencing of a deposed leader is done by the system that holds the data.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from coordinator.log.replay import Replay


# Of a record in a batch, besides its key and value: lengths, attributes, time and offset, at their longest.
RECORD_OVERHEAD_BYTES = 32


class Kind(Enum):
    LOG = "log"
    FEED = "feed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Who writes: the partition's leader, by its epoch."""

    producer_id: int
    epoch: int


class Stored(NamedTuple):
    offset: int
    key: bytes | None
    value: bytes | None


def size_of(key: bytes, value: bytes | None) -> int:
    """How many bytes of a batch the record takes at most."""
    return len(key) + len(value or b"") + RECORD_OVERHEAD_BYTES


class FencedError(Exception):
    """A newer leader writes this partition now; what was sent is not stored by this call."""


class OutOfSequenceError(Exception):
    """The store has not seen what came before (or has seen another's): this writer has lost the partition."""


class UnknownOutcomeError(Exception):
    """No answer: it may be stored or not. Only the identical batch may follow."""


class UnavailableError(Exception):
    """Refused for now (no leader, not enough replicas); certainly not stored."""


class Reader(Protocol):
    def read(
        self, kind: Kind, partition: int, offset_first: int, offset_next: int | None
    ) -> AsyncIterator[Sequence[Stored]]:
        """All that stands from offset_first (or the start, if later) below offset_next (None: the end as of now)."""


class Store(Reader, Protocol):
    async def append(
        self, kind: Kind, partition: int, writer: Writer, sequence: int, records: Sequence[tuple[bytes, bytes | None]]
    ) -> int:
        """Appends the records as one batch, atomically, and returns the first one's offset once it is durable."""

    async def replay(self, partition: int, offset_first: int, offset_next: int, replay: "Replay") -> None:
        """Folds all that stands there in the log: it may be long."""

    async def log_topic_id(self) -> bytes:
        """Names this very log: deleted and created again, it has another."""

    async def end_offset(self, kind: Kind, partition: int) -> int:
        """The offset after the last record that is durable."""
