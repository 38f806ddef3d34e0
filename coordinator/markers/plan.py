"""Which markers may go together, in what order, and what an answer means. Pure: no I/O, clock or randomness.

Never two transactions of one producer id in one request (answers are keyed by producer id), and on one partition the
next marker of a producer id only after the one before it is settled.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from enum import Enum

from oncebox.wire import ActiveProducer, ErrorCode, TopicPartition, TxnMarker

# One marker on one partition is one append at the broker: so many are a few milliseconds of its work.
REQUEST_MARKERS_MAX = 256
BACKOFF_FIRST_S = 0.02
BACKOFF_MAX_S = 5.0
# How long brokers must say that a partition is gone before its markers are given up.
GONE_AFTER_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one transaction ends, on whichever partition."""

    producer_id: int
    marker_epoch: int
    commit: bool
    coordinator_epoch: int


class Owed:
    """One marker on one partition. Compared by identity: the same may be owed twice, after a take-over."""

    __slots__ = (
        "cancelled",
        "dropped",
        "ending",
        "in_flight",
        "is_old",
        "paid",
        "partition",
        "settled",
        "since_s",
        "topic_id",
    )

    def __init__(
        self,
        ending: Ending,
        partition: TopicPartition,
        paid: Callable[[], None],
        since_s: float,
        topic_id: bytes | None = None,
        *,
        is_old: bool = False,
    ) -> None:
        self.ending = ending
        self.partition = partition
        # Of the topic that was written to, where it is known.
        self.topic_id = topic_id
        # Ask for the topic's id before it is sent.
        self.is_old = is_old and self.names_topic
        self.paid = paid
        self.since_s = since_s
        self.in_flight = False
        self.cancelled = False
        # Told as paid although no marker was written: the partition is gone.
        self.dropped = False
        # Nothing more will be done about it.
        self.settled = False

    @property
    def names_topic(self) -> bool:
        """Whether it is for this very topic, and not for whichever has its name."""
        return self.ending.commit and self.topic_id is not None


class Turns:
    """Whose marker is next, for each producer id on each partition."""

    def __init__(self) -> None:
        self._holders: dict[tuple[int, TopicPartition], Owed] = {}
        self._waiting: dict[tuple[int, TopicPartition], list[Owed]] = {}

    def take(self, owed: Owed) -> bool:
        """Whether it may be sent now; else it waits until `pass_on` returns it."""
        key = (owed.ending.producer_id, owed.partition)
        if self._holders.setdefault(key, owed) is owed:
            return True
        self._waiting.setdefault(key, []).append(owed)
        return False

    def pass_on(self, owed: Owed) -> Owed | None:
        """This one is settled: the one whose turn it is now, if any; by epoch."""
        key = (owed.ending.producer_id, owed.partition)
        if self._holders[key] is not owed:
            return None  # cancelled before its turn came
        waiting = [other for other in self._waiting.pop(key, ()) if not other.settled]
        if not waiting:
            del self._holders[key]
            return None
        self._holders[key] = following = min(waiting, key=lambda other: other.ending.marker_epoch)
        waiting.remove(following)
        if waiting:
            self._waiting[key] = waiting
        return following


def take(waiting: deque[Owed], limit: int = REQUEST_MARKERS_MAX) -> list[Owed]:
    """Takes what the next request to a broker carries; what has to wait for the one after stays, in its order."""
    taken: list[Owed] = []
    held: list[Owed] = []
    endings: dict[int, Ending] = {}
    while waiting and len(taken) < limit:
        owed = waiting.popleft()
        if owed.settled:
            continue
        ending = owed.ending
        other = endings.setdefault(ending.producer_id, ending)
        if other is ending or other == ending:
            taken.append(owed)
        else:
            held.append(owed)
    waiting.extendleft(reversed(held))
    return taken


def request(taken: Iterable[Owed]) -> list[TxnMarker]:
    """One marker per producer id, with its partitions.

    Sent again, it is written again unless a newer epoch is there (KAFKA-19999): an acknowledgement always says that it
    is replicated.
    """
    partitions: dict[int, tuple[Ending, list[TopicPartition]]] = {}
    for owed in taken:
        ending = owed.ending
        entry = partitions.get(ending.producer_id)
        if entry is None:
            partitions[ending.producer_id] = (ending, [owed.partition])
        else:
            entry[1].append(owed.partition)
    return [
        TxnMarker(
            producer_id=producer_id,
            producer_epoch=ending.marker_epoch,
            committed=ending.commit,
            partitions=tuple(marked),
            coordinator_epoch=ending.coordinator_epoch,
        )
        for producer_id, (ending, marked) in partitions.items()
    ]


def for_namesake(owed: Owed, topic_id: bytes | None) -> Owed:
    """The marker for the topic that has this id now.

    If it is not the one that was written to, but was created after that one was deleted, then whatever this producer id
    has open there came late from an older transaction: even a commit aborts it there, and fences what is still to come.
    """
    if not owed.ending.commit or None in (topic_id, owed.topic_id) or topic_id == owed.topic_id:
        return owed
    return Owed(replace(owed.ending, commit=False), owed.partition, owed.paid, owed.since_s)


class Verdict(Enum):
    PAID = "paid"
    # The partition, or its broker, cannot do it now.
    AGAIN = "again"
    # There is a newer epoch of this producer id, or of the coordinator: see `is_ended`.
    NEWER = "newer"
    FORBIDDEN = "forbidden"


def verdict(error: ErrorCode | None) -> Verdict:
    """What a broker's word on one marker means. None: absent from the answer, which is not done."""
    if error is ErrorCode.NONE:
        return Verdict.PAID
    if error in {ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.TRANSACTION_COORDINATOR_FENCED}:
        return Verdict.NEWER
    if error is ErrorCode.CLUSTER_AUTHORIZATION_FAILED:
        return Verdict.FORBIDDEN
    # Also what Kafka calls not retriable: a decided transaction stays owed, whatever a broker says.
    return Verdict.AGAIN


def is_ended(ending: Ending, producers: Iterable[ActiveProducer]) -> bool:
    """Whether the partition's producers show that this transaction is over there and its late writes are refused.

    Data epochs are even and marker epochs odd: the marker's own epoch can only have come with the marker, and a higher
    one only after it. With a lower one, nobody has ended it, whether its data is there or still on its way.
    """
    for producer in producers:
        if producer.producer_id == ending.producer_id:
            if producer.producer_epoch == ending.marker_epoch:
                return producer.txn_start_offset is None
            return producer.producer_epoch > ending.marker_epoch
    return False


def is_absent(answers: Collection[ErrorCode | None], *, brokers: int) -> bool:
    """Whether those asked, two where the cluster has two, agree that the partition does not exist.

    No topic id is needed: a name that is gone has none, and a topic made anew takes the marker by its name.
    """
    return len(answers) >= max(1, min(2, brokers)) and all(
        answer is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION for answer in answers
    )


def backoff_s(failures: int, jitter: float) -> float:
    """How long to wait after so many failures in a row; `jitter` from 0 to 1 spreads it over the upper half."""
    return min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(failures - 1, 30)) * (0.5 + 0.5 * jitter)
