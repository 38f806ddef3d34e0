"""Damage to whole transactions, to the feed, and transactions that hang: each is found and named."""

from __future__ import annotations

import time
import uuid
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    RESOURCE_TOPIC,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from oncebox.v1 import log_pb2, manifest_pb2, transaction_pb2
from spark_jobs import facts, log_state, snapshot
from spark_jobs.errors import CannotCheckError
from spark_jobs.findings import Kind
from spark_jobs.hanging import find_hanging
from spark_jobs.jobs.audit import audit
from spark_jobs.jobs.reconcile import run
from spark_jobs.log_state import LogCheck, check_log
from spark_jobs.whole import Transactions
from tests.support.coordinator import manifests
from tests.support.kafka import create_topic
from tests.support.reconcile import RELAY

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from spark_jobs.compare import Run
    from spark_jobs.result import Result
    from tests.support.reconcile import World

    Begun = Callable[..., AbstractContextManager[Run]]


def kinds(result: Result) -> dict[Kind, int]:
    return {finding.kind: finding.count for finding in result.findings}


def test_a_transaction_half_applied_by_position(world: World, check: Callable[..., Result]):
    world.transfer(*range(1, 6))
    world.apply()
    # The journal's position goes back: its rows are gone, the accounts' rows are there.
    for partition in range(world.partitions):
        source = world.sources[world.topics["journal"], partition]
        world.run("UPDATE oncebox.position SET next_offset = 0, high_offset = 0 WHERE source = %s", [source])
    world.run("DELETE FROM journal")
    result = check()
    assert kinds(result) == {Kind.ATOMICITY_BROKEN: 1}


def test_a_topic_that_is_rewound_breaks_no_transaction(world: World, check: Callable[..., Result]):
    for account in range(1, 6):
        world.transfer(account)
    world.apply()
    for partition in range(world.partitions):
        source = world.sources[world.topics["journal"], partition]
        world.run("UPDATE oncebox.position SET next_offset = 0 WHERE source = %s", [source])  # high_offset stays
    result = check()
    assert (result.findings, result.exit_code) == ((), 2)
    assert any("the relay was rewound" in note for note in result.unchecked)


def test_a_row_that_was_deleted_before_a_rewind_is_not_missing(world: World, check: Callable[..., Result]):
    world.transfer(*range(1, 6))
    world.apply()
    ((source, offset),) = world.run("SELECT oncebox_source, oncebox_offset FROM accounts WHERE id = 5")
    world.delete(5)
    world.apply()
    world.run("UPDATE oncebox.position SET next_offset = %s WHERE source = %s", [offset + 1, source])
    result = check()
    assert (result.findings, result.exit_code) == ((), 2)
    assert any("1 rows are not there, and a record that is to be applied again" in each for each in result.unchecked)


def test_a_topic_that_the_relay_has_dropped_breaks_no_transaction(world: World, check: Callable[..., Result]):
    """Its positions stay where they were, whatever is committed there."""
    world.transfer(1, 2)
    world.apply()
    world.run("DELETE FROM oncebox.target WHERE table_name = 'journal'")
    world.transfer(3, 4)
    world.apply()
    journal = [world.sources[world.topics["journal"], partition] for partition in range(world.partitions)]
    world.run("UPDATE oncebox.position SET next_offset = 1, high_offset = 1 WHERE source = ANY(%s)", [journal])
    result = check()
    assert (result.findings, result.exit_code, result.lag) == ((), 2, 0)
    assert result.unchecked == (f"the topic {world.topics['journal']} is mapped to no table: not checked",)


