"""A transaction too large for memory: in the tables it is whole or not there, wherever the relay is cut off."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from oncebox import Producer
from oncebox.reader import source
from oncebox.settings import load
from relay.config import RelaySettings
from relay.large import LargeTransactions
from relay.status import Status
from relay.transaction_mode import TransactionSession
from tests.support.relay import GUARD, Relays

if TYPE_CHECKING:
    from tests.integration.relay.conftest import Cutter
    from tests.support.coordinator import Coordinators
    from tests.support.kafka import TopicFactory

ROWS = 400
# A tenth of the large transaction.
LIMITS = {"buffer_bytes": 50_000, "batch_rows": 50}
NOTE = "x" * 400
# Exchanges of a session from where it drops what it kept: then it saves positions, commits, and goes on.
AFTER_SAVE = 10


class Kept:
    """How many pieces sessions have kept in the database."""

    def __init__(self) -> None:
        self.count = 0


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    made = Kept()
    keep = LargeTransactions.keep

    def keeping(self: LargeTransactions, part: Any) -> None:
        made.count += 1
        keep(self, part)

    monkeypatch.setattr(LargeTransactions, "keep", keeping)
    # A whole transaction of this size would come with one fetch.
    monkeypatch.setattr(source, "BATCH_MAX", 40)
    return made


async def send(transaction: Any, topic: str, row: int, state: str) -> None:
    value = {"id": row, "state": state, "note": NOTE}
    await transaction.send(topic, json.dumps(value).encode(), key=str(row).encode())


async def write(one: Coordinators, names: list[str], *, bad: int | None = None) -> None:
    """A small transaction on each side of the large one, and two on its rows while it is open: one that ends before it
    writes more, one that shares every partition with it.
    """
    both = [
        Producer(one.bootstrap_servers, one.addresses[0], transactional_id=f"{who}-{uuid.uuid4().hex[:6]}")
        for who in ("large", "small")
    ]
    async with both[0] as large, both[1] as small:

        async def commit_small(state: str, rows: range) -> None:
            async with small.transaction() as transaction:
                for row in rows:
                    for topic in names:
                        await send(transaction, topic, row, state)

        await commit_small("before", range(ROWS, ROWS + 10))
        transaction = await large.begin()
        for row in range(ROWS):
            for topic in names:
                await send(transaction, topic, row, "bad\x00" if row == bad else "large")
            if row == ROWS // 2:
                await transaction.flush()
                await commit_small("between", range(ROWS // 2 - 5, ROWS // 2 + 5))
        await transaction.flush()
        await commit_small("last", range(ROWS - 5, ROWS))
        await transaction.commit()
        await commit_small("after", range(3))


def expected(*, large: bool = True) -> dict[int, str]:
    found = dict.fromkeys(range(ROWS), "large") if large else {}
    found |= dict.fromkeys(range(ROWS // 2 - 5, ROWS // 2 + (1 if large else 5)), "between")
    found |= dict.fromkeys(range(ROWS - 5, ROWS), "last") | dict.fromkeys(range(ROWS, ROWS + 10), "before")
    return found | dict.fromkeys(range(3), "after")


def prepare(relays: Relays, one: Coordinators, names: list[str], **settings: Any) -> RelaySettings:
    sections: list[dict[str, Any]] = []
    for table, topic in zip(("one", "other"), names, strict=True):
        relays.run(f"CREATE TABLE {table} (id bigint PRIMARY KEY, state text, note text, {GUARD})")
        sections.append({"topic": topic, "table": table, "key": ["id"]})
    relays.run("CREATE TABLE log (id bigint, state text)")
    # Every record once: what is doubled or lost shows.
    columns: dict[str, Any] = {"id": {}, "state": {}}
    sections.append({"topic": names[0], "table": "log", "insert_mode": "insert", "guard": False, "columns": columns})
    relays.configure(
        sections, mode="transaction", feed_topic=one.feed_topic, session_ms=6000, limits=LIMITS, **settings
    )
    return load(RelaySettings, file=relays.config)


def seen(relays: Relays) -> list[dict[int, str]]:
    """Both tables at one instant."""
    rows = relays.rows("SELECT 0, id, state FROM one UNION ALL SELECT 1, id, state FROM other")
    return [{row: state for table, row, state in rows if table == which} for which in (0, 1)]


def check_whole(relays: Relays) -> bool:
    """Whether the large transaction is there; never a part of it."""
    one, other = seen(relays)
    assert one == other
    counts = {state: list(one.values()).count(state) for state in one.values()}
    # (Others have overwritten some of its rows, or are going to.)
    assert counts.get("large", 0) in {0, ROWS - 6, ROWS - 11, ROWS - 14}
    return "large" in counts


async def session(settings: RelaySettings, stop: asyncio.Event) -> None:
    status = Status(name=settings.name, instance="under-test")
    await TransactionSession(settings, "under-test", status, stop).run()


async def finish(relays: Relays, settings: RelaySettings) -> None:
    stop = asyncio.Event()
    running = asyncio.create_task(session(settings, stop))
    try:
        await asyncio.to_thread(relays.wait_until, lambda: seen(relays) == [expected()] * 2, lambda: str(seen(relays)))
    finally:
        stop.set()
        await running
    total = ROWS + 10 + 10 + 5 + 3
    assert relays.rows("SELECT count(*), count(DISTINCT (id, state)) FROM log") == [(total, total)]


async def test_it_is_cut_off_between_pieces(
    shared_coordinator: Coordinators,
    new_topic: TopicFactory,
    relays: Relays,
    cutter: Cutter,
    kept: Kept,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # However much of it lies ready, it is read bit by bit: there are many moments to cut at.
    monkeypatch.setattr("oncebox.reader.source.BATCH_MAX", 10)
    names = [new_topic(partitions=2), new_topic()]
    settings = prepare(relays, shared_coordinator, names)
    await write(shared_coordinator, names)
    # (From here on a session has its partitions and reads.)
    point, cuts = 20, 0
    while True:
        cutter.left = point
        cuts += await cutter.run(session(settings, asyncio.Event()), limit_s=30)
        if relays.rows("SELECT to_regclass('oncebox.position') IS NOT NULL") == [(True,)] and check_whole(relays):
            break
        point += 7
    assert cuts >= 10
    assert kept.count > cuts // 2, "pieces of most sessions were kept, and gone with them"
    await finish(relays, settings)


@pytest.mark.parametrize("exchanges", range(1, AFTER_SAVE + 1))
async def test_it_is_cut_off_around_the_commit(
    shared_coordinator: Coordinators,
    new_topic: TopicFactory,
    relays: Relays,
    cutter: Cutter,
    kept: Kept,
    monkeypatch: pytest.MonkeyPatch,
    exchanges: int,
) -> None:
    names = [new_topic(partitions=2), new_topic()]
    settings = prepare(relays, shared_coordinator, names)
    await write(shared_coordinator, names)
    drop = LargeTransactions.drop

    def dropping(self: LargeTransactions, units: Any) -> None:
        cutter.left = exchanges
        drop(self, units)

    monkeypatch.setattr(LargeTransactions, "drop", dropping)
    assert await cutter.run(session(settings, asyncio.Event()), limit_s=60)
    assert kept.count
    is_there = check_whole(relays)
    assert is_there or exchanges < AFTER_SAVE, "committed by then"
    assert not is_there or exchanges > 1
    monkeypatch.setattr(LargeTransactions, "drop", drop)
    await finish(relays, settings)


@pytest.mark.parametrize("on_error", ["park", "skip"])
async def test_a_bad_record_takes_all_of_it(
    shared_coordinator: Coordinators, new_topic: TopicFactory, relays: Relays, kept: Kept, on_error: str
) -> None:
    names = [new_topic(partitions=2), new_topic()]
    settings = prepare(relays, shared_coordinator, names, on_error=on_error)
    await write(shared_coordinator, names, bad=ROWS - 20)
    stop = asyncio.Event()
    running = asyncio.create_task(session(settings, stop))
    letters = "SELECT state, count(*) FROM oncebox.dead_letter WHERE error LIKE '%NUL%' GROUP BY 1"
    state = {"park": "parked", "skip": "skipped"}[on_error]
    try:
        await asyncio.to_thread(relays.wait_for, letters, [(state, 2 * ROWS)])
        if on_error == "skip":
            await asyncio.to_thread(
                relays.wait_until, lambda: seen(relays) == [expected(large=False)] * 2, lambda: str(seen(relays))
            )
        assert not check_whole(relays)
    finally:
        stop.set()
        await running
    assert kept.count
