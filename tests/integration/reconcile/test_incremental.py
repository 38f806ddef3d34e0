"""A later run reads only what is new, says so, and still sees an old row that was changed by hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import OFFSET_END, TopicPartition
from confluent_kafka.admin import AdminClient

from spark_jobs import older, size
from spark_jobs.findings import Kind
from spark_jobs.jobs.reconcile import run
from tests.support.coordinator import read_committed
from tests.support.reconcile import RELAY

if TYPE_CHECKING:
    from tests.support.reconcile import World


def test_runs_build_on_each_other(world: World, spark: Any, monkeypatch: pytest.MonkeyPatch):
    def go(**settings: Any) -> Any:
        return run(world.settings(**settings), lambda _: None, session=spark)[0]

    def heal(text: str) -> None:
        """After the rows were compared, before an alarm is raised."""
        if text == "reading manifests":
            world.run("UPDATE accounts SET balance = balance - 1 WHERE id = 1")

    world.transfer(*range(1, 8))
    world.apply()
    first = go()
    assert (first.kind, first.exit_code, first.run) == ("full", 0, 1)
    # What is left to read is known before Spark is started.
    monkeypatch.setattr(size, "LITTLE_MAX", 5)
    assert size.reads_little(world.settings())
    assert not size.reads_little(world.settings(full=True))
    world.transfer(20, 21)
    world.transfer(3, version=1)
    world.apply()
    second = go()
    assert (second.kind, second.since_run, second.exit_code) == ("incremental", 1, 0)
    assert "new since run 1" in second.sentence
    assert {table.table: table.rows_found for table in second.tables} == {"public.accounts": 3, "public.journal": 3}
    # By hand, in a row that the second run did not read.
    world.run("UPDATE accounts SET balance = balance + 1 WHERE id = 1")
    third = go()
    assert third.kind == "incremental"
    assert [(finding.kind, finding.count) for finding in third.findings] == [(Kind.ROW_DIFFERS, 1)]
    # A run with findings moves no mark: they are found again.
    assert [finding.kind for finding in go().findings] == [Kind.ROW_DIFFERS]
    # After a restore into another cluster transaction ids mean nothing: everything is compared.
    world.run("UPDATE oncebox.reconciliation_verified SET system_identifier = system_identifier + 1")
    last = run(world.settings(), heal, session=spark)[0]
    assert (last.kind, last.exit_code, last.findings) == ("full", 0, ())
    assert "public.accounts: 1 rows were wrong at the cut and right at a second look" in last.sentence
    folder = world.folder / "reports"
    assert {path.name for path in folder.glob("run-1.*")} == {"run-1.json", "run-1.html"}
    assert len(world.run("SELECT run FROM oncebox.reconciliation_runs")) == 5


def test_a_delete_of_an_older_row_that_took_no_effect(world: World, spark: Any, monkeypatch: pytest.MonkeyPatch):
    def go() -> Any:
        return run(world.settings(), lambda _: None, session=spark)[0]

    world.transfer(*range(1, 21))
    world.apply()
    (deleted,) = world.run("SELECT * FROM accounts WHERE id = 6")
    assert go().exit_code == 0
    world.run("CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
    world.run("CREATE TRIGGER keep BEFORE DELETE ON accounts FOR EACH ROW WHEN (OLD.id = 5) EXECUTE FUNCTION keep()")
    for account in (5, 6):
        world.delete(account)
    world.apply()
    world.run("DROP TRIGGER keep ON accounts")
    for keys_max in (older.KEYS_MAX, 1):
        monkeypatch.setattr(older, "KEYS_MAX", keys_max)
        kept = go()
        assert (kept.kind, kept.since_run) == ("incremental", 1)
        assert [(finding.kind, finding.count) for finding in kept.findings] == [(Kind.ROW_OLDER, 1)]
    # One of them was not written since the last run, the other one was: put back just as it had been.
    world.run("INSERT INTO accounts VALUES (%s, %s, %s, %s, %s, %s)", deleted)
    assert [(finding.kind, finding.count) for finding in go().findings] == [(Kind.ROW_OLDER, 2)]
    world.run("DELETE FROM accounts WHERE id IN (5, 6)")
    right = go()
    assert (right.kind, right.exit_code, right.findings) == ("incremental", 0, ())


def write_journal_by(world: World, insert_mode: str) -> None:
    key = ["id"] if insert_mode == "upsert" else []
    world.run(
        "UPDATE oncebox.target SET mapping = mapping || %s WHERE table_name = 'journal'",
        [json.dumps({"insert_mode": insert_mode, "key": key})],
    )


@pytest.mark.parametrize("insert_mode", ["upsert", "insert"])
def test_a_copy_of_an_older_row(world: World, spark: Any, monkeypatch: pytest.MonkeyPatch, insert_mode: str):
    """No index keeps it out. It names the same record, and nobody has written the row that it is a copy of."""
    write_journal_by(world, insert_mode)
    world.transfer(*range(1, 8))
    world.apply()
    assert run(world.settings(), lambda _: None, session=spark)[0].exit_code == 0
    world.run("ALTER TABLE journal DROP CONSTRAINT journal_pkey")
    world.run("INSERT INTO journal SELECT * FROM journal WHERE id IN (3000, 4000)")
    # As it should be, and written since: nothing is wrong with that.
    world.run("UPDATE journal SET account = account WHERE id = 5000")
    for keys_max in (older.KEYS_MAX, 1):
        monkeypatch.setattr(older, "KEYS_MAX", keys_max)
        copied = run(world.settings(), lambda _: None, session=spark)[0]
        assert copied.kind == "incremental"
        assert [(finding.kind, finding.count) for finding in copied.findings] == [(Kind.DUPLICATE, 2)]


@pytest.mark.parametrize("insert_mode", ["upsert", "insert"])
def test_dead_letters_that_were_replayed_since(world: World, spark: Any, insert_mode: str):
    """They stood aside when the records around them were compared, and no later run reads those again."""

    def go() -> Any:
        return run(world.settings(), lambda _: None, session=spark)[0]

    def rows() -> dict[str, list[Any]]:
        return {table: world.run(f"SELECT * FROM {table} ORDER BY id") for table in world.topics}

    def put(wanted: dict[str, list[Any]]) -> None:
        for table, present in rows().items():
            for row in set(present) - set(wanted[table]):
                world.run(f"DELETE FROM {table} WHERE id = %s", [row[0]])
            for row in set(wanted[table]) - set(present):
                world.run(f"INSERT INTO {table} VALUES ({', '.join(['%s'] * len(row))})", row)

    write_journal_by(world, insert_mode)
    world.transfer(*range(1, 8))
    world.apply()
    aside, begun = rows(), dict(world.run("SELECT source, next_offset FROM oncebox.position"))
    world.delete(4)
    world.transfer(5, version=1)
    world.transfer(8)
    world.apply()
    right = rows()
    put(aside)
    for topic in world.topics.values():
        for message in read_committed(world.servers, topic):
            source = world.sources[topic, message.partition() or 0]
            if (message.offset() or 0) >= begun[source]:
                world.run(
                    "INSERT INTO oncebox.dead_letter (relay, unit, state, source, record_offset, key, value, error, "
                    "record_at) VALUES (%s, 1, 'parked', %s, %s, %s, %s, '', now())",
                    [RELAY, source, message.offset(), message.key(), message.value()],
                )
    for _ in range(2):
        parked = go()
        assert (parked.exit_code, parked.findings, parked.parked) == (0, (), {"parked": 5})
    assert parked.kind == "incremental"
    world.run("UPDATE oncebox.dead_letter SET state = 'replayed', resolved_at = now()")
    for is_lost in (False, True):
        if is_lost:  # the letters are kept
            lose_records(world, OFFSET_END)
        replayed = go()
        assert (replayed.kind, replayed.exit_code) == ("incremental", 1)
        assert {(finding.kind, finding.where): finding.count for finding in replayed.findings} == {
            (Kind.ROW_OLDER, "public.accounts"): 2,
            (Kind.ROW_MISSING, "public.accounts"): 1,
            (Kind.ROW_MISSING, "public.journal"): 2,
        }
    put(right)
    for _ in range(2):
        mended = go()
        assert (mended.kind, mended.exit_code, mended.findings) == ("incremental", 0, ()), mended.sentence


def test_a_row_written_since_whose_record_is_past_retention(world: World, spark: Any):
    def go() -> Any:
        return run(world.settings(), lambda _: None, session=spark)[0]

    world.transfer(*range(1, 21))
    world.apply()
    assert go().exit_code == 0
    world.transfer(30)
    world.apply()
    lose_records(world, 4)
    quiet = go()
    assert (quiet.kind, quiet.exit_code, quiet.unchecked) == ("incremental", 0, ())  # all of it was checked before
    (one, other) = world.run("SELECT id, oncebox_source, oncebox_offset FROM accounts ORDER BY oncebox_offset LIMIT 2")
    world.run("UPDATE accounts SET balance = -1 WHERE id = %s", [one[0]])
    changed = go()
    assert (changed.findings, changed.exit_code) == ((), 2)
    since = f"rows written since run {quiet.run} name records that are past retention: not checked"
    assert changed.unchecked == (f"public.accounts: 1 {since}",)
    # A dead letter that was replayed is still there to compare with.
    account = {"id": other[0], "name": "mended", "balance": 7, "changed": "2026-01-02T03:04:05Z"}
    world.run(
        "UPDATE accounts SET name = 'mended', balance = 7, changed = '2026-01-02T03:04:05Z' WHERE id = %s", [other[0]]
    )
    world.run(
        "INSERT INTO oncebox.dead_letter (relay, unit, state, source, record_offset, key, value, error, record_at) "
        "VALUES (%s, 1, 'replayed', %s, %s, %s, %s, '', now())",
        [RELAY, other[1], other[2], str(other[0]).encode(), json.dumps(account).encode()],
    )
    assert go().unchecked == changed.unchecked
    world.run("UPDATE accounts SET name = 'by hand' WHERE id = %s", [other[0]])
    assert [(finding.kind, finding.count) for finding in go().findings] == [(Kind.ROW_DIFFERS, 1)]


def lose_records(world: World, before: int) -> None:
    """As retention would, of each partition of the accounts."""
    admin = AdminClient({"bootstrap.servers": world.servers})
    places = [TopicPartition(world.topics["accounts"], partition, before) for partition in range(world.partitions)]
    for each in admin.delete_records(places).values():
        each.result(30)
