"""A log that is not the one that was written is refused, by what the feed and the topic's id tell of it."""

import itertools

import pytest

from coordinator.core.records import IdState, NumberFloor, Tombstone, Transaction
from coordinator.core.state import TransactionState
from coordinator.loading import Loaded, load
from coordinator.log import codec
from coordinator.log.lead import EPOCH_LAST, NUMBERS_SKIPPED, LogLostError
from coordinator.log.port import Kind
from tests.support.memory_store import MemoryStore
from tests.unit.core.states import id_state, transaction

_nonces = (str(number).encode() for number in itertools.count())


async def taken_over(store: MemoryStore, *, accept_lost_log: bool = False) -> Loaded:
    return await load(store, 0, instance="i", address="i:1", nonce=_nonces.__next__, accept_lost_log=accept_lost_log)


def manifest(committed: Transaction) -> tuple[bytes, bytes]:
    return codec.encode_manifest("a", committed, 1_000_000)[0]


def commit(number: int) -> Transaction:
    return transaction(number, TransactionState.PREPARE_COMMIT)


def after(number: int) -> IdState:
    """Of an id whose numbers up to this one are decided."""
    return id_state(number=number + 1)


async def commits(store: MemoryStore, count: int, first: int = 1) -> None:
    loaded = await taken_over(store)
    for number in range(first, first + count):
        await loaded.log.append([codec.encode(after(number))])
        await loaded.feed.append([manifest(commit(number))])


async def test_a_log_that_was_truncated_within_its_last_leaders_time_is_refused() -> None:
    store = MemoryStore()
    await commits(store, 3)
    await taken_over(store)
    await commits(store, 3, first=4)
    whole = list(store.records[Kind.LOG])
    del store.records[Kind.LOG][-1:]
    with pytest.raises(LogLostError, match="remembers commit 6 of 'a', the log none above 5"):
        await taken_over(store)
    assert len(store.records[Kind.LOG]) == len(whole) - 1, "no epoch is used up by the attempt"
    store.records[Kind.LOG][:] = whole
    await taken_over(store)


async def test_the_last_commit_is_looked_for_behind_any_number_of_signs_of_life() -> None:
    store = MemoryStore()
    loaded = await taken_over(store)
    await loaded.log.append([codec.encode(after(1))])
    await loaded.feed.append([manifest(commit(1))])
    for _ in range(700):
        await loaded.feed.append([codec.encode_feed_leader(loaded.leader)])
    del store.records[Kind.LOG][-1:]
    with pytest.raises(LogLostError, match="remembers commit 1"):
        await taken_over(store)


async def test_commits_of_an_id_that_has_expired_are_no_loss() -> None:
    store = MemoryStore()
    await commits(store, 2)
    gone = Tombstone(transactional_id="a")
    store.records[Kind.LOG] += [codec.encode(NumberFloor(number_floor=3)), codec.encode(gone)]
    await taken_over(store)


async def test_a_restored_log_is_refused_however_much_of_it_there_is() -> None:
    store = MemoryStore()
    await commits(store, 2)
    store.topic_id = b"second"
    with pytest.raises(LogLostError, match=f"id {b'first'.hex()}, this is {b'second'.hex()}"):
        await taken_over(store)
    with pytest.raises(LogLostError):
        await taken_over(store, accept_lost_log=True)


async def test_a_leader_notices_that_it_writes_to_another_log() -> None:
    store = MemoryStore()
    loaded = await taken_over(store)
    await loaded.log.append([codec.encode(after(1))])
    store.records[Kind.LOG].clear()
    with pytest.raises(LogLostError, match="got offset 0, though 1 was taken"):
        await loaded.log.append([codec.encode(after(2))])


async def test_one_that_takes_over_notices_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    await commits(store, 2)
    real = MemoryStore.append

    async def append(self: MemoryStore, kind: Kind, *arguments: object) -> int:
        if kind is Kind.LOG:
            self.records[Kind.LOG].clear()
        return await real(self, kind, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryStore, "append", append)
    with pytest.raises(LogLostError, match="got offset 0"):
        await taken_over(store)


async def test_a_log_that_is_begun_anew_goes_on_above_the_lost_one() -> None:
    store = MemoryStore()
    await commits(store, 2)
    store.records[Kind.LOG].clear()
    store.topic_id = b"second"
    with pytest.raises(LogLostError, match="the feed remembers leader generation 0 epoch 0, the log none"):
        await taken_over(store)
    loaded = await taken_over(store, accept_lost_log=True)
    assert (loaded.leader.generation, loaded.leader.epoch, loaded.leader.log_topic_id) == (1, 0, b"second")
    assert loaded.ids.number_floor == 2 + NUMBERS_SKIPPED
    await loaded.log.append([codec.encode(after(3 + NUMBERS_SKIPPED))])
    assert (await taken_over(store)).leader.epoch == 1


@pytest.mark.parametrize("kept", [1, 2])
async def test_a_crash_while_it_is_begun_anew_leaves_it_safe(kept: int) -> None:
    """The floor stands before the old generation is closed: where that is done, nothing is missing."""
    store = MemoryStore()
    await commits(store, 2)
    feed = list(store.records[Kind.FEED])
    store.records[Kind.LOG].clear()
    store.topic_id = b"second"
    await taken_over(store, accept_lost_log=True)
    del store.records[Kind.LOG][kept:]
    store.records[Kind.FEED][:] = feed
    if kept == 1:
        with pytest.raises(LogLostError):
            await taken_over(store)
        return
    assert codec.parse_value(store.records[Kind.LOG][1][1] or b"").leader.epoch == EPOCH_LAST
    loaded = await taken_over(store)
    assert (loaded.leader.generation, loaded.leader.epoch) == (1, 0)
    assert loaded.ids.number_floor == 2 + NUMBERS_SKIPPED
