"""The end of a run, on a real broker: an open transaction is found wherever it stands, markers and the log are read,
and that nothing was found is written down.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Producer

from oncebox.local import LocalKafka
from proof.chaos import ending
from proof.chaos.history import FinalCopies, FinalLog, FinalRecords, HeldBack, Recorder, read
from proof.chaos.markers import endings
from proof.chaos.workload import PARTITIONS
from tests.support.kafka import TopicFactory


@pytest.fixture
def topics(new_topic: TopicFactory, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of this test's own, in place of one that is written to and of the one that holds the copies."""
    found = {"written": new_topic(partitions=PARTITIONS), "copies": new_topic(partitions=PARTITIONS)}
    monkeypatch.setattr(ending, "TOPICS", (found["written"],))
    monkeypatch.setattr(ending, "COPIES", found["copies"])
    monkeypatch.setattr(ending, "LISTS", found["written"])
    monkeypatch.setattr(ending, "CIRCLE", ())
    monkeypatch.setattr(ending, "QUIET_S", 1.0)
    return found


@pytest.fixture
def producer(kafka: LocalKafka, topic_name: str) -> Iterator[Producer]:
    named = {"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": topic_name}
    producer = Producer({**named, "transaction.timeout.ms": 600_000})  # Kafka does not end it before the test does
    producer.init_transactions(30)
    yield producer
    producer.purge()


@pytest.mark.parametrize("where", ["written", "copies"])
def test_an_open_transaction_holds_its_partition_back_until_it_is_ended(
    kafka: LocalKafka, topics: dict[str, str], topic_name: str, producer: Producer, tmp_path: Path, where: str
) -> None:
    parts: Any = SimpleNamespace(servers=kafka.bootstrap_servers)
    path = tmp_path / "history.jsonl"
    producer.begin_transaction()
    producer.produce(topics[where], b"{}", partition=2)
    producer.flush(30)
    with Recorder(path) as recorder:
        ending.await_stable(parts, recorder)
        producer.abort_transaction(30)
        # The abort is answered before its marker is written; a successor is not let in before that.
        Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": topic_name}).init_transactions(60)
        ending.await_stable(parts, recorder)
    (line,) = read(path)
    assert isinstance(line.event, HeldBack)
    assert (line.event.partition, line.event.offset_stable, line.event.offset_next) == (f"{topics[where]}-2", 0, 1)


def test_markers_are_read_with_what_they_ended(
    kafka: LocalKafka, new_topic: TopicFactory, topic_name: str, producer: Producer
) -> None:
    topic = new_topic(partitions=2)
    for item, end in (("a#0", producer.abort_transaction), ("b#0", producer.commit_transaction)):
        producer.begin_transaction()
        producer.produce(topic, json.dumps({"item": item}).encode(), partition=0)
        producer.flush(60)
        end(60)
    # A commit is answered before its marker is written; a successor is not let in before that.
    Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": topic_name}).init_transactions(60)
    # The second partition holds nothing.
    found = endings(kafka.bootstrap_servers, [(topic, 0), (topic, 1)], limit_s=60)
    assert [(each.partition, each.offset, each.is_commit, each.items) for each in found] == [
        (f"{topic}-0", 1, False, ["a#0"]),
        (f"{topic}-0", 3, True, ["b#0"]),
    ]
    # Kafka's own coordinator gives a marker the epoch of its data or, by the newer protocol, the one above.
    assert all(len(each.epochs) == 1 and each.marker_epoch - each.epochs[0] in {0, 1} for each in found)


@pytest.mark.usefixtures("topics")
def test_that_there_is_nothing_is_written_down(
    kafka: LocalKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "QUIET_S", 60.0)
    parts: Any = SimpleNamespace(servers=kafka.bootstrap_servers)
    with Recorder(tmp_path / "history") as recorder:
        assert ending.read_topics(parts, 0, recorder) == 0
    records, copies = [line.event for line in read(tmp_path / "history")]
    assert isinstance(records, FinalRecords)
    assert isinstance(copies, FinalCopies)
    assert records.records == copies.records == ()


def test_what_is_left_of_the_log_is_counted(
    kafka: LocalKafka, new_topic: TopicFactory, producer: Producer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a marker stands for what a compaction takes: an offset without a record."""
    topic = new_topic(partitions=2)
    monkeypatch.setattr(ending, "LOG", topic)
    producer.begin_transaction()
    for partition in (0, 0, 1):
        producer.produce(topic, b"x", partition=partition)
    producer.commit_transaction(60)
    parts: Any = SimpleNamespace(servers=kafka.bootstrap_servers)
    with Recorder(tmp_path / "history") as recorder:
        ending.read_log(parts, recorder)
    (log,) = [line.event for line in read(tmp_path / "history")]
    assert isinstance(log, FinalLog)
    assert (log.left, log.written) == (3, 5)
