"""One request under way to a broker, the next gathers: whatever becomes of the first, the next is sent."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from coordinator.log.kafka import KafkaStore, _Lane
from coordinator.log.lead import Appender, writer_of
from coordinator.log.port import Kind, UnknownOutcomeError
from oncebox.wire import (
    Appended,
    AuthenticationError,
    ErrorCode,
    KafkaSettings,
    OutcomeUnknownError,
    TopicPartition,
)

FIRST, SECOND = TopicPartition("log", 1), TopicPartition("log", 2)


class Line:
    """A wire whose first request fails when the test says."""

    def __init__(self, failure: Exception) -> None:
        self.fails = asyncio.Event()
        self._failure: Exception | None = failure
        self.metadata_failure: Exception | None = None

    async def produce(self, _node_id: int, batches: Mapping[TopicPartition, bytes], **_: Any) -> Any:
        failure, self._failure = self._failure, None
        if failure is not None:
            await self.fails.wait()
            raise failure
        return {where: Appended(ErrorCode.NONE, 7, -1, 0, None) for where in batches}

    def doubt(self, _node_id: int) -> None:
        pass

    async def metadata(self, *_: Any, **__: Any) -> None:
        if self.metadata_failure is not None:
            raise self.metadata_failure


@pytest.mark.parametrize("metadata_failure", [None, OutcomeUnknownError("lost"), RuntimeError("odd")])
@pytest.mark.parametrize("failure", [OutcomeUnknownError("lost"), AuthenticationError("denied"), RuntimeError("odd")])
async def test_what_gathers_behind_a_request_that_fails_is_sent(failure: Exception, metadata_failure: Exception | None):
    line: Any = Line(failure)
    line.metadata_failure = metadata_failure
    lane = _Lane(line, 1)
    first = lane.append(FIRST, b"first")
    await asyncio.sleep(0.01)
    second = lane.append(SECOND, b"second")
    line.fails.set()
    async with asyncio.timeout(60):
        with pytest.raises(UnknownOutcomeError):
            await first
        assert await second == (ErrorCode.NONE, 7)


@pytest.mark.parametrize("moment", ["before the request", "under way", "while the leaders are asked for"])
async def test_who_waits_is_told_when_the_lane_is_closed(moment: str):
    line: Any = Line(RuntimeError("odd"))
    line.metadata = lambda *_, **__: asyncio.Event().wait()
    lane = _Lane(line, 1)
    waiting = [lane.append(FIRST, b"first")]
    if moment != "before the request":
        await asyncio.sleep(0.01)
        waiting.append(lane.append(SECOND, b"second"))
    if moment == "while the leaders are asked for":
        line.fails.set()
        await asyncio.sleep(0.01)
    await lane.close()
    for future in waiting:
        with pytest.raises(UnknownOutcomeError):
            await future


class CutOff:
    """Who is said to lead leads no longer: it has not heard of it, and waits for replicas that follow another by now;
    or it has, and whoever says so has not.
    """

    def __init__(self, says: ErrorCode) -> None:
        self._says = says
        self.leader = 1
        self.doubted: list[int] = []
        self.asked: list[int] = []

    def leader_id(self, _where: TopicPartition) -> int:
        return self.leader

    def doubt(self, node_id: int = 1) -> None:
        """By default the one that last said who leads: itself."""
        self.doubted.append(node_id)

    async def metadata(self, *_: Any, **__: Any) -> None:
        # As Wire does: who is in doubt is asked last.
        self.leader = 2 if 1 in self.doubted else 1

    async def produce(self, node_id: int, batches: Mapping[TopicPartition, bytes], **_: Any) -> Any:
        self.asked.append(node_id)
        error = self._says if node_id == 1 else ErrorCode.NONE
        return {where: Appended(error, 7, -1, 0, None) for where in batches}


@pytest.mark.parametrize("says", [ErrorCode.REQUEST_TIMED_OUT, ErrorCode.NOT_LEADER_OR_FOLLOWER])
async def test_another_broker_is_asked_where_the_one_that_is_said_to_lead_does_not(says: ErrorCode) -> None:
    wire: Any = CutOff(says)
    store = KafkaStore(wire, KafkaSettings(bootstrap_servers="nowhere:1"), log_topic="log", feed_topic="feed")
    appender = Appender(store, Kind.LOG, 0, writer_of(0, 0, 1), 1)
    async with asyncio.timeout(10):
        assert await appender.append([(b"key", b"value")]) == 7
    assert wire.asked == [1, 2]
    await store.close()
