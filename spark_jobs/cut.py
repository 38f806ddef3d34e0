"""The point at which Kafka and the database are compared. Data and arithmetic only; spark_jobs.snapshot reads it.

A source is one partition of one incarnation of a topic. What the relay says it has applied, as far as Kafka still has
it and read_committed readers may read it, is the source's `ranges`; they alone are compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from spark_jobs.records import Record
    from spark_jobs.targets import Table

Range = tuple[int, int]  # first, next
# Within that time a manifest follows its decision, and clocks agree.
SETTLED_AFTER_MS = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTransaction:
    producer_id: int
    epoch: int
    offset_first: int
    age_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionFacts:
    """What Kafka says of a partition now."""

    topic_id: str  # 32 hex digits
    log_start: int
    stable: int
    high: int
    open: tuple[OpenTransaction, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """What the relay says of a source."""

    source: int
    topic: str
    topic_id: str
    partition: int
    start: int
    next: int
    beyond: tuple[Range, ...]
    high: int
    # A partition that was added to its topic: it was begun with when these sources were applied up to these offsets.
    waited_for: tuple[tuple[int, int], ...] = ()

    @property
    def applied(self) -> tuple[Range, ...]:
        return ((self.start, self.next), *self.beyond)

    @property
    def is_rewound(self) -> bool:
        """Rows may carry offsets up to `high` that are not applied again yet."""
        return self.high > max(last for _, last in self.applied)

    @property
    def written(self) -> tuple[Range, ...]:
        """With what was applied before a rewind: its rows are there."""
        return ((self.start, self.high),) if self.is_rewound else self.applied

    def has_applied(self, offset: int) -> bool:
        return any(first <= offset < last for first, last in self.applied)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    source: int
    offset: int
    state: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCut:
    position: Position
    facts: PartitionFacts | None  # None: this incarnation of the topic is gone
    ranges: tuple[Range, ...]
    verified: int  # below it all was found clean before

    @property
    def end(self) -> int:
        return max((last for _, last in self.ranges), default=self.position.next)

    @property
    def lag(self) -> int:
        if self.facts is None:
            return 0
        applied = sum(last - first for first, last in self.position.beyond)
        return max(self.facts.stable - self.position.next - applied, 0)

    @property
    def is_whole(self) -> bool:
        """Whether each record that was ever applied can be read."""
        position, facts = self.position, self.facts
        if facts is None or facts.log_start > position.start or position.is_rewound:
            return False
        return all(last <= facts.stable for _, last in position.applied)

    @property
    def expired(self) -> int:
        """Offsets that were applied and are gone from Kafka before any run has seen them."""
        if self.facts is None:
            return 0
        log_start = self.facts.log_start
        return sum(max(min(last, log_start) - max(first, self.verified), 0) for first, last in self.position.applied)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    relay: str
    mode: str
    fence: int  # the relay's: it rises when another process takes over, and with a rewind or a rebuild
    snapshot_text: str  # pg_current_snapshot(): the canary
    xmin: int
    system: int  # the database cluster's own identifier: transaction ids mean something inside of it only
    lsn: str
    config_hash: str
    sources: tuple[SourceCut, ...]
    mapped: frozenset[str]  # topics that the relay takes now; of others it has positions that stay where they were
    dead_letters: tuple[DeadLetter, ...]
    replayed: Mapping[tuple[int, int], Record]  # dead letters that were applied after all, mended or not
    letters_replayed: int  # how many times that was done
    has_more_letters: bool  # than are in here
    tables: tuple[Table, ...]
    at_ms: int  # when Kafka was asked for its ends
    feed: Mapping[int, Range]  # partition of the feed → what is read of it
    # The manifest of each commit decided since then is in there, if it has one; None: retention has cut the partition
    # short, and its oldest manifest has to tell. Partition n of the feed belongs to partition n of the log.
    feed_whole_from_ms: Mapping[int, int | None]
    feed_applied: Mapping[int, int]  # partition of the feed → the relay's own position
    compacted: frozenset[str]  # topics of which records may vanish one by one
    unpositioned: tuple[tuple[str, int, int], ...]  # topic, partition, records: no position yet
    notes: tuple[str, ...]  # what cannot be checked, in words
    told: tuple[str, ...]  # what is as it has to be and yet worth a word

    def of_topics(self, topics: Collection[str]) -> tuple[SourceCut, ...]:
        return tuple(source for source in self.sources if source.position.topic in topics)

    @property
    def lag(self) -> int:
        return sum(source.lag for source in self.of_topics(self.mapped)) + sum(each[2] for each in self.unpositioned)


def cut_source(position: Position, facts: PartitionFacts | None, *, verified: int) -> SourceCut:
    """Clamps what was applied to what can be read: from the log's start to the last stable offset."""
    if facts is None or facts.topic_id != position.topic_id:
        return SourceCut(position=position, facts=None, ranges=(), verified=verified)
    low = max(position.start, facts.log_start, verified)
    ranges = [(max(first, low), min(last, facts.stable)) for first, last in position.applied]
    return SourceCut(
        position=position,
        facts=facts,
        ranges=merge([each for each in ranges if each[0] < each[1]]),
        verified=verified,
    )


def waits(sources: Sequence[SourceCut]) -> dict[int, dict[int, int]]:
    """Source → of each that was there before it, up to where the relay had applied that before it began with this one.
    Below there, a row's record is older than any in this one, whatever the records' times say.
    """
    return {each.position.source: dict(each.position.waited_for) for each in sources if each.position.waited_for}


def feed_ranges(
    facts: Mapping[int, PartitionFacts], marked: Mapping[int, int], since: Mapping[int, int]
) -> tuple[dict[int, Range], set[int]]:
    """What is read of the feed, by partition, and those of which retention has left all of it. `marked`: where the last
    run has ended; `since`: where manifests begin whose decisions were too young for it (-1: there are none).
    """
    ranges, whole = {}, set()
    for partition, each in facts.items():
        end = marked.get(partition, 0)
        wanted = min(end, since.get(partition, end)) if since.get(partition, -1) >= 0 else end
        ranges[partition] = (max(each.log_start, wanted), each.stable)
        if each.log_start <= wanted:
            whole.add(partition)
    return ranges, whole


def merge(ranges: Sequence[Range]) -> tuple[Range, ...]:
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)


def beyond(ranges: Sequence[Range], known: Sequence[Range]) -> tuple[Range, ...] | None:
    """What `ranges` has and `known` has not; None: `known` has more."""
    left = list(merge(ranges))
    for first, last in known:
        at = next((at for at, each in enumerate(left) if each[0] <= first and last <= each[1]), None)
        if at is None:
            return None
        before, after = (left[at][0], first), (last, left[at][1])
        left[at : at + 1] = [each for each in (before, after) if each[0] < each[1]]
    return tuple(left)


def width_of(sources: Sequence[SourceCut], buckets: int) -> int:
    """Offsets per bucket: a power of two, so that buckets of different runs lie on each other."""
    total = sum(last - first for source in sources for first, last in source.ranges)
    width = 1_024
    while width * buckets < total:
        width *= 2
    return width
