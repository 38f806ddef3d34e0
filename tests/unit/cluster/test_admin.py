"""What any broker may answer is asked of another one where the first stands still."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from coordinator.cluster.admin import _of_any


class Asked:
    """Fails with these codes, one after the other, and then answers."""

    def __init__(self, *codes: int) -> None:
        self._codes = list(codes)
        self.times_s: list[float] = []

    def __call__(self, timeout_s: float) -> str:
        self.times_s.append(timeout_s)
        if self._codes:
            raise KafkaException(KafkaError(self._codes.pop(0)))
        return "answer"


def test_it_is_asked_of_others_in_the_time_there_is() -> None:
    asked = Asked(KafkaError._TIMED_OUT, KafkaError._TIMED_OUT, KafkaError._TIMED_OUT)
    assert _of_any(asked, 16.0) == "answer"
    assert asked.times_s == [2.0, 2.0, 4.0, 8.0]


def test_one_answer_is_enough_and_a_refusal_is_one() -> None:
    answered = Asked()
    assert _of_any(answered, 16.0) == "answer"
    assert len(answered.times_s) == 1
    refused = Asked(KafkaError._TIMED_OUT, KafkaError.TOPIC_ALREADY_EXISTS)
    with pytest.raises(KafkaException):
        _of_any(refused, 16.0)
    assert len(refused.times_s) == 2


def test_where_nobody_answers_it_says_so() -> None:
    asked = Asked(*[KafkaError._TIMED_OUT] * 4)
    with pytest.raises(KafkaException):
        _of_any(asked, 16.0)
    assert sum(asked.times_s) == 16.0
