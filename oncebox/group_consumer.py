"""A member of a consumer group in a thread of its own, for the transform loop.

It never commits by itself. Records that were polled from a partition that is then taken away are dropped; whoever holds
handled ones is told before the partition goes, and the partition goes when that call returns.

A member with a name of its own (group.instance.id) may be shut out of its group by its own repeated request to join,
whose first answer died with a broker. It joins anew. Only one that is shut out again and again has a living namesake.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from oncebox.errors import BrokersUnavailableError, ConsumeError, NamesakeError, RetriableError
from oncebox.reader.source import record_of
from oncebox.wire import FETCH_BACKOFF_MS, ErrorCode, KafkaSettings, TopicPartition, librdkafka_config

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from oncebox.reader.types import Record

NAME = "group.instance.id"
STRATEGY = "partition.assignment.strategy"
# Only what moves stands still: partitions are given up in one round and given to others in the next, for which whoever
# gave them up has to ask. A member with a name that dies before it asks gets the rest of its own when it is back,
# without a round: what it gave up is nobody's, until something else moves the group.
TWO_ROUNDS = "cooperative-sticky"

COMMITTED_TIMEOUT_S = 30.0
# Shut out more often than this, in this time: by a namesake that comes back, too.
SHUT_OUT_MAX = 3
SHUT_OUT_S = 60.0

log = logging.getLogger(__name__)


class JoinedAnewError(RetriableError):
    """With another consumer, which begins with what the group has committed."""


class GroupConsumer:
    def __init__(
        self,
        kafka: KafkaSettings,
        topics: Collection[str],
        group_id: str,
        *,
        config: Mapping[str, Any],
        revoked: Callable[[frozenset[TopicPartition], bool, bytes], None],
    ) -> None:
        """`revoked` is called in the consumer's thread, with whether the partitions may be another's already, and
        with the membership under which what was handled of them can still be committed.
        """
        from confluent_kafka import Consumer

        own: dict[str, Any] = librdkafka_config(kafka) | {
            "group.id": group_id,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "fetch.queue.backoff.ms": FETCH_BACKOFF_MS,
            STRATEGY: "roundrobin" if NAME in config else TWO_ROUNDS,
            **config,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
        }
        self._topics = list(topics)
        self._revoked = revoked
        # Taken away while the messages of one call were being gathered.
        self._gone: set[tuple[str, int]] = set()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="oncebox-transform")
        self._config = own
        self._shut_out_s: deque[float] = deque(maxlen=SHUT_OUT_MAX)
        self._consumer = Consumer(own, logger=log)

    async def open(self) -> None:
        await self._call(self._subscribe)

    def _subscribe(self) -> None:
        self._consumer.subscribe(self._topics, on_revoke=self._on_revoke, on_lost=self._on_lost)

    async def gather(self, count: int, timeout_s: float) -> tuple[list[Record], bytes]:
        """What has come, in each partition's order, and the membership under which it came."""
        records: tuple[list[Record], bytes] = await self._call(self._gather, count, timeout_s)
        return records

    def _gather(self, count: int, timeout_s: float) -> tuple[list[Record], bytes]:
        self._gone = set()
        first = self._consumer.poll(timeout_s)
        messages = [] if first is None else [first, *self._consumer.consume(count, timeout=0)]
        for message in messages:
            if message.error() is not None:
                self._check(message)
        records = [record_of(message) for message in messages if message.error() is None]
        if self._gone:
            dropped = [record for record in records if record[:2] in self._gone]
            records = [record for record in records if record[:2] not in self._gone]
            # Should one have come back already, it begins with what the group has committed.
            firsts: dict[TopicPartition, int] = {}
            for record in dropped:
                firsts.setdefault(TopicPartition(record.topic, record.partition), record.offset)
            try:
                self._rewind(firsts)
            except BrokersUnavailableError as error:
                # What has just been read, also of other partitions, would never be read again.
                self._begin_anew()
                raise JoinedAnewError(f"group {self._config['group.id']}: {error}; it has joined anew") from error
        return records, self._consumer.consumer_group_metadata()

    def _on_revoke(self, _consumer: Any, partitions: list[Any]) -> None:
        self._drop(partitions, lost=False)

    def _on_lost(self, _consumer: Any, partitions: list[Any]) -> None:
        self._drop(partitions, lost=True)

    def _drop(self, partitions: list[Any], *, lost: bool) -> None:
        gone = frozenset(TopicPartition(each.topic, each.partition) for each in partitions)
        if gone:
            self._gone |= gone
            self._revoked(gone, lost, self._consumer.consumer_group_metadata())

    async def rewind(self, firsts: Mapping[TopicPartition, int]) -> None:
        """To what the group has committed; where that is nothing, to these offsets."""
        await self._call(self._rewind, firsts)

    def _rewind(self, firsts: Mapping[TopicPartition, int]) -> None:
        from confluent_kafka import KafkaException
        from confluent_kafka import TopicPartition as Native

        mine = {(each.topic, each.partition) for each in self._consumer.assignment()}
        wanted = [Native(*where) for where in firsts if where in mine]
        if not wanted:
            return
        try:
            # Waits while another's transaction on these offsets is open.
            for found in self._consumer.committed(wanted, timeout=COMMITTED_TIMEOUT_S):
                where = TopicPartition(found.topic, found.partition)
                if found.error is not None and not _passes(found.error):
                    raise ConsumeError(f"the group's offset of {where.topic}:{where.partition}: {found.error.str()}")
                if found.error is not None:
                    # It holds no offset then, as if the group had committed none.
                    raise KafkaException(found.error)
                self._consumer.seek(Native(*where, found.offset if found.offset >= 0 else firsts[where]))
        except KafkaException as error:
            if _shut_out(error.args[0]):
                self._join_anew()  # and begins with what the group has committed
                log.warning("group %s: %s; it has joined anew", self._config["group.id"], error)
                return
            raise BrokersUnavailableError(f"the group's offsets cannot be had: {error}") from error

    def _check(self, message: Any) -> None:
        """Raises what no waiting mends."""
        from confluent_kafka import KafkaError

        error = message.error()
        # Too slow a handler: the group has gone on, and the consumer joins anew. Or a broker that has just started.
        if error.code() in {KafkaError._MAX_POLL_EXCEEDED, KafkaError.UNKNOWN_TOPIC_OR_PART}:  # noqa: SLF001
            log.warning("%s: %s", message.topic(), error.str())
        elif _shut_out(error):
            self._join_anew()
            raise JoinedAnewError(f"group {self._config['group.id']}: {error.str()}; it has joined anew")
        elif _passes(error):
            # While brokers come and go. What it could not ask for then, where to begin in partitions that have just
            # come to it, it does not ask for again before something else moves the group.
            self._begin_anew()
            raise JoinedAnewError(f"group {self._config['group.id']}: {error.str()}; it has joined anew")
        else:
            raise ConsumeError(f"{message.topic()}: {error.str()}")

    def _join_anew(self) -> None:
        """One that was shut out is of no use any more."""
        now_s = time.monotonic()
        if len(self._shut_out_s) == SHUT_OUT_MAX and now_s - self._shut_out_s[0] < SHUT_OUT_S:
            raise NamesakeError(
                f"group {self._config['group.id']} has another member with {NAME} "
                f"{self._config[NAME]!r}: each has taken the other's place {SHUT_OUT_MAX} times"
            )
        self._shut_out_s.append(now_s)
        self._begin_anew()

    def _begin_anew(self) -> None:
        from confluent_kafka import Consumer

        self._consumer.close()
        self._consumer = Consumer(self._config, logger=log)
        self._subscribe()

    async def close(self) -> None:
        """Leaves the group."""
        await self._call(self._consumer.close)
        self._executor.shutdown(wait=False)

    async def _call(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)


def _shut_out(error: Any) -> bool:
    from confluent_kafka import KafkaError

    # librdkafka tells a fatal error's reason only in its text.
    fatal = error.code() == KafkaError._FATAL and NAME in error.str()  # noqa: SLF001
    return bool(fatal or error.code() == KafkaError.FENCED_INSTANCE_ID)


def _passes(error: Any) -> bool:
    """Kafka's own word, or librdkafka's for brokers that do not answer."""
    from confluent_kafka import KafkaError

    by_itself = {KafkaError._TIMED_OUT, KafkaError._TIMED_OUT_QUEUE, KafkaError._TRANSPORT, KafkaError._WAIT_COORD}  # noqa: SLF001
    if error.code() == KafkaError.INVALID_MSG:
        return False  # Kafka's word is about what was sent; here it is the broker's copy that is damaged
    return error.code() in by_itself or (error.code() > 0 and ErrorCode(error.code()).retriable)
