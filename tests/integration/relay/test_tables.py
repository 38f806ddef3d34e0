"""Tables that the relay makes and changes itself, the dry run, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from oncebox.local import LocalPostgres
from relay.config import RelaySettings
from relay.database import connect
from relay.schema_changes import create_missing
from tests.support.relay import GUARD, Relays, call

if TYPE_CHECKING:
    from pathlib import Path

    from oncebox.local import LocalKafka
    from tests.support.coordinator import Coordinators
    from tests.support.kafka import TopicFactory


def send(kafka: LocalKafka, topic: str, *values: dict[str, object]) -> None:
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for value in values:
        producer.produce(topic, json.dumps(value).encode(), key=str(value["id"]).encode())
    producer.flush(30)


def command(relays: Relays, *words: str) -> subprocess.CompletedProcess[str]:
    place = [sys.executable, "-c", "from oncebox.cli import main; main()", "relay"]
    return subprocess.run(
        [*place, *words, "--config", str(relays.config)], capture_output=True, text=True, check=False, timeout=180
    )


def test_two_relays_that_start_at_once_create_a_table_once(relays: Relays) -> None:
    columns = {"id": "int"}
    relays.configure([{"topic": "orders", "table": "made", "key": ["id"], "columns": columns, "auto_create": True}])
    settings = RelaySettings.model_validate(relays.settings)
    with connect(settings, "one") as one, connect(settings, "two") as two, ThreadPoolExecutor(1) as thread:
        with one.transaction():
            create_missing(one, settings)
            other = thread.submit(create_missing, two, settings)
            relays.wait_for("SELECT 1 FROM pg_locks WHERE NOT granted AND locktype = 'advisory'", [(1,)])
        other.result(30)
        assert two.execute("SELECT count(*) FROM made").fetchall() == [(0,)]


def test_created_evolved_checked_and_told(kafka: LocalKafka, new_topic: TopicFactory, relays: Relays) -> None:
    topic = new_topic()
    columns = {"id": "int", "tags": "text[]", "who": {"type": "varchar(20)", "path": "customer.name"}}
    relays.run(f"CREATE TABLE grows (id smallint PRIMARY KEY, own bigint GENERATED ALWAYS AS IDENTITY, {GUARD})")
    relays.configure(
        [
            {"topic": topic, "table": "made", "key": ["id"], "columns": columns, "auto_create": True},
            {"topic": topic, "table": "grows", "key": ["id"], "auto_evolve": True},
        ],
        on_error="park",
    )
    send(kafka, topic, {"id": 1, "tags": ["a"], "customer": {"name": "Ada"}})
    checked = command(relays, "check")
    assert "ok      " in checked.stdout, checked.stderr
    assert relays.rows("SELECT to_regclass('made'), to_regclass('oncebox.relay')") == [(None, None)], (
        "it changes nothing"
    )

    relay = relays.start()
    relays.wait_for("SELECT id, tags, who FROM made", [(1, ["a"], "Ada")])
    relays.wait_for("SELECT id, tags, customer FROM grows", [(1, ["a"], {"name": "Ada"})])
    send(kafka, topic, {"id": 40000, "size": 1.5}, {"id": 3, "size": 2, "x'; --%s": True})
    relays.wait_for(
        'SELECT id, size, "x\'; --%s" FROM grows WHERE id > 1 ORDER BY id', [(3, 2.0, True), (40000, 1.5, None)]
    )
    assert relays.rows(
        "SELECT format_type(atttypid, atttypmod) FROM pg_attribute "
        "WHERE attrelid = 'grows'::regclass AND attname = 'id'"
    ) == [("bigint",)]

    # Columns that are not the record's to fill: adding them would not help.
    send(kafka, topic, {"id": 5, "own": 1}, {"id": 6, "oncebox_source": 1}, {"id": 7, "xmin": 1})
    parked = "SELECT count(*) FROM oncebox.dead_letter WHERE error LIKE '%unknown field%' AND state = 'parked'"
    relays.wait_for(parked, [(3,)])
    relays.run("UPDATE oncebox.dead_letter SET state = 'discarded'")

    send(kafka, topic, {"id": "no number"})
    relays.wait_for("SELECT state FROM oncebox.dead_letter WHERE state <> 'discarded'", [("parked",)])
    assert "problem" in command(relays, "check").stdout
    listed = command(relays, "dead-letters", "list")
    assert f"parked  {topic} partition 0 offset 6: Expected `int" in listed.stdout, listed.stderr
    for words in (("replay", "999"), ("discard", "999")):
        refused = command(relays, "dead-letters", *words)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "there is no" in refused.stderr
    assert "1 discarded" in command(relays, "dead-letters", "discard", listed.stdout.split()[0]).stdout
    send(kafka, topic, {"id": "no number either"})
    relays.wait_for("SELECT state FROM oncebox.dead_letter WHERE state <> 'discarded'", [("parked",)])
    (letter,) = relays.rows("SELECT id::text FROM oncebox.dead_letter WHERE state = 'parked'")[0]
    mended = relays.config.with_name("mended.json")
    mended.write_text('{"id": 77}')
    assert command(relays, "dead-letters", "fix", letter, "--value", str(mended)).returncode == 0
    assert "1 queued" in command(relays, "dead-letters", "replay", letter).stdout
    relays.wait_for("SELECT count(*) FROM made WHERE id = 77", [(1,)])
    relays.wait_for("SELECT count(*) FROM oncebox.dead_letter WHERE state = 'replayed'", [(1,)])
    assert "no parked dead letter" in command(relays, "dead-letters", "fix", letter, "--value", str(mended)).stderr

    assert command(relays, "pause").returncode == 0
    relays.wait_until(lambda: call(relay, "GetStatus") == "PAUSED", relay.log_tail)
    send(kafka, topic, {"id": 9})
    status = command(relays, "status")
    assert f"{topic}:0  at 8 of 9, lag 1 records" in status.stdout, status.stderr
    assert "paused" in status.stdout
    assert relays.rows("SELECT count(*) FROM made WHERE id = 9") == [(0,)]
    assert command(relays, "resume").returncode == 0
    relays.wait_for("SELECT count(*) FROM made WHERE id = 9", [(1,)])
    rewound = command(relays, "rewind", "--topic", topic, "--to", "earliest")
    assert f"{topic}:0  from 0" in rewound.stdout, rewound.stderr
    relays.wait_for("SELECT next_offset FROM oncebox.position", [(9,)])
    relays.run("INSERT INTO made (id) VALUES (1000)")
    assert f"{topic}:0  from 0" in command(relays, "rebuild", "--topic", topic, "--yes").stdout
    relays.wait_for("SELECT id FROM made WHERE id IN (1, 9, 1000) ORDER BY id", [(1,), (9,)])
    assert "unknown" in command(relays, "rewind", "--topic", "unknown", "--to", "earliest").stderr


def test_the_check_says_what_is_left_out(kafka: LocalKafka, new_topic: TopicFactory, relays: Relays) -> None:
    topic = new_topic()
    send(kafka, topic, {"id": 1, "size": 3})
    table = {"topic": topic, "table": "made", "key": ["id"], "auto_create": True, "columns": {"id": "bigint"}}
    relays.configure([table])
    assert "auto_evolve" not in command(relays, "check").stdout
    relays.configure([table | {"auto_evolve": True}])
    checked = command(relays, "check")
    assert 'ok      "public"."made": `columns` says what is taken, so that auto_evolve adds nothing' in checked.stdout


@pytest.mark.parametrize("mode", ["partition", "transaction"])
def test_the_check_blames_no_sample_for_a_row_that_is_still_to_come(
    kafka: LocalKafka, shared_coordinator: Coordinators, new_topic: TopicFactory, relays: Relays, mode: str
) -> None:
    orders, items = new_topic(), new_topic()
    send(kafka, items, {"id": 1, "order_id": 7}, {"id": 2, "order_id": None})
    relays.run(
        f"CREATE TABLE orders (id bigint PRIMARY KEY, {GUARD});"
        f"CREATE TABLE items (id bigint PRIMARY KEY, order_id bigint REFERENCES orders, {GUARD})"
    )
    tables = [{"topic": orders, "table": "orders", "key": ["id"]}, {"topic": items, "table": "items", "key": ["id"]}]
    relays.configure(tables, mode=mode, feed_topic=shared_coordinator.feed_topic)
    checked = command(relays, "check")
    if mode == "partition":  # nothing orders two topics there
        assert "items_order_id_fkey" in checked.stdout
        assert checked.returncode
        return
    assert "ok      1 sample records refer to rows that are not there" in checked.stdout
    assert "ok      1 sample records fit" in checked.stdout
    assert checked.returncode == 0


def test_a_key_that_is_deferrable_is_refused(kafka: LocalKafka, new_topic: TopicFactory, relays: Relays) -> None:
    topic = new_topic()
    send(kafka, topic, {"id": 1})
    relays.run(f"CREATE TABLE late (id bigint PRIMARY KEY DEFERRABLE, {GUARD})")
    relays.configure([{"topic": topic, "table": "late", "key": ["id"]}])
    told = command(relays, "check").stdout
    assert 'the primary key or unique constraint of "public"."late" on (id) is DEFERRABLE' in told, told
    relays.run("CREATE UNIQUE INDEX ON late (id)")
    assert "1 sample records fit" in command(relays, "check").stdout


@pytest.mark.parametrize("mode", ["partition", "transaction"])
def test_it_waits_for_a_database_that_is_killed(
    kafka: LocalKafka, shared_coordinator: Coordinators, new_topic: TopicFactory, tmp_path: Path, mode: str
) -> None:
    """PostgreSQL is killed under load, twice, and comes back; nothing is lost or doubled."""
    topic = new_topic(partitions=2)
    with (
        LocalPostgres(tmp_path / "postgres") as server,
        Relays(kafka.bootstrap_servers, server.dsn, tmp_path) as relays,
    ):
        relays.run(f"CREATE TABLE log (id bigint, {GUARD})")
        relays.configure(
            [{"topic": topic, "table": "log", "insert_mode": "insert"}],
            limits={"batch_rows": 200},
            mode=mode,
            feed_topic=shared_coordinator.feed_topic,
        )
        relay = relays.start()
        sent = 0
        producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
        for _ in range(2):
            for _ in range(10_000):
                producer.produce(topic, json.dumps({"id": sent}).encode(), key=str(sent).encode())
                sent += 1
                producer.poll(0)
            producer.flush(30)
            relays.wait_until(lambda: bool(relays.rows("SELECT 1 FROM log LIMIT 1")), relay.log_tail)
            server.kill()
            relays.wait_until(lambda: relay.log_contains("waits and tries again"), relay.log_tail)
            server.restart()
        relays.wait_for("SELECT count(*), count(DISTINCT id) FROM log", [(sent, sent)])
        assert relays.rows("SELECT count(*) FROM oncebox.dead_letter") == [(0,)]
        assert relay.running