def test_a_tampered_manifest(world: World, check: Callable[..., Result], begun: Begun):
    world.transfer(1, 2, 3)
    world.apply()
    topics = set(world.topics.values())
    own = next(each for each in manifests(world.coordinators) if topics & {one.topic for one in each.written})
    forged = manifest_pb2.Manifest()
    forged.CopyFrom(own)
    forged.number += 1_000_000
    del forged.written[1:]
    run = forged.written[0].runs[-1]
    run.offset_first, run.offset_next = run.offset_next, run.offset_next + 1  # the marker's offset
    producer = Producer({"bootstrap.servers": world.servers})

    def forge() -> None:
        value = manifest_pb2.FeedRecord(version=1, manifest=forged).SerializeToString()
        name = forged.transactional_id.encode()
        producer.produce(world.coordinators.feed_topic, value, key=name, partition=0)
        producer.flush(30)

    forge()
    result = check()
    assert kinds(result) == {Kind.MANIFEST_DIFFERS: 1}
    assert f"number {forged.number}" in result.findings[0].samples[0].detail
    # Of a compacted topic records vanish: what is claimed and gone contradicts nothing there.
    resource = ConfigResource(RESOURCE_TOPIC, own.written[0].topic)
    resource.add_incremental_config(
        ConfigEntry("cleanup.policy", "compact", incremental_operation=AlterConfigOpType.SET)
    )
    admin = AdminClient({"bootstrap.servers": world.servers})
    admin.incremental_alter_configs([resource])[resource].result(60)
    asked, deadline = ConfigResource(RESOURCE_TOPIC, own.written[0].topic), time.monotonic() + 60
    while admin.describe_configs([asked])[asked].result(60)["cleanup.policy"].value != "compact":
        assert time.monotonic() < deadline
    with begun() as later, closing(Transactions(later)) as feed:
        assert feed.check() == []
        assert any(f"{own.written[0].topic} is compacted" in each for each in feed.told)
    # But no topic has an offset past its end, whatever of it is compared.
    forged.number += 1
    run.offset_first, run.offset_next = run.offset_first + 1_000_000, run.offset_next + 1_000_001
    forge()
    with begun() as later, closing(Transactions(later)) as feed:
        (finding,) = feed.check()
    assert (finding.kind, finding.count) == (Kind.MANIFEST_DIFFERS, 1)
    (sample,) = finding.samples
    assert f"number {forged.number}: {own.written[0].topic}:" in sample.detail
    assert f":{run.offset_first} holds no committed record and 1 more: past the end" in sample.detail


class Forger:
    """Writes a log and a feed of its own."""

    def __init__(self, servers: str, *, partitions: int = 1) -> None:
        self.feed, self.log = (create_topic(servers, None, partitions=partitions) for _ in range(2))
        self._producer = Producer({"bootstrap.servers": servers})

    def outcomes(self, name: str, *, version: int = 1) -> None:
        """Number 1 is aborted, 2 and 3 are committed."""
        state = log_pb2.IdState()
        for number, result in enumerate((transaction_pb2.ABORTED, *[transaction_pb2.COMMITTED] * 2), start=1):
            state.outcomes.add(number=number, result=result, decided_at_ms=number)
        key = log_pb2.LogKey(transactional_id=name).SerializeToString()
        self._write(self.log, log_pb2.LogValue(version=version, id=state).SerializeToString(), key)

    def decided(self, name: str, *numbers: int, at_ms: int, partition: int = 0, is_owed: bool = False) -> None:
        """Each an hour after the one before. `is_owed`: their manifests are still to be written."""
        state = log_pb2.IdState()
        for index, number in enumerate(numbers):
            decided_at_ms = at_ms + index * 3_600_000
            state.outcomes.add(number=number, result=transaction_pb2.COMMITTED, decided_at_ms=decided_at_ms)
            if is_owed:
                state.transactions.add(number=number, state=transaction_pb2.PREPARE_COMMIT)
        key = log_pb2.LogKey(transactional_id=name).SerializeToString()
        self._write(self.log, log_pb2.LogValue(version=1, id=state).SerializeToString(), key, partition)

    def manifest(self, *, version: int = 1, partition: int = 0, **fields: Any) -> None:
        manifest = manifest_pb2.Manifest(**({"part_count": 1, "decided_at_ms": fields.get("number", 1)} | fields))
        record = manifest_pb2.FeedRecord(version=version, manifest=manifest)
        self._write(self.feed, record.SerializeToString(), None, partition)

    def _write(self, topic: str, value: bytes, key: bytes | None, partition: int = 0) -> None:
        self._producer.produce(topic, value, key=key, partition=partition)
        self._producer.flush(30)


def test_the_log_against_the_feed(world: World, check: Callable[..., Result], begun: Begun):
    forger = Forger(world.servers)
    forger.outcomes("a")
    for number in (1, 3):
        forger.manifest(transactional_id="a", number=number)

    def compared(log_topic: str, **settings: Any) -> LogCheck:
        with begun(feed_topic=forger.feed, log_topic=log_topic, **settings) as run, closing(Transactions(run)) as feed:
            feed.check()
            return check_log(run, feed.manifests, feed.oldest_ms)

    result = check(feed_topic=forger.feed, log_topic=forger.log)
    assert (kinds(result), result.exit_code) == ({Kind.LOG_DIFFERS: 2}, 1)
    told = "; ".join(sample.detail for sample in result.findings[0].samples)
    assert "a number 1: aborted in the log, committed in the feed" in told
    assert "a number 2: committed in the log, not in the feed" in told
    # All are counted, whatever the limits; and what cannot be read is told.
    forger.outcomes("b")
    forger.outcomes("c", version=2)
    (finding,) = (limited := compared(forger.log, suspects_max=1, samples_max=1)).findings
    assert (finding.count, len(finding.samples)) == (4, 1)
    assert f"{forger.log} holds 1 records of version 2, this process reads up to 1" in limited.unchecked
    # A coordinator that is gone in between owes a manifest: nothing contradicts it, and nothing is proved.
    owing = Forger(world.servers)
    owing.manifest(transactional_id="paid", number=1)
    owing.decided("paid", 1, at_ms=1, is_owed=True)
    owing.decided("owed", 1, 2, at_ms=1, is_owed=True)
    with begun(feed_topic=owing.feed, log_topic=owing.log) as run, closing(Transactions(run)) as feed:
        log = check_log(run, feed.manifests, feed.oldest_ms)
    assert log.findings == ()
    assert "2 commits are decided and not in the feed yet" in log.unchecked
    # Nothing to compare with is not clean.
    assert "the log no-such-log does not exist" in compared("no-such-log").unchecked
    end = TopicPartition(forger.feed, 0, 2)
    admin = AdminClient({"bootstrap.servers": world.servers})
    admin.delete_records([end])[TopicPartition(forger.feed, 0)].result(60)
    assert "is past retention: the log is not compared" in compared(forger.log).unchecked


