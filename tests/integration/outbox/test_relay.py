"""The relay on real parts: order, boundaries, what it does with bad rows, and what it says of itself."""

import asyncio
import json
from contextlib import suppress

import pytest

from relay.outbox import control, parked, publisher
from relay.outbox.token import StopError
from tests.integration.outbox.conftest import Outbox
from tests.support.coordinator import read_committed

SOURCES = pytest.mark.parametrize("source", ["logical", "commit_seq"])


@SOURCES
async def test_rows_are_published_in_commit_order_with_all_that_the_mapping_says(outbox: Outbox, source: str):
    await outbox.init(source=source)
    early, late = await outbox.connect(autocommit=False), await outbox.connect(autocommit=False)
    await outbox.write(1, 2, on=early)
    await outbox.write(3, 4, on=late)
    await late.commit()
    await outbox.write(5)
    async with outbox.running(source=source):
        assert [each.ids for each in await outbox.wait_published(3)] == [[3, 4, 5]]
        await early.commit()
        await outbox.write(6)
        rolled_back = await outbox.connect(autocommit=False)
        await outbox.write(7, on=rolled_back)
        await rolled_back.rollback()
        async with await outbox.connect() as connection:
            await connection.execute(
                "INSERT INTO outbox VALUES (8, %s, 'k', 'gone', NULL, '{\"trace\": \"abc\"}')", [outbox.suffix]
            )
        seen = await outbox.wait_published(6 + 1)
        for each in (early, late, rolled_back):
            await each.close()
    assert [row for each in seen for row in each.ids] == [3, 4, 5, 1, 2, 6, 8]
    *_, last = read_committed(outbox.one.bootstrap_servers, outbox.topic)
    assert (last.key(), last.value()) == (b"k", None)
    assert last.headers() == [("id", b"8"), ("type", b"gone"), ("trace", b"abc")]


@pytest.mark.parametrize("source", ["logical", "commit_seq"])
async def test_records_are_utf8_whatever_the_environment_says(outbox: Outbox, monkeypatch, source: str):
    """Decoding gives rows in the encoding of the client."""
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    await outbox.init(source=source)
    await outbox.write(1, key="Grüße")
    async with outbox.running(source=source):
        await outbox.wait_published(1)
    (record,) = read_committed(outbox.one.bootstrap_servers, outbox.topic)
    assert record.key() == "Grüße".encode()


async def test_a_transaction_is_never_cut_and_groups_are_whole(outbox: Outbox):
    await outbox.init()
    for first in range(0, 60, 6):
        await outbox.write(*range(first, first + 6))
    async with outbox.running(group_rows_max=10, slice_rows=4):
        seen = await outbox.wait_published(60)
    assert [row for each in seen for row in each.ids] == list(range(60))
    # Ten rows are reached within the second transaction, which is not cut.
    assert [len(each.ids) for each in seen] == [12] * 5


@SOURCES
async def test_a_transaction_larger_than_any_batch_is_one(outbox: Outbox, source: str):
    await outbox.init(source=source)
    async with await outbox.connect() as connection:
        await connection.execute(
            "INSERT INTO outbox SELECT n, %s, 'k', 't', to_jsonb(repeat('x', 1000)) FROM generate_series(1, 3000) n",
            [outbox.suffix],
        )
    small = {"group_rows_max": 100, "group_bytes_max": 10_000, "slice_rows": 500, "changes_max": 1_000}
    async with outbox.running(source=source, **small):
        (only,) = await outbox.wait_published(3000)
    assert only.ids == list(range(1, 3001))


@pytest.mark.parametrize("changes_max", [60_000, 2], ids=["in one look", "farther than a look"])
async def test_what_was_published_is_skipped_after_the_slot_fell_back(outbox: Outbox, monkeypatch, changes_max: int):
    """A crash of the server may lose where the slot stood; so may one of the relay before it advanced."""
    from relay.outbox.logical import LogicalSource

    async def forgotten(_self: LogicalSource, _end: int) -> None: ...

    await outbox.init()
    await outbox.write(1, 2)
    await outbox.write(3)
    with monkeypatch.context() as patch:
        patch.setattr(LogicalSource, "done", forgotten)
        async with outbox.running():
            await outbox.wait_published(3)
    await outbox.write(4)
    async with outbox.running(changes_max=changes_max, idle_ms=1):
        seen = await outbox.wait_published(4)
    assert [each.ids for each in seen] == [[1, 2, 3], [4]]


async def test_messages_that_fill_a_look_hide_nothing(outbox: Outbox):
    """Outside of a transaction they belong to nobody, and give no place to advance to."""
    await outbox.init()
    async with await outbox.connect() as connection:
        for _ in range(20):
            await connection.execute("SELECT pg_logical_emit_message(false, 'heartbeat', 'x')")
    await outbox.write(1)
    async with outbox.running(changes_max=3, idle_ms=1):
        assert [each.ids for each in await outbox.wait_published(1)] == [[1]]


