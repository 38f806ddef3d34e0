"""The checks of a cluster and the creation of our topics, on real brokers. Each command that a finding gives is run by
Kafka's own tools, as an administrator would, and has to mend what was found.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import time
import uuid
from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource  # type: ignore[attr-defined]

from coordinator.cluster import (
    ClusterError,
    Finding,
    OwnTopics,
    Report,
    Severity,
    check_cluster,
    ensure_topics,
    refuse,
    render,
)
from oncebox.local import LocalKafka
from oncebox.local.jars import kafka_jars
from oncebox.local.java import find_java
from oncebox.local.kafka import QUICK_START
from oncebox.wire import KafkaSettings, Wire
from tests.support.kafka import create_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.kafka

TRANSACTION_TIMEOUT_MAX_MS = 900_000
TOOLS = {
    "kafka-acls.sh": "org.apache.kafka.tools.AclCommand",
    "kafka-configs.sh": "kafka.admin.ConfigCommand",
    "kafka-reassign-partitions.sh": "org.apache.kafka.tools.reassign.ReassignPartitionsCommand",
    "kafka-topics.sh": "org.apache.kafka.tools.TopicCommand",
}


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Runs a command line by bash, with Kafka's tools on the path."""
    folder = tmp_path_factory.mktemp("tools")
    java = os.path.join(find_java(), "bin", "java")
    for name, main_class in TOOLS.items():
        script = folder / name
        line = [java, "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", f"{kafka_jars()}/*", main_class]
        script.write_text(f'#!/bin/sh\nexec {shlex.join(line)} "$@"\n')
        script.chmod(0o755)

    def run(command: str) -> str:
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path}
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def own() -> OwnTopics:
    name = f"test-{uuid.uuid4().hex[:12]}"
    return OwnTopics(log=f"{name}.log", feed=f"{name}.commits", partitions=4)


def settings_of(kafka: LocalKafka) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)


async def ensure(settings: KafkaSettings, own: OwnTopics, *, timeout_ms: int = 60_000) -> None:
    async with Wire(settings) as wire:
        assert await ensure_topics(wire, settings, own, timeout_ms=timeout_ms) == ()


async def check(settings: KafkaSettings, own: OwnTopics) -> Report:
    async with Wire(settings) as wire:
        return await check_cluster(
            wire, settings, own, transaction_timeout_max_ms=TRANSACTION_TIMEOUT_MAX_MS, timeout_ms=60_000
        )


async def check_until(settings: KafkaSettings, own: OwnTopics, holds: Callable[[Report], bool]) -> Report:
    """A broker may go by new rights and settings a moment after the controller has said that they are there."""
    async with asyncio.timeout(60):
        while not holds(report := await check(settings, own)):  # noqa: ASYNC110 - asks a broker
            await asyncio.sleep(0.1)
        return report


def configs(settings: KafkaSettings, topic: str) -> dict[str, str]:
    admin = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    described = admin.describe_configs([resource])[resource].result(60)
    return {name: entry.value for name, entry in described.items()}


def replication_factors(settings: KafkaSettings, topic: str) -> set[int]:
    admin = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    partitions = admin.list_topics(topic, timeout=60).topics[topic].partitions
    return {len(partition.replicas) for partition in partitions.values()}


def about(report: Report, text: str) -> Finding:
    (finding,) = [each for each in report.findings if text in each.what]
    return finding


def commands_in(error: object) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip().startswith("kafka-")]


async def test_instances_that_start_at_once_create_both_topics_as_they_must_be(kafka: LocalKafka, own: OwnTopics):
    settings = settings_of(kafka)

    await asyncio.gather(*(ensure(settings, own) for _ in range(4)))

    log, feed = configs(settings, own.log), configs(settings, own.feed)
    assert replication_factors(settings, own.log) == replication_factors(settings, own.feed) == {1}
    for topic in (log, feed):
        assert topic["message.timestamp.type"] == "LogAppendTime"
        assert topic["unclean.leader.election.enable"] == "false"
        assert topic["min.insync.replicas"] == "1"
        assert topic["compression.type"] == "producer"
        assert int(topic["max.message.bytes"]) > 1_000_000
    assert log["cleanup.policy"] == "compact"
    assert log["segment.bytes"] == str(100 * 1024 * 1024)
    assert feed["cleanup.policy"] == "delete"
    assert feed["retention.ms"] == str(30 * 24 * 3_600_000)
    assert feed["retention.bytes"] == "-1"


