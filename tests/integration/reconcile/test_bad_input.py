"""Whatever is missing or breaks: a verdict that says what was not checked, never "clean", never a stack trace."""

from __future__ import annotations

import json
import threading
import uuid
from contextlib import closing
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pydantic import SecretStr

from oncebox.local import LocalPostgres
from oncebox.settings import PostgresSection
from spark_jobs.database import EACH_ROW
from spark_jobs.errors import CannotCheckError, ReconcileError
from spark_jobs.findings import Kind
from spark_jobs.jobs import reconcile as job
from spark_jobs.jobs.reconcile import run
from spark_jobs.reconcile import reconcile
from spark_jobs.snapshot import APPLICATION, Snapshot
from spark_jobs.sources import table_rows
from spark_jobs.targets import by_table, read_target
from tests.support.coordinator import read_committed
from tests.support.kafka import await_partitions, create_topic
from tests.support.reconcile import COLUMNS, World, mapping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from spark_jobs.result import Result
    from tests.support.coordinator import Coordinators


def test_topics_and_tables_that_are_not_there(world: World, check: Callable[..., Result]):
    world.transfer(1, 2)
    world.apply()
    world.run("ALTER TABLE journal RENAME COLUMN account TO accounts")
    result = check()
    assert result.exit_code == 2
    assert any("public.journal" in note and "account" in note for note in result.unchecked)
    world.run("DROP TABLE journal")
    admin = AdminClient({"bootstrap.servers": world.servers})
    admin.delete_topics([world.topics["accounts"]], operation_timeout=30)[world.topics["accounts"]].result(60)
    await_partitions(world.servers, world.topics["accounts"], 0)
    gone = check()
    assert gone.exit_code == 2
    assert any("public.journal does not exist" in note for note in gone.unchecked)
    assert any(f"the topic {world.topics['accounts']} does not exist" in note for note in gone.unchecked)
    create_topic(world.servers, world.topics["accounts"], partitions=2)
    await_partitions(world.servers, world.topics["accounts"], 2)
    again = check()
    assert again.exit_code == 2
    assert any("incarnation" in note for note in again.unchecked)


def test_partitions_added_retention_and_a_rewind(world: World, check: Callable[..., Result]):
    world.transfer(*range(1, 20))
    world.apply()
    topic = world.topics["accounts"]
    admin = AdminClient({"bootstrap.servers": world.servers})
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result(60)
    await_partitions(world.servers, topic, 3)
    # Records there are lag until the relay has a position for it.
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": world.servers})
    producer.produce(topic, b'{"id": 500}', partition=2)
    producer.flush(30)
    added = check()
    assert (added.exit_code, added.lag) == (0, 1)
    from confluent_kafka import TopicPartition

    admin.delete_records([TopicPartition(topic, 0, 3)])[TopicPartition(topic, 0)].result(60)
    # A key has moved to the new partition. Damage where it came from must not make it look for its old record.
    (moved,), (missing,) = world.run(
        "SELECT id FROM accounts WHERE oncebox_source = %s ORDER BY id LIMIT 2", [world.sources[topic, 1]]
    )
    world.register()
    source = world.sources[topic, 2]
    producer.produce(topic, json.dumps({"id": moved}).encode(), key=str(moved).encode(), partition=2)
    producer.flush(30)
    world.run("UPDATE oncebox.position SET next_offset = 2, high_offset = 2 WHERE source = %s", [source])
    world.run("INSERT INTO accounts (id, oncebox_source, oncebox_offset) VALUES (500, %s, 0)", [source])
    world.run("DELETE FROM accounts WHERE id IN (%s, %s)", [moved, missing])
    world.run("INSERT INTO accounts (id, oncebox_source, oncebox_offset) VALUES (%s, %s, 1)", [moved, source])
    kept = check()
    assert any("3 offsets are past retention" in note for note in kept.unchecked)
    (finding,) = kept.findings
    assert (finding.kind, [sample.key for sample in finding.samples]) == (Kind.ROW_MISSING, [{"id": str(missing)}])


