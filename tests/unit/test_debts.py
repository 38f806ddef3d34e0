"""What a commit owes for long: the log tells where its manifest stands, so that nobody has to look for it again."""

import asyncio

import pytest
from msgspec.structs import replace

from coordinator.core.grants import Context, settle
from coordinator.core.invariants import InvariantBrokenError, check_step
from coordinator.core.owed import owed
from coordinator.core.records import Contents, Run, Transaction, Written
from coordinator.core.state import TransactionState
from coordinator.debts import Debts
from coordinator.loading import Loaded, load
from coordinator.log import codec
from coordinator.log.lead import Appender, writer_of
from coordinator.log.port import Kind
from coordinator.markers.port import Markers
from tests.support.memory_store import MemoryStore, NoMarkers
from tests.unit.core.states import NOW_MS, id_state, transaction


def commit(number: int, **changes: object) -> Transaction:
    written = (Written(topic="t", partition=0, record_count=1, runs=(Run(0, 1),)),)
    made = transaction(
        number, TransactionState.PREPARE_COMMIT, producer_id=1000 + number, contents=Contents(written=written)
    )
    return replace(made, decided_at_ms=NOW_MS, decision=number, **changes)


def open_debts(store: MemoryStore, markers: Markers) -> Debts:
    return Debts(
        feed=Appender(store, Kind.FEED, 0, writer_of(0, 0, 0), 1),
        markers=markers,
        coordinator_epoch=0,
        paid=lambda _name, _number: None,
        feed_offset_next=len(store.records[Kind.FEED]),
        feed_batch_max_bytes=1_000_000,
    )


async def write_manifests(debts: Debts) -> None:
    """Until all that can be written is."""
    writing = asyncio.create_task(debts.write_manifests())
    for _ in range(20):
        await asyncio.sleep(0)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)


async def test_a_debt_grows_long_once_its_manifest_stands() -> None:
    store, markers = MemoryStore(), NoMarkers()
    debts = open_debts(store, markers)
    debts.take_on(owed(id_state(commit(1), number=2)))
    assert debts.grow_long(NOW_MS + 1) == []
    await write_manifests(debts)
    assert debts.grow_long(NOW_MS) == []
    assert debts.manifests_of("a") == {}
    assert debts.grow_long(NOW_MS + 1) == ["a"]
    assert debts.grow_long(NOW_MS + 1) == []
    assert debts.manifests_of("a") == {1: 1}
    assert markers.paying == [1]


async def test_what_is_noted_is_not_written_again() -> None:
    store, markers = MemoryStore(), NoMarkers()
    debts = open_debts(store, markers)
    debts.take_on(owed(id_state(commit(1, feed_offset_next=7), commit(2), number=3)))
    await write_manifests(debts)
    assert sorted(markers.paying) == [1, 2]
    assert [codec.parse_feed(value).manifest.number for _, value in store.records[Kind.FEED]] == [2]
    assert debts.grow_long(NOW_MS + 1) == ["a"]
    assert debts.manifests_of("a") == {2: 1}


def test_the_note_is_all_that_may_change_of_a_decided_transaction() -> None:
    before = id_state(commit(1), number=2)
    after = settle(before, Context(now_ms=NOW_MS, manifests={1: 7}))
    assert after.transactions[0].feed_offset_next == 7
    assert settle(after, Context(now_ms=NOW_MS, manifests={1: 9})) == after
    check_step(before, after)
    for other in (
        replace(after.transactions[0], feed_offset_next=8),
        replace(after.transactions[0], feed_offset_next=0),
    ):
        with pytest.raises(InvariantBrokenError):
            check_step(after, replace(after, transactions=(other,)))
    with pytest.raises(InvariantBrokenError):
        check_step(before, replace(after, transactions=(replace(after.transactions[0], decision=9),)))


async def test_a_take_over_does_not_look_for_what_is_noted() -> None:
    """The manifest of an old debt may have been deleted by retention: it is neither looked for nor written again."""
    store = MemoryStore()

    async def taken_over() -> Loaded:
        return await load(
            store, 0, instance="i", address="i:1", nonce=iter([b"1", b"2"]).__next__, accept_lost_log=False
        )

    await taken_over()
    old = commit(1, feed_offset_first=1, feed_offset_next=2)
    young = commit(2, feed_offset_first=5)
    feed = [codec.encode_manifest("a", each, 1_000_000)[0] for each in (old, *[old] * 4, young)]
    store.records[Kind.FEED].extend(feed)
    store.records[Kind.LOG].append(codec.encode(id_state(old, young, number=3)))
    store.kept_from = 4
    store.read_from.clear()
    loaded = await taken_over()
    assert [(debt.number, debt.is_old) for debt in loaded.debts] == [(1, True), (2, True)]
    assert ("a", 2, 0) in loaded.written
    assert store.read_from[-1] == (Kind.FEED, 5)
    markers = NoMarkers()
    debts = open_debts(store, markers)
    count = len(store.records[Kind.FEED])
    debts.take_on(loaded.debts, loaded.written)
    await write_manifests(debts)
    assert sorted(markers.paying) == [1, 2]
    assert len(store.records[Kind.FEED]) == count