def test_retention_takes_from_the_feed_partition_by_partition(world: World, begun: Begun):
    forger, hour_ms = Forger(world.servers, partitions=2), 3_600_000
    for partition, name in enumerate(("whole", "cut")):
        forger.decided(name, 1, 2, 3, at_ms=100 * hour_ms, partition=partition)
        for number in (1, 3) if name == "whole" else (1, 2, 3):
            decided_at_ms = (99 + number) * hour_ms
            forger.manifest(transactional_id=name, number=number, decided_at_ms=decided_at_ms, partition=partition)
    admin, end = AdminClient({"bootstrap.servers": world.servers}), TopicPartition(forger.feed, 1, 2)
    admin.delete_records([end])[TopicPartition(forger.feed, 1)].result(60)
    with begun(feed_topic=forger.feed, log_topic=forger.log) as run, closing(Transactions(run)) as feed:
        feed.check()
        log = check_log(run, feed.manifests, feed.oldest_ms)
    (finding,) = log.findings
    assert [sample.detail for sample in finding.samples] == [
        "transaction whole number 2: committed in the log, not in the feed"
    ]
    assert log.told.startswith("2 commits of the log")


def test_a_coordinator_whose_clock_is_behind(world: World, begun: Begun):
    """What it decides during the run looks old, and its manifest stands behind what was read of the feed."""
    forger = Forger(world.servers)
    forger.manifest(transactional_id="old", number=1)
    forger.decided("old", 1, at_ms=1)
    with begun(feed_topic=forger.feed, log_topic=forger.log) as run, closing(Transactions(run)) as feed:
        feed.check()
        forger.decided("late", 1, 2, at_ms=1)
        forger.manifest(transactional_id="late", number=1)
        (finding,) = check_log(run, feed.manifests, feed.oldest_ms).findings
        assert [sample.detail for sample in finding.samples] == [
            "transaction late number 2: committed in the log, not in the feed"
        ]
        forger.manifest(transactional_id="late", number=2)
        assert check_log(run, feed.manifests, feed.oldest_ms).findings == ()


