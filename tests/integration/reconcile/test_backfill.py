"""A table is rebuilt from its topics at the point where the relay is. Killed anywhere it is done or not begun; a
running relay goes on; what could not be rebuilt exactly is refused.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    RESOURCE_TOPIC,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from oncebox import blocking, cli
from oncebox.settings import KafkaSection, PostgresSection
from spark_jobs.backfill import OWNER
from spark_jobs.config import ReconcileSettings
from spark_jobs.errors import CannotCheckError, ReconcileError
from spark_jobs.jobs.backfill import main, run
from spark_jobs.reconcile import reconcile
from spark_jobs.staging import LOCK
from tests.integration.reconcile.test_with_relay import KINDS, document
from tests.support.kafka import await_partitions
from tests.support.relay import GUARD, Relays

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spark_jobs.result import Result
    from spark_jobs.swap import Changes
    from tests.support.coordinator import Coordinators
    from tests.support.kafka import TopicFactory
    from tests.support.reconcile import World

    Backfilled = Callable[..., Changes]

STATE = "SELECT source, next_offset, applied_beyond::text, fence FROM oncebox.position ORDER BY source"
STAGED = "SELECT relname FROM pg_class WHERE relname LIKE 'backfill_staged_%'"


@pytest.fixture
def backfilled(spark: Any, world: World) -> Backfilled:
    def backfill(
        table: str = "accounts", *, is_dry: bool = False, progress: Callable[[str], None] = lambda _: None
    ) -> Changes:
        return run(world.settings(), table, progress, is_dry=is_dry, session=spark)

    return backfill


def rows(world: World, table: str) -> list[Any]:
    return sorted(world.run(f"SELECT * FROM {table}"), key=repr)


def counted(changes: Changes) -> tuple[int, int, int, int]:
    return changes.rows, changes.deleted, changes.changed, changes.inserted


def produce(world: World, partition: int, key: str, value: bytes | None, timestamp_ms: int = 0) -> None:
    producer = Producer({"bootstrap.servers": world.servers})
    producer.produce(world.topics["accounts"], value, key=key.encode(), partition=partition, timestamp=timestamp_ms)
    producer.flush(30)


@pytest.fixture
def command(spark: Any, world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`oncebox reconcile backfill`, with the tests' Spark."""

    @contextmanager
    def used(*_: object, **__: object) -> Iterator[Any]:
        yield spark

    def call(*arguments: str) -> int:
        given = ["reconcile", "backfill", *arguments, "--feed-topic", world.coordinators.feed_topic]
        with monkeypatch.context() as patched:
            patched.setattr("spark_jobs.session.used_session", used)
            with pytest.raises(SystemExit) as ended:
                cli.main(given)
        return int(ended.value.code or 0)

    monkeypatch.setenv("ONCEBOX_BOOTSTRAP_SERVERS", world.servers)
    monkeypatch.setenv("ONCEBOX_DSN", world.dsn)
    monkeypatch.setenv("ONCEBOX_RECONCILE_FEED_TOPIC", world.coordinators.feed_topic)
    monkeypatch.setattr("spark_jobs.session.submitted_session", lambda: spark)
    return call


