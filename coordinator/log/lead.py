"""Taking a log partition over, and writing it as its only leader.

Whoever reads its own nonce back from the log has won; from then on the store refuses every older leader's writes.
A sequence is never used twice with other bytes: after an unknown outcome the identical batch is sent until it is
acknowledged or refused.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.core.records import NumberFloor
from coordinator.log import codec
from coordinator.log.port import (
    FencedError,
    Kind,
    OutOfSequenceError,
    Store,
    Stored,
    UnavailableError,
    UnknownOutcomeError,
    Writer,
)
from coordinator.log.replay import Replay
from oncebox.v1 import log_pb2

EPOCHS_PER_GENERATION = 32_768
# Only closes a generation: nobody leads with it.
EPOCH_LAST = EPOCHS_PER_GENERATION - 1
GENERATION_LAST = 65_535
# After a lost log numbers go on well above those in the feed: transactions that never got there had some too.
NUMBERS_SKIPPED = 1_000_000
# Far above the producer ids that Kafka hands out.
PRODUCER_ID_BASE = 1 << 62
RETRY_FIRST_S = 0.02
RETRY_MAX_S = 1.0
SEQUENCES = 1 << 31

Records = Sequence[tuple[bytes, bytes | None]]


class LostError(Exception):
    """Somebody else leads the partition."""


class LogLostError(Exception):
    """This is not the log that was written: it was deleted, cut or restored from a backup."""

    def __init__(self, partition: int, evidence: str) -> None:
        super().__init__(
            f"log partition {partition}: {evidence}. The log was deleted, truncated or restored from a backup; "
            "see docs/when-the-log-is-lost.md"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Leadership:
    """What a take-over found and won. Log and feed go on after the leader record, which had sequence 0."""

    leader: log_pb2.LeaderState
    log_offset_next: int
    feed_offset_next: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _FeedTail:
    """What the end of the feed remembers: the last leader, and the highest numbers committed last."""

    leader: tuple[int, int] | None
    committed: Mapping[str, int]


def writer_of(partition: int, generation: int, epoch: int) -> Writer:
    return Writer(producer_id=PRODUCER_ID_BASE + partition + (generation << 20), epoch=epoch)


def coordinator_epoch(leader: log_pb2.LeaderState) -> int:
    """Generation and epoch in one number, as Kafka's markers carry it."""
    return leader.generation * EPOCHS_PER_GENERATION + leader.epoch


class Appender:
    """Appends to one partition as one writer, one batch in flight, each acknowledged or refused before the next."""

    def __init__(
        self, store: Store, kind: Kind, partition: int, writer: Writer, sequence: int, offset_next: int = 0
    ) -> None:
        """`offset_next`: the partition's end as far as this writer has seen it."""
        self._store = store
        self._kind = kind
        self._partition = partition
        self._writer = writer
        self._sequence = sequence
        self._offset_next = offset_next
        self._began_s: float | None = None

    @property
    def waits_s(self) -> float:
        """For how long the append that is under way has not been acknowledged; 0.0: there is none."""
        return asyncio.get_running_loop().time() - self._began_s if self._began_s is not None else 0.0

    async def append(self, records: Records) -> int:
        """The first record's offset. Raises LostError when somebody else leads; waits as long as the store is away."""
        self._began_s = asyncio.get_running_loop().time()
        offset = await _append_until_known(
            self._store, self._kind, self._partition, self._writer, self._sequence, records
        )
        self._began_s = None
        if self._kind is Kind.LOG:
            # A topic that is created again knows none of its former writers, and takes whatever they send.
            _check_grown(self._partition, offset, self._offset_next)
        self._sequence = (self._sequence + len(records)) % SEQUENCES
        self._offset_next = offset + len(records)
        return offset


def _check_grown(partition: int, offset: int, offset_next: int) -> None:
    if offset < offset_next:
        raise LogLostError(partition, f"an append got offset {offset}, though {offset_next - 1} was taken before")


async def _append_until_known(
    store: Store, kind: Kind, partition: int, writer: Writer, sequence: int, records: Records
) -> int:
    pause_s = RETRY_FIRST_S
    while True:
        try:
            return await store.append(kind, partition, writer, sequence, records)
        except (FencedError, OutOfSequenceError) as error:
            raise LostError(f"{kind.value} partition {partition}: {error}") from error
        except (UnknownOutcomeError, UnavailableError):
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RETRY_MAX_S)


