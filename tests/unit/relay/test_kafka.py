"""What the relay asks Kafka besides records."""

from __future__ import annotations

from typing import Any

import pytest

from relay import kafka
from relay.kafka import KafkaAdmin, Topics, UnknownTopicError

FOUND = Topics(ids={"t": "id"}, partitions=[("t", 0)])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Topics | None]:
    """What brokers answer, one after the other; None: they do not know the topic."""
    answers: list[Topics | None] = []

    def answer(_: Any) -> Topics:
        found = answers.pop(0) if answers else None
        if found is None:
            raise UnknownTopicError("the topic 't' does not exist")
        return found

    monkeypatch.setattr(KafkaAdmin, "_describe", lambda *_: {})
    monkeypatch.setattr(kafka, "_topics", answer)
    monkeypatch.setattr(kafka, "RETRY_S", 0.001)
    return answers


def test_a_broker_that_has_just_started_may_not_know_a_topic_yet(asked: list[Topics | None]) -> None:
    asked += [None, None, FOUND]
    admin: Any = KafkaAdmin.__new__(KafkaAdmin)
    assert admin.topics(["t"]) is FOUND


def test_a_topic_that_stays_unknown_is_told(asked: list[Topics | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka, "UNKNOWN_TOPIC_S", 0.01)
    admin: Any = KafkaAdmin.__new__(KafkaAdmin)
    with pytest.raises(UnknownTopicError, match="does not exist"):
        admin.topics(["t"])
    assert not asked
