"""The coordinator's own topics, the log and the feed: created where absent, checked where present.

An existing topic is never changed: where it would break a guarantee, all that differs is told at once, with the
commands that mend it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Final

from confluent_kafka import KafkaError, KafkaException

from coordinator.cluster import commands
from coordinator.cluster.admin import broker_configs, create_topic
from coordinator.cluster.facts import DENIED, TopicFacts, read_topics
from coordinator.cluster.findings import ClusterError, Finding, Severity, refuse
from coordinator.log.consumer import leaders_group
from oncebox.wire import KafkaSettings, TopicPartition, Wire

logger = logging.getLogger(__name__)

REPLICATION_FACTOR: Final = 3
MIN_IN_SYNC: Final = 2
DAY_MS: Final = 24 * 3_600_000
FOR_EVER: Final = -1
POLL_S: Final = 0.1
LEADER_WAIT_S: Final = 15.0
# Kafka's default; our batches stay well below, whatever default the cluster has.
MESSAGE_MAX_BYTES: Final = 1_048_588
OPERATIONS: Final = ("Create", "Describe", "DescribeConfigs", "Read", "Write")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTopics:
    log: str
    feed: str
    partitions: int
    feed_retention_ms: int = 30 * DAY_MS  # or FOR_EVER

    @property
    def group(self) -> str:
        """The consumer group that says who leads what."""
        return leaders_group(self.log)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One setting of a topic: what it is created with, and what an existing one must keep to."""

    name: str
    value: str
    holds: Callable[[str], bool]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    topic: str
    partitions: int
    rules: tuple[Rule, ...]
    # Set at creation; an administrator may change them.
    preferences: Mapping[str, str]
    # Whether partitions may be added to it later.
    grows: bool

    @property
    def config(self) -> dict[str, str]:
        return {rule.name: rule.value for rule in self.rules} | dict(self.preferences)


def _exactly(name: str, value: str, why: str) -> Rule:
    return Rule(name=name, value=value, holds=lambda found: found == value, why=why)


def _at_least(name: str, value: int, why: str) -> Rule:
    def holds(found: str) -> bool:
        return int(found) == FOR_EVER or FOR_EVER < value <= int(found)

    return Rule(name=name, value=str(value), holds=holds, why=why)


DURABLE: Final = (
    _exactly(
        "unclean.leader.election.enable",
        "false",
        "A replica that lags behind could become leader, and decided transactions would be forgotten.",
    ),
    _exactly(
        "message.timestamp.type",
        "LogAppendTime",
        "Brokers forget a writer by the time of its last batch: that must be their own clock, not ours.",
    ),
    _at_least("max.message.bytes", MESSAGE_MAX_BYTES, "The coordinator's largest batches would be refused."),
)


def plans(own: OwnTopics) -> tuple[Plan, Plan]:
    """Of the log and of the feed."""
    log = Plan(
        topic=own.log,
        partitions=own.partitions,
        rules=(_exactly("cleanup.policy", "compact", "The last state of every id must be kept for ever."), *DURABLE),
        preferences={
            "compression.type": "producer",
            # A take-over reads the whole partition: small segments and early cleaning keep that short.
            "segment.bytes": str(100 * 1024 * 1024),
            "min.cleanable.dirty.ratio": "0.2",
            "delete.retention.ms": str(DAY_MS),
        },
        grows=False,
    )
    feed = Plan(
        topic=own.feed,
        partitions=own.partitions,
        rules=(
            _exactly("cleanup.policy", "delete", "Every manifest must be kept until it is old, not only the last."),
            _at_least("retention.ms", own.feed_retention_ms, "Manifests would go sooner than feed_retention_ms says."),
            _exactly(
                "retention.bytes", str(FOR_EVER), "Manifests must go by their age alone, not when there are many."
            ),
            *DURABLE,
        ),
        preferences={"compression.type": "producer"},
        grows=True,
    )
    return log, feed


def topic_findings(kafka: KafkaSettings, plan: Plan, facts: TopicFacts) -> list[Finding]:
    """What about an existing topic breaks a guarantee."""
    if facts.configs is None or not facts.replicas:
        return [_not_allowed(kafka, plan)]
    found = _count_findings(kafka, plan, len(facts.replicas))
    for rule in plan.rules:
        setting = facts.configs.get(rule.name)
        if setting is not None and not rule.holds(setting.value):
            command = commands.set_topic_config(kafka, plan.topic, rule.name, rule.value)
            found.append(_problem(f"{plan.topic} has {rule.name}={setting.value}", rule.why, command))
    replication_factor = min(map(len, facts.replicas.values()))
    min_in_sync = int(facts.configs["min.insync.replicas"].value)
    if min_in_sync > replication_factor:
        value = str(_min_in_sync(replication_factor))
        command = commands.set_topic_config(kafka, plan.topic, "min.insync.replicas", value)
        what = f"{plan.topic} has min.insync.replicas={min_in_sync} and replication factor {replication_factor}"
        found.append(_problem(what, "Nothing can be written to it.", command))
    return found


def _count_findings(kafka: KafkaSettings, plan: Plan, count: int) -> list[Finding]:
    if count == plan.partitions:
        return []
    what = f"{plan.topic} has {count} partitions, and log_partitions is {plan.partitions}"
    if not plan.grows:
        why = "An id's partition follows from the count, so the count of an existing log never changes."
        return [_problem(what, why, f"# set log_partitions to {count}")]
    why = "Partition n of the feed belongs to partition n of the log."
    if count < plan.partitions:
        return [_problem(what, why, commands.add_partitions(kafka, plan.topic, plan.partitions))]
    return [
        _problem(what, why, "# set log_partitions to the log's count, or feed_topic to a new name: no topic shrinks")
    ]


