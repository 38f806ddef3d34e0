"""What the relay asks Kafka besides records: topics with their ids, and offsets. Blocking."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oncebox.wire import KafkaSettings, librdkafka_config
from relay.types import RelayError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

TIMEOUT_S = 30.0
UNKNOWN_TOPIC_S = 3.0
RETRY_S = 0.1
EARLIEST, LATEST = -2, -1

Place = tuple[str, int]


class UnknownTopicError(RelayError):
    """To be made, or to be left out of the settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topics:
    # As UUIDs in text.
    ids: Mapping[str, str]
    partitions: Sequence[Place]


class KafkaAdmin:
    def __init__(self, settings: KafkaSettings) -> None:
        from confluent_kafka.admin import AdminClient

        config: dict[str, Any] = dict(librdkafka_config(settings))
        # Below errors: what fails is raised, and a line of the library's own for each attempt would tell no more.
        self._admin = AdminClient(config | {"log_level": 2})

    def topics(self, names: Sequence[str]) -> Topics:
        return self.ask_topics(names)()

    def ask_topics(self, names: Sequence[str]) -> Callable[[], Topics]:
        """Asks at once; what it returns waits for the answer. A broker that has just started may not know a topic yet,
        so one that is unknown is asked for again a while.
        """
        first = self._describe(names)

        def answer() -> Topics:
            deadline_s = time.monotonic() + UNKNOWN_TOPIC_S
            answers = first
            while True:
                try:
                    return _topics(answers)
                except UnknownTopicError:
                    if time.monotonic() > deadline_s:
                        raise
                    time.sleep(RETRY_S)
                    answers = self._describe(names)

        return answer

    def _describe(self, names: Sequence[str]) -> Mapping[str, Any]:
        from confluent_kafka import TopicCollection

        found: Mapping[str, Any]
        found = self._admin.describe_topics(TopicCollection(list(names)), request_timeout=TIMEOUT_S)
        return found

    def offsets(self, places: Sequence[Place], at: int | datetime, *, read_committed: bool = False) -> dict[Place, int]:
        """EARLIEST, LATEST (with read_committed: the last stable offset), or the first at or after a time."""
        from confluent_kafka import IsolationLevel, TopicPartition
        from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

        if not isinstance(at, int):
            spec: Any = OffsetSpec.for_timestamp(int(at.timestamp() * 1000))
        else:
            spec = OffsetSpec.earliest() if at == EARLIEST else OffsetSpec.latest()  # type: ignore[no-untyped-call]
        level = IsolationLevel.READ_COMMITTED if read_committed else IsolationLevel.READ_UNCOMMITTED
        wanted: dict[Any, Any] = {TopicPartition(topic, partition): spec for topic, partition in places}
        if not wanted:
            return {}
        answers = self._admin.list_offsets(wanted, isolation_level=level, request_timeout=TIMEOUT_S)
        found = {(where.topic, where.partition): each.result(TIMEOUT_S).offset for where, each in answers.items()}
        none = [place for place, offset in found.items() if offset < 0]
        return found | (self.offsets(none, LATEST) if none else {})


def first_times(settings: KafkaSettings, at: Mapping[Place, int]) -> dict[Place, int]:
    """The timestamp, in ms, of the first committed record at or after each offset, where there is one."""
    from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

    if not at:
        return {}
    config: dict[str, Any] = librdkafka_config(settings) | {
        "group.id": "oncebox-relay-control",
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "earliest",
        # No more than one batch of each.
        "fetch.message.max.bytes": 1,
        "queued.min.messages": 1,
        "log_level": 2,
    }
    found: dict[Place, int] = {}
    left = set(at)
    deadline_s = time.monotonic() + TIMEOUT_S
    consumer = Consumer(config)
    try:
        consumer.assign([TopicPartition(*place, offset) for place, offset in at.items()])
        while left:
            message = consumer.poll(max(deadline_s - time.monotonic(), 0))
            if message is None:
                raise TimeoutError("Kafka does not give the records that are to be applied next")
            place, error = (str(message.topic()), int(message.partition() or 0)), message.error()
            if error is None:
                found.setdefault(place, message.timestamp()[1])
            elif error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 - the library's name for it
                raise KafkaException(error)
            if place in left:
                left.remove(place)
                consumer.pause([TopicPartition(*place)])
        return found
    finally:
        consumer.close()


def _topics(answers: Mapping[str, Any]) -> Topics:
    from confluent_kafka import KafkaException

    ids: dict[str, str] = {}
    partitions: list[Place] = []
    for name, described in answers.items():
        try:
            found = described.result(TIMEOUT_S)
        except KafkaException as error:
            if error.args[0].name() == "UNKNOWN_TOPIC_OR_PART":
                raise UnknownTopicError(f"the topic {name!r} does not exist") from error
            raise
        high, low = found.topic_id.get_most_significant_bits(), found.topic_id.get_least_significant_bits()
        ids[name] = str(uuid.UUID(int=(high & (1 << 64) - 1) << 64 | low & (1 << 64) - 1))
        partitions += [(name, each.id) for each in found.partitions]
    return Topics(ids=ids, partitions=sorted(partitions))


def explained(error: Exception, bootstrap_servers: str) -> str:
    """In one sentence: of a KafkaException or TimeoutError that was raised here."""
    why = f"not within {TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else error.args[0].str()
    return f"Kafka does not answer at {bootstrap_servers}: {why}"
