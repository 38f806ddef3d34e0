"""Damage to whole transactions, to the feed, and transactions that hang: each is found and named."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    RESOURCE_TOPIC,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from oncebox.v1 import log_pb2, manifest_pb2, transaction_pb2
from spark_jobs.findings import Kind
from spark_jobs.hanging import find_hanging
from spark_jobs.jobs.audit import audit
from spark_jobs.log_state import LogCheck, check_log
from spark_jobs.whole import Transactions
from tests.support.coordinator import manifests
from tests.support.kafka import create_topic

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
    producer.produce(
        world.coordinators.feed_topic,
        manifest_pb2.FeedRecord(version=1, manifest=forged).SerializeToString(),
        key=forged.transactional_id.encode(),
        partition=0,
    )
    producer.flush(30)
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


def test_the_log_against_the_feed(world: World, begun: Begun):
    feed, log = (create_topic(world.servers, None) for _ in range(2))
    state = log_pb2.IdState()
    for number, result in (
        (1, transaction_pb2.ABORTED),
        (2, transaction_pb2.COMMITTED),
        (3, transaction_pb2.COMMITTED),
    ):
        state.outcomes.add(number=number, result=result, decided_at_ms=number)
    producer = Producer({"bootstrap.servers": world.servers})
    key = log_pb2.LogKey(transactional_id="a").SerializeToString()
    producer.produce(log, log_pb2.LogValue(version=1, id=state).SerializeToString(), key=key)
    for number in (1, 3):
        manifest = manifest_pb2.Manifest(transactional_id="a", number=number, decided_at_ms=number, part_count=1)
        producer.produce(feed, manifest_pb2.FeedRecord(version=1, manifest=manifest).SerializeToString())
    producer.flush(30)

    def compared(log_topic: str) -> LogCheck:
        with begun(feed_topic=feed, log_topic=log_topic) as run, closing(Transactions(run)) as manifests:
            manifests.check()
            return check_log(run, manifests.manifests, manifests.oldest_ms)

    (finding,) = compared(log).findings
    assert (finding.kind, finding.count) == (Kind.LOG_DIFFERS, 2)
    told = "; ".join(sample.detail for sample in finding.samples)
    assert "a number 1: aborted in the log, committed in the feed" in told
    assert "a number 2: committed in the log, not in the feed" in told
    # Nothing to compare with is not clean.
    assert "the log no-such-log does not exist" in compared("no-such-log").unchecked
    end = TopicPartition(feed, 0, 2)
    admin = AdminClient({"bootstrap.servers": world.servers})
    admin.delete_records([end])[TopicPartition(feed, 0)].result(60)
    assert "is past retention: the log is not compared" in compared(log).unchecked


def test_a_hanging_transaction(world: World, check: Callable[..., Result], begun: Begun):
    world.transfer(1, 2)
    world.apply()
    topic = world.topics["accounts"]
    producer = Producer({"bootstrap.servers": world.servers, "transactional.id": f"hangs-{topic}"})
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
