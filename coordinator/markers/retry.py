"""The slow way for markers, one per request on connections of its own: where a partition fails or has no known leader.

Per partition two may be under way, one that has failed before and one that has not: what is never answered keeps back
only its like. A partition is sick from a failure until the next success; meanwhile its new markers come here too, so
that they spoil no batch.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from coordinator.markers import plan
from coordinator.markers.leaders import Leaders
from coordinator.markers.plan import Owed, Verdict
from coordinator.markers.port import Brokers
from oncebox.wire import ErrorCode, TopicPartition, WireError

# Requests under way per broker; partitions beyond that take turns.
LANES_MAX = 8
LOOK_LANE = "markers-look"
# A change of leader takes some attempts, and is nothing to tell.
TELL_AFTER_FAILURES = 5

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    text: str
    verdict: Verdict = Verdict.AGAIN


class _Track:
    """Markers of one partition that are sent one after the other, and the task that does it."""

    __slots__ = ("queue", "task")

    def __init__(self) -> None:
        self.queue: deque[Owed] = deque()
        self.task: asyncio.Task[None] | None = None

    def first(self) -> Owed | None:
        while self.queue and self.queue[0].settled:
            self.queue.popleft()
        return self.queue[0] if self.queue else None


class _Stalled:
    """A partition with markers that go the slow way."""

    __slots__ = ("absent_since_s", "failed", "fresh", "partition", "problem", "told")

    def __init__(self, partition: TopicPartition) -> None:
        self.partition = partition
        self.fresh = _Track()  # never sent
        self.failed = _Track()
        self.problem: Problem | None = None
        self.told: Verdict | None = None
        self.absent_since_s: float | None = None


class _Pool:
    """The connections to one broker; the one used last is given first, so few are opened while little is wrong."""

    def __init__(self) -> None:
        self._free = [f"markers-retry-{index}" for index in range(LANES_MAX, 0, -1)]
        self._turn = asyncio.Semaphore(LANES_MAX)

    @asynccontextmanager
    async def lane(self) -> AsyncIterator[str]:
        async with self._turn:
            lane = self._free.pop()
            try:
                yield lane
            finally:
                self._free.append(lane)


class RetryLane:
    def __init__(
        self,
        brokers: Brokers,
        *,
        timeout_ms: int,
        jitter: Callable[[], float],
        settle: Callable[[Owed], None],
        resume: Callable[[Owed], None],
    ) -> None:
        """`settle` gets each marker that is paid, or was cancelled under way; `resume` what may go with the others."""
        self.sick: set[TopicPartition] = set()
        self._brokers = brokers
        self._leaders = Leaders(brokers, timeout_ms=timeout_ms)
        self._timeout_ms = timeout_ms
        self._jitter = jitter
        self._settle = settle
        self._resume = resume
        self._clock = asyncio.get_running_loop().time
        self._stalled: dict[TopicPartition, _Stalled] = {}
        self._pools: dict[int, _Pool] = {}
        self._brokers_max = 0
        self._looks = 0
        self._forbidden_told = False

    async def close(self) -> None:
        tracks = [track for stalled in self._stalled.values() for track in (stalled.fresh, stalled.failed)]
        tasks = [track.task for track in tracks if track.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._leaders.close()

    def hold(self, owed: Owed) -> None:
        """Not sent yet: its partition is sick, or has no known leader."""
        stalled = self._stall(owed.partition)
        self._enqueue(stalled, stalled.fresh, owed)

    def look_first(self, owed: Owed) -> None:
        """Not sent yet: whether its topic is still the same has to be asked first."""
        stalled = self._stall(owed.partition)
        self._enqueue(stalled, stalled.failed, owed)

    def take_over(self, owed: Owed, problem: Problem) -> None:
        """Sent and not acknowledged."""
        stalled = self._stall(owed.partition)
        self._note(stalled, problem)
        self._enqueue(stalled, stalled.failed, owed)

    def owed(self) -> list[Owed]:
        return [
            owed
            for stalled in self._stalled.values()
            for track in (stalled.fresh, stalled.failed)
            for owed in track.queue
            if not owed.settled
        ]

    def problems(self) -> dict[TopicPartition, str]:
        every = self._stalled.items()
        return {partition: stalled.problem.text for partition, stalled in every if stalled.problem is not None}

    def _stall(self, partition: TopicPartition) -> _Stalled:
        stalled = self._stalled.get(partition)
        if stalled is None:
            stalled = self._stalled[partition] = _Stalled(partition)
        return stalled

    def _enqueue(self, stalled: _Stalled, track: _Track, owed: Owed) -> None:
        track.queue.append(owed)
        if track.task is None:
            track.task = asyncio.create_task(self._care(stalled, track))

    async def _care(self, stalled: _Stalled, track: _Track) -> None:
        failures = 0
        while track.first() is not None:
            if failures:
                await asyncio.sleep(plan.backoff_s(failures, self._jitter()))
            try:
                advanced = await self._step(stalled, track, anew=failures > 0)
            except Exception:
                # Whatever it was: without this task the partition's markers would be owed for ever.
                log.exception("markers on %s-%d: an attempt failed", *stalled.partition)
                advanced = False
            failures = 0 if advanced else failures + 1
            if failures:
                self._tell(stalled, failures)
        track.task = None
        if stalled.fresh.task is None and stalled.failed.task is None:
            del self._stalled[stalled.partition]
            self.sick.discard(stalled.partition)

    async def _step(self, stalled: _Stalled, track: _Track, *, anew: bool) -> bool:
        """One attempt to get on; whether it did."""
        partition = stalled.partition
        first = track.first()
        if first is None:
            return True
        # Which topic has this name is asked for with each attempt. What was heard before may be of one that was deleted
        # since: for the one that was written to it would be an abort.
        heard_since_s = 0.0
        is_late = track is stalled.failed and first.names_topic
        must_look = is_late and not self._leaders.has_heard(partition.topic, first.since_s)
        if anew or must_look or partition in self.sick or self._brokers.leader_id(partition) is None:
            heard_since_s = self._clock()
            await self._leaders.refresh(partition.topic)
        node_id = self._brokers.leader_id(partition)
        if node_id is None:
            return await self._look_for(stalled)
        stalled.absent_since_s = None
        if track is stalled.fresh and partition not in self.sick:
            self._resume_fresh(stalled)
            return True
        async with self._pools.setdefault(node_id, _Pool()).lane() as lane:
            owed = track.first()
            if owed is None:
                return True
            if owed.names_topic and not self._leaders.has_heard(partition.topic, max(owed.since_s, heard_since_s)):
                return False
            owed.in_flight = True
            try:
                problem = await self._send(node_id, owed, lane)
            finally:
                owed.in_flight = False
        track.queue.remove(owed)
        if problem is None:
            self._recovered(stalled)
        else:
            self._note(stalled, problem)
        if problem is None or owed.cancelled:
            self._settle(owed)
        else:
            self._enqueue(stalled, stalled.failed, owed)
        return problem is None

    async def _send(self, node_id: int, owed: Owed, lane: str) -> Problem | None:
        """None: it is paid."""
        markers = plan.request((plan.for_namesake(owed, self._leaders.topic_ids.get(owed.partition.topic)),))
        try:
            answer = await self._brokers.write_txn_markers(node_id, markers, timeout_ms=self._timeout_ms, lane=lane)
            error = answer.get(owed.ending.producer_id, {}).get(owed.partition)
            if plan.verdict(error) is Verdict.NEWER:
                return await self._verify(node_id, owed, lane, refusal=error)
            return None if error is ErrorCode.NONE else problem_of(error)
        except WireError as failure:
            return Problem(text=str(failure))

    async def _verify(self, node_id: int, owed: Owed, lane: str, *, refusal: ErrorCode | None) -> Problem | None:
        """The broker knows of something newer: believed where the producer's state there shows it."""
        partition, ending = owed.partition, owed.ending
        answer = await self._brokers.describe_producers(node_id, [partition], timeout_ms=self._timeout_ms, lane=lane)
        described = answer.get(partition)
        seen: object = None if described is None else described.error.name
        if described is not None and described.error is ErrorCode.NONE:
            if plan.is_ended(ending, described.producers):
                return None
            seen = next((each for each in described.producers if each.producer_id == ending.producer_id), None)
        text = f"broker {node_id} refuses {ending} ({refusal!r}) although it is not ended there: {seen}"
        if refusal is ErrorCode.TRANSACTION_COORDINATOR_FENCED:
            text += "; a coordinator with a higher epoch writes this producer's markers, so this one is deposed"
        return Problem(text=text, verdict=Verdict.NEWER)

    async def _look_for(self, stalled: _Stalled) -> bool:
        """The partition has no known leader. Drops its markers once it has been gone for long enough."""
        nodes = sorted(self._brokers.brokers)
        self._brokers_max = max(self._brokers_max, len(nodes))
        self._looks += 1
        asked = {nodes[(self._looks + index) % len(nodes)] for index in range(2)} if nodes else set()
        answers = await asyncio.gather(*(self._existence(node_id, stalled.partition) for node_id in sorted(asked)))
        now_s = self._clock()
        if not plan.is_absent(answers, brokers=self._brokers_max):
            stalled.absent_since_s = None
        elif stalled.absent_since_s is None:
            stalled.absent_since_s = now_s
        elif now_s - stalled.absent_since_s >= plan.GONE_AFTER_S:
            self._drop(stalled)
            return True
        said = ", ".join("nothing" if answer is None else answer.name for answer in answers)
        self._note(stalled, Problem(text=f"no leader is known; brokers {sorted(asked)} say {said}"))
        return False

    async def _existence(self, node_id: int, partition: TopicPartition) -> ErrorCode | None:
        try:
            answer = await self._brokers.describe_producers(
                node_id, [partition], timeout_ms=self._timeout_ms, lane=LOOK_LANE
            )
        except WireError:
            return None
        return answer[partition].error if partition in answer else None

    def _drop(self, stalled: _Stalled) -> None:
        dropped = [*_take_idle(stalled.fresh), *_take_idle(stalled.failed)]
        log.warning(
            "%s-%d has been gone for %.0f s: %d markers are not needed any more",
            *stalled.partition,
            plan.GONE_AFTER_S,
            len(dropped),
        )
        for owed in dropped:
            if not owed.settled:  # being told of one, its owner may cancel others
                owed.dropped = True
                self._settle(owed)

    def _note(self, stalled: _Stalled, problem: Problem) -> None:
        stalled.problem = problem
        if problem.verdict is not Verdict.NEWER:
            self.sick.add(stalled.partition)

    def _recovered(self, stalled: _Stalled) -> None:
        if stalled.told is not None:
            log.info("%s-%d takes markers again", *stalled.partition)
        stalled.problem = stalled.told = None
        self._forbidden_told = False
        self.sick.discard(stalled.partition)
        self._resume_fresh(stalled)

    def _resume_fresh(self, stalled: _Stalled) -> None:
        for owed in _take_idle(stalled.fresh):
            self._resume(owed)

    def _tell(self, stalled: _Stalled, failures: int) -> None:
        problem = stalled.problem
        if problem is None or problem.verdict is stalled.told:
            return
        if problem.verdict is Verdict.FORBIDDEN:
            if not self._forbidden_told:
                log.error("no markers can be written: %s", problem.text)
            self._forbidden_told = True
        elif problem.verdict is Verdict.NEWER:
            log.error("a marker on %s-%d: %s", *stalled.partition, problem.text)
        elif failures < TELL_AFTER_FAILURES:
            return
        else:
            log.warning("markers on %s-%d wait: %s", *stalled.partition, problem.text)
        stalled.told = problem.verdict


def _take_idle(track: _Track) -> list[Owed]:
    """All that are not under way."""
    idle = [owed for owed in track.queue if not (owed.settled or owed.in_flight)]
    track.queue = deque(owed for owed in track.queue if owed.in_flight)
    return idle


def problem_of(error: ErrorCode | None) -> Problem:
    """Of a broker's word that is not NONE; None: it had none."""
    text = "absent from the broker's answer" if error is None else error.name
    if error is ErrorCode.CLUSTER_AUTHORIZATION_FAILED:
        text += ": the coordinator's principal needs ALTER or CLUSTER_ACTION on the cluster"
    return Problem(text=text, verdict=plan.verdict(error))
