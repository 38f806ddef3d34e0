"""Where a reader begins: in the topics, and in the feed so far back that no commit of what is to be read is missed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from oncebox.reader.source import list_offsets, topics_of
from oncebox.reader.types import FeedTooShortError, PartitionPosition, Position, ReadError
from oncebox.wire import EARLIEST, LATEST, TopicPartition, Wire

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    topic_ids: Mapping[str, str]
    partitions: Mapping[TopicPartition, PartitionPosition]
    feed: Mapping[int, int]
    # Feed partitions that are read from their begin, which is not where they once began; emptied as they are met.
    cut_feed: set[int]
    # Set where such a one holds nothing any more.
    horizon_ms: int | None
    # With until_end: how far each partition is to be read.
    ends: Mapping[TopicPartition, int] | None


async def starting(
    wire: Wire,
    topics: Collection[str],
    feed_topic: str,
    start: Position | Literal["earliest", "latest"],
    *,
    until_end: bool,
) -> Start:
    found = await topics_of(wire, [*topics, feed_topic])
    partitions = [TopicPartition(topic, index) for topic in topics for index in found[topic].partitions]
    feed = [TopicPartition(feed_topic, index) for index in found[feed_topic].partitions]
    topic_ids = {topic: topic_id.hex for topic in topics if (topic_id := found[topic].topic_id) is not None}
    feed_firsts = {where.partition: first for where, first in (await list_offsets(wire, feed, EARLIEST)).items()}
    cut: set[int] = set()
    if start == "latest":
        # The feed's ends first: what is written to the topics from then on is committed behind them.
        feed_at = {where.partition: end for where, end in (await list_offsets(wire, feed, LATEST)).items()}
        begins = _beginning(await list_offsets(wire, partitions, LATEST))
    else:
        firsts = await list_offsets(wire, partitions, EARLIEST)
        held = start if isinstance(start, Position) else Position(feed={}, partitions={})
        _check_topics(held, topic_ids)
        topics_held = {where.topic for where in held.partitions}
        begins = {where: _begin(where, first, held, topics_held) for where, first in firsts.items()}
        goes_on = held.feed.keys() == feed_firsts.keys() and topics_held >= set(topics)
        feed_at = dict(held.feed) if goes_on else feed_firsts
        cut = set() if goes_on else {index for index, first in feed_firsts.items() if first > 0}
        _check_feed(feed_at, feed_firsts, feed_topic)
    cut_ends = await list_offsets(wire, [where for where in feed if where.partition in cut], LATEST)
    empty = {where.partition for where, end in cut_ends.items() if end <= feed_firsts[where.partition]}
    return Start(
        topic_ids=topic_ids,
        partitions=begins,
        feed=feed_at,
        cut_feed=cut,
        horizon_ms=int(time.time() * 1000) if empty else None,
        ends=await list_offsets(wire, partitions, LATEST, read_committed=True) if until_end else None,
    )


def _beginning(offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, PartitionPosition]:
    return {where: PartitionPosition(next_offset=offset) for where, offset in offsets.items()}


def _begin(where: TopicPartition, first: int, held: Position, topics_held: set[str]) -> PartitionPosition:
    at = held.partitions.get(where)
    if at is None:
        # A partition that was added to its topic since is read from where it began.
        at = PartitionPosition(next_offset=0 if where.topic in topics_held else first)
    if at.next_offset < first:
        raise ReadError(
            f"{where.topic}:{where.partition}: the position is {at.next_offset}, but records below {first} have been "
            "deleted: they were not read"
        )
    return at


def _check_topics(held: Position, topic_ids: Mapping[str, str]) -> None:
    for topic, topic_id in held.topic_ids.items():
        if topic_ids.get(topic, topic_id) != topic_id:
            raise ReadError(f"the topic {topic!r} was deleted and made again since the position was taken: begin anew")


def _check_feed(feed_at: Mapping[int, int], firsts: Mapping[int, int], feed_topic: str) -> None:
    for index, at in feed_at.items():
        if at < firsts[index]:
            raise FeedTooShortError(
                f"{feed_topic}:{index}: the position is {at}, but commits below {firsts[index]} have been deleted: "
                "what is still to be read cannot be told apart any more"
            )
