"""The configuration of one Kafka node, as text. Pure: the same input gives the same file. Paths in it are relative to
the node's folder, where the broker runs: a comma or an umlaut in the folder's own path cannot break it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from oncebox.local.ports import HOST

if TYPE_CHECKING:
    from collections.abc import Mapping

DATA = "data"
KEYSTORE = "keystore.pem"
SECURE_LISTENER: dict[str, object] = {
    "listener.name.secure.sasl.enabled.mechanisms": "SCRAM-SHA-256",
    "listener.name.secure.scram-sha-256.sasl.jaas.config": (
        "org.apache.kafka.common.security.scram.ScramLoginModule required;"
    ),
    "listener.name.secure.ssl.keystore.type": "PEM",
    "listener.name.secure.ssl.keystore.location": KEYSTORE,
    "listener.name.secure.ssl.client.auth": "none",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePorts:
    client: int
    broker: int  # between brokers, and for clients that must bypass a proxy in front of `client`
    controller: int
    secure: int  # SASL_SSL; listened on only in a secure cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where a broker runs, if not simply here."""

    address: str = HOST
    enter: tuple[str, ...] = ()  # what its command begins with to be there


HERE = Host()


def server_properties(
    *,
    node_id: int,
    ports: Mapping[int, NodePorts],
    hosts: Mapping[int, Host],
    advertised_port: int | None,
    secure: bool,
    extra: Mapping[str, str],
) -> str:
    """The text of server.properties for `node_id` in the cluster of all nodes in `ports`."""
    mine, address = ports[node_id], hosts[node_id].address
    replicas = len(ports)
    listeners = {"CLIENT": mine.client, "BROKER": mine.broker, "CONTROLLER": mine.controller}
    protocols = {"CLIENT": "PLAINTEXT", "BROKER": "PLAINTEXT", "CONTROLLER": "PLAINTEXT"}
    if secure:
        listeners["SECURE"] = mine.secure
        protocols["SECURE"] = "SASL_SSL"
    endpoints = {name: f"{name}://{address}:{port}" for name, port in listeners.items()}
    advertised = {name: endpoint for name, endpoint in endpoints.items() if name != "CONTROLLER"}
    if advertised_port is not None:
        advertised["CLIENT"] = f"CLIENT://{HOST}:{advertised_port}"
    voters = [f"{node}@{hosts[node].address}:{at.controller}" for node, at in ports.items()]
    properties = {
        "process.roles": "broker,controller",
        "node.id": node_id,
        "controller.quorum.voters": ",".join(voters),
        "listeners": ",".join(endpoints.values()),
        "advertised.listeners": ",".join(advertised.values()),
        "listener.security.protocol.map": ",".join(f"{name}:{protocol}" for name, protocol in protocols.items()),
        "inter.broker.listener.name": "BROKER",
        "controller.listener.names": "CONTROLLER",
        "log.dirs": DATA,
        "default.replication.factor": replicas,
        "min.insync.replicas": max(1, replicas - 1),
        "offsets.topic.replication.factor": replicas,
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": max(1, replicas - 1),
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": max(1, replicas - 1),
        # 50 partitions each by default: the first consumer of a small cluster would wait seconds for them.
        "offsets.topic.num.partitions": 8,
        "transaction.state.log.num.partitions": 8,
        "share.coordinator.state.topic.num.partitions": 8,
        # Off: the broker would ask its own transaction coordinator about producers that are not that coordinator's.
        "transaction.partition.verification.enable": "false",
        "unclean.leader.election.enable": "false",
        "auto.create.topics.enable": "false",
        "group.initial.rebalance.delay.ms": 0,
        # A killed broker's partitions get new leaders, and itself its place again, sooner than in nine seconds.
        "broker.session.timeout.ms": 4000,
        "broker.heartbeat.interval.ms": 500,
    }
    if secure:
        properties |= SECURE_LISTENER
    properties |= extra
    return "".join(f"{key}={value}\n" for key, value in properties.items())