def test_json_that_jsonb_would_refuse(world: World, check: Callable[..., Result]):
    """A json column keeps any text; one such row must not end every run."""
    given = json.dumps(mapping(COLUMNS | {"document": "json"}, ["id"]))
    world.run("ALTER TABLE accounts ADD document json")
    world.run("UPDATE oncebox.target SET mapping = %s WHERE table_name = 'accounts'", [given])
    documents = {1: r'{"x":  "a\u0000b"}', 2: "1e200000", 3: r'{"b": 1, "a": "\ud83d\ude00"}'}
    transaction = world.producer.begin()
    for key, document in documents.items():
        value = f'{{"id": {key}, "document": {document} }}'
        transaction.send(world.topics["accounts"], value.encode(), key=str(key).encode())
    transaction.commit()
    for each in read_committed(world.servers, world.topics["accounts"]):
        key = int(each.key() or b"")
        place = (world.sources[each.topic() or "", each.partition() or 0], each.offset())
        world.run(
            "INSERT INTO accounts (id, document, oncebox_source, oncebox_offset) VALUES (%s, %s, %s, %s)",
            [key, documents[key], *place],
        )
    world.advance("accounts")
    result = check()
    assert (result.findings, result.exit_code) == ((), 0)
    world.run("UPDATE accounts SET document = '2e200000' WHERE id = 2")
    (finding,) = check().findings
    assert (finding.kind, finding.count, finding.samples[0].key) == (Kind.ROW_DIFFERS, 1, {"id": "2"})


def test_spark_connects_as_the_snapshot_does(database: str, monkeypatch: pytest.MonkeyPatch):
    """An address may leave to the environment what it likes."""
    given = conninfo_to_dict(database)
    for name, part in (("PGHOST", "host"), ("PGPORT", "port"), ("PGUSER", "user"), ("PGPASSWORD", "password")):
        monkeypatch.setenv(name, str(given.get(part) or "none"))
    with Snapshot(f"postgresql:///{given['dbname']}") as snapshot:
        options = snapshot.jdbc_options()
    assert options["url"] == f"jdbc:postgresql://{given['host']}:{given['port']}/{given['dbname']}"
    assert (options["user"], options["password"]) == (given["user"], given.get("password") or "none")


def test_spark_sees_the_tables_that_the_snapshot_sees(database: str, spark: Any):
    """Also where the address says in which schema names are looked for, and another one has the same name."""
    (table,) = by_table([read_target("t", "shop", "t", mapping({"id": "bigint"}, ["id"], guard=False))])
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA shop; CREATE TABLE shop.t (id bigint); CREATE TABLE public.t (id bigint)")
        connection.execute("INSERT INTO shop.t VALUES (1); INSERT INTO public.t VALUES (2), (3)")
    with Snapshot(make_conninfo(database, options="-c search_path=shop")) as snapshot:
        rows = table_rows(spark, snapshot, table, EACH_ROW).collect()
    assert [row.key_text for row in rows] == ["1;"]


def test_wrong_places(world: World, spark: Any, postgres: Any):
    with pytest.raises(ReconcileError, match="no tables of a relay"):
        run(
            world.settings().model_copy(update={"postgres": type(world.settings().postgres)(dsn=postgres.dsn)}),
            lambda _: None,
            session=spark,
        )
    with pytest.raises(ReconcileError, match="name one relay"):
        run(world.settings(relay="other"), lambda _: None, session=spark)


def test_the_snapshot_holder_is_killed(world: World, spark: Any):
    world.transfer(1, 2)
    world.apply()

    def kill(text: str) -> None:
        if "parts of the table are summed" in text:
            with psycopg.connect(world.dsn, autocommit=True) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s "
                    "AND state = 'idle in transaction' AND datname = current_database()",
                    [APPLICATION],
                )

    with pytest.raises(CannotCheckError, match="run again"):
        run(world.settings(), kill, session=spark)
    assert world.run("SELECT to_regclass('oncebox.reconciliation_runs')") == [(None,)]


def test_a_table_that_is_emptied_or_rewritten_meanwhile(world: World, spark: Any):
    """PostgreSQL then shows an old snapshot an empty table. A rebuild does the one, a relay that widens a column the
    other.
    """
    world.transfer(1, 2)
    world.apply()
    world.run("INSERT INTO journal (id, account) VALUES (7, 7)")
    told: list[str] = []

    def tell(text: str) -> None:
        if not told:
            world.run("TRUNCATE accounts")
            world.run("ALTER TABLE journal ALTER account TYPE bigint")
        told.append(text)

    result, _, _ = reconcile(spark, world.settings(), tell)
    assert (result.findings, result.exit_code) == ((), 2)
    wanted = {f"public.{table}: was emptied or rewritten while it was compared" for table in ("accounts", "journal")}
    assert {note.partition(";")[0] for note in result.unchecked} == wanted


@pytest.fixture
def own_postgres(tmp_path: Path) -> Iterator[LocalPostgres]:
    """One that may be restarted."""
    with LocalPostgres(tmp_path / "postgres") as server:
        yield server


