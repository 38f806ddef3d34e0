"""The demo's real parts: topics, coordinators, relays and a client in a process of its own. Each ends with the demo."""

import re
import sys
from pathlib import Path

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from proof.demo.bank import TOPICS
from proof.faults.process import ChildProcess

PARTITIONS = 3
READY_S = 60.0
# What `oncebox relay run --config` would be given.
RELAY_CONFIG = """\
name: bank
kafka: {{bootstrap_servers: "{servers}"}}
postgres: {{dsn: "{dsn}"}}
listen_port: 0
http_port: 0
session_ms: 3000
tables:
  - {{topic: debits, key: transfer, auto_create: true, columns: {{transfer: text, account: int, amount: int}}}}
  - {{topic: credits, key: transfer, auto_create: true, columns: {{transfer: text, account: int, amount: int}}}}
  - topic: journal
    key: transfer
    auto_create: true
    columns: {{transfer: text, amount: int, source: {{type: int, path: from}}, target: {{type: int, path: to}}}}
"""


class DemoFailedError(Exception):
    """What was promised did not hold."""


def create_topics(bootstrap_servers: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    wanted = [NewTopic(topic, PARTITIONS, config={"min.insync.replicas": "2"}) for topic in TOPICS]
    for future in admin.create_topics(wanted).values():
        future.result()


def coordinator(bootstrap_servers: str, folder: Path, number: int) -> ChildProcess:
    return ChildProcess(
        [sys.executable, "-m", "coordinator"],
        log=folder / f"coordinator-{number}.log",
        environment={
            "ONCEBOX_BOOTSTRAP_SERVERS": bootstrap_servers,
            "ONCEBOX_COORDINATOR_LISTEN_PORT": "0",
            "ONCEBOX_COORDINATOR_HTTP_PORT": "0",
        },
    )


def relay(bootstrap_servers: str, dsn: str, folder: Path, number: int) -> ChildProcess:
    config = folder / "relay.yaml"
    config.write_text(RELAY_CONFIG.format(servers=bootstrap_servers, dsn=dsn))
    return ChildProcess([sys.executable, "-m", "relay", str(config)], log=folder / f"relay-{number}.log")


def client(bootstrap_servers: str, coordinators: list[str], folder: Path, name: str) -> ChildProcess:
    """Makes transfers until it is killed."""
    return ChildProcess(
        [sys.executable, "-m", "proof.demo.bank", bootstrap_servers, ",".join(coordinators), name],
        log=folder / f"{name}.log",
    )


def address_of(process: ChildProcess) -> str:
    process.wait_ready(lambda: process.log_contains("serves at"), timeout_s=READY_S)
    found = re.search(r"serves at ([^,]+),", process.log_tail(200))
    if found is None:
        raise DemoFailedError(f"{process.log.name}: it does not say where it serves: {process.log_tail(5)}")
    return found.group(1)
