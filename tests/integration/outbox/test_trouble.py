"""Bad rows, and databases that are not what they were: told in a clear sentence, never a silent gap or repeat."""

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pydantic import SecretStr

from oncebox.local import LocalPostgres
from oncebox.producer import Producer
from oncebox.settings import PostgresSection
from oncebox.wire import Appended, ErrorCode, Wire
from relay.outbox import control, parked
from relay.outbox.database import Database
from relay.outbox.publisher import BEHIND
from relay.outbox.relay import OutboxRelay
from relay.outbox.resync import resync
from tests.integration.outbox.conftest import POLL_S, Outbox
from tests.support.coordinator import Coordinators
from tests.support.kafka import create_topic

READ_BY_SOMEBODY = (
    "SELECT count(*) FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL, 'proto_version', '1', "
    "'publication_names', 'oncebox_outbox')"
)


async def write_bad(outbox: Outbox, row_id: int, *, key: str = "bad", **columns: Any) -> None:
    values = {"id": row_id, "aggregatetype": outbox.suffix, "aggregateid": key, "type": "t", "payload": "{}"} | columns
    async with await outbox.connect() as connection:
        await connection.execute(
            f"INSERT INTO outbox ({', '.join(values)}) VALUES ({', '.join(['%s'] * len(values))})".encode(),
            list(values.values()),
        )


BAD = {
    "oversized": ({"payload": f'"{"x" * 1_100_000}"'}, "a request holds"),
    "unknown topic": ({"aggregatetype": "nobody-made-this"}, "create it first"),
    "no name for a topic": ({"aggregatetype": "a b"}, "no name for a topic"),
    "headers": ({"headers": "[1]"}, "not a JSON object"),
}


@pytest.mark.parametrize("kind", BAD)
async def test_a_bad_row_stops_it_after_all_that_came_before(outbox: Outbox, kind: str):
    columns, told = BAD[kind]
    await outbox.init()
    await outbox.write(1)
    await write_bad(outbox, 2, **columns)
    await outbox.write(3)
    message = await outbox.run_until_stopped()
    assert "the row with id 2 cannot be published" in message
    assert told in message
    assert [each.ids for each in await outbox.wait_published(1)] == [[1]]
    (status,) = await control.status(outbox.dsn)
    assert (status.state, status.message) == ("STOPPED", message)


async def test_a_row_that_only_the_broker_refuses_is_found(outbox: Outbox):
    small = f"{outbox.suffix}-small"
    create_topic(outbox.one.bootstrap_servers, f"outbox.event.{small}", config={"max.message.bytes": "2000"})
    await outbox.init()
    await outbox.write(1)
    await write_bad(outbox, 2, aggregatetype=small)
    await write_bad(outbox, 3, aggregatetype=small, payload=f'"{"x" * 5000}"')
    await outbox.write(4)
    message = await outbox.run_until_stopped()
    assert "the row with id 3 cannot be published" in message
    assert "MESSAGE_TOO_LARGE" in message
    assert [each.ids for each in await outbox.wait_published(1)] == [[1]]