def test_a_damaged_table_is_as_its_topic_says(
    world: World,
    backfilled: Backfilled,
    command: Callable[..., int],
    check: Callable[..., Result],
    capsys: pytest.CaptureFixture[str],
):
    world.transfer(*range(1, 12))
    world.transfer(3, 4, version=1)
    world.transfer(6, version=9, commit=False)
    world.delete(5)
    # Each record of the journal is a row of its own, and one of them deletes nothing.
    world.run("ALTER TABLE journal DROP CONSTRAINT journal_pkey, ADD COLUMN line serial")
    world.run(
        'UPDATE oncebox.target SET mapping = mapping || \'{"insert_mode": "insert", "key": []}\' '
        "WHERE table_name = 'journal'"
    )
    world.run("ALTER TABLE accounts ADD COLUMN note text")
    world.run("CREATE UNIQUE INDEX journal_unique ON journal (id)")
    world.apply()
    world.run("DROP INDEX journal_unique")
    world.run("UPDATE accounts SET note = 'mine' WHERE id IN (1, 11)")
    right, entries, state = rows(world, "accounts"), rows(world, "journal"), world.run(STATE)
    world.run("DELETE FROM accounts WHERE id = 10")
    world.run("UPDATE accounts SET balance = 7, name = NULL WHERE id = 11")
    world.run("INSERT INTO accounts (id, name) VALUES (1000, 'by hand')")
    world.run("UPDATE accounts SET oncebox_offset = 1000000 WHERE id = 3")  # no record could ever replace it
    world.run("INSERT INTO journal SELECT * FROM journal WHERE id = 2000")
    world.run("DELETE FROM journal WHERE id = 7000")
    spoilt = rows(world, "accounts")

    assert command("accounts") == 0
    counts = "10 rows: 1 deleted, 2 changed, 1 inserted"
    assert capsys.readouterr().out == f"accounts: would have {counts}; rolled back, --apply does it\n"
    assert (rows(world, "accounts"), world.run(STATE), world.run(STAGED)) == (spoilt, state, [])
    assert main(["accounts", "--apply"]) == 0
    assert f"accounts: has {counts}; the relay goes on from where it was" in capsys.readouterr().err
    assert rows(world, "accounts") == right
    assert counted(backfilled("public.journal")) == (13, 1, 0, 1)
    assert [row[:2] for row in rows(world, "journal")] == [row[:2] for row in entries]
    assert [row[:3] for row in world.run(STATE)] == [row[:3] for row in state]
    assert world.run(STAGED) == []
    result = check()
    assert (result.findings, result.exit_code) == ((), 0)
    assert (command("nothing", "--apply"), main(["nothing"]), main([])) == (4, 4, 4)


def test_killed_anywhere_it_is_done_or_not_begun(world: World, backfilled: Backfilled):
    world.transfer(*range(1, 6))
    world.apply()
    right = rows(world, "accounts")
    world.run("DELETE FROM accounts WHERE id < 3")
    spoilt, state = rows(world, "accounts"), world.run(STATE)

    def killed_at(step: str) -> Callable[[str], None]:
        def progress(text: str) -> None:
            if step in text:
                world.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s", [OWNER])

        return progress

    for step in ("offsets are staged", "the relay is held", "verifying"):
        with pytest.raises(CannotCheckError, match="the database failed"):
            backfilled(progress=killed_at(step))
        assert (rows(world, "accounts"), world.run(STATE)) == (spoilt, state)
        assert len(world.run(STAGED)) == 1  # that of the run before was dropped
    backfilled(progress=killed_at("committed"))
    assert (rows(world, "accounts"), world.run(STAGED)) == (right, [])


@pytest.mark.parametrize("rule", ["CASCADE", "SET NULL"])
def test_a_row_does_not_go_that_takes_others_with_it(world: World, backfilled: Backfilled, rule: str):
    world.transfer(1, 2)
    world.apply()
    world.run("INSERT INTO accounts (id, name) VALUES (1000, 'by hand')")
    world.run(f"CREATE TABLE child (account bigint REFERENCES accounts ON DELETE {rule})")
    world.run("INSERT INTO child VALUES (1), (1000)")
    spoilt, state = rows(world, "accounts"), world.run(STATE)
    for is_dry in (True, False):
        with pytest.raises(ReconcileError, match=r"1 rows of public\.child refer to a row of public\.accounts"):
            backfilled(is_dry=is_dry)
        assert (rows(world, "accounts"), world.run(STATE)) == (spoilt, state)
        assert rows(world, "child") == [(1,), (1000,)]
    world.run("DELETE FROM child WHERE account = 1000")
    assert counted(backfilled()) == (2, 1, 0, 0)
    assert rows(world, "child") == [(1,)]


