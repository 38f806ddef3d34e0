"""How far the feed goes: nothing that was acknowledged before this was asked stands behind the answer. And where it
is to be read from, so that nothing that came since a time is left out.

A leader's word is not enough for that: one that stood still and was replaced answers once more before it knows, and by
the end that was then. So replicas are asked, all but one of which have to answer: what is acknowledged stands on two.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from oncebox.errors import BrokersUnavailableError
from oncebox.reader.source import OFFSETS_TIMEOUT_S, RETRY_S, topics_of
from oncebox.wire import LATEST, ErrorCode, TopicPartition, Wire, WireError

if TYPE_CHECKING:
    from collections.abc import Collection

# With so many, what is acknowledged stands on two of them (min.insync.replicas); with fewer, maybe on one alone.
REPLICAS_SAFE = 3
# They are to be asked for again if they are not reached in time: what was never acknowledged may be cut off there.
ENDS_VALID_S = 1.0


async def ends_of(wire: Wire, topic: str, partitions: Collection[int]) -> dict[int, int] | None:
    """Behind all that was acknowledged before this was called, maybe also what is not yet. None: too few answer."""
    offsets = await _asked(wire, topic, partitions, LATEST)
    return None if offsets is None else {partition: max(found) for partition, found in offsets.items()}


async def first_since(wire: Wire, topic: str, partition: int, timestamp_ms: int) -> int | None:
    """Not behind any record of that time or later that was acknowledged before this was called; -1: there is none.
    None: too few answer.
    """
    offsets = await _asked(wire, topic, [partition], timestamp_ms)
    return None if offsets is None else min((each for each in offsets[partition] if each >= 0), default=-1)


async def _asked(wire: Wire, topic: str, partitions: Collection[int], timestamp_ms: int) -> dict[int, list[int]] | None:
    """What replicas answer, by partition."""
    wanted = [TopicPartition(topic, index) for index in partitions]
    deadline = asyncio.get_running_loop().time() + OFFSETS_TIMEOUT_S
    while (offsets := await _asked_once(wire, wanted, timestamp_ms)) is None:
        if asyncio.get_running_loop().time() > deadline:
            return None
        await asyncio.sleep(RETRY_S)
        try:
            await topics_of(wire, {topic})
        except BrokersUnavailableError:
            return None
    return {where.partition: found for where, found in offsets.items()}


async def _asked_once(
    wire: Wire, partitions: Collection[TopicPartition], timestamp_ms: int
) -> dict[TopicPartition, list[int]] | None:
    replicas = {where: wire.replica_ids(where) for where in partitions}
    by_broker: dict[int, dict[TopicPartition, int]] = {}
    for where, broker_ids in replicas.items():
        for broker_id in broker_ids:
            by_broker.setdefault(broker_id, {})[where] = timestamp_ms
    found: dict[TopicPartition, list[int]] = {where: [] for where in partitions}
    asked = [
        asyncio.ensure_future(wire.list_offsets(broker_id, wanted, of_replica=True))
        for broker_id, wanted in by_broker.items()
    ]
    try:
        for answered in asyncio.as_completed(asked):
            try:
                answer = await answered
            except WireError:
                continue
            for where, listed in answer.items():
                if listed.error is ErrorCode.NONE:
                    found[where].append(listed.offset)
            # One that hangs is not waited for.
            if all(_are_enough(len(offsets), len(replicas[where])) for where, offsets in found.items()):
                return found
    finally:
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    return None


def _are_enough(answers: int, replicas: int) -> bool:
    return answers > 0 and answers >= (replicas - 1 if replicas >= REPLICAS_SAFE else replicas)
