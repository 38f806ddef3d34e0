"""What the cluster says too late, or not at all, is never taken for a deletion."""

from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from coordinator.api import topics as module
from coordinator.api.rules import TopicsUnavailableError
from coordinator.api.topics import AGE_MAX_S, KafkaTopics
from oncebox.wire import ErrorCode

TOPIC_ID = UUID(int=7)


class Cluster:
    """Answers after `takes_s` on a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.takes_s = 0.0
        self.answer = SimpleNamespace(partitions=[0, 1], topic_id=TOPIC_ID, error=ErrorCode.NONE)

    async def metadata(self, names: Any, *, timeout_ms: int) -> Any:
        self.now_s += self.takes_s
        return SimpleNamespace(topics=dict.fromkeys(names, self.answer))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(module, "monotonic", lambda: cluster.now_s)
    return cluster


async def test_an_answer_that_took_long_counts_for_whoever_asked(cluster: Cluster):
    topics = KafkaTopics(cluster)  # type: ignore[arg-type]
    cluster.takes_s = AGE_MAX_S + 1
    await topics.refresh(["orders"])
    assert topics.topic_id("orders", however_old=True) == TOPIC_ID.bytes
    assert topics.topic_id("orders") is None


async def test_a_topic_without_a_leader_is_not_a_deleted_one(cluster: Cluster):
    topics = KafkaTopics(cluster)  # type: ignore[arg-type]
    await topics.refresh(["orders"])
    cluster.now_s += AGE_MAX_S + 1
    cluster.answer = SimpleNamespace(partitions=[], topic_id=None, error=ErrorCode.LEADER_NOT_AVAILABLE)
    with pytest.raises(TopicsUnavailableError):
        await topics.refresh(["orders"])


async def test_a_deleted_topic_is_known_as_such(cluster: Cluster):
    topics = KafkaTopics(cluster)  # type: ignore[arg-type]
    await topics.refresh(["orders"])
    cluster.answer = SimpleNamespace(partitions=[], topic_id=None, error=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    await topics.refresh(["orders"])
    assert topics.topic_id("orders") is None
