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


def server_properties(
    *,
    node_id: int,
    ports: Mapping[int, NodePorts],
    advertised_port: int,
    secure: bool,
    extra: Mapping[str, str],
) -> str:
    """The text of server.properties for `node_id` in the cluster of all nodes in `ports`."""
    mine = ports[node_id]
    replicas = len(ports)
    listeners = {"CLIENT": mine.client, "BROKER": mine.broker, "CONTROLLER": mine.controller}
    advertised = {"CLIENT": advertised_port, "BROKER": mine.broker}
    protocols = {"CLIENT": "PLAINTEXT", "BROKER": "PLAINTEXT", "CONTROLLER": "PLAINTEXT"}
    if secure:
        listeners["SECURE"] = advertised["SECURE"] = mine.secure
        protocols["SECURE"] = "SASL_SSL"
    properties = {
        "process.roles": "broker,controller",
        "node.id": node_id,
        "controller.quorum.voters": ",".join(f"{node}@{HOST}:{at.controller}" for node, at in ports.items()),
        "listeners": _endpoints(listeners),
        "advertised.listeners": _endpoints(advertised),
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


def _endpoints(listeners: Mapping[str, int]) -> str:
    return ",".join(f"{name}://{HOST}:{port}" for name, port in listeners.items())
