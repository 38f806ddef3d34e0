"""Writes control markers: batched over producers, one request in flight per broker, sent at once when it is idle.

A marker that failed, and all later ones of a partition that fails, go through `retry` by themselves, so that one dead
partition or one request that is never answered delays nobody else. A marker is retried until it is written, its
partition is gone, or its payment is cancelled; how many wait, and since when, is always visible in `status`.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from coordinator.core import records
from coordinator.core.owed import Debt
from coordinator.markers import plan
from coordinator.markers.plan import Ending, Owed
from coordinator.markers.port import Brokers
from coordinator.markers.retry import Problem, RetryLane, problem_of
from oncebox.wire import ErrorCode, TopicPartition, WireError

TIMEOUT_MS = 5_000
LANE = "markers"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkerStatus:
    """Markers (one per partition and transaction) that are owed, by where they are."""

    waiting: int
    in_flight: int
    retrying: int
    # Since the oldest of those retrying was first owed.
    oldest_retrying_s: float
    # Partitions that fail, and why.
    problems: Mapping[TopicPartition, str]


class _Payment:
    __slots__ = ("_forget", "_owed")

    def __init__(self, owed: list[Owed], forget: Callable[[Owed], None]) -> None:
        self._owed = owed
        self._forget = forget

    @property
    def dropped(self) -> frozenset[records.TopicPartition]:
        return frozenset(records.TopicPartition(*owed.partition) for owed in self._owed if owed.dropped)

    def cancel(self) -> None:
        for owed in self._owed:
            if not owed.settled:
                self._forget(owed)


class _Lane:
    """One broker: what waits for it, and how much of it is under way."""

    __slots__ = ("in_flight", "node_id", "task", "waiting")

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id
        self.waiting: deque[Owed] = deque()
        self.in_flight = 0
        self.task: asyncio.Task[None] | None = None


class MarkerWriter:
    """Make it, use it and close it within one event loop."""

    def __init__(
        self, brokers: Brokers, *, timeout_ms: int = TIMEOUT_MS, jitter: Callable[[], float] = random.random
    ) -> None:
        self._brokers = brokers
        self._timeout_ms = timeout_ms
        self._clock = asyncio.get_running_loop().time
        self._turns = plan.Turns()
        self._lanes: dict[int, _Lane] = {}
        self._unsettled = 0
        self._retry = RetryLane(
            brokers, timeout_ms=timeout_ms, jitter=jitter, settle=self._settle, resume=self._dispatch
        )

    async def close(self) -> None:
        """Stops sending. What is unpaid stays owed, and is paid by whoever leads next."""
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._retry.close()

    def pay(self, debt: Debt, *, coordinator_epoch: int, paid: Callable[[records.TopicPartition], None]) -> _Payment:
        ending = Ending(
            producer_id=debt.producer_id,
            marker_epoch=debt.marker_epoch,
            commit=debt.commit,
            coordinator_epoch=coordinator_epoch,
        )
        now_s = self._clock()
        topic_ids = {entry.topic: entry.topic_id for entry in debt.transaction.contents.written if entry.topic_id}
        every = [
            Owed(
                ending,
                TopicPartition(*partition),
                partial(paid, partition),
                now_s,
                topic_ids.get(partition.topic),
                is_old=debt.is_old,
            )
            for partition in sorted(debt.partitions)
        ]
        self._unsettled += len(every)
        for owed in every:
            if self._turns.take(owed):
                self._dispatch(owed)
        return _Payment(every, self._forget)

    def status(self) -> MarkerStatus:
        in_flight = sum(lane.in_flight for lane in self._lanes.values())
        retrying = self._retry.owed()
        since_s = min((owed.since_s for owed in retrying), default=None)
        return MarkerStatus(
            waiting=self._unsettled - in_flight - len(retrying),
            in_flight=in_flight,
            retrying=len(retrying),
            oldest_retrying_s=0.0 if since_s is None else self._clock() - since_s,
            problems=self._retry.problems(),
        )

    def _dispatch(self, owed: Owed) -> None:
        if owed.is_old:
            self._retry.look_first(owed)
            return
        node_id = self._brokers.leader_id(owed.partition)
        if node_id is None:
            self._retry.hold(owed)
            return
        lane = self._lanes.get(node_id)
        if lane is None:
            lane = self._lanes[node_id] = _Lane(node_id)
        lane.waiting.append(owed)
        if lane.task is None:
            # Runs in the loop's next round: all that is owed in this one goes into the first request.
            lane.task = asyncio.create_task(self._drain(lane))

    async def _drain(self, lane: _Lane) -> None:
        # One more round of the loop: other shards whose manifests came back with the same answer pay too.
        await asyncio.sleep(0)
        while taken := self._take(lane):
            try:
                markers = plan.request(taken)
                answer = await self._brokers.write_txn_markers(
                    lane.node_id, markers, timeout_ms=self._timeout_ms, lane=LANE
                )
            except WireError as error:
                self._all_failed(taken, str(error))
            except Exception as error:
                # Whatever it was, a lane that dies would leave its broker's markers owed for ever.
                log.exception("cannot send markers to broker %d", lane.node_id)
                self._all_failed(taken, repr(error))
            else:
                self._answered(taken, answer)
        lane.task = None

    def _take(self, lane: _Lane) -> list[Owed]:
        while taken := plan.take(lane.waiting):
            if self._retry.sick:
                taken = self._without_sick(taken)
            if taken:
                break
        for owed in taken:
            owed.in_flight = True
        lane.in_flight = len(taken)
        return taken

    def _without_sick(self, taken: list[Owed]) -> list[Owed]:
        healthy = []
        for owed in taken:
            if owed.partition in self._retry.sick:
                self._retry.hold(owed)
            else:
                healthy.append(owed)
        return healthy

    def _answered(self, taken: list[Owed], answer: Mapping[int, Mapping[TopicPartition, ErrorCode]]) -> None:
        for owed in taken:
            owed.in_flight = False
            producer = answer.get(owed.ending.producer_id)
            error = None if producer is None else producer.get(owed.partition)
            if error is ErrorCode.NONE or owed.cancelled:
                self._settle(owed)
            else:
                self._retry.take_over(owed, problem_of(error))

    def _all_failed(self, taken: list[Owed], text: str) -> None:
        problem = Problem(text=text)
        for owed in taken:
            owed.in_flight = False
            if owed.cancelled:
                self._settle(owed)
            else:
                self._retry.take_over(owed, problem)

    def _forget(self, owed: Owed) -> None:
        owed.cancelled = True
        # One that is under way keeps its turn until it is answered: nothing may overtake it.
        if not owed.in_flight:
            self._settle(owed)

    def _settle(self, owed: Owed) -> None:
        owed.settled = True
        self._unsettled -= 1
        following = self._turns.pass_on(owed)
        if following is not None:
            self._dispatch(following)
        if not owed.cancelled:
            try:
                owed.paid()
            except Exception:
                # Whoever was told is at fault, not the other markers of this answer.
                log.exception("a callback failed after the marker on %s-%d was written", *owed.partition)