async def test_a_feed_with_other_settings_is_refused_until_its_commands_are_run(
    kafka: LocalKafka, own: OwnTopics, shell: Callable[[str], str]
):
    settings = settings_of(kafka)
    other = {"cleanup.policy": "compact,delete", "retention.ms": "1000", "retention.bytes": "-1"}
    create_topic(settings.bootstrap_servers, own.feed, partitions=3, config=other)

    with pytest.raises(ClusterError) as refused:
        await ensure(settings, own)

    text = str(refused.value)
    assert f"{own.feed} has 3 partitions, and log_partitions is 4" in text
    assert f"{own.feed} has cleanup.policy=compact,delete" in text
    assert f"{own.feed} has retention.ms=1000" in text
    assert f"{own.feed} has message.timestamp.type=CreateTime" in text
    assert len(commands_in(refused.value)) == 4
    async with Wire(settings) as wire:
        assert not (await wire.metadata([own.log])).topics[own.log].partitions, "created beside a refused feed"
    for command in commands_in(refused.value):
        shell(command)
    await ensure(settings, own)


async def test_a_log_with_another_count_or_a_looser_policy_is_refused(kafka: LocalKafka, own: OwnTopics):
    settings = settings_of(kafka)
    other = {"cleanup.policy": "compact,delete", "unclean.leader.election.enable": "true"}
    create_topic(settings.bootstrap_servers, own.log, partitions=5, config=other)

    with pytest.raises(ClusterError) as refused:
        await ensure(settings, own)

    text = str(refused.value)
    assert f"{own.log} has 5 partitions, and log_partitions is 4" in text
    assert "set log_partitions to 5" in text
    assert f"{own.log} has cleanup.policy=compact,delete" in text
    assert f"{own.log} has unclean.leader.election.enable=true" in text


async def test_one_broker_is_fit_with_a_warning_but_not_in_strict_mode(kafka: LocalKafka, own: OwnTopics):
    settings = settings_of(kafka)
    await ensure(settings, own)

    report = await check(settings, own)

    assert [each.what for each in report.findings if each.severity > Severity.OK] == ["the cluster has 1 broker"]
    assert report.producer_id_expiration_ms == 24 * 3_600_000
    refuse(report.findings, strict=False)
    with pytest.raises(ClusterError, match="the cluster has 1 broker"):
        refuse(report.findings, strict=True)


async def test_three_brokers_are_fit_in_strict_mode(kafka_cluster: LocalKafka, own: OwnTopics):
    settings = settings_of(kafka_cluster)

    before = await check(settings, own)
    await ensure(settings, own)
    after = await check(settings, own)

    assert about(before, f"{own.log} does not exist yet").severity is Severity.OK
    for report in (before, after):
        assert {each.severity for each in report.findings} == {Severity.OK}, render(report.findings)
        refuse(report.findings, strict=True)
    for topic in (own.log, own.feed):
        assert replication_factors(settings, topic) == {3}
        assert configs(settings, topic)["min.insync.replicas"] == "2"