async def take_over(
    store: Store,
    partition: int,
    *,
    instance: str,
    address: str,
    nonce: Callable[[], bytes],
    replay: Replay,
    accept_lost_log: bool = False,
) -> Leadership:
    """Wins the partition, log first, then feed, or raises LostError. The whole log is folded into `replay`.

    With `accept_lost_log` an empty log is begun anew where the feed remembers an older one.
    """
    # Before the log: leaders write to the log first, so what the feed knows now the log must know when it is read.
    tail = await _feed_tail(store, partition)
    log_topic_id = await store.log_topic_id()
    read_next = 0
    while True:
        read_first, read_next = read_next, await store.end_offset(Kind.LOG, partition)
        await store.replay(partition, read_first, read_next, replay)
        evidence = _evidence_of_loss(replay, tail, log_topic_id)
        # Compaction may remove a record in favour of one that is written while we read: then we read on.
        if read_next == read_first or evidence is None:
            break
    leader = log_pb2.LeaderState(nonce=nonce(), instance=instance, address=address, log_topic_id=log_topic_id)
    if evidence is not None:
        if not accept_lost_log or read_next:
            raise LogLostError(partition, evidence)
        leader.generation = tail.leader[0] if tail.leader else 0
        floor = NumberFloor(number_floor=await _highest_number_in_feed(store, partition) + NUMBERS_SKIPPED)
        # As after a used-up generation: whoever may still write as a leader of the lost log is fenced first.
        await _close_generation(store, partition, leader, [codec.encode(floor)])
    elif replay.leader is not None:
        leader.generation, leader.epoch = replay.leader[0], replay.leader[1] + 1
        if leader.epoch >= EPOCH_LAST:
            await _close_generation(store, partition, leader, [])
    offset = await _win_log(store, partition, leader, read_next, replay)
    writer = writer_of(partition, leader.generation, leader.epoch)
    feed_record = codec.encode_feed_leader(leader)
    feed_offset = await _append_until_known(store, Kind.FEED, partition, writer, 0, [feed_record])
    ours = False
    async for chunk in store.read(Kind.FEED, partition, feed_offset, feed_offset + 1):
        ours = ours or _is_ours(chunk, feed_offset, feed_record[1])
    if not ours:
        raise LostError(f"another instance took feed partition {partition} over at the same moment")
    return Leadership(leader=leader, log_offset_next=offset + 1, feed_offset_next=feed_offset + 1)


async def _win_log(store: Store, partition: int, leader: log_pb2.LeaderState, read_next: int, replay: Replay) -> int:
    """Writes the leader's record, folds all that stands before it, and returns its offset."""
    writer = writer_of(partition, leader.generation, leader.epoch)
    record = codec.encode_leader(leader)
    offset = await _append_until_known(store, Kind.LOG, partition, writer, 0, [record])
    _check_grown(partition, offset, read_next)
    # From here on no older leader can write to the log; what it wrote between our two reads stands in this tail.
    ours = False
    async for chunk in store.read(Kind.LOG, partition, read_next, offset + 1):
        replay.fold(chunk)
        ours = ours or _is_ours(chunk, offset, record[1])
    # A repeat of (epoch, sequence) is acknowledged without being stored: only the nonce tells who was first.
    if not ours:
        raise LostError(f"another instance took log partition {partition} over at the same moment")
    return offset


def _is_ours(chunk: Sequence[Stored], offset: int, value: bytes) -> bool:
    return any(entry.offset == offset and entry.value == value for entry in chunk)


async def _feed_tail(store: Store, partition: int) -> _FeedTail:
    """Searched from the end in growing steps."""
    offset_next = await store.end_offset(Kind.FEED, partition)
    window = 256
    leader: tuple[int, int] | None = None
    committed: dict[str, int] = {}
    while offset_next > 0 and (leader is None or not committed):
        offset_first = max(offset_next - window, 0)
        newest, numbers = None, {}
        async for chunk in store.read(Kind.FEED, partition, offset_first, offset_next):
            for entry in chunk:
                parsed = codec.parse_feed(entry.value)
                if parsed.WhichOneof("record") == "leader":
                    newest = (parsed.leader.generation, parsed.leader.epoch)
                else:
                    numbers[parsed.manifest.transactional_id] = parsed.manifest.number
        # The last ones are enough: decisions get there in the order in which they stand in the log.
        leader, committed = leader or newest, committed or numbers
        offset_next, window = offset_first, window * 4
    return _FeedTail(leader=leader, committed=committed)


async def _highest_number_in_feed(store: Store, partition: int) -> int:
    highest = 0
    async for chunk in store.read(Kind.FEED, partition, 0, None):
        for entry in chunk:
            highest = max(highest, codec.parse_feed(entry.value).manifest.number)
    return highest


def _evidence_of_loss(replay: Replay, tail: _FeedTail, log_topic_id: bytes) -> str | None:
    """The log is written before the feed: a feed that knows more tells of a lost log."""
    log, feed = replay.leader, tail.leader
    if feed is not None and (log is None or feed > log):
        known = f"generation {log[0]} epoch {log[1]}" if log else "none"
        return f"the feed remembers leader generation {feed[0]} epoch {feed[1]}, the log {known}"
    for transactional_id, number in tail.committed.items():
        decided_max = replay.decided_max(transactional_id)
        if number > decided_max:
            return f"the feed remembers commit {number} of {transactional_id!r}, the log none above {decided_max}"
    if replay.leader_topic_id not in {b"", log_topic_id}:
        return f"its last leader wrote to a topic with id {replay.leader_topic_id.hex()}, this is {log_topic_id.hex()}"
    return None


async def _close_generation(store: Store, partition: int, leader: log_pb2.LeaderState, records: Records) -> None:
    """Fences every writer of a used-up generation, and moves the leader on to the next one."""
    if leader.generation >= GENERATION_LAST:
        raise LostError(f"log partition {partition} has used up all its generations")
    leader.epoch = EPOCH_LAST
    writer = writer_of(partition, leader.generation, EPOCH_LAST)
    # First what is to be remembered: where this generation is closed, it stands.
    if records:
        await _append_until_known(store, Kind.LOG, partition, writer, 0, records)
    await _append_until_known(store, Kind.LOG, partition, writer, len(records), [codec.encode_leader(leader)])
    await _append_until_known(store, Kind.FEED, partition, writer, 0, [codec.encode_feed_leader(leader)])
    leader.generation, leader.epoch = leader.generation + 1, 0
