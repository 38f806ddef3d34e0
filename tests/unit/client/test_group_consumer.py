"""What a member of a group does about errors that come among its messages."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from oncebox.errors import ConsumeError
from oncebox.group_consumer import GroupConsumer, JoinedAnewError
from oncebox.wire import KafkaSettings


@pytest.fixture
def consumer() -> Iterator[GroupConsumer]:
    """Of brokers that are not there."""
    made = GroupConsumer(KafkaSettings(bootstrap_servers="127.0.0.1:9"), ["t"], "g", config={}, revoked=lambda *_: None)
    yield made
    made._consumer.close()
    made._executor.shutdown()


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