@pytest.mark.parametrize("code", [ErrorCode.UNKNOWN_SERVER_ERROR, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED])
async def test_no_row_is_parked_for_trouble_of_the_brokers(outbox: Outbox, monkeypatch, code: ErrorCode):
    """Nor for a right that the relay lacks: it waits, and tries again."""
    produce, left = Wire.produce, 4

    def refusing(self: Wire, node_id: int, batches: Any, **given: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            return produce(self, node_id, batches, **given)
        answered = asyncio.get_running_loop().create_future()
        answered.set_result({where: Appended(code, -1, -1, -1, None) for where in batches})
        return answered

    monkeypatch.setattr(Wire, "produce", refusing)
    await outbox.init()
    await outbox.write(1)
    await outbox.write(2)
    async with outbox.running(bad_row="park"):
        seen = await outbox.wait_published(2)
    assert [row for each in seen for row in each.ids] == [1, 2]
    assert await outbox.fetch("SELECT FROM oncebox.outbox_parked") == []


async def test_parked_with_its_transaction_and_later_ones_of_its_keys(outbox: Outbox):
    await outbox.init()
    async with await outbox.connect(autocommit=False) as connection:
        await outbox.write(1, on=connection, key="a")
        await outbox.write(2, on=connection, key="b")
        await connection.execute("UPDATE outbox SET id = id")
        await connection.execute(
            "INSERT INTO outbox (id, aggregatetype, aggregateid, headers) VALUES (3, %s, 'c', '[]')", [outbox.suffix]
        )
    await outbox.write(4, key="d")
    async with await outbox.connect(autocommit=False) as connection:
        await outbox.write(5, on=connection, key="e")
        await outbox.write(6, on=connection, key="b")
    await outbox.write(7, key="e")
    await outbox.write(8, key="f")
    for _ in range(2):  # again is the same as once
        async with outbox.running(bad_row="park", slice_rows=2):
            seen = await outbox.wait_published(2)
    assert [row for each in seen for row in each.ids] == [4, 8]
    found = await outbox.fetch("SELECT row_id, reason FROM oncebox.outbox_parked ORDER BY position, number")
    assert [row_id for row_id, _ in found] == ["1", "2", "3", "5", "6", "7"]
    assert [reason for _, reason in found][2:] == ["its headers are not a JSON object", *[BEHIND] * 3]


async def test_a_bad_message_is_parked_whatever_its_id_is(outbox: Outbox):
    await outbox.init()
    message = r'{"id": "a\u0000b", "aggregatetype": "no topic", "aggregateid": "k", "payload": 1}'
    await run_sql(outbox, "SELECT pg_logical_emit_message(true, 'outbox', %s)", message)
    await outbox.write(1)
    async with outbox.running(bad_row="park"):
        await outbox.wait_published(1)
    ((row_id,),) = await outbox.fetch("SELECT row_id FROM oncebox.outbox_parked")
    assert row_id == "a\N{REPLACEMENT CHARACTER}b"


@pytest.mark.parametrize("source", ["logical", "commit_seq"])
async def test_a_key_that_stays_bad_does_not_park_without_end(outbox: Outbox, source: str):
    given = {"source": source, "bad_row": "park", "parked_rows_max": 3}
    await outbox.init(**given)
    await write_bad(outbox, 1, key="k", headers="[1]")
    await outbox.write(2, 3, key="k")
    await outbox.write(4)
    await outbox.write(5, key="k")
    await outbox.write(6)
    for _ in range(2):
        message = await outbox.run_until_stopped(**given)
        assert "more than 3 rows would be parked (parked_rows_max), 3 are" in message
        assert BEHIND in message
    assert [each.ids for each in await outbox.wait_published(1)] == [[4]]
    assert await parked.discard(outbox.settings(**given)) == 3
    async with outbox.running(**given):
        seen = await outbox.wait_published(3)
    assert [row for each in seen for row in each.ids] == [4, 5, 6]


async def test_what_is_parked_survives_a_crash_of_the_server(tmp_path: Path, shared_coordinator: Coordinators):
    """Kafka's token is past it. Here commits are not on disk when they are answered, for seconds."""
    late = {"wal_writer_delay": "10s", "checkpoint_timeout": "1h", "autovacuum": "off"}
    with LocalPostgres(tmp_path / "postgres", settings=late) as server:
        outbox = Outbox(dsn=server.dsn, one=shared_coordinator)
        create_topic(shared_coordinator.bootstrap_servers, outbox.topic)
        await outbox.init()
        await write_bad(outbox, 1, headers="[1]")
        await run_sql(outbox, f"ALTER DATABASE {server.dsn.rpartition('/')[2]} SET synchronous_commit = off")

        def crash(step: str) -> None:
            if step == "after commit":
                server.kill()

        relay = OutboxRelay(outbox.settings(bad_row="park", idle_ms=60_000), on_step=crash)
        task = asyncio.create_task(relay.run())
        while server.running:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(POLL_S)
        relay.stop()
        await task
        await asyncio.to_thread(server.restart)
        assert await outbox.fetch("SELECT row_id FROM oncebox.outbox_parked") == [("1",)]


async def test_a_writer_that_stays_open_is_told_and_others_go_on(outbox: Outbox):
    await outbox.init()
    async with await outbox.connect(autocommit=False) as open_one:
        await outbox.write(1, on=open_one)
        (pid,) = await (await open_one.execute("SELECT pg_backend_pid()")).fetchone()  # type: ignore[misc]
        async with outbox.running(writer_warn_s=1):
            await outbox.write(2)
            assert [each.ids for each in await outbox.wait_published(1)] == [[2]]
            await outbox.wait_told(f"process {pid}")
            await open_one.commit()
            seen = await outbox.wait_published(2)
    assert [each.ids for each in seen] == [[2], [1]]


async def test_prepared_transactions_and_other_databases_are_told_too(outbox: Outbox, postgres: LocalPostgres):
    """They keep the log as well. Also while the relay is paused."""
    await outbox.init()
    async with await outbox.connect(autocommit=False) as connection:
        await outbox.write(1, on=connection)
        await connection.execute(f"PREPARE TRANSACTION 'forgotten-{outbox.suffix}'".encode())
    try:
        async with outbox.running(writer_warn_s=1, slot_warn_bytes=1_000_000) as relay:
            await control.set_paused(outbox.settings(), is_paused=True)
            await outbox.wait_told("PAUSED")
            await outbox.wait_told(f"the prepared transaction 'forgotten-{outbox.suffix}'")
            await run_sql(outbox, "SELECT pg_logical_emit_message(true, 'other', repeat('x', 2000000))")
            await outbox.wait_told("the slot keeps ")
            age = relay.metrics.registry.get_sample_value("oncebox_outbox_slot_age_transactions")
            assert age is not None
            assert age >= 1
    finally:
        await run_sql(outbox, f"ROLLBACK PREPARED 'forgotten-{outbox.suffix}'")
    elsewhere = await psycopg.AsyncConnection.connect(postgres.dsn)
    async with elsewhere, outbox.running(writer_warn_s=1):
        await elsewhere.execute("SELECT pg_current_xact_id()")
        await outbox.wait_told(f"process {elsewhere.info.backend_pid}")
        await elsewhere.rollback()


async def test_a_slot_whose_log_is_gone_is_noticed(tmp_path: Path, shared_coordinator: Coordinators):
    """max_slot_wal_keep_size: rather no slot than a full disk. Noticed while it runs, and at the start."""
    keep_little = {"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB", "max_wal_size": "32MB"}
    with LocalPostgres(tmp_path / "postgres", settings=keep_little) as server:
        outbox = Outbox(dsn=server.dsn, one=shared_coordinator)
        create_topic(shared_coordinator.bootstrap_servers, outbox.topic)
        await outbox.init()
        await outbox.write(1)
        stopped = asyncio.create_task(outbox.run_until_stopped())
        await outbox.wait_published(1)
        await control.set_paused(outbox.settings(), is_paused=True)
        await outbox.wait_told("PAUSED")
        await outbox.write(2)
        for _ in range(3):
            await run_sql(outbox, "SELECT pg_logical_emit_message(true, 'other', 'x'), pg_switch_wal()")
        await run_sql(outbox, "CHECKPOINT")
        assert "was invalidated" in await stopped
        assert "was invalidated" in await outbox.run_until_stopped()
        assert (await resync(outbox.settings(), apply=True)).missing == ["2"]
        await control.set_paused(outbox.settings(), is_paused=False)
        await outbox.write(3)
        async with outbox.running():
            seen = await outbox.wait_published(3)
        assert [row for each in seen for row in each.ids] == [1, 2, 3]


@pytest.mark.parametrize("jump", ["1 hour", "-1 hour"])
async def test_a_clock_that_jumps_changes_nothing(outbox: Outbox, jump: str):
    """The sign of life looks too old, or is from times to come: each row comes once."""
    await outbox.init()
    async with outbox.running(takeover_ms=2000):
        second = OutboxRelay(outbox.settings(takeover_ms=2000))
        task = asyncio.create_task(second.run())
        for row_id in range(6):
            if row_id % 2:
                await run_sql(outbox, "UPDATE oncebox.outbox_relay SET beat_at = now() - %s::interval", jump)
            await outbox.write(row_id, key="k")
            await outbox.wait_published(row_id + 1)
        seen = await outbox.seen()
        second.stop()
        await task
    assert [row for each in seen for row in each.ids] == list(range(6))


async def test_one_that_has_just_begun_to_lead_is_not_put_out(outbox: Outbox):
    """Only the last sign of life of whoever led before is there, and that is old."""
    await outbox.init()
    await run_sql(outbox, "UPDATE oncebox.outbox_relay SET beat_at = now() - interval '1 hour'")
    leading, waiting = [await Database.open(outbox.settings(takeover_ms=1_000)) for _ in range(2)]
    async with leading.connection, waiting.connection, asyncio.timeout(60):
        assert await leading.lead()
        assert not await waiting.lead()
        first_s = time.monotonic()
        assert not await waiting.put_out_silent_leader()
        while not await waiting.put_out_silent_leader():  # noqa: ASYNC110 - it counts itself
            await asyncio.sleep(0.05)
        assert time.monotonic() - first_s >= 1
        while not await waiting.lead():  # noqa: ASYNC110 - the session ends in its own time
            await asyncio.sleep(0.05)


async def test_a_slow_start_is_not_taken_for_death(outbox: Outbox, monkeypatch):
    """Both begin long after the last sign of life of whoever led before."""
    start, settings = Producer.start, outbox.settings(takeover_ms=4_000)

    async def slow(self: Producer) -> None:
        await asyncio.sleep(5)  # longer than a leader may be silent
        await start(self)

    await outbox.init()
    await run_sql(outbox, "UPDATE oncebox.outbox_relay SET beat_at = now() - interval '1 hour'")
    monkeypatch.setattr(Producer, "start", slow)
    relays = [OutboxRelay(settings), OutboxRelay(settings)]
    async with asyncio.TaskGroup() as tasks:
        for relay in relays:
            tasks.create_task(relay.run())
        await outbox.write(1)
        await outbox.wait_published(1)
        assert await outbox.fetch("SELECT fence FROM oncebox.outbox_relay") == [(1,)]
        for relay in relays:
            relay.stop()


async def published_once(outbox: Outbox) -> None:
    await outbox.init()
    await outbox.write(1)
    async with outbox.running():
        await outbox.wait_published(1)
        await outbox.write(2)
        await outbox.wait_published(2)


async def run_sql(outbox: Outbox, query: str, *values: Any) -> None:
    async with await outbox.connect() as connection:
        await connection.execute(query.encode(), values)


async def test_a_slot_that_is_gone_or_made_anew_is_noticed(outbox: Outbox):
    await published_once(outbox)
    slot = outbox.settings().slot
    await run_sql(outbox, "SELECT pg_drop_replication_slot(%s)", slot)
    await outbox.write(3)
    assert "does not exist" in await outbox.run_until_stopped()
    await run_sql(outbox, "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", slot)
    assert "beyond all that this relay has published" in await outbox.run_until_stopped()


async def test_a_slot_that_somebody_else_has_read_is_noticed(outbox: Outbox):
    await published_once(outbox)
    await outbox.write(3)
    await run_sql(outbox, READ_BY_SOMEBODY, outbox.settings().slot)
    assert "beyond all that this relay has published" in await outbox.run_until_stopped()


async def test_an_older_copy_another_timeline_and_another_cluster_are_noticed(outbox: Outbox):
    await published_once(outbox)
    await run_sql(outbox, "UPDATE oncebox.outbox_relay SET fence = 0")
    for _ in range(3):  # also for one that is started again and again
        assert "older copy" in await outbox.run_until_stopped()
    await run_sql(outbox, "UPDATE oncebox.outbox_relay SET fence = 100, timeline = 9")
    assert "restored or failed over" in await outbox.run_until_stopped()
    await run_sql(outbox, "UPDATE oncebox.outbox_relay SET timeline = 1, system_identifier = '5'")
    assert "another database cluster" in await outbox.run_until_stopped()


async def test_a_database_that_knows_no_outbox_or_another_table_is_told(outbox: Outbox):
    assert "oncebox outbox init" in await outbox.run_until_stopped()
    await outbox.init()
    await run_sql(outbox, "ALTER TABLE outbox RENAME COLUMN payload TO body")
    async with await outbox.connect() as connection:
        await connection.execute("INSERT INTO outbox (id, aggregatetype, aggregateid, body) VALUES (1, 'a', 'b', '{}')")
    assert "no column payload" in await outbox.run_until_stopped()
    other = outbox.settings(columns={"payload": "body"}, topic=outbox.topic)
    relay = OutboxRelay(other)
    task = asyncio.create_task(relay.run())
    await outbox.wait_published(1)
    relay.stop()
    await task


async def test_missing_rights_are_told(outbox: Outbox):
    await outbox.init()
    async with await outbox.connect() as connection:
        await connection.execute("CREATE ROLE weak LOGIN PASSWORD 'weak'")
        try:
            await connection.execute("GRANT USAGE ON SCHEMA oncebox TO weak; GRANT ALL ON oncebox.outbox_relay TO weak")
            weak = re.sub("//[^@]+@", "//weak:weak@", outbox.dsn)
            message = await outbox.run_until_stopped(postgres=PostgresSection(dsn=SecretStr(weak)))
            assert "the database refuses: permission denied" in message
        finally:
            await connection.execute("DROP OWNED BY weak; DROP ROLE weak")


async def test_a_database_that_is_down_is_waited_for(outbox: Outbox):
    await outbox.init()
    settings = outbox.settings().model_copy(
        update={"postgres": PostgresSection(dsn=SecretStr(outbox.dsn.replace("127.0.0.1", "127.0.0.2")))}
    )
    relay = OutboxRelay(settings)
    task = asyncio.create_task(relay.run())
    await asyncio.sleep(0.5)
    assert not task.done()
    relay.stop()
    await task