def test_no_decision_is_between_two_runs(world: World, spark: Any, monkeypatch: pytest.MonkeyPatch):
    """Too young for one run: the next one compares it, with its manifest, which the first one has read."""
    for module in (snapshot, log_state):
        monkeypatch.setattr(module, "SETTLED_AFTER_MS", 5_000)
    forger = Forger(world.servers)
    for number in range(5):
        forger.manifest(transactional_id="old", number=number)
    time.sleep(11)  # so that a later run has no need of them
    world.run("UPDATE oncebox.relay SET mode = 'partition'")
    given = world.settings(feed_topic=forger.feed, log_topic=forger.log)
    # Nothing is verified yet: that leaves a mark below which there is nothing.
    assert run_once(given, spark).exit_code == 0
    world.transfer(1)
    world.apply()
    forger.manifest(transactional_id="young", number=1)
    forger.decided("young", 1, at_ms=time.time_ns() // 1_000_000)
    first = run_once(given, spark)
    assert (first.kind, first.exit_code, first.feed["0"][0]) == ("full", 0, 0)
    forger.decided("lost", 1, at_ms=first.started_at_ms)
    time.sleep(max(5 + first.started_at_ms / 1000 - time.time(), 0) + 1)
    second = run_once(given, spark)
    assert (second.kind, second.feed["0"][0]) == ("incremental", 5)
    (finding,) = second.findings
    assert (finding.kind, finding.count) == (Kind.LOG_DIFFERS, 1)
    assert "lost number 1: committed in the log, not in the feed" in finding.samples[0].detail


def run_once(settings: Any, spark: Any) -> Result:
    return run(settings, lambda _: None, session=spark)[0]


def test_a_feed_of_a_newer_version(world: World, check: Callable[..., Result], spark: Any):
    forger = Forger(world.servers)
    forger.outcomes("a")
    for number in (2, 3):
        forger.manifest(transactional_id="a", number=number, version=number)
    topics = {"feed_topic": forger.feed, "log_topic": forger.log}
    result = check(**topics)
    assert (result.findings, result.exit_code) == ((), 2)
    (note,) = result.unchecked
    assert f"the feed {forger.feed} holds 2 records of version 3, this process reads up to 1: upgrade it" in note
    with pytest.raises(CannotCheckError, match="of version 3"):
        audit(world.settings(**topics), hours=1, session=spark)


def test_a_group_offset_beyond_the_end(world: World, begun: Begun, monkeypatch: pytest.MonkeyPatch):
    world.transfer(*range(1, 6))
    world.apply()
    topic, forger, asked = world.topics["accounts"], Forger(world.servers), []
    told: list[str] = []

    def group(ahead: int) -> transaction_pb2.GroupOffsets:
        with begun() as run:
            ends = [source.facts.high for source in run.cut.of_topics([topic]) if source.facts]
        found = transaction_pb2.GroupOffsets(group_id="readers")
        for partition, end in enumerate(ends):
            found.offsets.add(topic=topic, partition=partition, offset_next=end + ahead * partition)
        return found

    async def listed(wire: Any, leader: int, partitions: list[Any], topic_id: str) -> Any:
        asked.append(partitions[0].topic)
        return await of_leader(wire, leader, partitions, topic_id)

    def checked() -> list[Any]:
        with begun(feed_topic=forger.feed) as run, closing(Transactions(run)) as feed:
            found = feed.check()
            told[:] = feed.told
            return found

    of_leader = facts._of_leader
    forger.manifest(transactional_id="a", number=1, group_offsets=[group(0)])
    assert checked() == []
    forger.manifest(transactional_id="a", number=2, group_offsets=[group(1)])
    monkeypatch.setattr(facts, "_of_leader", listed)
    (finding,) = checked()
    assert (finding.kind, finding.where) == (Kind.GROUP_OFFSET_BEYOND, f"{topic}:1")
    assert "group readers at" in finding.samples[0].detail
    # The feed's end is taken before the topics': whoever reads on meanwhile is not beyond them.
    assert asked[0] == forger.feed
    assert len(asked) == 3
    # What is not compared is told: of a topic that is not the relay's, and of one that was made again.
    assert told == []
    elsewhere = transaction_pb2.GroupOffsets(group_id="readers")
    elsewhere.offsets.add(topic="elsewhere", partition=0, offset_next=5)
    forger.manifest(transactional_id="a", number=3, group_offsets=[elsewhere])
    world.run("INSERT INTO oncebox.source (topic, topic_id, partition) VALUES (%s, %s, 0)", [topic, uuid.uuid4()])
    world.run(
        "INSERT INTO oncebox.position (relay, source, start_offset, next_offset, high_offset) "
        "SELECT %s, max(source), 0, 0, 0 FROM oncebox.source",
        [RELAY],
    )
    assert checked() == []
    assert told == ["3 group offsets are of topics that are not the relay's, or made again: not compared"]


def test_a_hanging_transaction(world: World, check: Callable[..., Result], begun: Begun):
    world.transfer(1, 2)
    world.apply()
    topic = world.topics["accounts"]
    named = {"bootstrap.servers": world.servers, "transactional.id": f"hangs-{topic}"}
    producer = Producer({**named, "transaction.timeout.ms": 600_000})  # Kafka does not end it before the test does
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"{}", partition=0)
    producer.flush(30)
    time.sleep(0.01)  # older than the limit below
    result = check(hanging_age_ms=1)
    assert kinds(result) == {Kind.HANGING_TRANSACTION: 1}
    (sample,) = result.findings[0].samples
    assert f"oncebox txn hanging --topic {topic} --end" in sample.detail
    assert f"oncebox partition who-blocks {topic}:0" in sample.detail
    producer.abort_transaction(30)
    # The abort is answered before its marker is written; a successor is not let in before that.
    Producer(named).init_transactions(60)
    with begun(hanging_age_ms=1) as run:
        assert find_hanging(run) == []


def test_the_audit(world: World, spark: Any):
    world.transfer(1, 2)
    world.transfer(3, commit=False)
    figures = audit(world.settings(), hours=1, session=spark)
    assert figures["committed"] >= 1
    assert figures["aborted_by_cause"]["owner"] >= 1
    assert (
        any(world.topics["accounts"] in each["partition"] for each in figures["hot_partitions"])
        or len(figures["hot_partitions"]) == 10
    )
