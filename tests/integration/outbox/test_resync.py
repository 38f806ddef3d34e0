"""After a lost slot: what is missing is published, what is published is not, and what comes meanwhile comes once."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka import Producer as StockProducer
from confluent_kafka.admin import AdminClient

from oncebox.local.postgres import find_binaries
from oncebox.outbox import EMIT
from oncebox.wire import librdkafka_config
from relay.outbox import parked
from relay.outbox import resync as work
from relay.outbox.database import Database
from relay.outbox.plan import TableError
from relay.outbox.resync import resync
from relay.outbox.token import StopError
from tests.integration.outbox.conftest import Outbox
from tests.integration.outbox.test_trouble import run_sql, write_bad
from tests.support.coordinator import read_committed

TAKEOVER_MS = 5_000
EMITTED = EMIT.replace("%(message)s", "%s")


@pytest.mark.parametrize("source", ["logical", "commit_seq"])
async def test_a_lost_slot_is_made_good(outbox: Outbox, source: str, monkeypatch):
    await outbox.init(source=source)
    await outbox.write(1, 2)
    async with outbox.running(source=source):
        await outbox.wait_published(2)
        with monkeypatch.context() as patch:
            patch.setattr(work, "LEAD_S", 0.5)
            with pytest.raises(StopError, match="is running"):
                await resync(outbox.settings(source=source), apply=True)
    await outbox.write(3)
    settings = outbox.settings(source=source)
    async with await outbox.connect() as connection:
        if source == "logical":
            await connection.execute("SELECT pg_drop_replication_slot(%s)", [settings.slot])
        else:
            await connection.execute("UPDATE oncebox.outbox_relay SET timeline = 9")
            await connection.execute("DELETE FROM oncebox.outbox_commit")
    await outbox.write(4)
    await outbox.run_until_stopped(source=source)
    looked = await resync(settings, apply=False)
    assert (looked.rows, looked.published, looked.missing) == (4, 2, ["3", "4"])

    real = work._table

    async def meanwhile(*given):
        """Between the new slot and the look at the table: it is in both."""
        await outbox.write(5)
        # A relay that stands by would take over from one that shows no sign of life.
        await asyncio.sleep(1.3 * TAKEOVER_MS / 1000)
        return await real(*given)

    monkeypatch.setattr(work, "_table", meanwhile)
    resyncing = asyncio.create_task(resync(outbox.settings(source=source, takeover_ms=TAKEOVER_MS), apply=True))
    await outbox.wait_until("SELECT owner = 'resync' FROM oncebox.outbox_relay")
    async with outbox.running(source=source, takeover_ms=TAKEOVER_MS):
        done = await resyncing
        assert (done.rows, done.published, done.coming) == (5, 2, 1)
        assert done.missing == (["3", "4"])
        await outbox.write(6)
        seen = await outbox.wait_published(6)
        await asyncio.sleep(0.3)
    assert await outbox.seen() == seen
    assert sorted(row for each in seen for row in each.ids) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("source", ["logical", "commit_seq"])
async def test_one_that_fails_on_the_way_leaves_no_gap(outbox: Outbox, source: str, monkeypatch):
    """No relay starts until it was run again; what it had published already is not published again."""
    await outbox.init(source=source)
    await outbox.write(1)
    async with outbox.running(source=source):
        await outbox.wait_published(1)
    await outbox.write(2)
    await outbox.write(3)

    def failing(*_given: Any) -> Any:
        raise ZeroDivisionError

    # Before anything is compared; after the first of two groups; with all of it published.
    for step in ("_table", "encode", "_restart"):
        with monkeypatch.context() as patch:
            patch.setattr(work, step, failing)
            with pytest.raises(ZeroDivisionError):
                await resync(outbox.settings(source=source, group_rows_max=1), apply=True)
        assert "resync --apply" in await outbox.run_until_stopped(source=source)
    done = await resync(outbox.settings(source=source), apply=True)
    assert (done.rows, done.published, done.missing) == (3, 3, [])
    await outbox.write(4)
    async with outbox.running(source=source):
        seen = await outbox.wait_published(4)
    assert [row for each in seen for row in each.ids] == [1, 2, 3, 4]


async def fail_before_the_end(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_given: Any) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(work, "_compare", failing)
        with pytest.raises(ZeroDivisionError):
            await resync(outbox.settings(), apply=True)


async def test_what_is_written_between_two_runs_is_kept(outbox: Outbox, monkeypatch):
    """Also what was deleted at once, or never was in the table: the slot of the first run has it."""
    await outbox.init()
    await outbox.write(1)
    async with outbox.running():
        await outbox.wait_published(1)
    for row_id in (2, 4):
        await fail_before_the_end(outbox, monkeypatch)
        await run_sql(outbox, EMITTED, json.dumps({"id": row_id, "aggregatetype": outbox.suffix, "payload": {}}))
        await outbox.write(row_id + 1)
        await run_sql(outbox, "DELETE FROM outbox WHERE id = %s", row_id + 1)
    done = await resync(outbox.settings(), apply=True)
    assert (done.rows, done.published, done.missing) == (1, 1, [])
    await outbox.write(6)
    async with outbox.running():
        seen = await outbox.wait_published(6)
    assert [row for each in seen for row in each.ids] == [1, 2, 3, 4, 5, 6]


async def test_a_slot_that_cannot_be_read_is_not_kept(outbox: Outbox, monkeypatch):
    await outbox.init()
    await outbox.write(1)
    await fail_before_the_end(outbox, monkeypatch)
    await run_sql(outbox, "ALTER TABLE outbox RENAME payload TO other")
    await run_sql(outbox, "INSERT INTO outbox (id, aggregatetype, aggregateid) VALUES (2, %s, 'k')", outbox.suffix)
    await run_sql(outbox, "ALTER TABLE outbox RENAME other TO payload")
    with pytest.raises(TableError, match="no column payload"):
        await resync(outbox.settings(), apply=True)
    assert (await resync(outbox.settings(), apply=True)).missing == ["1", "2"]
    await outbox.write(3)
    async with outbox.running():
        seen = await outbox.wait_published(3)
    assert [row for each in seen for row in each.ids] == [1, 2, 3]


async def test_a_session_that_is_just_ending_is_waited_for(outbox: Outbox):
    """As of a relay that was stopped a moment ago."""
    await outbox.init()
    ending = await Database.open(outbox.settings())
    assert await ending.lead()
    resyncing = asyncio.create_task(resync(outbox.settings(), apply=False))
    await outbox.wait_until(
        "SELECT count(*) = 2 FROM pg_stat_activity WHERE application_name = 'oncebox-outbox' "
        "AND datname = current_database() AND query LIKE '%%pg_try_advisory_lock%%'"
    )
    await ending.close()
    assert (await resyncing).missing == []


async def test_who_reads_the_slot_to_its_end_is_waited_for(outbox: Outbox):
    """As does the server for a relay that was killed meanwhile, until it notices."""
    await outbox.init()
    settings = outbox.settings()
    reading = await asyncio.create_subprocess_exec(
        *(find_binaries() / "pg_recvlogical", "--start", "--file=-", f"--dbname={outbox.dsn}"),
        *(f"--slot={settings.slot}", "--option=proto_version=1", f"--option=publication_names={settings.publication}"),
    )
    try:
        await outbox.wait_until("SELECT active FROM pg_replication_slots WHERE database = current_database()")
        resyncing = asyncio.create_task(resync(settings, apply=True))
        await outbox.wait_until(
            "SELECT count(*) > 0 FROM pg_stat_activity "
            "WHERE query LIKE '%%pg_drop_replication%%' AND pid <> pg_backend_pid() AND datname = current_database()"
        )
    finally:
        reading.kill()
        await reading.wait()
    await resyncing
    await outbox.write(1)
    async with outbox.running():
        await outbox.wait_published(1)


def test_only_a_topic_that_is_not_there_is_empty(outbox: Outbox, monkeypatch):
    """Any other error hides what is published, and all of it would be published again."""
    assert list(work._published_ids(outbox.settings(), "nobody-made-this")) == []

    class Refused:
        def __init__(self, _config: Any) -> None: ...

        def list_topics(self, topic: str, **_given: Any) -> Any:
            return SimpleNamespace(topics={topic: SimpleNamespace(error=KafkaError(KafkaError.LEADER_NOT_AVAILABLE))})

        def close(self) -> None: ...

    monkeypatch.setattr(work, "Consumer", Refused)
    with pytest.raises(StopError, match="cannot be read"):
        list(work._published_ids(outbox.settings(), outbox.topic))


async def test_what_is_behind_an_open_transaction_is_not_published_again(outbox: Outbox, monkeypatch):
    """It is committed, but no reader sees it before the other transaction has ended."""
    await outbox.init()
    named = {"bootstrap.servers": outbox.one.bootstrap_servers, "transactional.id": outbox.suffix}
    other = StockProducer({**named, "transaction.timeout.ms": 600_000})  # Kafka does not end it before the test does
    async with outbox.running():
        await outbox.write(1)
        await outbox.wait_published(1)
        await asyncio.to_thread(other.init_transactions, 30)
        other.begin_transaction()
        other.produce(outbox.topic, b"open")
        assert await asyncio.to_thread(other.flush, 30) == 0
        await outbox.write(2)
        await outbox.wait_until("SELECT rows_published = 2 FROM oncebox.outbox_relay")
    await run_sql(outbox, "SELECT pg_drop_replication_slot(%s)", outbox.settings().slot)
    with monkeypatch.context() as patch:
        patch.setattr(work, "READ_TIMEOUT_S", 8.0)
        for apply in (False, True):
            with pytest.raises(StopError, match=f"{outbox.topic}:0.*an open transaction holds it back.*who-blocks"):
                await resync(outbox.settings(), apply=apply)

    class EndsItThen(Consumer):
        """Once the first of it is read, up to the open transaction."""

        def poll(self, *given: Any) -> Any:
            message = super().poll(*given)
            if message is not None and message.error() is not None and ended == []:
                ended.append(message.offset())
                other.abort_transaction(30)
            return message

    ended: list[int | None] = []
    monkeypatch.setattr(work, "Consumer", EndsItThen)
    done = await resync(outbox.settings(), apply=True)
    assert ended == [2]  # the first record, and its marker
    assert (done.rows, done.published, done.missing) == (2, 2, [])
    async with outbox.running():
        await outbox.write(3)
        seen = await outbox.wait_published(3)
    assert [row for each in seen for row in each.ids] == [1, 2, 3]


def test_a_topic_that_is_cut_off_while_it_is_read_is_read_on(outbox: Outbox, monkeypatch):
    """By its retention: what is left of it is published all the same."""
    stock = StockProducer({"bootstrap.servers": outbox.one.bootstrap_servers})
    for number in range(40):
        stock.produce(outbox.topic, b"x" * 1_000, headers={"id": str(number).encode()})
        assert stock.flush(30) == 0
    few = {"fetch.message.max.bytes": 1_000, "queued.min.messages": 1, "queued.max.messages.kbytes": 1}
    monkeypatch.setattr(work, "librdkafka_config", lambda settings: librdkafka_config(settings) | few)
    ids = iter(work._published_ids(outbox.settings(), outbox.topic))
    assert next(ids) == b"0"
    admin = AdminClient({"bootstrap.servers": outbox.one.bootstrap_servers})
    before = TopicPartition(outbox.topic, 0, 38)
    admin.delete_records([before])[before].result(30)
    assert [*ids][-2:] == [b"38", b"39"]


async def test_what_is_parked_and_published_is_let_go(outbox: Outbox):
    """Whole or not at all: what is published in part is told, and left to a person."""
    await outbox.init()
    given = {"bad_row": "park"}
    async with await outbox.connect(autocommit=False) as connection:
        await outbox.write(1, on=connection)
        await outbox.write(2, on=connection)
        await connection.execute("UPDATE outbox SET id = id")
        await connection.execute(
            "INSERT INTO outbox (id, aggregatetype, aggregateid, headers) VALUES (3, %s, 'c', '[]')", [outbox.suffix]
        )
    await write_bad(outbox, 4, headers="[1]")
    async with outbox.running(**given):
        await outbox.wait_until("SELECT count(*) = 4 FROM oncebox.outbox_parked")
    stock = StockProducer({"bootstrap.servers": outbox.one.bootstrap_servers})
    for row_id in (1, 3):
        stock.produce(outbox.topic, b"{}", headers={"id": str(row_id).encode()})
    assert await asyncio.to_thread(stock.flush, 30) == 0
    for apply in (False, True):
        with pytest.raises(StopError, match=r"published in part: (1, 3|3, 1) can be read in Kafka, 2 cannot"):
            await resync(outbox.settings(**given), apply=apply)
    stock.produce(outbox.topic, b"{}", headers={"id": b"2"})
    assert await asyncio.to_thread(stock.flush, 30) == 0
    for apply in (False, True):
        done = await resync(outbox.settings(**given), apply=apply)
        assert (done.rows, done.published, done.parked, done.missing) == (4, 3, 1, [])
        assert done.settled == ["1", "2", "3"]
    assert await outbox.fetch("SELECT row_id FROM oncebox.outbox_parked") == [("4",)]


async def test_what_is_parked_stays_so(outbox: Outbox):
    """And is published once, when somebody wants it to be."""
    await outbox.init()
    given = {"bad_row": "park"}
    await write_bad(outbox, 1, key="k", headers="[1]")
    await outbox.write(2, key="k")
    async with outbox.running(**given):
        await outbox.wait_until("SELECT count(*) = 2 FROM oncebox.outbox_parked")
    done = await resync(outbox.settings(**given), apply=True)
    assert (done.rows, done.parked, done.missing, done.bad) == (2, 2, [], [])
    await outbox.fetch("UPDATE oncebox.outbox_parked SET headers = NULL RETURNING 1")
    assert await parked.retry(outbox.settings(**given)) == 2
    await outbox.write(3, key="k")
    async with outbox.running(**given):
        seen = await outbox.wait_published(3)
    assert [row for each in seen for row in each.ids] == [1, 2, 3]


async def test_ids_of_transactions_that_another_server_gave_are_given_again(outbox: Outbox):
    """A dump brings them along, of rows and of numbers; here the next transaction has the same."""
    given = {"source": "commit_seq"}
    await outbox.init(**given)
    await outbox.write(1)
    async with outbox.running(**given):
        await outbox.wait_published(1)
    await run_sql(outbox, "UPDATE oncebox.outbox_relay SET system_identifier = '7'")
    async with await outbox.connect(autocommit=False) as connection:
        found = await (await connection.execute("SELECT pg_current_xact_id()::text")).fetchone()
        assert found is not None
        await run_sql(outbox, "UPDATE outbox SET oncebox_transaction = %s::text::xid8", found[0])
        await run_sql(outbox, "INSERT INTO oncebox.outbox_commit VALUES (1, 'outbox', %s::text::xid8)", found[0])
        assert "another database cluster" in await outbox.run_until_stopped(**given)
        done = await resync(outbox.settings(**given), apply=True)
        assert (done.rows, done.published, done.missing) == (1, 1, [])
        await outbox.write(2, on=connection)
    await outbox.write(3)
    async with outbox.running(**given):
        await outbox.wait_published(3)
        await outbox.wait_until("SELECT count(*) = 0 FROM oncebox.outbox_commit")
    assert [row for each in await outbox.seen() for row in each.ids] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["char(20)", "bytea", "inet"])
@pytest.mark.parametrize("source", ["logical", "commit_seq"])
async def test_ids_and_keys_are_the_same_by_whatever_way_they_are_read(outbox: Outbox, source: str, kind: str):
    """Decoding, a query, and the look at what is published already."""
    await run_sql(
        outbox,
        f"CREATE TABLE outbox (id {kind}, aggregatetype text, aggregateid {kind}, payload text, "
        "created_at timestamptz DEFAULT now())",
    )
    await outbox.init(source=source)
    value = {"char(20)": "a", "bytea": "\\x61", "inet": "10.0.0.1"}[kind]
    insert = f"INSERT INTO outbox VALUES (%s::text::{kind}, %s, %s::text::{kind}, 'x')"
    await run_sql(outbox, insert, value, outbox.suffix, value)
    settings = outbox.settings(source=source, cleanup="delete")
    async with outbox.running(source=source):
        await outbox.wait_until("SELECT rows_published = 1 FROM oncebox.outbox_relay")
    (record,) = read_committed(outbox.one.bootstrap_servers, outbox.topic)
    expected = value.ljust(20 if kind.startswith("char") else 0).encode()
    assert (record.key(), record.headers()) == (expected, [("id", expected)])
    looked = await resync(settings, apply=False)
    assert (looked.published, looked.missing) == (1, [])
    await run_sql(outbox, insert, value, outbox.suffix, value)
    async with outbox.running(source=source, cleanup="delete"):
        await outbox.wait_deleted()