def by_submit(world: World, monkeypatch: pytest.MonkeyPatch, tell: Callable[[str], None], dsn: str) -> int:
    """As spark-submit calls the job."""
    monkeypatch.setenv("ONCEBOX_BOOTSTRAP_SERVERS", world.servers)
    monkeypatch.setenv("ONCEBOX_DSN", dsn)
    monkeypatch.setenv("ONCEBOX_RECONCILE_FEED_TOPIC", world.coordinators.feed_topic)
    monkeypatch.setenv("ONCEBOX_RECONCILE_LOG_TOPIC", world.coordinators.log_topic)
    monkeypatch.setenv("ONCEBOX_RECONCILE_REPORT_FOLDER", str(world.folder / "reports"))
    monkeypatch.setattr(job, "tell", tell)
    return job.main([])


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("step", ["parts of the table are summed", "reading manifests"])
def test_the_database_is_restarted(
    step: str,
    shared_coordinator: Coordinators,
    own_postgres: LocalPostgres,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        if step in text and sum(step in each for each in told) == 1:
            own_postgres.restart()

    with closing(World(shared_coordinator, own_postgres.dsn, tmp_path)) as world:
        world.transfer(1, 2)
        world.apply()
        assert by_submit(world, monkeypatch, tell, world.dsn) == 2
        assert any(step in each for each in told)
        assert told[-1].startswith("nothing could be concluded: ")
        assert "run again" in told[-1]
        assert world.run("SELECT to_regclass('oncebox.reconciliation_runs')") == [(None,)]


@pytest.mark.usefixtures("spark")
def test_a_role_that_may_only_read(world: World, monkeypatch: pytest.MonkeyPatch):
    """The comparison is finished, so its report is there; without a mark."""
    world.transfer(1, 2)
    world.apply()
    role, told = f"reader_{uuid.uuid4().hex[:8]}", list[str]()
    world.run(f"CREATE ROLE {role} LOGIN PASSWORD 'reader' IN ROLE pg_read_all_data")
    try:
        code = by_submit(world, monkeypatch, told.append, make_conninfo(world.dsn, user=role, password="reader"))
    finally:
        world.run(f"DROP ROLE {role}")
    assert code == 0, told
    assert "the result could not be stored in the database, and leaves no mark: permission denied" in told[-2]
    (page,) = (world.folder / "reports").glob("run-*.html")
    assert told[-1] == f"report: {page}"
    assert "could not be stored" in page.read_text()
    assert world.run("SELECT to_regclass('oncebox.reconciliation_runs')") == [(None,)]


def test_a_role_that_policies_hide_rows_from(world: World, spark: Any, check: Callable[..., Result]):
    """What it does not see is not missing."""
    world.transfer(*range(1, 6))
    world.apply()
    role = f"reader_{uuid.uuid4().hex[:8]}"
    world.run(f"CREATE ROLE {role} LOGIN PASSWORD 'reader' IN ROLE pg_read_all_data")
    try:
        world.run("ALTER TABLE accounts ENABLE ROW LEVEL SECURITY")
        world.run("CREATE POLICY newer ON accounts FOR SELECT USING (id > 2)")
        dsn = SecretStr(make_conninfo(world.dsn, user=role, password="reader"))
        hidden = check(postgres=PostgresSection(dsn=dsn))
        assert (hidden.findings, hidden.exit_code) == ((), 2)
        (told,) = hidden.unchecked
        assert told.startswith("public.accounts: row-level security may hide rows from this role")
        with Snapshot(dsn.get_secret_value()) as snapshot:
            options = snapshot.jdbc_options()
            of_spark = spark.read.jdbc(options.pop("url"), "public.accounts", properties=options)
            with pytest.raises(Py4JJavaError, match="row-level security"):
                of_spark.collect()
            statement = "SELECT count(*) FROM public.accounts"
            is_refused = pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security")
            with snapshot.joined() as connection, is_refused:
                connection.execute(statement)
            with pytest.raises(CannotCheckError, match="row-level security"):
                snapshot.execute(statement)
        world.run(f"ALTER ROLE {role} BYPASSRLS")
        assert check(postgres=PostgresSection(dsn=dsn)).exit_code == 0
    finally:
        world.run(f"DROP ROLE {role}")


def test_clean_while_writers_are_at_work(world: World, check: Callable[..., Result]):
    world.transfer(*range(1, 20))
    world.apply()
    stop = threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        version = 1
        while not stop.is_set():
            try:
                world.transfer(*range(1, 6), version=version)
                world.apply()
            except BaseException as error:  # noqa: BLE001 - told below
                failures.append(error)
                return
            version += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        result = check()
    finally:
        stop.set()
        thread.join(60)
    assert failures == []
    assert (result.findings, result.unchecked) == ((), ())
