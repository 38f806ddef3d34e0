"""Transactions that have been open for long: whose they are as far as the log knows, and what to do. Ends nothing.

A transaction that waits for its decision, or whose marker the coordinator owes, looks to Kafka just like one that
nobody knows. Only commands that ask the coordinators first are given.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from spark_jobs.facts import read_facts
from spark_jobs.findings import Finding, Kind, Sample
from spark_jobs.log_state import OPEN_STATES, log_ranges, open_transactions
from spark_jobs.sources import topic_records

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from spark_jobs.compare import Run
    from spark_jobs.cut import OpenTransaction, PartitionFacts


class Owner(NamedTuple):
    transactional_id: str
    number: int
    state: str
    epoch: int
    age_ms: int  # since it began


def find_hanging(run: Run) -> list[Finding]:
    old = {
        (source.position.topic, source.position.partition): source.facts
        for source in run.cut.sources
        if source.facts is not None and _old(run, source.facts)
    }
    if not old:
        return []
    # Once more: the cut was taken when the run began, and what has ended since hangs no longer.
    now = read_facts(run.kafka, sorted({topic for topic, _ in old}))
    still = {}
    for (topic, partition), before in old.items():
        facts = now.get(topic, {}).get(partition)
        known = {_name(each) for each in _old(run, before)}
        if facts is not None and (same := [each for each in _old(run, facts) if _name(each) in known]):
            still[topic, partition] = (facts, same)
    owners = _owners(run, {each.producer_id for _, same in still.values() for each in same})
    findings = []
    for (topic, partition), (facts, same) in still.items():
        hanging = [each for each in same if not _is_young(run, each, owners.get(each.producer_id))]
        samples = tuple(
            Sample(detail=told(topic, partition, facts, each, owners.get(each.producer_id))) for each in hanging
        )
        if hanging:
            where = f"{topic}:{partition}"
            findings.append(Finding(kind=Kind.HANGING_TRANSACTION, where=where, count=len(hanging), samples=samples))
    return findings


def _name(each: OpenTransaction) -> tuple[int, int, int]:
    """A producer that dates its records long ago has one after the other that looks old."""
    return each.producer_id, each.epoch, each.offset_first


def _is_young(run: Run, each: OpenTransaction, owner: Owner | None) -> bool:
    """By the log, whatever the records' own times say."""
    return owner is not None and owner.epoch == each.epoch and owner.age_ms < run.settings.hanging_age_ms


def _old(run: Run, facts: PartitionFacts) -> Sequence[OpenTransaction]:
    return [each for each in facts.open if each.age_ms >= run.settings.hanging_age_ms]


def _owners(run: Run, producer_ids: set[int]) -> Mapping[int, Owner]:
    from pyspark.sql import functions as F  # noqa: N812

    topic = run.settings.log_topic
    records = topic_records(run.spark, run.kafka, {topic: log_ranges(run)}, is_committed=False)
    if records is None or not producer_ids:
        return {}
    rows = open_transactions(records).filter(F.col("producer_id").isin(sorted(producer_ids))).collect()
    now_ms = time.time_ns() // 1_000_000
    return {
        row.producer_id: Owner(
            row.transactional_id, row.number, OPEN_STATES[row.state], row.epoch, now_ms - row.started_at_ms
        )
        for row in rows
    }


def told(topic: str, partition: int, facts: PartitionFacts, each: OpenTransaction, owner: Owner | None) -> str:
    name = "" if owner is None else f"{owner.transactional_id} number {owner.number}"
    if owner is None:
        whose = (
            f"the log does not know it; if no coordinator does, this ends it: oncebox txn hanging --topic {topic} --end"
        )
    elif owner.state == "PREPARED":
        whose = f"{name} is prepared: its owner or the resolver decides it"
    elif owner.state == "ONGOING":
        whose = f"it is {name}: oncebox txn describe '{owner.transactional_id}'"
    else:
        whose = f"{name} is decided ({owner.state}): the coordinator owes its marker"
    return (
        f"producer id {each.producer_id}, epoch {each.epoch}, open from offset {each.offset_first}, last write "
        f"{each.age_ms // 1000} s ago; {facts.high - facts.stable} offsets wait; {whose}; who holds readers back: "
        f"oncebox partition who-blocks {topic}:{partition}"
    )
