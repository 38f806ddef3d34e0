"""What a broker is told to do: safe replication, no surprises from the broker's own transaction checks."""

from __future__ import annotations

import pytest

from oncebox.local.kafka_properties import HERE, Host, NodePorts, server_properties

PORTS = {
    node: NodePorts(client=node * 10, broker=node * 10 + 1, controller=node * 10 + 2, secure=node * 10 + 3)
    for node in (1, 2, 3)
}


def parsed(**changed: object) -> dict[str, str]:
    values: dict[str, object] = {
        "node_id": 1,
        "ports": PORTS,
        "hosts": dict.fromkeys(PORTS, HERE),
        "advertised_port": None,
        "secure": False,
        "extra": {},
        **changed,
    }
    text = server_properties(**values)  # type: ignore[arg-type]
    return dict(line.split("=", 1) for line in text.splitlines())


@pytest.mark.parametrize(("nodes", "replicas", "in_sync"), [((1,), "1", "1"), ((1, 2, 3), "3", "2")])
def test_replication_follows_the_number_of_brokers(nodes: tuple[int, ...], replicas: str, in_sync: str):
    properties = parsed(ports={node: PORTS[node] for node in nodes})
    for name in ("default", "offsets.topic", "transaction.state.log"):
        assert properties[f"{name}.replication.factor"] == replicas
    assert properties["min.insync.replicas"] == properties["transaction.state.log.min.isr"] == in_sync


def test_what_exactly_once_needs():
    properties = parsed()
    assert properties["transaction.partition.verification.enable"] == "false"
    assert properties["unclean.leader.election.enable"] == "false"
    assert properties["auto.create.topics.enable"] == "false"


def test_only_the_clients_listener_is_advertised_elsewhere():
    properties = parsed(advertised_port=99)
    assert properties["listeners"] == "CLIENT://127.0.0.1:10,BROKER://127.0.0.1:11,CONTROLLER://127.0.0.1:12"
    assert properties["advertised.listeners"] == "CLIENT://127.0.0.1:99,BROKER://127.0.0.1:11"


def test_extra_properties_win():
    assert parsed(extra={"auto.create.topics.enable": "true"})["auto.create.topics.enable"] == "true"


def test_the_secure_listener_is_there_only_on_demand():
    assert "SECURE" not in str(parsed())
    assert parsed(secure=True)["listeners"].endswith("SECURE://127.0.0.1:13")


def test_brokers_on_hosts_of_their_own_find_each_other_there():
    hosts = {node: Host(address=f"198.18.0.{node}") for node in PORTS}
    properties = parsed(hosts=hosts, advertised_port=99)
    assert properties["listeners"] == "CLIENT://198.18.0.1:10,BROKER://198.18.0.1:11,CONTROLLER://198.18.0.1:12"
    assert properties["advertised.listeners"] == "CLIENT://127.0.0.1:99,BROKER://198.18.0.1:11"
    assert properties["controller.quorum.voters"] == "1@198.18.0.1:12,2@198.18.0.2:22,3@198.18.0.3:32"
