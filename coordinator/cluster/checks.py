"""Is this cluster fit for exactly-once? The facts are judged one by one; each judgement is a finding.

Problems make a right result impossible; warnings mean that acknowledged data could be lost with a broker. What
cannot be seen is never taken for good. Nothing in the cluster is changed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from coordinator.cluster import commands
from coordinator.cluster.admin import Setting
from coordinator.cluster.facts import BrokerFacts, ClusterFacts, TopicFacts, read_cluster
from coordinator.cluster.findings import Finding, Severity
from coordinator.cluster.topics import DAY_MS, MIN_IN_SYNC, REPLICATION_FACTOR, OwnTopics, plans, topic_findings
from oncebox.wire import OFFSETS_TOPIC, KafkaSettings, Wire

VERIFICATION: Final = "transaction.partition.verification.enable"
EXPIRATION: Final = "producer.id.expiration.ms"
MARKERS: Final = 27

# The requests that we send, and the versions of each that will do.
NEEDED: Final[Mapping[str, tuple[int, tuple[int, ...]]]] = {
    "Produce": (0, (8,)),
    "ListOffsets": (2, (3,)),
    "Metadata": (3, (11,)),
    "FindCoordinator": (10, (1,)),
    "DescribeGroups": (15, (0,)),
    "InitProducerId": (22, (0,)),
    "WriteTxnMarkers": (MARKERS, (1, 2)),
    "TxnOffsetCommit": (28, (3,)),
    "DescribeProducers": (61, (0,)),
    "DescribeTransactions": (65, (0,)),
    "ListTransactions": (66, (0,)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    findings: tuple[Finding, ...]
    # How long brokers remember a producer that is silent: the least of all brokers, and a day where it is unknown.
    producer_id_expiration_ms: int


async def check_cluster(
    wire: Wire, kafka: KafkaSettings, own: OwnTopics, *, transaction_timeout_max_ms: int, timeout_ms: int = 15_000
) -> Report:
    """`timeout_ms` is for each broker; they are asked at the same time."""
    topics = (own.log, own.feed, OFFSETS_TOPIC)
    facts = await read_cluster(wire, kafka, topics, probe_topic=own.log, group=own.group, timeout_ms=timeout_ms)
    return judge(facts, kafka, own, transaction_timeout_max_ms=transaction_timeout_max_ms)


def judge(facts: ClusterFacts, kafka: KafkaSettings, own: OwnTopics, *, transaction_timeout_max_ms: int) -> Report:
    findings = [
        *_unseen(facts, kafka),
        *_requests(facts.brokers),
        *_privilege(facts.brokers, kafka),
        *_group(facts, kafka, own),
        *_native_transactions(facts.brokers, kafka),
        *_verification(facts.brokers, kafka),
        *_expiration(facts.brokers, kafka, transaction_timeout_max_ms),
        *_unclean_election(facts.brokers, kafka),
        *_durability(facts, kafka),
        *_own_topics(facts.topics, kafka, own),
    ]
    return Report(findings=tuple(findings), producer_id_expiration_ms=_expiration_ms(facts.brokers))


def _own_topics(topics: Mapping[str, TopicFacts], kafka: KafkaSettings, own: OwnTopics) -> Iterator[Finding]:
    for plan in plans(own):
        if plan.topic not in topics:
            yield _ok(f"{plan.topic} does not exist yet; the coordinator will create it")
        elif found := topic_findings(kafka, plan, topics[plan.topic]):
            yield from found
        else:
            yield _ok(f"{plan.topic} has the settings that it needs")


def _unseen(facts: ClusterFacts, kafka: KafkaSettings) -> Iterator[Finding]:
    for node_id, reason in sorted(facts.unanswered.items()):
        yield Finding(
            severity=Severity.NOTE,
            what=f"broker {node_id} gave no answer and is not checked: {reason}",
            why="Check again when it is back.",
        )
    hidden = [node_id for node_id, broker in facts.brokers.items() if broker.configs is None]
    if hidden:
        yield Finding(
            severity=Severity.WARNING,
            what=f"we may not read the settings of {_named(hidden)}",
            why=f"Nobody has made sure that {VERIFICATION} is false and unclean leader election is off.",
            mend=(commands.allow_on_cluster(kafka, "DescribeConfigs"),),
        )


def _requests(brokers: Mapping[int, BrokerFacts]) -> Iterator[Finding]:
    lacking = {
        node_id: missing
        for node_id, broker in brokers.items()
        if (missing := [name for name, need in NEEDED.items() if not _takes(broker, *need)])
    }
    for node_id, missing in sorted(lacking.items()):
        yield Finding(
            severity=Severity.PROBLEM,
            what=f"broker {node_id} does not take the versions that we send of {', '.join(missing)}",
            why="Its Kafka is too old or too new for this release, which is made for 4.3.",
        )
    if brokers and not lacking:
        yield _ok(f"every request that we send is taken by {_named(brokers)}")
    first_only = [node_id for node_id, broker in brokers.items() if not _takes(broker, MARKERS, (2,))]
    if first_only and not lacking:
        yield Finding(
            severity=Severity.NOTE,
            what=f"transaction markers are taken in version 1 only (Kafka before 4.2) by {_named(first_only)}",
            why="Safe: our epochs alone keep a late marker from ending a later transaction.",
        )


def _takes(broker: BrokerFacts, api_key: int, versions: Iterable[int]) -> bool:
    oldest, newest = broker.versions.get(api_key, (0, -1))
    return any(oldest <= version <= newest for version in versions)


def _privilege(brokers: Mapping[int, BrokerFacts], kafka: KafkaSettings) -> Iterator[Finding]:
    denied = [node_id for node_id, broker in brokers.items() if broker.may_write_markers is False]
    if denied:
        yield Finding(
            severity=Severity.PROBLEM,
            what=f"we may not write transaction markers on {_named(denied)}",
            why="No transaction could ever be completed. The privilege is ClusterAction (or Alter) on the cluster.",
            mend=(commands.allow_on_cluster(kafka, "ClusterAction"),),
        )
    elif any(broker.may_write_markers for broker in brokers.values()):
        yield _ok("we may write transaction markers")


def _group(facts: ClusterFacts, kafka: KafkaSettings, own: OwnTopics) -> Iterator[Finding]:
    if not facts.may_use_group:
        yield Finding(
            severity=Severity.PROBLEM,
            what=f"we may not join the group {own.group}",
            why="It says which instance leads which part of the log: without it none would lead any.",
            mend=(commands.allow_on_group(kafka, own.group, "Read"),),
        )


def _native_transactions(brokers: Mapping[int, BrokerFacts], kafka: KafkaSettings) -> Iterator[Finding]:
    blind = [node_id for node_id, broker in brokers.items() if broker.may_see_transactions is False]
    if blind:
        yield Finding(
            severity=Severity.WARNING,
            what=f"we may not see all transactions of Kafka's own coordinator on {_named(blind)}",
            why="One that is open could be taken for hanging. So hanging transactions are only shown, and not ended "
            "unless the feed holds their commit. The privilege is Describe on all transactional ids.",
            mend=(commands.allow_on_transactional_ids(kafka, "*", "Describe"),),
        )
    elif any(broker.may_see_transactions for broker in brokers.values()):
        yield _ok("we may see all transactions of Kafka's own coordinator")


def _verification(brokers: Mapping[int, BrokerFacts], kafka: KafkaSettings) -> Iterator[Finding]:
    yield from _broker_setting(
        brokers,
        kafka,
        name=VERIFICATION,
        good=lambda value: value == "false",
        value="false",
        severity=Severity.PROBLEM,
        why="Such a broker asks Kafka's own transaction coordinator about every transactional write, and refuses ours, "
        "which that one does not know. Kafka's own clients from 4.0 on are verified all the same.",
    )


def _expiration(
    brokers: Mapping[int, BrokerFacts], kafka: KafkaSettings, transaction_timeout_max_ms: int
) -> Iterator[Finding]:
    least_ms = 2 * transaction_timeout_max_ms
    impossible = _expiration_ms(brokers) < least_ms
    why = (
        f"A producer would be forgotten, and with it what fences it, while its transaction (up to "
        f"{transaction_timeout_max_ms} ms) may still go on; {least_ms} ms is the least."
        if impossible
        else "Brokers forget sooner than in a day whom to fence: producer ids are replaced, and idle log partitions "
        "taken over anew, as much sooner."
    )
    yield from _broker_setting(
        brokers,
        kafka,
        name=EXPIRATION,
        good=lambda value: int(value) >= DAY_MS,
        value=str(DAY_MS),
        severity=Severity.PROBLEM if impossible else Severity.NOTE,
        why=why,
    )


def _expiration_ms(brokers: Mapping[int, BrokerFacts]) -> int:
    known = [setting for _, setting in _settings(brokers, EXPIRATION)]
    return min((int(setting.value) for setting in known), default=DAY_MS)


def _unclean_election(brokers: Mapping[int, BrokerFacts], kafka: KafkaSettings) -> Iterator[Finding]:
    yield from _broker_setting(
        brokers,
        kafka,
        name="unclean.leader.election.enable",
        good=lambda value: value == "false",
        value="false",
        severity=Severity.WARNING,
        why="In topics that do not say otherwise, a replica that lags behind may become leader: what was committed "
        "there is lost, though every transaction says that it is done.",
    )


def _durability(facts: ClusterFacts, kafka: KafkaSettings) -> Iterator[Finding]:
    replicas = [ids for topic in facts.topics.values() for ids in topic.replicas.values()]
    node_ids = sorted({*facts.brokers, *facts.unanswered, *(node_id for ids in replicas for node_id in ids)})
    if len(node_ids) < REPLICATION_FACTOR:
        yield Finding(
            severity=Severity.WARNING,
            what=f"the cluster has {len(node_ids)} broker{'s' if len(node_ids) > 1 else ''}",
            why="What a broker has acknowledged is lost with its disk. Three are needed for three replicas, of which "
            "two must have a write before it is acknowledged.",
        )
        return
    weak = [_weak_topic(kafka, name, topic, node_ids) for name, topic in facts.topics.items() if not _is_durable(topic)]
    yield from weak
    if facts.topics and not weak:
        yield _ok(f"{', '.join(facts.topics)}: three replicas or more, two in sync for every write")
    yield from _broker_setting(
        facts.brokers,
        kafka,
        name="min.insync.replicas",
        good=lambda value: int(value) >= MIN_IN_SYNC,
        value=str(MIN_IN_SYNC),
        severity=Severity.WARNING,
        why="In topics that do not say otherwise, a write that only one broker has is acknowledged, and lost with it.",
    )
    yield from _broker_setting(
        facts.brokers,
        kafka,
        name="default.replication.factor",
        good=lambda value: int(value) >= REPLICATION_FACTOR,
        value=str(REPLICATION_FACTOR),
        severity=Severity.WARNING,
        why="Topics that are created without a replication factor get too few replicas.",
        dynamic=False,
    )


def _is_durable(topic: TopicFacts) -> bool:
    if topic.configs is None or not topic.replicas:
        return True  # not seen; of our own topics that is told elsewhere
    replicated = all(len(ids) >= REPLICATION_FACTOR for ids in topic.replicas.values())
    return replicated and int(topic.configs["min.insync.replicas"].value) >= MIN_IN_SYNC


def _weak_topic(kafka: KafkaSettings, name: str, topic: TopicFacts, node_ids: list[int]) -> Finding:
    factor = min(map(len, topic.replicas.values()))
    min_in_sync = int((topic.configs or {})["min.insync.replicas"].value)
    mend = []
    if factor < REPLICATION_FACTOR:
        mend.append(
            commands.raise_replication(
                kafka, name, topic.replicas, replication_factor=REPLICATION_FACTOR, node_ids=node_ids
            )
        )
    if min_in_sync < MIN_IN_SYNC:
        mend.append(commands.set_topic_config(kafka, name, "min.insync.replicas", str(MIN_IN_SYNC)))
    return Finding(
        severity=Severity.WARNING,
        what=f"{name} has replication factor {factor} and min.insync.replicas={min_in_sync}",
        why="What is acknowledged could be lost with a single broker.",
        mend=tuple(mend),
    )


def _broker_setting(
    brokers: Mapping[int, BrokerFacts],
    kafka: KafkaSettings,
    *,
    name: str,
    good: Callable[[str], bool],
    value: str,
    severity: Severity,
    why: str,
    dynamic: bool = True,
) -> Iterator[Finding]:
    """One finding for all brokers where the setting is not good, or one that says it is."""
    settings = list(_settings(brokers, name))
    bad = {node_id: setting for node_id, setting in settings if not good(setting.value)}
    if bad:
        values = " or ".join(sorted({setting.value for setting in bad.values()}))
        everywhere = [] if all(setting.of_one_broker for setting in bad.values()) else [None]
        targets = [*everywhere, *(node_id for node_id, setting in bad.items() if setting.of_one_broker)]
        mend = tuple(commands.set_broker_config(kafka, name, value, node_id=target) for target in targets)
        if not dynamic:
            mend = (f"# {name}={value} in server.properties of each broker, then restart one after the other",)
        yield Finding(severity=severity, what=f"{name} is {values} on {_named(bad)}", why=why, mend=mend)
    elif settings:
        yield _ok(f"{name} is {' or '.join(sorted({setting.value for _, setting in settings}))}")


def _settings(brokers: Mapping[int, BrokerFacts], name: str) -> Iterator[tuple[int, Setting]]:
    """A broker too old to know the setting has none."""
    for node_id, broker in brokers.items():
        if broker.configs is not None and name in broker.configs:
            yield node_id, broker.configs[name]


def _named(node_ids: Iterable[int]) -> str:
    listed = sorted(node_ids)
    return f"broker{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"


def _ok(what: str) -> Finding:
    return Finding(severity=Severity.OK, what=what)
