"""The shell commands that mend what a check found, with the real values, as an administrator would type them.

Only text: nothing here runs a command.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Final

from oncebox.wire import KafkaSettings

# Where brokers ask for more than an address, the administrator's own access goes into this file.
COMMAND_CONFIG: Final = "admin.properties"


def set_topic_config(kafka: KafkaSettings, topic: str, name: str, value: str) -> str:
    return _configs(
        kafka, "--entity-type", "topics", "--entity-name", topic, "--alter", "--add-config", f"{name}={value}"
    )


def set_broker_config(kafka: KafkaSettings, name: str, value: str, *, node_id: int | None) -> str:
    """None: for all brokers. Takes effect at once, without a restart."""
    entity = ("--entity-default",) if node_id is None else ("--entity-name", str(node_id))
    return _configs(kafka, "--entity-type", "brokers", *entity, "--alter", "--add-config", f"{name}={value}")


def create_topic(
    kafka: KafkaSettings, topic: str, *, partitions: int, replication_factor: int, config: Mapping[str, str]
) -> str:
    options = [part for name, value in config.items() for part in ("--config", f"{name}={value}")]
    counts = ("--partitions", str(partitions), "--replication-factor", str(replication_factor))
    return _command(kafka, "kafka-topics.sh", "--create", "--topic", topic, *counts, *options)


def add_partitions(kafka: KafkaSettings, topic: str, partitions: int) -> str:
    return _command(kafka, "kafka-topics.sh", "--alter", "--topic", topic, "--partitions", str(partitions))


def allow_on_cluster(kafka: KafkaSettings, *operations: str) -> str:
    return _allow(kafka, operations, "--cluster")


def allow_on_topic(kafka: KafkaSettings, topic: str, *operations: str) -> str:
    return _allow(kafka, operations, "--topic", topic)


def allow_on_group(kafka: KafkaSettings, group: str, *operations: str) -> str:
    return _allow(kafka, operations, "--group", group)


def allow_on_transactional_ids(kafka: KafkaSettings, name: str, *operations: str) -> str:
    return _allow(kafka, operations, "--transactional-id", name)


def raise_replication(
    kafka: KafkaSettings,
    topic: str,
    replicas: Mapping[int, Sequence[int]],
    *,
    replication_factor: int,
    node_ids: Sequence[int],
) -> str:
    """Each partition keeps its replicas and gets more, spread over the brokers."""
    rows = [
        {"topic": topic, "partition": partition, "replicas": _more(current, partition, replication_factor, node_ids)}
        for partition, current in sorted(replicas.items())
        if len(current) < replication_factor
    ]
    plan = json.dumps({"version": 1, "partitions": rows}, separators=(",", ":"))
    file = f"{topic}.json"
    move = _command(kafka, "kafka-reassign-partitions.sh", "--reassignment-json-file", file, "--execute")
    return f"echo {shlex.quote(plan)} > {shlex.quote(file)} && {move}"


def _more(current: Sequence[int], partition: int, replication_factor: int, node_ids: Sequence[int]) -> list[int]:
    others = [node_id for node_id in node_ids if node_id not in current]
    start = partition % len(others) if others else 0
    return [*current, *others[start:], *others[:start]][:replication_factor]


def _configs(kafka: KafkaSettings, *arguments: str) -> str:
    return _command(kafka, "kafka-configs.sh", *arguments)


def _allow(kafka: KafkaSettings, operations: Sequence[str], *resource: str) -> str:
    named = [part for operation in operations for part in ("--operation", operation)]
    return _command(kafka, "kafka-acls.sh", "--add", "--allow-principal", _principal(kafka), *named, *resource)


def _principal(kafka: KafkaSettings) -> str:
    if kafka.sasl_username:
        return f"User:{kafka.sasl_username}"
    if kafka.ssl_certificate_location:
        return "User:<subject of our certificate>"
    return "User:ANONYMOUS"


def _command(kafka: KafkaSettings, script: str, *arguments: str) -> str:
    access = () if kafka.security_protocol == "PLAINTEXT" else ("--command-config", COMMAND_CONFIG)
    return shlex.join([script, "--bootstrap-server", kafka.bootstrap_servers, *access, *arguments])
