"""Each kind of damage, done by hand, is found and named, and nothing else is. A plan mends exactly that, twice is once,
and undo puts the damage back.
"""

from __future__ import annotations

import json
import uuid
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql

from oncebox import cli
from oncebox.settings import kafka_settings
from spark_jobs.database import digest_sql
from spark_jobs.errors import ReconcileError
from spark_jobs.findings import Kind
from spark_jobs.jobs.repair import plan_of
from spark_jobs.queries import query
from spark_jobs.reconcile import reconcile
from spark_jobs.records import Record, to_json
from spark_jobs.repair import FORMAT, OVERTAKEN, REFERENCES, UNAPPLIED, apply_plan, apply_undo
from spark_jobs.settle import Settler
from spark_jobs.snapshot import Snapshot
from spark_jobs.targets import by_table, config_hash, read_target
from spark_jobs.verdict import Verdict
from tests.support.coordinator import read_committed
from tests.support.reconcile import mapping

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from spark_jobs.result import Result
    from tests.support.reconcile import World

ROWS = "SELECT * FROM accounts ORDER BY id"
ENTRIES = "SELECT * FROM journal ORDER BY id"


def damage(world: World, old: tuple[int, int]) -> None:
    """Each kind, each in a row of its own. `old`: a record of account 5, which is deleted."""
    world.run("DELETE FROM accounts WHERE id = 10")
    world.run("UPDATE accounts SET balance = 7, name = NULL WHERE id = 11")
    world.run("INSERT INTO accounts (id, name) VALUES (1000, 'by hand')")
    world.run("UPDATE accounts SET oncebox_offset = 0, name = 'old' WHERE id = 3 AND oncebox_offset > 0")
    world.run("INSERT INTO accounts VALUES (5, 'back', 5, now(), %s, %s)", old)
    world.run("ALTER TABLE journal DROP CONSTRAINT journal_pkey")
    world.run("INSERT INTO journal SELECT * FROM journal WHERE id = 2000")
    world.run("UPDATE journal SET account = 77 WHERE ctid = (SELECT min(ctid) FROM journal WHERE id = 2000)")
    # Over a row and as a new one: data of an aborted transaction, and a half of one that is not applied yet.
    leaked = world.next_offset(6)
    world.transfer(6, version=9, commit=False)
    world.transfer(7, 50, version=4)
    placed = {
        each.key(): (world.sources[each.topic() or "", each.partition() or 0], each.offset())
        for each in read_committed(world.servers, world.topics["accounts"])
    }
    world.run("UPDATE accounts SET balance = 6.09, oncebox_offset = %s WHERE id = 6", [leaked])
    world.run(
        "INSERT INTO accounts SELECT 77, 'leaked', 1, now(), oncebox_source, %s FROM accounts WHERE id = 6", [leaked]
    )
    world.run(
        "UPDATE accounts SET name = 'né 7.4', balance = 7.04, oncebox_offset = %s WHERE id = 7", [placed[b"7"][1]]
    )
    world.run("INSERT INTO accounts VALUES (50, 'né 50.4', 50.04, '2026-01-02T03:04:05.678Z', %s, %s)", placed[b"50"])


