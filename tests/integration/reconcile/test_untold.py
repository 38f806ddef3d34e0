"""Records of which it cannot be said which row they make: told as not checked, never a finding, and the run goes on."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import Producer

from spark_jobs.findings import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from spark_jobs.result import Result
    from tests.support.reconcile import World

AT_MS = time.time_ns() // 1_000_000  # long ago would be past retention


def produce(world: World, partition: int, key: str, account: dict[str, Any] | None) -> None:
    producer = Producer({"bootstrap.servers": world.servers})
    value = None if account is None else json.dumps(account).encode()
    producer.produce(world.topics["accounts"], value, key=key.encode(), partition=partition, timestamp=AT_MS)
    assert producer.flush(30) == 0


def test_keys_that_cannot_be_told(world: World, check: Callable[..., Result]):
    produce(world, 0, "1", {"id": 1, "name": "told"})
    produce(world, 0, "900", {"id": 900.0, "name": "the relay reads a whole number"})
    produce(world, 0, "1", {"id": 1.0, "name": "over a row that had a key"})
    world.apply()
    result = check(full=True)
    assert (result.findings, sum(table.rows_found for table in result.tables)) == ((), 2)
    assert result.unchecked == ("public.accounts: 2 records have keys that cannot be told here: not checked",)
    assert result.exit_code == 2
    # One whose key is NULL is found by no index.
    produce(world, 0, "", {"id": None, "name": "nobody"})
    world.run(
        "UPDATE oncebox.position SET next_offset = next_offset + 1, high_offset = high_offset + 1 WHERE source = %s",
        [world.sources[world.topics["accounts"], 0]],
    )
    (finding,) = check(full=True).findings
    assert (finding.kind, finding.count, finding.samples[0].key_text) == (Kind.ROW_MISSING, 1, "~")


def test_keys_with_records_of_the_same_time_in_two_partitions(world: World, check: Callable[..., Result]):
    for account in (1, 2, 3):
        produce(world, 0, str(account), {"id": account, "name": "there"})
    produce(world, 1, "1", {"id": 1, "name": "here"})
    produce(world, 1, "2", None)
    world.apply()
    source = world.sources[world.topics["accounts"], 0]
    world.run("DELETE FROM accounts")
    world.run(
        "INSERT INTO accounts (id, name, oncebox_source, oncebox_offset) "
        "SELECT each, 'there', %s, each - 1 FROM generate_series(1, 3) AS each",
        [source],
    )
    result = check(full=True)
    assert result.findings == ()
    note = "public.accounts: 2 keys have records of the same time in two partitions: not checked"
    assert (result.unchecked, result.exit_code) == ((note,), 2)
    world.run("UPDATE accounts SET name = 'by hand' WHERE id = 3")
    assert [(finding.kind, finding.count) for finding in check(full=True).findings] == [(Kind.ROW_DIFFERS, 1)]
