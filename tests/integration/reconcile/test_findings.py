"""Nothing is found where nothing is wrong, and nothing is lost where much is. Damage of each kind is in test_repair and
test_transactions.
"""

from __future__ import annotations

import json
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from spark_jobs.findings import Kind
from spark_jobs.reconcile import reconcile
from spark_jobs.verdict import Verdict
from tests.support.coordinator import read_committed
from tests.support.reconcile import RELAY, World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from oncebox.local import LocalPostgres
    from spark_jobs.result import Result
    from tests.support.coordinator import Coordinators


@pytest.mark.usefixtures("compacting")
def test_clean(world: World, check: Callable[..., Result]):
    world.transfer(*range(1, 20))
    world.transfer(99, commit=False)
    world.transfer(3, 4, version=1)
    world.delete(5)
    world.apply()
    result = check()
    assert result.findings == ()
    assert result.unchecked == ()
    assert (result.verdict, result.exit_code) == (Verdict.CLEAN, 0)
    assert {table.table: table.rows_found for table in result.tables} == {"public.accounts": 18, "public.journal": 21}
    assert result.transactions >= 3
    # Records that are not applied yet are lag, and a parked one has no row: neither is a finding.
    world.transfer(7, version=2)
    world.run(
        "INSERT INTO oncebox.dead_letter (relay, source, record_offset, record_at, unit, error, state) "
        "SELECT %s, oncebox_source, oncebox_offset, now(), 1, 'bad', 'parked' FROM accounts WHERE id = 19",
        [RELAY],
    )
    world.run("DELETE FROM accounts WHERE id = 19")
    # One that was mended and replayed stands in its row as it was mended, not as the topic has it.
    mended = {"id": 18, "name": "mended", "balance": 18, "changed": "2026-01-02T03:04:05.678Z"}
    world.run(
        "INSERT INTO oncebox.dead_letter (relay, source, record_offset, record_at, key, value, unit, error, state) "
        "SELECT %s, oncebox_source, oncebox_offset, now(), '18', %s, 2, 'bad', 'replayed' FROM accounts WHERE id = 18",
        [RELAY, json.dumps(mended).encode()],
    )
    world.run("UPDATE accounts SET name = 'mended' WHERE id = 18")
    later = check()
    assert later.findings == ()
    assert later.verdict is Verdict.CLEAN
    assert later.lag > 0
    assert later.parked == {"parked": 1}


COMPACTING = {
    "cleanup.policy": "compact",
    "segment.ms": "200",
    "min.cleanable.dirty.ratio": "0.001",
    "max.compaction.lag.ms": "200",
}