def _not_allowed(kafka: KafkaSettings, plan: Plan) -> Finding:
    return _problem(
        f"{plan.topic}: we may not see this topic or its settings",
        "The coordinator alone reads and writes it, and has to know that it keeps what is written.",
        commands.allow_on_topic(kafka, plan.topic, *OPERATIONS),
    )


def _problem(what: str, why: str, *mend: str) -> Finding:
    return Finding(severity=Severity.PROBLEM, what=what, why=why, mend=mend)


def _min_in_sync(replication_factor: int) -> int:
    return max(1, replication_factor - 1)


async def ensure_topics(
    wire: Wire, kafka: KafkaSettings, own: OwnTopics, *, timeout_ms: int = 60_000
) -> tuple[TopicPartition, ...]:
    """Creates what is absent, refuses (ClusterError) what is not as it must be, and waits until every partition has a
    leader. Returns the partitions that have none when the time is up: the others can be served. Several instances may
    do this at once.
    """
    deadline = monotonic() + timeout_ms / 1000
    both = plans(own)
    existing = await _checked(wire, kafka, both, deadline)
    absent = [plan for plan in both if plan.topic not in existing]
    for plan in absent:
        await _create(wire, kafka, plan, deadline)
    # Also what we created: another instance, with other settings, may have been first.
    while absent and len(await _checked(wire, kafka, both, deadline)) < len(both):
        if monotonic() > deadline:
            raise ClusterError(f"topic {both[0].topic} or {both[1].topic} is created, but not all brokers know it yet")
        await asyncio.sleep(POLL_S)
    return await _await_leaders(wire, both, min(deadline, monotonic() + LEADER_WAIT_S))


async def _checked(wire: Wire, kafka: KafkaSettings, wanted: Sequence[Plan], deadline: float) -> dict[str, TopicFacts]:
    facts = await read_topics(wire, kafka, [plan.topic for plan in wanted], timeout_ms=_left_ms(deadline))
    found = [each for plan in wanted if plan.topic in facts for each in topic_findings(kafka, plan, facts[plan.topic])]
    refuse(found, strict=False)
    return facts


async def _create(wire: Wire, kafka: KafkaSettings, plan: Plan, deadline: float) -> None:
    """With three replicas where there are three brokers, be they up or not, and else with one."""
    replication_factor = REPLICATION_FACTOR
    while True:
        config = plan.config | {"min.insync.replicas": str(_min_in_sync(replication_factor))}
        try:
            await create_topic(
                kafka,
                plan.topic,
                partitions=plan.partitions,
                replication_factor=replication_factor,
                config=config,
                timeout_s=_left_ms(deadline) / 1000,
            )
        except KafkaException as error:
            code = error.args[0].code()
            if code == KafkaError.TOPIC_ALREADY_EXISTS:
                return
            if code != KafkaError.INVALID_REPLICATION_FACTOR:
                raise _not_created(kafka, plan, config, error.args[0]) from error
        else:
            logger.info("created topic %s with replication factor %d", plan.topic, replication_factor)
            return
        if not await _expects_three(wire, kafka, deadline):
            replication_factor = 1
        elif monotonic() + POLL_S < deadline:
            # Brokers that start together: the first one up must not make us settle for one replica for ever.
            await asyncio.sleep(POLL_S)
        else:
            raise ClusterError(
                f"topic {plan.topic} is not created: default.replication.factor says that this cluster has at least "
                f"{REPLICATION_FACTOR} brokers, but fewer have come up. Start them, or set default.replication.factor=1"
            )


async def _expects_three(wire: Wire, kafka: KafkaSettings, deadline: float) -> bool:
    try:
        configs = await broker_configs(kafka, min(wire.brokers), timeout_s=_left_ms(deadline) / 1000)
    except KafkaException as error:
        if error.args[0].code() in DENIED:
            return False
        raise ClusterError(
            f"the settings of broker {min(wire.brokers)} cannot be read: {error.args[0].str()}"
        ) from error
    return int(configs["default.replication.factor"].value) >= REPLICATION_FACTOR


def _not_created(kafka: KafkaSettings, plan: Plan, config: Mapping[str, str], error: KafkaError) -> ClusterError:
    text = f"topic {plan.topic} is not created: {error.str()}"
    if error.code() in DENIED:
        allow = commands.allow_on_topic(kafka, plan.topic, *OPERATIONS)
        create = commands.create_topic(
            kafka, plan.topic, partitions=plan.partitions, replication_factor=REPLICATION_FACTOR, config=config
        )
        text += f"\nAllow it with\n  {allow}\nor let an administrator create it with\n  {create}"
    return ClusterError(text)


async def _await_leaders(wire: Wire, wanted: Sequence[Plan], deadline: float) -> tuple[TopicPartition, ...]:
    while True:
        await wire.metadata([plan.topic for plan in wanted], timeout_ms=_left_ms(deadline))
        leaderless = tuple(
            TopicPartition(plan.topic, index)
            for plan in wanted
            for index in range(plan.partitions)
            if wire.leader_id(TopicPartition(plan.topic, index)) is None
        )
        if not leaderless:
            return ()
        if monotonic() + POLL_S > deadline:
            logger.warning("without a leader: %s", ", ".join(f"{topic}-{index}" for topic, index in leaderless))
            return leaderless
        await asyncio.sleep(POLL_S)


def _left_ms(deadline: float) -> int:
    return max(1_000, round((deadline - monotonic()) * 1000))
