"""Which log partitions are this instance's: a stock Kafka consumer group on the log topic decides.

Only an opinion: safety never depends on it, the log itself fences. The consumer reads nothing. Each member's client id
carries its address, so the group also tells who else there is.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from oncebox.wire import ErrorCode, KafkaSettings, Wire, WireError, librdkafka_config

if TYPE_CHECKING:
    from confluent_kafka import Consumer, TopicPartition

logger = logging.getLogger(__name__)

POLL_S = 0.1
# The broker's default minimum.
SESSION_TIMEOUT_MS = 6_000
HEARTBEAT_MS = 1_000
RESTART_S = 1.0
LEAVE_TIMEOUT_S = 10.0
# Also the rebalance timeout: for so long a group waits for a member that died after it had joined a rebalance. More
# than giving partitions back may take.
REBALANCE_TIMEOUT_MS = 10_000
REVOKE_TIMEOUT_S = 5.0
MEMBERS_TIMEOUT_MS = 5_000
MEMBERS_LANE = "members"
CLIENT_ID_PREFIX = "oncebox-coordinator"


def client_id(instance: str, address: str) -> str:
    return f"{CLIENT_ID_PREFIX}/{instance}/{address}"


def parse_client_id(value: str) -> tuple[str, str] | None:
    """Instance and address, where it is one of ours."""
    prefix, _, rest = value.partition("/")
    instance, _, address = rest.partition("/")
    return (instance, address) if prefix == CLIENT_ID_PREFIX and instance and address else None


class MembersUnknownError(Exception):
    """Nobody said just now who the members are."""


class Group:
    """Membership in the group. Calls back on the event loop."""

    def __init__(
        self,
        settings: KafkaSettings,
        wire: Wire,
        *,
        group_id: str,
        topic: str,
        instance: str,
        address: str,
        assigned: Callable[[set[int]], None],
        revoked: Callable[[set[int]], Awaitable[None]],
    ) -> None:
        self._config: dict[str, object] = {
            **librdkafka_config(settings),
            "client.id": client_id(instance, address),
            "group.id": group_id,
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": SESSION_TIMEOUT_MS,
            "heartbeat.interval.ms": HEARTBEAT_MS,
            "max.poll.interval.ms": REBALANCE_TIMEOUT_MS,
            "enable.auto.commit": False,
            "auto.offset.reset": "latest",
            "topic.metadata.refresh.interval.ms": 60_000,
        }
        self._wire = wire
        self._group_id = group_id
        self._topic = topic
        self._assigned = assigned
        self._revoked = revoked
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._stay, name="group", daemon=True)
        self._loop: asyncio.AbstractEventLoop

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def leave(self, within_s: float) -> None:
        """Leaves the group, so that the others take over at once."""
        self._closing.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, min(within_s, LEAVE_TIMEOUT_S))
            if self._thread.is_alive():
                logger.warning("group %s does not let us go; its session ends by itself", self._group_id)

    async def members(self) -> dict[str, str]:
        """Instance → address of all members, this one included.

        The group's coordinator alone is asked for them: whatever else is silent, it keeps nobody from being found.
        """
        try:
            client_ids = await self._client_ids()
        except (WireError, MembersUnknownError) as error:
            with suppress(WireError):
                # Who coordinates the group may be another by now.
                await self._wire.metadata((), timeout_ms=MEMBERS_TIMEOUT_MS)
            raise MembersUnknownError(str(error)) from error
        return dict(pair for pair in map(parse_client_id, client_ids) if pair is not None)

    async def _client_ids(self) -> tuple[str, ...]:
        found_id: int | None = None
        try:
            found = await self._wire.find_group_coordinator(
                self._group_id, timeout_ms=MEMBERS_TIMEOUT_MS, lane=MEMBERS_LANE
            )
            found_id = found.node_id
            if found_id is None:
                raise MembersUnknownError(f"who coordinates it is answered with {found.error.name}")
            group = await self._wire.describe_group(
                found_id, self._group_id, timeout_ms=MEMBERS_TIMEOUT_MS, lane=MEMBERS_LANE
            )
        except WireError:
            self._wire.doubt(found_id)
            raise
        if group.error:
            # Whoever named it may be cut off from the others.
            self._wire.doubt(None if group.error is ErrorCode.NOT_COORDINATOR else found_id)
            raise MembersUnknownError(f"broker {found_id} answers {group.error.name}")
        return group.client_ids

    def _stay(self) -> None:
        while not self._closing.is_set():
            try:
                self._poll()
            except Exception:
                # An instance that has left its group unnoticed would never lead anything again.
                logger.exception("group %s: membership failed; joining again", self._group_id)
                self._closing.wait(RESTART_S)

    def _poll(self) -> None:
        from confluent_kafka import Consumer

        consumer = Consumer(self._config)
        consumer.subscribe([self._topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost)
        try:
            while not self._closing.is_set():
                message = consumer.poll(POLL_S)
                error = message.error() if message is not None else None
                if error is not None:
                    logger.info("group %s: %s", self._group_id, error.str())
        finally:
            consumer.close()

    def _on_assign(self, consumer: "Consumer", partitions: "list[TopicPartition]") -> None:
        consumer.incremental_assign(partitions)
        # Assigned to be led, not to be read.
        consumer.pause(partitions)
        self._loop.call_soon_threadsafe(self._assigned, _numbers(partitions))

    def _on_revoke(self, consumer: "Consumer", partitions: "list[TopicPartition]") -> None:
        """Returns once they are resigned: the group gives them away after that."""
        future = asyncio.run_coroutine_threadsafe(self._resign(_numbers(partitions)), self._loop)
        try:
            future.result(REVOKE_TIMEOUT_S)
        except TimeoutError:
            logger.warning("log partitions %s were not resigned in time; the log fences us", _numbers(partitions))
        consumer.incremental_unassign(partitions)

    def _on_lost(self, consumer: "Consumer", partitions: "list[TopicPartition]") -> None:
        self._on_revoke(consumer, partitions)

    async def _resign(self, partitions: set[int]) -> None:
        await self._revoked(partitions)


def _numbers(partitions: "Iterable[TopicPartition]") -> set[int]:
    return {partition.partition for partition in partitions}