@pytest.fixture(scope="module")
def compacting(
    shared_coordinator: Coordinators, postgres: LocalPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """Begun before the other test, so that the broker's cleaner works meanwhile."""
    with psycopg.connect(postgres.dsn_of("postgres"), autocommit=True) as connection:
        connection.execute("CREATE DATABASE compacting")
    folder = tmp_path_factory.mktemp("compacting")
    world = World(shared_coordinator, postgres.dsn_of("compacting"), folder, partitions=1, config=COMPACTING)
    with closing(world):
        world.transfer(1, 2, 3)
        world.apply()
        world.transfer(1, version=1)  # past the cut
        _roll(world)
        yield world


def _roll(world: World) -> None:
    """A segment older than segment.ms is closed by the next record, and can be cleaned."""
    time.sleep(0.3)
    world.transfer(99)


def test_what_compaction_took_is_no_finding(compacting: World, spark: Any):
    topic = compacting.topics["accounts"]
    deadline = time.monotonic() + 120
    while any(each.offset() == 0 for each in read_committed(compacting.servers, topic)):
        assert time.monotonic() < deadline
        _roll(compacting)
    result, _, _ = reconcile(spark, compacting.settings(), lambda _: None)
    assert (result.findings, result.unchecked, result.verdict) == ((), (), Verdict.CLEAN)
    assert [(table.rows_found, table.superseded) for table in result.tables] == [(3, 1), (3, 0)]
    assert any(f"{topic} is compacted" in each for each in result.told)


def found(result: Result) -> dict[Kind, int]:
    return {finding.kind: finding.count for finding in result.findings}


def test_rows_of_before_the_relays_start(world: World, check: Callable[..., Result]):
    """The table held them already, and nothing but that tells of them: nobody calls them extra, or deletes them."""
    world.transfer(1, 2)
    world.run("INSERT INTO accounts (id, name) VALUES (1, 'one'), (2, 'two')")
    world.advance("accounts", "journal")
    world.run("UPDATE oncebox.position SET start_offset = next_offset")
    world.transfer(3, 4)
    world.apply()
    world.run("UPDATE accounts SET balance = 7 WHERE id = 4")
    result = check()
    assert found(result) == {Kind.ROW_DIFFERS: 1}
    assert any("public.accounts: 2 rows name no record" in each for each in result.unchecked)


def test_a_rare_finding_is_not_lost_behind_many(world: World, check: Callable[..., Result]):
    world.transfer(*range(1, 60))
    world.apply()
    world.run("UPDATE accounts SET balance = balance + 1 WHERE id <= 40")
    result = check(suspects_max=6)
    assert found(result) == {Kind.ROW_DIFFERS: 40}
    assert result.sentence == "about 40 findings: about 40 row differs"
    assert result.unchecked == (
        "public.accounts: 34 more rows do not seem to be right, and were not looked at one by one",
    )
    # A row under another key still stands at its record's place, and yet the old key is missing and the new one extra.
    world.run("UPDATE accounts SET id = 1000 WHERE id = 50")
    result = check(suspects_max=6)
    assert found(result) == {Kind.ROW_DIFFERS: 40, Kind.ROW_MISSING: 1, Kind.ROW_EXTRA: 1}
    samples = {finding.kind: [sample.key["id"] for sample in finding.samples] for finding in result.findings}
    assert (samples[Kind.ROW_MISSING], samples[Kind.ROW_EXTRA]) == (["50"], ["1000"])
    # As many rows as records, and yet one is gone and another is there twice.
    world.run("UPDATE accounts SET id = 50 WHERE id = 1000")
    world.run("UPDATE accounts SET balance = balance - 1 WHERE id <= 40")
    world.run("ALTER TABLE journal DROP CONSTRAINT journal_pkey")
    world.run("DELETE FROM journal WHERE id = 7000")
    world.run("INSERT INTO journal SELECT * FROM journal WHERE id = 8000")
    assert found(check()) == {Kind.ROW_MISSING: 1, Kind.DUPLICATE: 1}


def test_what_only_the_database_can_tell_is_looked_at_or_told(world: World, check: Callable[..., Result]):
    transaction = world.producer.begin()
    for each in range(1, 9):
        account = {"id": each, "name": "", "balance": 1, "changed": "infinity"}
        transaction.send(world.topics["accounts"], json.dumps(account).encode(), key=str(each).encode())
    transaction.commit()
    world.apply()
    assert check().exit_code == 0
    limited = check(suspects_max=3)
    assert (limited.findings, limited.exit_code) == ((), 2)
    assert limited.unchecked == (
        "public.accounts: 5 more rows do not seem to be right, and were not looked at one by one",
    )


def test_deletes_that_took_no_effect(world: World, check: Callable[..., Result]):
    """In a table that PostgreSQL has counted: nearly each record is a row there, and their sums agree."""
    world.transfer(*range(1, 61))
    world.apply()
    (deleted,) = world.run("SELECT * FROM accounts WHERE id = 5")
    (replaced,) = world.run("SELECT * FROM accounts WHERE id = 7")
    put_back = "INSERT INTO accounts VALUES (%s, %s, %s, %s, %s, %s)"
    world.delete(5)
    world.apply()
    world.run("ANALYZE")
    assert check().exit_code == 0
    world.run(put_back, deleted)
    assert found(check()) == {Kind.ROW_OLDER: 1}
    # Without its constraint a table may hold what was replaced beside what has replaced it.
    world.run("DELETE FROM accounts WHERE id = 5")
    world.transfer(7, version=1)
    world.apply()
    world.run("ALTER TABLE accounts DROP CONSTRAINT accounts_pkey")
    world.run(put_back, replaced)
    world.run("ANALYZE")
    assert found(check()) == {Kind.DUPLICATE: 1}