async def test_a_broker_that_is_away_neither_lowers_the_replication_nor_refuses_the_start(
    kafka_cluster: LocalKafka, own: OwnTopics
):
    settings = KafkaSettings(bootstrap_servers=f"{kafka_cluster.host}:{kafka_cluster.brokers[0].port}")
    async with Wire(settings) as wire:
        # Else the paused one may be asked first, for as long as it is a member.
        wire._responsive_id = kafka_cluster.brokers[0].node_id
        kafka_cluster.brokers[2].pause()  # a member for some seconds more, to which others may send us
        report = await check_cluster(
            wire, settings, own, transaction_timeout_max_ms=TRANSACTION_TIMEOUT_MAX_MS, timeout_ms=15_000
        )

    assert about(report, "broker 3 gave no answer").severity is Severity.NOTE
    refuse(report.findings, strict=True)
    # No longer a member, it is still one of three.
    kafka_cluster.brokers[2].kill()
    deadline = time.monotonic() + 60
    while kafka_cluster.brokers[0].members() != {1, 2}:
        assert time.monotonic() < deadline, "broker 3 is still a member"
        await asyncio.sleep(0.1)
    await ensure(settings, own)
    assert replication_factors(settings, own.log) == replication_factors(settings, own.feed) == {3}
    refuse((await check(settings, own)).findings, strict=True)


async def test_a_topic_with_one_replica_is_a_warning_that_its_commands_mend(
    kafka_cluster: LocalKafka, own: OwnTopics, shell: Callable[[str], str]
):
    settings = settings_of(kafka_cluster)
    await ensure(settings, own)
    weak = OwnTopics(log=f"{own.log}.weak", feed=own.feed, partitions=own.partitions)
    config = configs(settings, own.log)
    kept = {name: config[name] for name in ("cleanup.policy", "message.timestamp.type")} | {"min.insync.replicas": "1"}
    create_topic(settings.bootstrap_servers, weak.log, partitions=4, replication_factor=1, config=kept)

    report = await check(settings, weak)

    finding = about(report, f"{weak.log} has replication factor 1 and min.insync.replicas=1")
    assert finding.severity is Severity.WARNING
    with pytest.raises(ClusterError):
        refuse(report.findings, strict=True)
    for command in finding.mend:
        shell(command)
    kafka_cluster.await_in_sync()
    deadline = time.monotonic() + 60
    while replication_factors(settings, weak.log) != {3}:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    refuse((await check(settings, weak)).findings, strict=True)


@pytest.fixture(scope="module")
def unfit_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalKafka]:
    """Everything is wrong here that can be. Whoever comes by the plain listener is an administrator; the secure one
    knows a user without any right.
    """
    properties = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
        "transaction.partition.verification.enable": "true",
        "producer.id.expiration.ms": "600000",
        "unclean.leader.election.enable": "true",
        "default.replication.factor": "3",
    }
    with LocalKafka(
        tmp_path_factory.mktemp("unfit"), secure=True, properties=properties, jvm_options=[QUICK_START]
    ) as kafka:
        yield kafka


def user_settings(kafka: LocalKafka) -> KafkaSettings:
    return KafkaSettings(
        bootstrap_servers=kafka.secure_servers,
        security_protocol="SASL_SSL",
        sasl_mechanism="SCRAM-SHA-256",
        sasl_username=kafka.username,
        sasl_password=kafka.password,
        ssl_ca_location=str(kafka.ca_path),
    )


def as_administrator(kafka: LocalKafka, command: str) -> str:
    """The same command by the plain listener, in place of an administrator's own access by the secure one."""
    access = f"--bootstrap-server {kafka.secure_servers} --command-config admin.properties"
    assert access in command
    return command.replace(access, f"--bootstrap-server {kafka.bootstrap_servers}")


async def test_a_user_who_may_not_create_topics_can_have_them_created(
    unfit_kafka: LocalKafka, own: OwnTopics, shell: Callable[[str], str]
):
    settings = user_settings(unfit_kafka)
    allow = f"kafka-acls.sh --bootstrap-server {unfit_kafka.bootstrap_servers} --add --allow-principal User:oncebox"
    shell(f"{allow} --operation Describe --operation DescribeConfigs --topic {own.log} --topic {own.feed}")

    for topic in (own.log, own.feed):
        with pytest.raises(ClusterError, match=f"topic {topic} is not created: .*\n.*\n.*\nor let an admin") as refused:
            await ensure(settings, own)
        create = as_administrator(unfit_kafka, commands_in(refused.value)[1])
        # There is only one broker here.
        shell(create.replace("--replication-factor 3", "--replication-factor 1").replace("replicas=2", "replicas=1"))

    await ensure(settings, own)


