"""Who watches a chaos run and is told to stop first looks at all that is there by then, on real parts."""

import json
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from confluent_kafka import Producer

from oncebox.local import LocalKafka
from proof.chaos import watch
from proof.chaos.history import Look, Poll, Sum, read
from proof.chaos.watch import Looker, Poller
from proof.chaos.workload import PARTITIONS, TOPICS
from tests.support.kafka import TopicFactory

RECORDS = 3 * watch.POLL_RECORDS_MAX


@pytest.fixture
def topic(new_topic: TopicFactory, monkeypatch: pytest.MonkeyPatch) -> str:
    topic = new_topic(partitions=PARTITIONS)
    monkeypatch.setattr(watch, "TOPICS", (topic,))
    return topic


@pytest.fixture
def open_transaction(kafka: LocalKafka, topic: str) -> Iterator[None]:
    """Behind all that is committed there is what never will be."""
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": topic})
    producer.init_transactions(60)
    producer.begin_transaction()
    for number in range(RECORDS):
        producer.produce(topic, _value(f"committed#{number}"), partition=number % (PARTITIONS - 1))
    producer.commit_transaction(60)
    producer.begin_transaction()
    producer.produce(topic, _value("open#0"), partition=0)
    producer.flush(60)
    yield
    producer.abort_transaction(60)


def _value(item: str) -> bytes:
    return json.dumps({"item": item, "amount": 1}).encode()


@pytest.mark.usefixtures("open_transaction")
def test_the_consumer_reads_to_the_end_of_what_is_committed(kafka: LocalKafka, tmp_path: Path) -> None:
    with Poller("consumer", tmp_path / "history", kafka.bootstrap_servers):
        pass
    polls = [line.event for line in read(tmp_path / "history")]
    found = {record.item for poll in polls if isinstance(poll, Poll) for record in poll.records}
    assert found == {f"committed#{number}" for number in range(RECORDS)}


def test_somebody_looks_once_more(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 1_000)
    with psycopg.connect(database, autocommit=True) as connection:
        for table in TOPICS:
            connection.execute(f"CREATE TABLE {table} (op text, amount int)".encode())
        with Looker("looker", tmp_path / "history", database):
            connection.execute("INSERT INTO lists VALUES ('a', 7)")
    (look,) = [line.event for line in read(tmp_path / "history")]
    assert isinstance(look, Look)
    assert look.sums["lists"][:2] == (1, 7)
    assert look.sums["debits"] == Sum(0, 0, 0)