def test_nobody_is_waited_for_without_end(world: World, backfilled: Backfilled, monkeypatch: pytest.MonkeyPatch):
    """Behind a lock that is waited for, the relay and all other writers of the table wait, too."""
    world.transfer(1, 2)
    world.apply()
    world.run("DELETE FROM accounts WHERE id = 1")
    spoilt, state = rows(world, "accounts"), world.run(STATE)
    monkeypatch.setattr("spark_jobs.backfill.LOCK_WAIT_MS", 100)
    for held in ("UPDATE accounts SET name = 'mine'", "UPDATE oncebox.relay SET beat_at = now()"):
        with psycopg.connect(world.dsn, options="-c search_path=public") as other:
            other.execute(held)
            with pytest.raises(CannotCheckError, match=r"somebody else has locked .*, for 0\.1 s by now"):
                backfilled()
            other.rollback()
        assert (rows(world, "accounts"), world.run(STATE), world.run(STAGED)) == (spoilt, state, [])
    assert counted(backfilled()) == (2, 0, 0, 1)


@pytest.mark.parametrize(("mode", "table"), [("transaction", "things"), ("partition", "lines")])
def test_a_running_relay_goes_on(
    mode: str,
    table: str,
    relays: Relays,
    shared_coordinator: Coordinators,
    new_topic: TopicFactory,
    spark: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    # What the relay applies meanwhile is staged in a second round, and the rest while it is held.
    monkeypatch.setattr("spark_jobs.backfill.HELD_OFFSETS_MAX", 10)
    monkeypatch.setattr("spark_jobs.backfill.ROUNDS_MAX", 2)
    topic, other = (new_topic(partitions=2) for _ in range(2))
    relays.run(f"CREATE TABLE public.things ({KINDS}, {GUARD})")
    relays.run('CREATE TABLE public.copies (id text COLLATE "POSIX" PRIMARY KEY, whole bigint)')
    relays.run(f"CREATE TABLE public.lines (id text, version bigint, {GUARD})")
    relays.configure(
        [
            {"topic": topic, "table": "public.things", "key": ["id"]},
            {"topic": topic, "table": "public.copies", "key": ["id"], "include": ["id", "whole"], "guard": False},
            {"topic": other, "table": "public.lines", "insert_mode": "insert"},
        ],
        mode=mode,
        feed_topic=shared_coordinator.feed_topic,
    )
    relays.start()
    relays.wait_for("SELECT count(*) FROM oncebox.position", [(4,)])
    settings = ReconcileSettings(
        kafka=KafkaSection(bootstrap_servers=shared_coordinator.bootstrap_servers),
        postgres=PostgresSection(dsn=relays.dsn),  # type: ignore[arg-type]
        log_topic=shared_coordinator.log_topic,
        feed_topic=shared_coordinator.feed_topic,
        full=True,
    )
    stop = threading.Event()

    def write() -> None:
        version = 0
        with blocking.Producer(
            shared_coordinator.bootstrap_servers, shared_coordinator.addresses, transactional_id=topic
        ) as producer:
            while not stop.is_set():
                version += 1
                transaction = producer.begin()
                for number in range(version % 7, 40, 7):
                    key = f"n-{number}".encode()
                    is_delete = number % 11 == version % 5
                    value = None if is_delete else json.dumps(document(number, version)).encode()
                    transaction.send(topic, value, key=key)
                    line = json.dumps({"id": f"n-{number}", "version": version})
                    transaction.send(other, line.encode(), key=key)
                if version % 5:
                    transaction.commit()
                else:
                    transaction.abort()

    def applied() -> int:
        return int(relays.rows("SELECT coalesce(sum(next_offset), 0) FROM oncebox.position")[0][0])

    moved: list[str] = []

    def progress(text: str) -> None:
        """The relay is always ahead of what is staged when it is held."""
        if "are staged" in text and not moved:
            before = applied()
            relays.wait_until(lambda: applied() > before + 50, lambda: "the relay stands still", timeout_s=120)
        if "the relay is held" in text:
            moved.append(text)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        relays.wait_until(lambda: applied() > 300, lambda: "the relay stands still", timeout_s=120)
        if table == "things":  # as no later record could mend it
            relays.run(
                "BEGIN; LOCK TABLE things IN SHARE ROW EXCLUSIVE MODE; UPDATE things SET ratio = 1, text = 'by hand', "
                "oncebox_offset = oncebox_offset + 1000000; COMMIT"
            )
        else:
            relays.run("DELETE FROM lines WHERE version % 3 = 1")
        run(settings, table, progress, is_dry=False, session=spark)
        assert "applied 0 offsets" not in moved[0]
        before = applied()
        relays.wait_until(lambda: applied() > before + 200, lambda: "the relay does not go on", timeout_s=120)
    finally:
        stop.set()
        writer.join(60)
    # Most rows are by now the relay's own work: a backfill would write the very same.
    assert counted(run(settings, table, lambda _: None, is_dry=True, session=spark))[1:] == (0, 0, 0)
    relays.run("INSERT INTO public.copies VALUES ('by hand', 1)")
    assert counted(run(settings, "copies", lambda _: None, is_dry=False, session=spark))[1:] == (1, 0, 0)
    result, _, _ = reconcile(spark, settings, lambda _: None)
    assert (result.findings, result.unchecked) == ((), ())


def test_a_key_that_moved_to_another_partition(world: World, backfilled: Backfilled):
    """The newer one counts, by the records' times as in the comparison; the guard remembers the other."""
    topic = world.topics["accounts"]
    at_ms = time.time_ns() // 1_000_000  # what is a week old is deleted at any moment
    produce(world, 0, "1", b'{"id": 1, "name": "old"}', at_ms - 1_000)
    produce(world, 1, "1", b'{"id": 1, "name": "new"}', at_ms)
    world.run("UPDATE oncebox.position SET next_offset = 1, high_offset = 1")
    world.run(
        "UPDATE oncebox.position SET next_offset = 0, high_offset = 0 WHERE source > %s", [world.sources[topic, 1]]
    )
    backfilled()
    assert world.run("SELECT name, oncebox_source FROM accounts") == [("new", world.sources[topic, 1])]
    remembered = world.run("SELECT target_table, row_key, source, record_offset FROM oncebox.tombstone")
    assert remembered == [('"public"."accounts"', [1], world.sources[topic, 0], 0)]
    produce(world, 0, "1", b'{"id": 1, "name": "as new"}', at_ms)
    world.run(
        "UPDATE oncebox.position SET next_offset = 2, high_offset = 2 WHERE source = %s", [world.sources[topic, 0]]
    )
    with pytest.raises(ReconcileError, match="1 keys have records of the same time in two partitions"):
        backfilled()


def test_a_partition_that_waited_has_the_newer_records(
    world: World, backfilled: Backfilled, check: Callable[..., Result]
):
    """The relay begins with one that was added when all that stood in the others is applied, whatever the times say."""
    topic = world.topics["accounts"]
    old, new = (world.sources[topic, partition] for partition in range(2))
    at_ms = time.time_ns() // 1_000_000
    for key in ("1", "2", "3"):
        produce(world, 0, key, f'{{"id": {key}, "name": "old"}}'.encode(), at_ms)
    produce(world, 1, "1", b'{"id": 1, "name": "new"}', at_ms - 1_000)
    produce(world, 1, "2", None, at_ms)
    produce(world, 1, "3", b'{"id": 3, "name": "older"}', at_ms - 1_000)
    # By somebody who had not heard of the new partition yet: what came behind that is told by the times.
    produce(world, 0, "3", b'{"id": 3, "name": "newest"}', at_ms + 1)
    world.advance("accounts")
    world.run("UPDATE oncebox.position SET waits_for = %s WHERE source = %s", [json.dumps({str(old): 3}), new])
    world.run(
        "INSERT INTO accounts (id, name, oncebox_source, oncebox_offset) "
        "VALUES (1, 'new', %s, 0), (3, 'newest', %s, 3)",
        [new, old],
    )
    result = check()
    assert (result.findings, result.unchecked) == ((), ())
    assert counted(backfilled()) == (2, 0, 0, 0)


def test_dead_letters_count_as_they_were_replayed(world: World, backfilled: Backfilled):
    source = world.sources[world.topics["accounts"], 0]
    for offset, name in enumerate(("right", "parked", "spoilt")):
        produce(world, 0, str(offset // 2), json.dumps({"id": offset // 2, "name": name}).encode())
        if name != "right":
            world.run(
                "INSERT INTO oncebox.dead_letter (relay, source, record_offset, record_at, value, unit, error, state) "
                "VALUES ('test', %s, %s, now(), '{\"id\": 1, \"name\": \"mended\"}', 1, '', %s)",
                [source, offset, "parked" if name == "parked" else "replayed"],
            )
    world.run("UPDATE oncebox.position SET next_offset = 3, high_offset = 3 WHERE source = %s", [source])
    backfilled()
    assert world.run("SELECT id, name FROM accounts ORDER BY id") == [(0, "right"), (1, "mended")]

    def replayed(text: str) -> None:
        if "are staged" in text:
            world.run("UPDATE oncebox.dead_letter SET state = 'replayed'")

    with pytest.raises(CannotCheckError, match="dead letters were settled meanwhile"):
        backfilled(progress=replayed)


def set_policy(admin: AdminClient, topic: str, policy: str) -> None:
    resource = ConfigResource(RESOURCE_TOPIC, topic)
    resource.add_incremental_config(ConfigEntry("cleanup.policy", policy, incremental_operation=AlterConfigOpType.SET))
    admin.incremental_alter_configs([resource])[resource].result(60)
    asked, deadline = ConfigResource(RESOURCE_TOPIC, topic), time.monotonic() + 60
    while admin.describe_configs([asked])[asked].result(60)["cleanup.policy"].value != policy:
        assert time.monotonic() < deadline


def test_what_cannot_be_rebuilt_exactly_is_refused(world: World, backfilled: Backfilled):
    world.transfer(*range(1, 20))
    world.apply()
    topic, right = world.topics["accounts"], rows(world, "accounts")

    def refused(match: str, table: str = "accounts", kind: type[Exception] = ReconcileError) -> None:
        with pytest.raises(kind, match=match):
            backfilled(table)
        assert rows(world, "accounts") == right

    refused("writes no table public.nothing; its tables: public.accounts, public.journal", "nothing")
    with psycopg.connect(world.dsn) as other:
        other.execute("SELECT pg_advisory_lock(%s)", [LOCK])
        refused("another backfill is under way")
    mapped = "UPDATE oncebox.target SET mapping = mapping || %s WHERE table_name = 'accounts'"
    for change, back, match in (
        ({"ordering": "changed"}, {"ordering": None}, "with an ordering column"),
        ({"insert_mode": "insert", "guard": False}, {"insert_mode": "upsert", "guard": True}, "without a key"),
    ):
        world.run(mapped, [json.dumps(change)])
        refused(match)
        world.run(mapped, [json.dumps(back)])
    positions = "UPDATE oncebox.position SET {} WHERE source = %s"
    source = world.sources[topic, 0]
    world.run(positions.format("high_offset = high_offset + 5"), [source])
    refused("was rewound and is not back")
    world.run(positions.format("high_offset = next_offset, start_offset = 2"), [source])
    refused("rows come from before the relay's start")
    world.run(mapped, [json.dumps({"guard": False})])
    refused("the relay began at 2, and without the guard")
    world.run(mapped, [json.dumps({"guard": True})])
    world.run(positions.format("start_offset = 0"), [source])
    # A row of a compacted topic that names an offset which holds no record (any more).
    world.run(
        "UPDATE accounts SET oncebox_offset = (SELECT max(next_offset) - 1 FROM oncebox.position WHERE source = %s) "
        "WHERE id = (SELECT min(id) FROM accounts WHERE oncebox_source = %s)",
        [source, source],
    )
    right = rows(world, "accounts")
    admin = AdminClient({"bootstrap.servers": world.servers})
    for policy in ("compact", "delete"):
        set_policy(admin, topic, policy)
        if policy == "compact":
            refused("1 rows name records that their compacted topic does not have", kind=CannotCheckError)
    assert counted(backfilled()) == (19, 0, 1, 0)
    # A row that PostgreSQL refuses to hold.
    world.run("ALTER TABLE accounts ADD CONSTRAINT small CHECK (balance < 5) NOT VALID")
    world.run("DELETE FROM accounts WHERE id = 12")
    right = rows(world, "accounts")
    refused('PostgreSQL refuses: .*"small"; nothing is changed')
    admin.delete_records([TopicPartition(topic, 0, 3)])[TopicPartition(topic, 0)].result(60)
    refused("retention has removed the offsets 0 to 2")
    admin.delete_topics([topic], operation_timeout=30)[topic].result(60)
    await_partitions(world.servers, topic, 0)
    refused("the topic was deleted")
