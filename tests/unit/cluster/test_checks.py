"""Each fact that matters, judged by itself: nothing but that fact differs from a cluster that is fit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.cluster import ClusterError, Finding, OwnTopics, Report, Severity, refuse, render
from coordinator.cluster.admin import Setting
from coordinator.cluster.checks import NEEDED, judge
from coordinator.cluster.facts import BrokerFacts, ClusterFacts, TopicFacts
from coordinator.cluster.topics import plans
from oncebox.wire import GroupMember, KafkaSettings, UnsupportedRequestError, requests

if TYPE_CHECKING:
    from collections.abc import Mapping

KAFKA = KafkaSettings(bootstrap_servers="kafka:9092")
OWN = OwnTopics(log="oncebox.log", feed="oncebox.commits", partitions=2)
HOUR_MS = 3_600_000
CONFIGS = {
    "transaction.partition.verification.enable": "false",
    "producer.id.expiration.ms": str(24 * HOUR_MS),
    "unclean.leader.election.enable": "false",
    "min.insync.replicas": "2",
    "default.replication.factor": "3",
}


def settings(values: Mapping[str, str], **flags: bool) -> dict[str, Setting]:
    return {name: Setting(value=value, **flags) for name, value in values.items()}


BROKER = BrokerFacts(
    versions={api_key: (0, max(versions)) for api_key, versions in NEEDED.values()},
    configs=settings(CONFIGS),
    may_write_markers=True,
    may_see_transactions=True,
)


def topic(config: Mapping[str, str], replicas: tuple[int, ...] = (1, 2, 3)) -> TopicFacts:
    return TopicFacts(
        replicas={0: replicas, 1: replicas}, configs=settings({"min.insync.replicas": "2"} | dict(config))
    )


TOPICS = {plan.topic: topic(plan.config) for plan in plans(OWN)}
FIT = ClusterFacts(brokers={1: BROKER, 2: BROKER, 3: BROKER}, unanswered={}, topics=TOPICS)


def test_a_group_that_we_may_not_join_is_a_problem_with_its_command() -> None:
    finding = only(replace(FIT, may_use_group=False))
    assert finding.severity is Severity.PROBLEM
    (command,) = finding.mend
    assert command.endswith("--operation Read --group oncebox.log.leaders")


def with_broker_2(**changes: Any) -> ClusterFacts:
    return replace(FIT, brokers={**FIT.brokers, 2: replace(BROKER, **changes)})


def with_config_2(name: str, value: str, **flags: bool) -> ClusterFacts:
    return with_broker_2(configs=settings(CONFIGS) | settings({name: value}, **flags))


def judged(facts: ClusterFacts, kafka: KafkaSettings = KAFKA) -> Report:
    return judge(facts, kafka, OWN, transaction_timeout_max_ms=900_000)


def only(facts: ClusterFacts, kafka: KafkaSettings = KAFKA) -> Finding:
    (finding,) = [each for each in judged(facts, kafka).findings if each.severity > Severity.OK]
    return finding


def test_a_fit_cluster_has_only_good_findings():
    report = judged(FIT)

    assert {each.severity for each in report.findings} == {Severity.OK}
    assert report.producer_id_expiration_ms == 24 * HOUR_MS
    refuse(report.findings, strict=True)


def test_verification_on_one_broker_is_a_problem_mended_for_all():
    finding = only(with_config_2("transaction.partition.verification.enable", "true"))

    assert finding.severity is Severity.PROBLEM
    assert finding.what == "transaction.partition.verification.enable is true on broker 2"
    assert finding.mend == (
        (
            "kafka-configs.sh --bootstrap-server kafka:9092 --entity-type brokers --entity-default --alter "
            "--add-config transaction.partition.verification.enable=false"
        ),
    )


def test_what_is_set_for_one_broker_is_mended_at_that_broker():
    finding = only(with_config_2("transaction.partition.verification.enable", "true", of_one_broker=True))

    assert "--entity-name 2 " in finding.mend[0]
    assert len(finding.mend) == 1


def test_a_broker_too_old_to_verify_is_none_that_does():
    known = {name: value for name, value in CONFIGS.items() if "verification" not in name}
    facts = replace(FIT, brokers=dict.fromkeys((1, 2, 3), replace(BROKER, configs=settings(known))))

    assert not [each for each in judged(facts).findings if each.severity > Severity.OK]


def test_markers_denied_by_one_broker_are_a_problem():
    finding = only(with_broker_2(may_write_markers=False))

    assert finding.severity is Severity.PROBLEM
    assert finding.mend == (
        (
            "kafka-acls.sh --bootstrap-server kafka:9092 --add --allow-principal User:ANONYMOUS "
            "--operation ClusterAction --cluster"
        ),
    )


def test_transactions_that_we_may_not_see_are_a_warning():
    finding = only(with_broker_2(may_see_transactions=False))

    assert finding.severity is Severity.WARNING
    assert finding.mend == (
        (
            "kafka-acls.sh --bootstrap-server kafka:9092 --add --allow-principal User:ANONYMOUS "
            "--operation Describe --transactional-id '*'"
        ),
    )


def test_settings_that_cannot_be_read_are_a_warning():
    secure = replace(KAFKA, security_protocol="SASL_SSL", sasl_username="jörg k", sasl_password="secret")
    finding = only(with_broker_2(configs=None), secure)

    assert finding.severity is Severity.WARNING
    assert finding.mend == (
        (
            "kafka-acls.sh --bootstrap-server kafka:9092 --command-config admin.properties --add "
            "--allow-principal 'User:jörg k' --operation DescribeConfigs --cluster"
        ),
    )


def test_a_broker_that_gave_no_answer_is_no_reason_to_refuse():
    facts = replace(FIT, brokers={1: BROKER, 3: BROKER}, unanswered={2: "no answer within 5 ms"})

    assert only(facts).severity is Severity.NOTE
    refuse(judged(facts).findings, strict=True)


@pytest.mark.parametrize(
    ("expiration_ms", "severity"),
    [(12 * HOUR_MS, Severity.NOTE), (HOUR_MS // 2, Severity.NOTE), (HOUR_MS // 2 - 1, Severity.PROBLEM)],
)
def test_a_short_memory_for_producers_is_reported_and_in_the_end_a_problem(expiration_ms: int, severity: Severity):
    facts = with_config_2("producer.id.expiration.ms", str(expiration_ms))

    assert only(facts).severity is severity
    assert judged(facts).producer_id_expiration_ms == expiration_ms


def test_a_request_that_a_broker_does_not_take_is_a_problem():
    produce_until_7 = {**BROKER.versions, 0: (0, 7)}

    finding = only(with_broker_2(versions=produce_until_7))

    assert finding.severity is Severity.PROBLEM
    assert finding.what == "broker 2 does not take the versions that we send of Produce"


def test_markers_of_version_1_only_are_worth_a_note():
    assert only(with_broker_2(versions={**BROKER.versions, 27: (0, 1)})).severity is Severity.NOTE


@pytest.mark.parametrize(
    ("name", "value", "mend"),
    [
        ("unclean.leader.election.enable", "true", "kafka-configs.sh"),
        ("min.insync.replicas", "1", "kafka-configs.sh"),
        ("default.replication.factor", "1", "# default.replication.factor=3 in server.properties"),
    ],
)
def test_cluster_defaults_that_lose_data_are_warnings(name: str, value: str, mend: str):
    finding = only(with_config_2(name, value))

    assert finding.severity is Severity.WARNING
    assert finding.mend[0].startswith(mend)


def test_fewer_than_three_brokers_are_one_warning():
    one_replica = {plan.topic: topic(plan.config | {"min.insync.replicas": "1"}, (1,)) for plan in plans(OWN)}

    finding = only(ClusterFacts(brokers={1: BROKER}, unanswered={}, topics=one_replica))

    assert finding.severity is Severity.WARNING
    assert finding.what == "the cluster has 1 broker"


def test_a_broker_that_is_down_still_counts_where_it_has_replicas():
    assert not [
        each
        for each in judged(replace(FIT, brokers={1: BROKER, 2: BROKER})).findings
        if each.severity is Severity.WARNING
    ]


def test_group_offsets_with_too_few_replicas_are_a_warning():
    offsets = topic({"min.insync.replicas": "1"}, (2,))

    finding = only(replace(FIT, topics={**TOPICS, "__consumer_offsets": offsets}))

    assert finding.severity is Severity.WARNING
    assert finding.what == "__consumer_offsets has replication factor 1 and min.insync.replicas=1"
    raise_replication, raise_min_in_sync = finding.mend  # in this order: the other way round stops all writes
    assert '"partition":0,"replicas":[2,1,3]' in raise_replication
    assert '"partition":1,"replicas":[2,3,1]' in raise_replication
    assert raise_min_in_sync.endswith("--add-config min.insync.replicas=2")


def test_own_topics_are_judged_by_their_rules():
    log = topic(plans(OWN)[0].config | {"cleanup.policy": "delete"})

    assert only(replace(FIT, topics={**TOPICS, OWN.log: log})).what == "oncebox.log has cleanup.policy=delete"


def test_problems_refuse_always_and_warnings_in_strict_mode():
    note = Finding(severity=Severity.NOTE, what="a note")
    warning = Finding(severity=Severity.WARNING, what="a warning")
    problem = Finding(severity=Severity.PROBLEM, what="a problem")

    refuse([note, warning], strict=False)
    refuse([note], strict=True)
    with pytest.raises(ClusterError, match="a warning"):
        refuse([note, warning], strict=True)
    with pytest.raises(ClusterError) as refused:
        refuse([note, warning, problem], strict=False)
    assert "a problem" in str(refused.value)
    assert "a warning" not in str(refused.value)


def test_the_text_has_the_worst_first_and_commands_on_lines_of_their_own():
    findings = [
        Finding(severity=Severity.OK, what="brokers are there"),
        Finding(severity=Severity.PROBLEM, what="x is true", why="Because.", mend=("mend --it " + "y" * 200, "again")),
    ]

    assert render(findings).splitlines() == [
        "PROBLEM  x is true",
        "         Because.",
        "           mend --it " + "y" * 200,
        "           again",
        "ok       brokers are there",
    ]


def test_every_request_that_we_send_is_among_those_checked():
    calls = [
        requests.metadata_call(()),
        requests.produce_call({}, transactional_id=None, acks=-1, timeout_ms=1),
        requests.markers_call([]),
        requests.txn_offset_commit_call(
            {}, group_id="g", member=GroupMember(), transactional_id="t", producer_id=1, producer_epoch=0
        ),
        requests.init_producer_id_call(),
        requests.list_offsets_call({}, read_committed=True),
        requests.describe_producers_call([]),
        requests.list_transactions_call([]),
        requests.describe_transactions_call([]),
        requests.find_group_coordinator_call("g"),
        requests.describe_group_call("g"),
    ]
    assert len(calls) == len([name for name in vars(requests) if name.endswith("_call")]), "a request is new"

    for api_key, versions in NEEDED.values():
        for version in versions:
            offered = dict.fromkeys(range(100), (0, -1)) | {api_key: (version, version)}
            taken = [call for call in calls if _is_taken(call, offered)]
            assert len(taken) == 1, f"API {api_key} version {version} is not what we send"


def _is_taken(call: requests.Call, offered: Mapping[int, tuple[int, int]]) -> bool:
    try:
        call.prepare(offered)
    except UnsupportedRequestError:
        return False
    return True