async def test_a_user_without_rights_is_told_which_to_ask_for(
    unfit_kafka: LocalKafka, own: OwnTopics, shell: Callable[[str], str]
):
    settings = user_settings(unfit_kafka)

    report = await check(settings, own)

    with pytest.raises(ClusterError, match="we may not write transaction markers on broker 1"):
        refuse(report.findings, strict=False)
    with pytest.raises(ClusterError, match="we may not see this topic"):
        await ensure(settings, own)
    denied = [each for each in report.findings if "we may not" in each.what]
    severities = {each.what.split(" on ")[0]: each.severity for each in denied}
    assert severities == {
        "we may not read the settings of broker 1": Severity.WARNING,
        "we may not write transaction markers": Severity.PROBLEM,
        "we may not see all transactions of Kafka's own coordinator": Severity.WARNING,
        f"{own.log}: we may not see this topic or its settings": Severity.PROBLEM,
        f"{own.feed}: we may not see this topic or its settings": Severity.PROBLEM,
        f"we may not join the group {own.group}": Severity.PROBLEM,
    }
    for finding in denied:
        (command,) = finding.mend
        shell(as_administrator(unfit_kafka, command))
    granted = await check_until(
        settings, own, lambda report: not [each for each in report.findings if "we may not" in each.what]
    )
    assert about(granted, "we may write transaction markers").severity is Severity.OK
    assert about(granted, "we may see all transactions of Kafka's own coordinator").severity is Severity.OK


async def test_settings_that_make_exactly_once_impossible_are_refused_until_their_commands_are_run(
    unfit_kafka: LocalKafka, own: OwnTopics, shell: Callable[[str], str]
):
    settings = settings_of(unfit_kafka)

    report = await check(settings, own)

    verification = about(report, "transaction.partition.verification.enable is true on broker 1")
    expiration = about(report, "producer.id.expiration.ms is 600000 on broker 1")
    election = about(report, "unclean.leader.election.enable is true on broker 1")
    assert verification.severity is expiration.severity is Severity.PROBLEM
    assert election.severity is Severity.WARNING
    assert report.producer_id_expiration_ms == 600_000
    with pytest.raises(ClusterError) as refused:
        refuse(report.findings, strict=False)
    assert verification.mend[0] in str(refused.value)
    for finding in (verification, expiration, election):
        for command in finding.mend:
            shell(command)
    await check_until(
        settings,
        own,
        lambda mended: (
            [each.what for each in mended.findings if each.severity > Severity.OK] == ["the cluster has 1 broker"]
        ),
    )


async def test_a_command_reaches_a_setting_of_one_broker_too(
    unfit_kafka: LocalKafka, own: OwnTopics, shell: Callable[[str], str]
):
    settings = settings_of(unfit_kafka)
    setting = "transaction.partition.verification.enable"
    start = f"kafka-configs.sh --bootstrap-server {settings.bootstrap_servers} --entity-type brokers --entity-name 1"
    shell(f"{start} --alter --add-config {setting}=true")

    def has(text: str) -> Callable[[Report], bool]:
        return lambda report: any(text in each.what for each in report.findings)

    is_true = f"{setting} is true on broker 1"
    (command,) = about(await check_until(settings, own, has(is_true)), is_true).mend
    shell(command)

    mended = await check_until(settings, own, has(f"{setting} is false"))
    assert about(mended, f"{setting} is false").severity is Severity.OK


async def test_one_replica_is_not_settled_for_where_more_brokers_are_still_to_come(
    unfit_kafka: LocalKafka, own: OwnTopics
):
    settings = settings_of(unfit_kafka)

    with pytest.raises(ClusterError, match=r"default\.replication\.factor says that this cluster has at least 3"):
        await ensure(settings, own, timeout_ms=2_000)

    async with Wire(settings) as wire:
        assert not (await wire.metadata([own.log])).topics[own.log].partitions
