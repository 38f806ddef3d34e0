"""Where the relay stands in each partition, and whose they are: the rows of oncebox.position. Blocking."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from psycopg.types.json import Jsonb

from relay.database import Connection, application_name, check_incarnations, ensure_sources
from relay.encoding import time_of
from relay.kafka import EARLIEST, LATEST, KafkaAdmin, Place, Topics
from relay.queries import query
from relay.types import FencedError, RelayError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from relay.config import RelaySettings, Start

START_LOCK = 0x6F6E6365_706F73
PRUNE_S = 300.0


@dataclass(slots=True)
class Held:
    """A partition that is ours, as long as the fence holds."""

    source: int
    fence: int
    next_offset: int
    # Sources that must be applied up to these offsets before this one may be read.
    waits_for: Mapping[int, int] = field(default_factory=dict)


def begin(
    connection: Connection, settings: RelaySettings, kafka: KafkaAdmin, topics: Topics, *, start: Start | None = None
) -> dict[Place, int]:
    """Gives every partition a source and a position. Those of a topic that is new to this relay begin at `start`, or
    where the settings say; one that was added to a topic begins at its first record, once what the others had is
    applied.
    """
    check_incarnations(connection, settings.name, dict(topics.ids))
    sources = ensure_sources(connection, dict(topics.ids), topics.partitions)
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [START_LOCK])
        rows = connection.execute(
            query("positions"), {"relay": settings.name, "topic_ids": list(topics.ids.values())}
        ).fetchall()
        # A topic that was taken out for a while has its positions still, but its commits were passed over in the feed.
        connection.execute(query("forget_feed_of_fewer"), {"relay": settings.name, "topics": settings.topics})
        known = {(row[0], row[1]) for row in rows}
        new = [place for place in topics.partitions if place not in known]
        for topic in dict.fromkeys(topic for topic, _ in new):
            places = [place for place in new if place[0] == topic]
            before = [place for place in known if place[0] == topic]
            if not before:
                # Its records may belong to commits that the feed told long ago: it is read from its begin.
                connection.execute(query("forget_feed"), {"relay": settings.name})
            at = kafka.offsets(places, EARLIEST) if before else _start(kafka, start or settings.start, places)
            ends = kafka.offsets(before, LATEST)
            waits_for = Jsonb({str(sources[place]): end for place, end in ends.items()}) if before else None
            for place in places:
                connection.execute(
                    query("ensure_position"),
                    {
                        "relay": settings.name,
                        "source": sources[place],
                        "offset": at[place],
                        "waits_for": waits_for,
                    },
                )
    return sources


def _start(kafka: KafkaAdmin, start: Start, places: Sequence[Place]) -> dict[Place, int]:
    if isinstance(start, datetime):
        return kafka.offsets(places, start)
    if not isinstance(start, dict):
        return kafka.offsets(places, EARLIEST if start == "earliest" else LATEST)
    firsts, ends = kafka.offsets(places, EARLIEST), kafka.offsets(places, LATEST)
    found = {place: start[place[0]].get(place[1], -1) if place[0] in start else firsts[place] for place in places}
    for (topic, partition), offset in found.items():
        first, end = firsts[topic, partition], ends[topic, partition]
        if not first <= offset <= end:
            given = "nothing" if offset < 0 else offset
            raise RelayError(f"start says {given} of {topic} partition {partition}, which has offsets {first} to {end}")
    return found


def overtaken_by_retention(place: Place, told: str) -> RelayError:
    topic, partition = place
    return RelayError(
        f"{topic} partition {partition}: records that were to be read next have been deleted ({told}): they are lost "
        f"to this relay; `oncebox relay rewind --topic {topic} --partition {partition} --to earliest` goes on with "
        "what is left"
    )


def freed(connection: Connection, relay: str, waits: Mapping[int, Mapping[int, int]]) -> list[int]:
    """The sources that have no longer to wait: what they waited for is applied."""
    if not waits:
        return []
    reached: dict[int, int] = dict(connection.execute(query("next_offsets"), {"relay": relay}).fetchall())
    return [
        source for source, ends in waits.items() if all(reached.get(before, 0) >= end for before, end in ends.items())
    ]


def prune(connection: Connection, kafka: KafkaAdmin, sources: Mapping[Place, int]) -> None:
    """Forgets tombstones that no record left in Kafka can be older than."""
    firsts = kafka.offsets(list(sources), EARLIEST)
    values = {"sources": [sources[place] for place in firsts], "firsts": list(firsts.values())}
    connection.execute(query("prune_tombstones"), values)


class OwnPartitions:
    """Partition mode: each partition has an owner and a fence of its own."""

    def __init__(self, relay: str, instance: str) -> None:
        self._relay = relay
        self._instance = instance
        self.held: dict[Place, Held] = {}
        self.high_offsets: dict[int, int] = {}

    def take(self, connection: Connection, sources: Mapping[Place, int], places: Sequence[Place]) -> None:
        """Raises the fence of these partitions. A former owner that did not let go has its sessions ended: it may stand
        still in the middle of a transaction.
        """
        wanted = {sources[place]: place for place in places}
        asked = {"relay": self._relay, "sources": list(wanted)}
        owners = {row[3] for row in connection.execute(query("who_fenced"), asked)} - {None, self._instance}
        if owners:
            names = [application_name(owner) for owner in owners]
            connection.execute(query("end_sessions_of"), {"names": names})
        rows = connection.execute(query("take_partitions"), asked | {"owner": self._instance}).fetchall()
        waits = {row[0]: {int(key): end for key, end in row[5].items()} for row in rows if row[5]}
        for source in freed(connection, self._relay, waits):
            del waits[source]
        for source, next_offset, high_offset, fence, _, _ in rows:
            if high_offset > next_offset:
                self.high_offsets[source] = high_offset
            self.held[wanted[source]] = Held(
                source=source,
                fence=fence,
                next_offset=next_offset,
                waits_for=waits.get(source, {}),
            )

    def release(self, connection: Connection, places: Sequence[Place]) -> None:
        gone = [held for place in places if (held := self.held.pop(place, None)) is not None]
        connection.execute(
            query("release_partitions"),
            {
                "relay": self._relay,
                "sources": [held.source for held in gone],
                "fences": [held.fence for held in gone],
            },
        )

    def save(self, connection: Connection, ends: Mapping[Place, tuple[int, int | None]]) -> None:
        """`ends`: the next offset, and the newest record's timestamp. The last statement before the commit: what was
        taken over by somebody else, or is not where we left it, raises and so undoes the batch.
        """
        held = {place: self.held[place] for place in ends if place in self.held}
        if len(held) < len(ends):
            raise FencedError("a partition was taken away meanwhile")
        values: dict[str, Any] = {
            "relay": self._relay,
            "sources": [each.source for each in held.values()],
            "fences": [each.fence for each in held.values()],
            "befores": [each.next_offset for each in held.values()],
            "afters": [ends[place][0] for place in held],
            "record_ats": [time_of(ends[place][1]) for place in held],
        }
        if connection.execute(query("save_partitions"), values).rowcount == len(ends):
            return
        self.check(connection)
        raise FencedError("a position is not where this process left it: nothing of the batch was written")

    def check(self, connection: Connection) -> None:
        """Raises where somebody has taken a partition over, or has moved its position."""
        fences = {each.source: each.fence for each in self.held.values()}
        rows = connection.execute(query("who_fenced"), {"relay": self._relay, "sources": list(fences)}).fetchall()
        for source, fence, _, owner, since in rows:
            if fence != fences[source]:
                whose = "an administrator" if owner in {None, self._instance} else f"{owner} at {since}"
                raise FencedError(f"fenced by {whose}: what was not committed is read again")

    def bind(self, connection: Connection) -> None:
        """Binds a commit that moves no position: who takes over waits for it, or has raised the fence before."""
        fences = {held.source: held.fence for held in self.held.values()}
        asked = {"relay": self._relay, "sources": list(fences)}
        if dict(connection.execute(query("hold_partitions"), asked).fetchall()) != fences:
            raise FencedError("a partition was taken away meanwhile: nothing was written")

    def saved(self, ends: Mapping[Place, tuple[int, int | None]]) -> None:
        for place, (offset, _) in ends.items():
            if place in self.held:
                self.held[place].next_offset = offset
