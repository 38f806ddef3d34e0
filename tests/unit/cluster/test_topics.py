"""What an existing topic may be like, and what is told where it may not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from coordinator.cluster import OwnTopics, Severity
from coordinator.cluster.admin import Setting
from coordinator.cluster.facts import TopicFacts
from coordinator.cluster.topics import FOR_EVER, plans, topic_findings
from oncebox.wire import KafkaSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from coordinator.cluster import Finding
    from coordinator.cluster.topics import Plan

KAFKA = KafkaSettings(bootstrap_servers="kafka:9092")
DAY_MS = 24 * 3_600_000
LOG, FEED = plans(OwnTopics(log="oncebox.log", feed="oncebox.commits", partitions=4))


def found(
    plan: Plan, changed: Mapping[str, str] | None = None, *, partitions: int = 4, replication_factor: int = 3
) -> list[Finding]:
    config = plan.config | {"min.insync.replicas": "2"} | dict(changed or {})
    facts = TopicFacts(
        replicas={index: tuple(range(1, replication_factor + 1)) for index in range(partitions)},
        configs={name: Setting(value=value) for name, value in config.items()},
    )
    return topic_findings(KAFKA, plan, facts)


@pytest.mark.parametrize("plan", [LOG, FEED])
def test_a_topic_as_we_create_it_is_as_it_must_be(plan):
    assert found(plan) == []


@pytest.mark.parametrize(
    ("plan", "name", "value"),
    [
        (LOG, "cleanup.policy", "delete"),
        (LOG, "cleanup.policy", "compact,delete"),
        (LOG, "message.timestamp.type", "CreateTime"),
        (LOG, "unclean.leader.election.enable", "true"),
        (LOG, "max.message.bytes", "900000"),
        (FEED, "cleanup.policy", "compact"),
        (FEED, "retention.ms", str(30 * DAY_MS - 1)),
        (FEED, "retention.bytes", "1073741824"),
        (FEED, "unclean.leader.election.enable", "true"),
        (FEED, "max.message.bytes", "900000"),
    ],
)
def test_a_setting_that_breaks_a_guarantee_comes_with_the_command_that_mends_it(plan, name: str, value: str):
    (finding,) = found(plan, {name: value})

    assert finding.severity is Severity.PROBLEM
    assert finding.what == f"{plan.topic} has {name}={value}"
    assert finding.mend == (
        (
            f"kafka-configs.sh --bootstrap-server kafka:9092 --entity-type topics --entity-name {plan.topic} --alter "
            f"--add-config {name}={plan.config[name]}"
        ),
    )


@pytest.mark.parametrize(
    ("plan", "name", "value"),
    [
        (LOG, "max.message.bytes", "20000000"),
        (LOG, "segment.bytes", "1048576"),
        (LOG, "min.cleanable.dirty.ratio", "0.5"),
        (FEED, "retention.ms", str(31 * DAY_MS)),
        (FEED, "retention.ms", "-1"),
        (FEED, "compression.type", "zstd"),
    ],
)
def test_an_administrator_may_change_the_rest(plan, name: str, value: str):
    assert found(plan, {name: value}) == []


def test_a_feed_kept_for_ever_must_be_kept_for_ever():
    _, feed = plans(OwnTopics(log="l", feed="f", partitions=4, feed_retention_ms=FOR_EVER))

    assert found(feed) == []
    assert len(found(feed, {"retention.ms": str(10_000 * DAY_MS)})) == 1


def test_the_count_of_an_existing_log_rules_the_setting():
    (finding,) = found(LOG, partitions=5)

    assert finding.what == "oncebox.log has 5 partitions, and log_partitions is 4"
    assert finding.mend == ("# set log_partitions to 5",)


def test_a_feed_can_grow_but_not_shrink():
    (fewer,) = found(FEED, partitions=3)
    (more,) = found(FEED, partitions=5)

    assert fewer.mend == (
        "kafka-topics.sh --bootstrap-server kafka:9092 --alter --topic oncebox.commits --partitions 4",
    )
    assert more.mend[0].startswith("# ")


def test_more_in_sync_than_there_are_replicas_could_never_be_written():
    (finding,) = found(LOG, replication_factor=1)

    assert finding.what == "oncebox.log has min.insync.replicas=2 and replication factor 1"
    assert finding.mend[0].endswith("--add-config min.insync.replicas=1")


def test_each_difference_is_told():
    changed = {"cleanup.policy": "compact", "retention.ms": "1", "retention.bytes": "1"}

    assert len(found(FEED, changed, partitions=3)) == 4


def test_a_topic_that_we_may_not_see_is_refused():
    (finding,) = topic_findings(KAFKA, LOG, TopicFacts(replicas={}, configs=None))

    assert finding.severity is Severity.PROBLEM
    assert finding.mend == (
        (
            "kafka-acls.sh --bootstrap-server kafka:9092 --add --allow-principal User:ANONYMOUS --operation Create "
            "--operation Describe --operation DescribeConfigs --operation Read --operation Write --topic oncebox.log"
        ),
    )