def test_damage_is_found_named_mended_and_put_back(
    world: World, check: Callable[..., Result], spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    world.transfer(*range(1, 12))
    world.transfer(3, 4, version=1)
    world.apply()
    (old,) = world.run("SELECT oncebox_source, oncebox_offset FROM accounts WHERE id = 5")
    world.delete(5)
    world.apply()
    right, entries = world.run(ROWS), world.run(ENTRIES)
    damage(world, old)
    spoilt = world.run(ROWS)

    settings = world.settings(full=True)
    result, cut, tables = reconcile(spark, settings, lambda _: None)
    assert {(finding.kind, finding.where): finding.count for finding in result.findings} == {
        (Kind.ROW_MISSING, "public.accounts"): 1,
        (Kind.ROW_DIFFERS, "public.accounts"): 1,
        (Kind.ROW_EXTRA, "public.accounts"): 1,
        (Kind.ROW_OLDER, "public.accounts"): 2,
        (Kind.ABORTED_DATA, "public.accounts"): 2,
        (Kind.ATOMICITY_BROKEN, "public.accounts"): 2,
        (Kind.DUPLICATE, "public.journal"): 1,
    }
    assert (result.verdict, result.exit_code) == (Verdict.FINDINGS, 1)
    by_finding = {finding.kind: finding.samples for finding in result.findings}
    (missing,) = by_finding[Kind.ROW_MISSING]
    assert (missing.key, missing.expected.rpartition(":")[0].rpartition(":")[0]) == (
        {"id": "10"},
        world.topics["accounts"],
    )
    assert "transaction world-" in missing.detail
    assert all("transaction world-" in sample.detail for sample in by_finding[Kind.ATOMICITY_BROKEN])

    settler = Settler(spark, kafka_settings(settings.kafka), Snapshot(""), cut)
    plan = plan_of(result, cut, tables, settler, limit=100)
    by_key = {action["key_text"]: (action["do"], action["why"].partition(";")[0]) for action in plan["actions"]}
    assert by_key == {
        "10;": ("write", Kind.ROW_MISSING),
        "11;": ("write", Kind.ROW_DIFFERS),
        "1000;": ("delete", Kind.ROW_EXTRA),
        "3;": ("write", Kind.ROW_OLDER),
        "5;": ("delete", Kind.ROW_OLDER),
        "2000;": ("write", Kind.DUPLICATE),
        "6;": ("write", Kind.ABORTED_DATA),
        "77;": ("delete", Kind.ABORTED_DATA),
        "7;": ("write", Kind.ATOMICITY_BROKEN),
        "50;": ("delete", Kind.ATOMICITY_BROKEN),
    }
    assert len(plan["actions"]) == 10
    (file, undo, other) = (tmp_path / f"{name}.json" for name in ("plan", "undo", "other"))
    file.write_text(json.dumps(plan))

    def repair(*arguments: object) -> int:
        with pytest.raises(SystemExit) as ended:
            cli.main(["reconcile", "repair", *map(str, arguments), "--dsn", world.dsn])
        return int(ended.value.code or 0)

    # What cannot be undone is not done: a file of an earlier repair is never written over.
    undo.write_text("earlier")
    assert repair(file, "--undo-file", undo) == 4
    assert undo.read_text() == "earlier"
    undo.unlink()
    assert repair(file, "--undo-file", undo, "--dry-run") == 0
    assert (undo.exists(), world.run(ROWS)) == (False, spoilt)

    # A row that somebody has changed since the plan is left alone.
    world.run("UPDATE accounts SET balance = 8 WHERE id = 11")
    fences = world.run("SELECT fence FROM oncebox.position")
    assert repair(file, "--undo-file", undo) == 1
    assert world.run("SELECT fence FROM oncebox.position") != fences
    assert world.run("SELECT balance FROM accounts WHERE id = 11") == [(8,)]
    mended = next(row for row in right if row[0] == 11)
    world.run("UPDATE accounts SET name = %s, balance = %s WHERE id = 11", mended[1:3])
    assert (world.run(ROWS), world.run(ENTRIES)) == (right, entries)
    result = check()
    assert (result.findings, result.exit_code) == ((), 0)

    # Again: nothing is as the plan found it, so nothing is done, and there is nothing to undo.
    assert repair(file, "--undo-file", other) == 1
    assert (other.exists(), world.run(ROWS), world.run(ENTRIES)) == (False, right, entries)
    damaged = [row if row[0] != 11 else mended for row in spoilt]
    for _ in range(2):
        assert repair(undo, "--undo") == 0
        assert world.run(ROWS) == damaged
        assert sorted(world.run("SELECT id, account FROM journal WHERE id = 2000")) == [(2000, 2), (2000, 77)]

    # The relay comes to the transaction of which a half stood there: its guard keeps both rows, and a repair does too.
    world.advance("accounts")
    capsys.readouterr()
    assert repair(file, "--undo-file", other) == 1
    left_alone = {line.split()[3] for line in capsys.readouterr().out.splitlines() if OVERTAKEN in line}
    assert left_alone == {"6;:", "7;:", "50;:", "77;:"}
    names = world.run("SELECT id, name FROM accounts WHERE id IN (7, 50) ORDER BY id")
    assert names == [(7, "né 7.4"), (50, "né 50.4")]


@pytest.mark.postgres
def test_a_table_without_a_guard_is_left_alone_once_the_relay_has_gone_on(database: str):
    """Nobody remembers its deletes: the row that the plan misses may be one of them by now."""
    columns = {"id": "bigint", "name": "text"}
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute((files("relay") / "sql" / "schema.sql").read_text())
        connection.execute("CREATE TABLE public.bare (id bigint PRIMARY KEY, name text)")
        connection.execute("INSERT INTO oncebox.relay (relay, mode) VALUES ('r', 'partition')")
        connection.execute(
            "INSERT INTO oncebox.target (relay, topic, table_schema, table_name, mapping) "
            "VALUES ('r', 't', 'public', 'bare', %s)",
            [json.dumps(mapping(columns, ["id"], guard=False))],
        )
        connection.execute(
            "INSERT INTO oncebox.source (topic, topic_id, partition) VALUES ('t', %s, 0)", [uuid.uuid4()]
        )
        connection.execute(
            "INSERT INTO oncebox.position (relay, source, start_offset, next_offset, applied_beyond, high_offset) "
            "SELECT 'r', source, 0, 5, '{[7,9)}', 9 FROM oncebox.source"
        )
        ((source,),) = connection.execute("SELECT source FROM oncebox.source").fetchall()
        mappings = connection.execute(query("targets"), {"relay": "r"}).fetchall()
    record = Record(topic="t", partition=0, offset=2, timestamp_ms=0, key=b"2", value=b'{"id": 2, "name": "two"}')
    action = {"do": "write", "table": "public.bare", "key_text": "2;", "found": None, "copies": 0, "digest": None}
    plan: dict[str, Any] = {
        "format": FORMAT,
        "kind": "plan",
        "relay": "r",
        "config_hash": config_hash([(row[0], row[1], row[2], row[3]) for row in mappings]),
        "applied": {str(source): [[0, 5], [7, 9]]},
        "letters_replayed": 0,
        "actions": [{**action, "why": "row missing", "source": source, "record": to_json(record)}],
    }

    def repaired(**seen: Any) -> tuple[int, int]:
        done = apply_plan(database, plan | seen, keep=lambda _: None)
        assert all("the relay has applied more since the plan" in each for each in done["skipped"])
        return done["done"], len(done["skipped"])

    assert repaired(applied={str(source): [[0, 4], [7, 9]]}) == (0, 1)
    assert repaired(applied={str(source): [[0, 5]]}) == (0, 1)
    assert repaired(applied={}) == (0, 1)
    assert repaired(letters_replayed=1) == (0, 1)
    assert repaired() == (1, 0)


@pytest.mark.postgres
def test_a_row_is_not_brought_back_that_a_record_of_another_partition_has_deleted_since(database: str):
    """Its key has moved there with new partitions. No row was there to be taken over, so that nothing but the delete
    itself is remembered.
    """
    columns = {"id": "bigint", "name": "text"}
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute((files("relay") / "sql" / "schema.sql").read_text())
        connection.execute(
            "CREATE TABLE public.moved (id bigint PRIMARY KEY, name text, oncebox_source int, oncebox_offset bigint)"
        )
        connection.execute("INSERT INTO oncebox.relay (relay, mode) VALUES ('r', 'partition')")
        connection.execute(
            "INSERT INTO oncebox.target (relay, topic, table_schema, table_name, mapping) "
            "VALUES ('r', 't', 'public', 'moved', %s)",
            [json.dumps(mapping(columns, ["id"]))],
        )
        connection.execute(
            "INSERT INTO oncebox.source (topic, topic_id, partition) SELECT 't', %s, generate_series(0, 1)",
            [uuid.uuid4()],
        )
        connection.execute(
            "INSERT INTO oncebox.position (relay, source, start_offset, next_offset, high_offset) "
            "SELECT 'r', source, 0, 5, 5 FROM oncebox.source"
        )
        (old,), (new,) = connection.execute("SELECT source FROM oncebox.source ORDER BY partition").fetchall()
        mappings = connection.execute(query("targets"), {"relay": "r"}).fetchall()

        def deleted(source: int, offset: int, key: int) -> None:
            connection.execute(
                "INSERT INTO oncebox.tombstone (target_table, row_key, source, record_offset) "
                'VALUES (\'"public"."moved"\', jsonb_build_array(%s), %s, %s)',
                [key, source, offset],
            )

        def write(key: int) -> dict[str, Any]:
            value = json.dumps({"id": key, "name": "back"}).encode()
            record = Record(topic="t", partition=0, offset=2, timestamp_ms=0, key=None, value=value)
            row = {"do": "write", "table": "public.moved", "key_text": f"{key};", "found": None, "copies": 0}
            return {**row, "digest": None, "why": "row missing", "source": old, "record": to_json(record)}

        plan: dict[str, Any] = {
            "format": FORMAT,
            "kind": "plan",
            "relay": "r",
            "config_hash": config_hash([(row[0], row[1], row[2], row[3]) for row in mappings]),
            "applied": {str(old): [[0, 5]], str(new): [[0, 3]]},
            "letters_replayed": 0,
            "actions": [write(1), write(2), write(3), write(4)],
        }
        deleted(new, 2, 1)  # known to the plan, which has found the record that came later
        deleted(new, 3, 2)
        deleted(old, 1, 3)
        deleted(old, 4, 4)
        done = apply_plan(database, plan, keep=lambda _: None)
        assert sorted(connection.execute("SELECT id FROM public.moved").fetchall()) == [(1,), (3,)]
        # Nor one whose record the relay has not applied any more: it has read the topic again from where that begins by
        # now, or is on its way back, or the topic was made again.
        connection.execute("DELETE FROM public.moved")
        for change in (
            "UPDATE oncebox.position SET start_offset = 3 WHERE source = %s",
            "UPDATE oncebox.position SET start_offset = 0, next_offset = 2 WHERE source = %s",
            "DELETE FROM oncebox.position WHERE source = %s",
        ):
            connection.execute(change, [old])
            left = apply_plan(database, plan | {"actions": [write(1)]}, keep=lambda _: None)
            assert (left["done"], left["skipped"]) == (0, [f"public.moved 1;: {UNAPPLIED}"])
        assert connection.execute("SELECT FROM public.moved").fetchall() == []
    assert [each.partition(":")[0] for each in done["skipped"]] == ["public.moved 2;", "public.moved 4;"]
    assert all("a newer record has deleted it" in each for each in done["skipped"])


@pytest.mark.postgres
def test_an_undo_changes_nothing_but_what_the_repair_has_changed(database: str, monkeypatch: pytest.MonkeyPatch):
    """Columns that are not the relay's may have got new values since, and other rows may refer to the row."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute((files("relay") / "sql" / "schema.sql").read_text())
        connection.execute(
            "CREATE TABLE public.parent (id bigint PRIMARY KEY, name text, note text, made bigint GENERATED ALWAYS AS "
            "IDENTITY, oncebox_source integer, oncebox_offset bigint)"
        )
        connection.execute("CREATE TABLE public.child (parent bigint REFERENCES public.parent ON DELETE CASCADE)")
        connection.execute("INSERT INTO oncebox.relay (relay, mode) VALUES ('r', 'partition')")
        connection.execute(
            "INSERT INTO oncebox.target (relay, topic, table_schema, table_name, mapping) "
            "VALUES ('r', 't', 'public', 'parent', %s)",
            [json.dumps(mapping({"id": "bigint", "name": "text"}, ["id"]))],
        )
        connection.execute(
            "INSERT INTO oncebox.source (topic, topic_id, partition) VALUES ('t', %s, 0)", [uuid.uuid4()]
        )
        ((source,),) = connection.execute("SELECT source FROM oncebox.source").fetchall()
        connection.execute(
            "INSERT INTO parent (id, name, note, oncebox_source, oncebox_offset) VALUES (1, 'spoilt', 'old', %s, 0)",
            [source],
        )
        connection.execute(
            "INSERT INTO oncebox.position (relay, source, start_offset, next_offset, high_offset) "
            "VALUES ('r', %s, 0, 5, 5)",
            [source],
        )
        connection.execute("INSERT INTO child VALUES (1)")
        mappings = connection.execute(query("targets"), {"relay": "r"}).fetchall()
        hashed = config_hash([(row[0], row[1], row[2], row[3]) for row in mappings])
        (table,) = by_table([read_target(*row) for row in mappings])
        ((digest,),) = connection.execute(sql.SQL("SELECT {} FROM parent").format(digest_sql(table.first))).fetchall()
        record = Record(topic="t", partition=0, offset=0, timestamp_ms=0, key=b"1", value=b'{"id": 1, "name": "one"}')
        action = {
            "do": "write",
            "table": "public.parent",
            "key_text": "1;",
            "found": [source, 0],
            "copies": 1,
            "digest": digest,
            "why": "row differs",
            "source": source,
            "record": to_json(record),
        }
        plan: dict[str, Any] = {
            "format": FORMAT,
            "kind": "plan",
            "relay": "r",
            "config_hash": hashed,
            "applied": {str(source): [[0, 5]]},
            "letters_replayed": 0,
            "actions": [action],
        }
        undos: list[dict[str, Any]] = []
        # Whoever holds the row holds up the relay, too, as long as the repair waits.
        monkeypatch.setattr("spark_jobs.repair.LOCK_WAIT_MS", 100)
        with psycopg.connect(database) as other:
            other.execute("SELECT FROM parent FOR UPDATE")
            with pytest.raises(ReconcileError, match="somebody else has locked"):
                apply_plan(database, plan, keep=undos.append)
        assert apply_plan(database, plan, keep=undos.append)["done"] == 1
        connection.execute("UPDATE parent SET note = 'new'")
        for count in (1, 0):
            assert apply_undo(database, json.loads(json.dumps(undos[0]))) == count
            assert connection.execute("SELECT id, name, note, made FROM parent").fetchall() == [(1, "spoilt", "new", 1)]
            assert connection.execute("SELECT parent FROM child").fetchall() == [(1,)]


@pytest.mark.postgres
def test_an_undo_puts_back_every_value_as_it_was(database: str):
    """In a row that stands there and in one that was deleted; in columns of the relay's and in others."""
    columns = {"id": "bigint", "raw": "json", "document": "jsonb", "words": "integer[]"}
    odd = (r'{"x": "a\u0000b", "x": 1.0}', "null", "[2:3]={7,NULL}", "[0:0]={1}", r"\x00ff", "(1,)")
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute((files("relay") / "sql" / "schema.sql").read_text())
        connection.execute(
            "CREATE TYPE public.pair AS (a integer, b text); CREATE TABLE public.odd (id bigint PRIMARY KEY, raw json, "
            "document jsonb, words integer[], lengths float[], bytes bytea, pair public.pair, "
            "twice bigint GENERATED ALWAYS AS (id * 2) STORED, oncebox_source integer, oncebox_offset bigint)"
        )
        connection.execute("INSERT INTO oncebox.relay (relay, mode) VALUES ('r', 'partition')")
        connection.execute(
            "INSERT INTO oncebox.target (relay, topic, table_schema, table_name, mapping) "
            "VALUES ('r', 't', 'public', 'odd', %s)",
            [json.dumps(mapping(columns, ["id"]))],
        )
        connection.execute(
            "INSERT INTO oncebox.source (topic, topic_id, partition) VALUES ('t', %s, 0)", [uuid.uuid4()]
        )
        connection.execute(
            "INSERT INTO oncebox.position (relay, source, start_offset, next_offset, high_offset) "
            "SELECT 'r', source, 0, 5, 5 FROM oncebox.source"
        )
        ((source,),) = connection.execute("SELECT source FROM oncebox.source").fetchall()
        for key in (1, 2):
            connection.execute(
                "INSERT INTO public.odd (id, raw, document, words, lengths, bytes, pair, oncebox_source, "
                "oncebox_offset) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)",
                [key, *odd, source, key],
            )
        mappings = connection.execute(query("targets"), {"relay": "r"}).fetchall()
        (table,) = by_table([read_target(*row) for row in mappings])
        asked = sql.SQL("SELECT {} FROM public.odd ORDER BY id").format(digest_sql(table.first))
        digests = [digest for (digest,) in connection.execute(asked)]
        value = b'{"id": 1, "raw": {}, "document": {}, "words": [1]}'
        record = Record(topic="t", partition=0, offset=1, timestamp_ms=0, key=b"1", value=value)
        row = {"table": "public.odd", "copies": 1, "why": ""}
        write = {"do": "write", "key_text": "1;", "source": source, "record": to_json(record), "found": [source, 1]}
        delete = {"do": "delete", "key_text": "2;", "found": [source, 2]}
        plan: dict[str, Any] = {
            "format": FORMAT,
            "kind": "plan",
            "relay": "r",
            "config_hash": config_hash([(each[0], each[1], each[2], each[3]) for each in mappings]),
            "applied": {str(source): [[0, 5]]},
            "letters_replayed": 0,
            "actions": [row | write | {"digest": digests[0]}, row | delete | {"digest": digests[1]}],
        }
        undos: list[dict[str, Any]] = []
        everything = "SELECT odd::text, document IS NULL FROM public.odd ORDER BY id"
        spoilt = connection.execute(everything).fetchall()
        assert apply_plan(database, plan, keep=undos.append) == {"done": 2, "skipped": []}
        mended = connection.execute(everything).fetchall()
        undo = json.loads(json.dumps(undos[0]))
        # What something else makes other rows of is not done at all.
        connection.execute(
            "CREATE FUNCTION other() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.document := NULL; RETURN NEW; END'"
        )
        connection.execute("CREATE TRIGGER other BEFORE UPDATE ON public.odd FOR EACH ROW EXECUTE FUNCTION other()")
        with pytest.raises(ReconcileError, match=r"public\.odd 1;: the row does not read as it did before; all is"):
            apply_undo(database, undo)
        assert connection.execute(everything).fetchall() == mended
        connection.execute("DROP TRIGGER other ON public.odd")
        assert apply_undo(database, undo) == 2
        assert connection.execute(everything).fetchall() == spoilt


@pytest.mark.postgres
@pytest.mark.parametrize("rule", ["NO ACTION", "RESTRICT", "CASCADE", "SET NULL"])
def test_rows_that_refer_to_each_other_are_mended_whatever_their_order(database: str, rule: str):
    """As a delete that cascades leaves them; tables stand in a plan in the order of their names."""
    reference = f"bigint REFERENCES public.parent ON DELETE {rule}"
    tables = {"child": reference, "parent": reference}
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute((files("relay") / "sql" / "schema.sql").read_text())
        connection.execute("INSERT INTO oncebox.relay (relay, mode) VALUES ('r', 'partition')")
        for name, reference in reversed(tables.items()):
            connection.execute(
                f"CREATE TABLE public.{name} (id bigint PRIMARY KEY, refers {reference}, oncebox_source integer, "
                "oncebox_offset bigint)"
            )
            connection.execute(
                "INSERT INTO oncebox.target (relay, topic, table_schema, table_name, mapping) "
                "VALUES ('r', %s, 'public', %s, %s)",
                [f"{name}-topic", name, json.dumps(mapping({"id": "bigint", "refers": "bigint"}, ["id"]))],
            )
            connection.execute(
                "INSERT INTO oncebox.source (topic, topic_id, partition) VALUES (%s, %s, 0)", [name, uuid.uuid4()]
            )
        connection.execute(
            "INSERT INTO oncebox.position (relay, source, start_offset, next_offset, high_offset) "
            "SELECT 'r', source, 0, 5, 5 FROM oncebox.source"
        )
        # By hand: 20 refers to 10.
        connection.execute("INSERT INTO parent (id) VALUES (10); INSERT INTO child (id, refers) VALUES (20, 10)")
        mappings = connection.execute(query("targets"), {"relay": "r"}).fetchall()
        by_name = {table.table: table for table in by_table([read_target(*row) for row in mappings])}

        def row(name: str, key: int) -> dict[str, Any]:
            return {"table": f"public.{name}", "key_text": f"{key};", "found": None, "why": ""}

        def write(name: str, key: int, refers: int | None) -> dict[str, Any]:
            value = json.dumps({"id": key, "refers": refers}).encode()
            record = Record(topic=f"{name}-topic", partition=0, offset=2, timestamp_ms=0, key=None, value=value)
            return {
                **row(name, key),
                "do": "write",
                "copies": 0,
                "digest": None,
                "source": 1,
                "record": to_json(record),
            }

        def delete(name: str, key: int) -> dict[str, Any]:
            found = sql.SQL("SELECT {} FROM {} WHERE id = {}").format(
                digest_sql(by_name[name].first), sql.Identifier(name), key
            )
            ((digest,),) = connection.execute(found).fetchall()
            return {**row(name, key), "do": "delete", "copies": 1, "digest": digest}

        plan: dict[str, Any] = {
            "format": FORMAT,
            "kind": "plan",
            "relay": "r",
            "config_hash": config_hash([(each[0], each[1], each[2], each[3]) for each in mappings]),
            "applied": {},
            "letters_replayed": 0,
            "actions": [
                write("child", 2, 1),
                delete("parent", 10),
                delete("child", 20),
                write("parent", 1, 3),
                write("parent", 3, None),
            ],
        }
        undos: list[dict[str, Any]] = []
        done = apply_plan(database, plan, keep=undos.append)
        assert (done["done"], done["skipped"]) == (5, [])
        parents, children = "SELECT id, refers FROM parent ORDER BY id", "SELECT id, refers FROM child"
        assert connection.execute(parents).fetchall() == [(1, 3), (3, None)]
        assert connection.execute(children).fetchall() == [(2, 1)]
        assert apply_undo(database, undos[0]) == 5
        assert connection.execute(parents).fetchall() == [(10, None)]
        assert connection.execute(children).fetchall() == [(20, 10)]
        # What nothing of the plan brings is told, and nothing is done.
        with pytest.raises(psycopg.errors.ForeignKeyViolation):
            apply_plan(
                database, plan | {"actions": [write("parent", 5, None), write("child", 6, 7)]}, keep=undos.append
            )
        # Nor is what refers to a row changed with it, where the plan does not know of it.
        connection.execute("INSERT INTO parent (id, refers) VALUES (30, 30), (31, 30)")
        for key in (10, 30):
            with pytest.raises((ReconcileError, *REFERENCES)):
                apply_plan(database, plan | {"actions": [delete("parent", key)]}, keep=undos.append)
        assert connection.execute(parents).fetchall() == [(10, None), (30, 30), (31, 30)]
        assert connection.execute(children).fetchall() == [(20, 10)]
        assert len(undos) == 1
        # One that refers to itself alone goes.
        connection.execute("DELETE FROM parent WHERE id = 31")
        apply_plan(database, plan | {"actions": [delete("parent", 30)]}, keep=undos.append)
        assert connection.execute(parents).fetchall() == [(10, None)]
