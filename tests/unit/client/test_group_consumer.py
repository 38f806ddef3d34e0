"""What a member of a group does about errors that come among its messages."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as Native

from oncebox.errors import ConsumeError
from oncebox.group_consumer import GroupConsumer, JoinedAnewError
from oncebox.wire import FETCH_BACKOFF_MS, KafkaSettings, TopicPartition


@pytest.fixture
def consumer() -> Iterator[GroupConsumer]:
    """Of brokers that are not there."""
    made = GroupConsumer(KafkaSettings(bootstrap_servers="127.0.0.1:9"), ["t"], "g", config={}, revoked=lambda *_: None)
    yield made
    made._consumer.close()
    made._executor.shutdown()


def test_a_full_queue_does_not_stop_fetching_for_a_second() -> None:
    """As librdkafka has it by default; the caller's own word counts all the same."""
    settings = KafkaSettings(bootstrap_servers="127.0.0.1:9")
    for given, expected in (({}, FETCH_BACKOFF_MS), ({"fetch.queue.backoff.ms": 100}, 100)):
        made = GroupConsumer(settings, ["t"], "g", config=given, revoked=lambda *_: None)
        assert made._config["fetch.queue.backoff.ms"] == expected
        made._consumer.close()
        made._executor.shutdown()


class Moving:
    """Stands in for librdkafka's consumer: a partition goes and comes back in one call, and a message with it."""

    def __init__(self, owner: GroupConsumer, committed: Native | KafkaError) -> None:
        self.is_closed = False
        self.sought: list[Native] = []
        self._owner = owner
        self._committed = committed

    def poll(self, _timeout_s: float) -> Any:
        self._owner._on_revoke(self, [Native("t", 0)])
        return SimpleNamespace(
            error=lambda: None,
            topic=lambda: "t",
            partition=lambda: 0,
            offset=lambda: 5,
            timestamp=lambda: (1, 0),
            key=lambda: None,
            value=lambda: b"5",
            headers=lambda: None,
        )

    def consume(self, _count: int, timeout: float) -> list[Any]:
        del timeout
        return []

    def consumer_group_metadata(self) -> bytes:
        return b"member"

    def assignment(self) -> list[Native]:
        return [Native("t", 0)]

    def committed(self, _wanted: list[Native], timeout: float) -> list[Any]:
        del timeout
        if isinstance(self._committed, KafkaError):
            raise KafkaException(self._committed)
        return [self._committed]

    def seek(self, where: Native) -> None:
        self.sought.append(where)

    def close(self) -> None:
        self.is_closed = True


def replaced(consumer: GroupConsumer, committed: Any) -> Any:
    consumer._consumer.close()
    moving: Any = Moving(consumer, committed)
    consumer._consumer = moving
    return moving


def of_partition(offset: int, code: int | None = None) -> Any:
    error = None if code is None else KafkaError(code)
    return SimpleNamespace(topic="t", partition=0, offset=offset, error=error)


def test_what_came_of_a_partition_that_went_and_is_back_is_read_again(consumer: GroupConsumer):
    moving = replaced(consumer, of_partition(3))
    assert consumer._gather(10, 0.0)[0] == []
    assert [(where.topic, where.partition, where.offset) for where in moving.sought] == [("t", 0, 3)]


@pytest.mark.parametrize(
    "answer",
    [
        KafkaError(KafkaError._TIMED_OUT),
        of_partition(-1001, KafkaError.UNSTABLE_OFFSET_COMMIT),
    ],
)
def test_where_it_is_not_known_from_where_to_read_again_it_joins_anew(consumer: GroupConsumer, answer: Any):
    """The consumer has passed what was dropped: to go on with it would pass these records over."""
    moving = replaced(consumer, answer)
    with pytest.raises(JoinedAnewError, match="it has joined anew"):
        consumer._gather(10, 0.0)
    assert moving.is_closed
    assert consumer._consumer is not moving
    assert moving.sought == []


def test_an_offset_that_may_not_be_asked_for_is_none_that_was_not_committed(consumer: GroupConsumer):
    moving = replaced(consumer, of_partition(-1001, KafkaError.TOPIC_AUTHORIZATION_FAILED))
    with pytest.raises(ConsumeError, match="t:0"):
        consumer._rewind({TopicPartition("t", 0): 7})
    assert moving.sought == []


def message(code: int) -> Any:
    return SimpleNamespace(error=lambda: KafkaError(code), topic=lambda: None)


@pytest.mark.parametrize(
    "code", [KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError._TIMED_OUT]
)
def test_what_passes_is_met_by_joining_anew(consumer: GroupConsumer, code: int):
    """Offsets that could not be had of a coordinator on the move are not asked for again by librdkafka."""
    for _ in range(5):
        before = consumer._consumer
        with pytest.raises(JoinedAnewError, match=r"group g: .*; it has joined anew"):
            consumer._check(message(code))
        assert consumer._consumer is not before


@pytest.mark.parametrize(
    "code", [KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError.INVALID_MSG]
)
def test_what_no_waiting_mends_is_raised(consumer: GroupConsumer, code: int):
    before = consumer._consumer
    with pytest.raises(ConsumeError):
        consumer._check(message(code))
    assert consumer._consumer is before


def test_a_topic_that_is_not_known_yet_is_waited_for(consumer: GroupConsumer):
    consumer._check(message(KafkaError.UNKNOWN_TOPIC_OR_PART))
