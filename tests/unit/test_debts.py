"""What a commit owes: its manifest, in batches that brokers take. What is owed for long is not looked for again."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from coordinator.cluster.topics import MESSAGE_MAX_BYTES
from coordinator.core.grants import Context, settle
from coordinator.core.invariants import InvariantBrokenError, check_step
from coordinator.core.owed import owed
from coordinator.core.records import Contents, Run, Transaction, Written
from coordinator.core.state import TransactionState
from coordinator.debts import Debts
from coordinator.loading import Loaded, load
from coordinator.log import codec
from coordinator.log.lead import Appender, writer_of
from coordinator.log.port import Kind, size_of
from coordinator.markers.port import Markers
from coordinator.serving import ShardSettings
from oncebox.v1 import log_pb2
from oncebox.wire import batch_builder
from tests.support.memory_store import MemoryStore, NoMarkers
from tests.unit.core.states import NOW_MS, id_state, transaction


def commit(number: int, **changes: object) -> Transaction:
    written = (Written(topic="t", partition=0, record_count=1, runs=(Run(0, 1),)),)
    made = transaction(
        number, TransactionState.PREPARE_COMMIT, producer_id=1000 + number, contents=Contents(written=written)
    )
    return replace(made, decided_at_ms=NOW_MS, decision=number, **changes)


def open_debts(
    store: MemoryStore, markers: Markers, *, batch_max_bytes: int = 1_000_000, batch_max_records: int = 1_000
) -> Debts:
    return Debts(
        feed=Appender(store, Kind.FEED, 0, writer_of(0, 0, 0), 1),
        markers=markers,
        leader=log_pb2.LeaderState(nonce=b"0"),
        paid=lambda _name, _number: None,
        feed_offset_next=len(store.records[Kind.FEED]),
        feed_batch_max_bytes=batch_max_bytes,
        feed_batch_max_records=batch_max_records,
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


class Batches(MemoryStore):
    """Keeps what was appended to the feed batch by batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Sequence[tuple[bytes, bytes | None]]] = []

    async def append(self, kind: Kind, *arguments: Any) -> int:
        if kind is Kind.FEED:
            self.batches.append(arguments[-1])
        return await super().append(kind, *arguments)


def bytes_of(batch: Sequence[tuple[bytes, bytes | None]]) -> int:
    builder = batch_builder(transactional=False, producer_id=1 << 62, producer_epoch=1, base_sequence=1)
    for index, (key, value) in enumerate(batch):
        builder.append(index, None, key, value, [])
    return len(builder.build())


def kinds(store: MemoryStore) -> list[str | None]:
    return [codec.parse_feed(value).WhichOneof("record") for _, value in store.records[Kind.FEED]]


@pytest.mark.parametrize("name", ["{}", "{}" + "n" * 500])
async def test_brokers_take_whatever_waited_while_the_feed_was_away(name: str) -> None:
    store = Batches()
    settings = ShardSettings()
    # However many records: their size alone must keep a batch small enough.
    debts = open_debts(store, NoMarkers(), batch_max_bytes=settings.batch_max_bytes, batch_max_records=1_000_000)
    count = 8_000
    for number in range(1, count + 1):
        state = id_state(commit(number), number=number + 1, transactional_id=name.format(number))
        debts.take_on(owed(state))
    await write_manifests(debts)
    assert max(bytes_of(batch) for batch in store.batches) <= settings.batch_max_bytes < MESSAGE_MAX_BYTES
    assert [codec.parse_feed(value).manifest.number for _, value in store.records[Kind.FEED]] == [*range(1, count + 1)]


async def test_a_leaders_record_is_never_far_from_the_end_of_the_feed() -> None:
    """A take-over reads the feed back to the last one before it reads the log."""
    store = Batches()
    await load(store, 0, instance="i", address="i:1", nonce=lambda: b"1", accept_lost_log=False)
    debts = open_debts(store, NoMarkers(), batch_max_records=10)
    for number in range(1, 96):
        debts.take_on(owed(id_state(commit(number), number=number + 1)))
        if number % 7 == 0 or number > 70:
            await write_manifests(debts)
    assert max(len(batch) for batch in store.batches) <= 10
    stands = kinds(store)
    assert stands.count("manifest") == 95
    leaders = [index for index, kind in enumerate(stands) if kind == "leader"]
    assert max(after - before for before, after in pairwise([*leaders, len(stands)])) <= 20


async def test_only_the_missing_parts_of_a_manifest_are_appended() -> None:
    entries = tuple(
        Written(topic="t", partition=n, record_count=1, runs=(Run(n, n + 1),), topic_id=b"topic-id-of-t...")
        for n in range(20)
    )
    large = replace(commit(2), contents=Contents(written=entries))
    parts = codec.encode_manifest("a", large, 200)
    assert len(parts) > 3
    store = Batches()
    debts = open_debts(store, NoMarkers(), batch_max_bytes=200)
    written = frozenset({("a", 2, 0), ("a", 2, 2)})
    debts.take_on(owed(id_state(commit(1), large, commit(3), number=4)), written)
    await write_manifests(debts)
    found = [codec.parse_feed(value).manifest for _, value in store.records[Kind.FEED]]
    missing = [(2, part) for part in range(len(parts)) if part not in {0, 2}]
    assert [(manifest.number, manifest.part) for manifest in found] == [(1, 0), *missing, (3, 0)]
    assert {part.part_count for part in found if part.number == 2} == {len(parts)}
    # A part is cut to the limit before its key and what every record needs are counted: alone it may be above.
    assert all(len(batch) == 1 or sum(size_of(*record) for record in batch) <= 200 for batch in store.batches)
    assert debts.of("a")[2].feed_offset_next == 1 + len(missing)
