"""Real coordinator instances as processes: as many as a test wants, on a log of their own."""

from __future__ import annotations

import re
import sys
import time
import uuid
from operator import sub
from typing import TYPE_CHECKING, Self

import pytest
from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from oncebox.v1 import manifest_pb2
from proof.faults.process import ChildProcess, http_ok

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from oncebox.local import LocalKafka

READY_S = 90.0
LOG_PARTITIONS = 4
MARKERS_S = 60.0


class Coordinators:
    """Instances that share one log. `start()` adds one; all are killed at the end of the test."""

    def __init__(self, bootstrap_servers: str, folder: Path, **settings: str) -> None:
        self.bootstrap_servers = bootstrap_servers
        self.log_topic = f"oncebox.log.{uuid.uuid4().hex[:8]}"
        self.feed_topic = f"oncebox.commits.{uuid.uuid4().hex[:8]}"
        self.processes: list[ChildProcess] = []
        self.addresses: list[str] = []
        self.http_ports: list[int] = []
        self._folder = folder
        self._settings = settings

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()

    def start(self, *, wait_ready: bool = True, module: str = "coordinator", **settings: str) -> ChildProcess:
        number = len(self.processes) + 1
        environment = {
            "ONCEBOX_BOOTSTRAP_SERVERS": self.bootstrap_servers,
            "ONCEBOX_COORDINATOR_LISTEN_PORT": "0",
            "ONCEBOX_COORDINATOR_HTTP_PORT": "0",
            "ONCEBOX_COORDINATOR_LOG_TOPIC": self.log_topic,
            "ONCEBOX_COORDINATOR_FEED_TOPIC": self.feed_topic,
            "ONCEBOX_COORDINATOR_LOG_PARTITIONS": str(LOG_PARTITIONS),
            **{f"ONCEBOX_COORDINATOR_{name.upper()}": value for name, value in (self._settings | settings).items()},
        }
        process = ChildProcess(
            [sys.executable, "-m", module],
            log=self._folder / f"coordinator-{number}-{uuid.uuid4().hex[:4]}.log",
            environment=environment,
        )
        process.start()
        self.processes.append(process)
        process.wait_ready(lambda: process.log_contains(r"serves at .*\n"), timeout_s=READY_S)
        found = re.search(r"serves at (\S+), health (\d+)", process.log.read_text())
        if found is None:
            raise RuntimeError(process.log_tail())
        self.addresses.append(found[1])
        self.http_port = int(found[2])
        self.http_ports.append(self.http_port)
        if wait_ready:
            process.wait_ready(self.is_ready, timeout_s=READY_S)
        return process

    def is_ready(self) -> bool:
        """The one that was started last."""
        return http_ok(f"http://127.0.0.1:{self.http_port}/ready")


@pytest.fixture
def coordinators(kafka: LocalKafka, tmp_path: Path) -> Iterator[Coordinators]:
    """On the one broker; start() as many instances as wanted."""
    with Coordinators(kafka.bootstrap_servers, tmp_path) as all_of_them:
        yield all_of_them


@pytest.fixture(scope="session")
def shared_coordinator(kafka: LocalKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinators]:
    """One instance for the whole run, for tests that neither kill nor reconfigure it."""
    with Coordinators(kafka.bootstrap_servers, tmp_path_factory.mktemp("coordinator")) as one:
        one.start()
        yield one


def read_committed(bootstrap_servers: str, topic: str, *, has_open: bool = False) -> list[Message]:
    """All that a stock consumer with read_committed sees, up to the end of every partition: where no transaction is
    left open on purpose, once the last one has its markers.
    """
    if not has_open:
        wait_for_markers(bootstrap_servers, topic)
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": f"test-{uuid.uuid4().hex[:8]}",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    try:
        partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
        consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in partitions])
        messages: list[Message] = []
        ended: set[int | None] = set()
        while len(ended) < len(partitions):
            message = consumer.poll(30)
            if message is None:
                raise TimeoutError(f"{topic} was not read to its end: partitions {ended} of {len(partitions)} were")
            error = message.error()
            if error is None:
                messages.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition())
        return messages
    finally:
        consumer.close()


def wait_for_markers(bootstrap_servers: str, topic: str) -> None:
    """Of all that stands there by now: the answer to a commit does not wait for them for ever."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    partitions = [TopicPartition(topic, each) for each in admin.list_topics(topic, timeout=30).topics[topic].partitions]
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    deadline_s = time.monotonic() + MARKERS_S

    def ends(isolation: IsolationLevel) -> list[int]:
        while True:
            asked = admin.list_offsets(dict.fromkeys(partitions, latest), isolation_level=isolation)
            try:
                return [asked[partition].result(30).offset for partition in partitions]
            except KafkaException:  # of a broker that has just gone, or come
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.02)

    now = ends(IsolationLevel.READ_UNCOMMITTED)
    while min(map(sub, stable := ends(IsolationLevel.READ_COMMITTED), now)) < 0:
        assert time.monotonic() < deadline_s, f"a transaction is open in {topic}: stable up to {stable} of {now}"
        time.sleep(0.02)


def values(bootstrap_servers: str, topic: str, *, has_open: bool = False) -> list[bytes]:
    return [message.value() or b"" for message in read_committed(bootstrap_servers, topic, has_open=has_open)]


def manifests(coordinators: Coordinators) -> list[manifest_pb2.Manifest]:
    records = [
        manifest_pb2.FeedRecord.FromString(value)
        for value in values(coordinators.bootstrap_servers, coordinators.feed_topic)
    ]
    return [record.manifest for record in records if record.WhichOneof("record") == "manifest"]