async def test_a_second_relay_stands_by_and_takes_over(outbox: Outbox):
    await outbox.init()
    async with outbox.running() as first:
        standing_by = asyncio.create_task(_run_second(outbox))
        await outbox.write(1)
        await outbox.wait_published(1)
        first.stop()
        await asyncio.sleep(0)
        await outbox.write(2)
        seen = await outbox.wait_published(2)
        standing_by.cancel()
        with suppress(asyncio.CancelledError):
            await standing_by
    assert [each.ids for each in seen] == [[1], [2]]


async def _run_second(outbox: Outbox) -> None:
    async with outbox.running():
        await asyncio.Event().wait()


@SOURCES
async def test_published_rows_are_deleted_if_wanted(outbox: Outbox, source: str):
    await outbox.init(source=source)
    await outbox.write(1, 2)
    async with outbox.running(source=source, cleanup="delete"):
        await outbox.write(3)
        seen = await outbox.wait_published(3)
        await outbox.wait_deleted()
    assert [row for each in seen for row in each.ids] == [1, 2, 3]


async def test_more_rows_than_are_remembered_are_deleted_too(outbox: Outbox, monkeypatch):
    monkeypatch.setattr(publisher, "DELETED_AT_ONCE_MAX", 10)
    await outbox.init()
    await outbox.write(*range(40))
    await outbox.write(40)
    # The look that finds them again is full of them.
    async with outbox.running(cleanup="delete", slice_rows=7, changes_max=20, idle_ms=1):
        seen = await outbox.wait_published(41)
        await outbox.wait_deleted()
    assert [each.ids for each in seen] == [list(range(40)), [40]]


async def test_rows_may_be_gone_before_they_are_read_and_messages_need_no_table(outbox: Outbox):
    await outbox.init()
    async with await outbox.connect(autocommit=False) as connection:
        await outbox.write(1, on=connection)
        await connection.execute("DELETE FROM outbox")
        content = {"id": 2, "aggregatetype": outbox.suffix, "aggregateid": "k", "payload": {"a": 1}}
        await connection.execute("SELECT pg_logical_emit_message(true, 'outbox', %s)", [json.dumps(content)])
    async with outbox.running(cleanup="delete"):
        seen = await outbox.wait_published(2)
    assert [each.ids for each in seen] == [[1, 2]]


@SOURCES
async def test_parked_rows_are_published_after_all(outbox: Outbox, source: str):
    """Also while the relay runs; each once, in the order they had, before what came later with their keys."""
    given = {"source": source, "bad_row": "park"}
    await outbox.init(**given)
    settings = outbox.settings(**given)
    async with await outbox.connect() as connection:
        await connection.execute(
            "INSERT INTO outbox (id, aggregatetype, aggregateid, payload, headers) VALUES (1, %s, 'k', '[1]', '[]')",
            [outbox.suffix],
        )
    await outbox.write(2, key="k")
    async with outbox.running(**given):
        await outbox.write(3, key="other")
        assert [each.ids for each in await outbox.wait_published(1)] == [[3]]
        assert [row.row_id for row in await parked.listed(settings, 10)] == ["1", "2"]
        assert await parked.retry(settings) == 2
        # It is still bad: all stay where they are, and are no longer handed back.
        await outbox.wait_until("SELECT count(*) = 2 AND bool_and(retry IS NULL) FROM oncebox.outbox_parked")
        await outbox.fetch("UPDATE oncebox.outbox_parked SET headers = NULL WHERE row_id = '1' RETURNING 1")
        await control.set_paused(settings, is_paused=True)
        await outbox.wait_told("PAUSED")
    # Committed before it is tried again, read after.
    await outbox.write(4, key="k")
    assert await parked.retry(settings) == 2
    with pytest.raises(StopError, match="already"):
        await parked.discard(settings)
    await control.set_paused(settings, is_paused=False)
    async with outbox.running(**given):
        await outbox.write(5, key="k")
        seen = await outbox.wait_published(5)
        await outbox.wait_until("SELECT count(*) = 0 FROM oncebox.outbox_parked")
        await outbox.write(6, key="k")
        seen = await outbox.wait_published(6)
    assert [row for each in seen for row in each.ids] == [3, 1, 2, 4, 5, 6]
    *values, _ = [each.value() for each in read_committed(outbox.one.bootstrap_servers, outbox.topic)]
    assert values == [b'{"row": 3}', b"[1]", b'{"row": 2}', b'{"row": 4}', b'{"row": 5}']
    assert await parked.discard(settings) == 0


async def test_pause_and_status(outbox: Outbox):
    await outbox.init()
    async with outbox.running():
        await control.set_paused(outbox.settings(), is_paused=True)
        await outbox.wait_told("PAUSED")
        await outbox.write(1)
        (told,) = await control.status(outbox.dsn)
        assert told.is_paused
        assert told.kept_bytes is not None
        assert await outbox.seen() == []
        await control.set_paused(outbox.settings(), is_paused=False)
        await outbox.wait_published(1)
    (told,) = await control.status(outbox.dsn)
    assert (told.state, told.rows_published) == ("STOPPED", 1)
