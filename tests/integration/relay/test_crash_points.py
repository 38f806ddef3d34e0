"""The relay is cut off after every single exchange with the database and every fetch from Kafka, and begun anew.

A cut closes the connection at once and throws the process's memory away, as SIGKILL does (which the other tests use);
here it can be placed after each statement, COMMIT included.
"""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer as StockProducer

from oncebox import Producer
from oncebox.settings import load
from relay.config import RelaySettings
from relay.partition_mode import PartitionSession
from relay.status import Status
from relay.transaction_mode import TransactionSession
from tests.support.relay import GUARD, Relays

if TYPE_CHECKING:
    from tests.integration.relay.conftest import Cutter
    from tests.support.coordinator import Coordinators
    from tests.support.kafka import TopicFactory

# More than one session with a few batches has.
POINTS = 75
TRANSACTIONS = 400
# Where nothing is left to do there are a few exchanges each second still.
CUT_LIMIT_S = 60.0


async def transfers(one: Coordinators, names: list[str]) -> dict[str, int]:
    """Sums of pairs are zero in each transaction; between them, records of a plain producer."""
    expected: dict[str, int] = {}
    stock = StockProducer({"bootstrap.servers": one.bootstrap_servers})
    async with Producer(one.bootstrap_servers, one.addresses[0], transactional_id=f"x-{uuid.uuid4().hex[:6]}") as mine:
        for number in range(TRANSACTIONS):
            rows = {f"a{number % 7}": number, f"b{number % 5}": -number}
            transaction = await mine.begin()
            for topic, (row, amount) in zip(names, rows.items(), strict=True):
                value = json.dumps({"id": row, "pair": number, "amount": amount}).encode()
                await transaction.send(topic, value, key=row.encode())
            if number % 9 == 4:
                await transaction.abort()
            else:
                await transaction.commit()
                expected |= rows
            if number % 10 == 0:
                plain = json.dumps({"id": f"plain-{number}", "pair": -1, "amount": 0}).encode()
                stock.produce(names[number % 2], plain, key=b"plain")
                expected[f"plain-{number}"] = 0
    stock.flush(30)
    return expected


async def _passed_on(stop: asyncio.Event, to: threading.Event) -> None:
    await stop.wait()
    to.set()


async def session(settings: RelaySettings, stop: asyncio.Event) -> None:
    given = (settings, "under-test", Status(name=settings.name, instance="under-test"))
    if settings.mode == "transaction":
        await TransactionSession(*given, stop).run()
        return
    stop_thread = threading.Event()
    asyncio.get_running_loop().create_task(_passed_on(stop, stop_thread))
    await asyncio.to_thread(lambda: PartitionSession(*given, stop_thread).run())


PAIRS = "SELECT id, pair FROM one WHERE pair >= 0 UNION ALL SELECT id, pair FROM other WHERE pair >= 0"


def after(number: int) -> dict[str, int]:
    """The rows once all transactions up to this one are applied, and no other: they are of one writer."""
    found: dict[str, int] = {}
    for each in range(number + 1):
        if each % 9 != 4:
            found |= {f"a{each % 7}": each, f"b{each % 5}": each}
    return found


@pytest.mark.parametrize(
    ("mode", "points"),
    [
        ("transaction", range(1, POINTS + 1)),
        # Each of these has to join the group first.
        ("partition", range(30, POINTS + 1, 4)),
        pytest.param("partition", range(1, POINTS + 1), marks=pytest.mark.long),
    ],
    ids=["transaction", "partition", "partition-all"],
)
async def test_a_cut_after_every_exchange_loses_and_doubles_nothing(
    shared_coordinator: Coordinators, new_topic: TopicFactory, relays: Relays, cutter: Cutter, mode: str, points: range
) -> None:
    one = shared_coordinator
    names = [new_topic(partitions=2), new_topic()]
    for table in ("one", "other"):
        relays.run(f"CREATE TABLE {table} (id text PRIMARY KEY, pair bigint, amount bigint, {GUARD})")
    relays.run("CREATE TABLE log (id text, pair bigint, amount bigint)")
    expected = await transfers(one, names)
    sections: list[dict[str, Any]] = [
        {"topic": topic, "table": table, "key": ["id"]} for topic, table in zip(names, ("one", "other"), strict=True)
    ]
    # Every record once: what is doubled or lost shows.
    sections.append({"topic": names[0], "table": "log", "insert_mode": "insert", "guard": False})
    relays.configure(sections, mode=mode, feed_topic=one.feed_topic, limits={"batch_rows": 6}, session_ms=6000)
    settings = load(RelaySettings, file=relays.config)

    cuts = 0
    for point in points:
        stop = asyncio.Event()
        cutter.left = point
        try:
            cuts += await cutter.run(session(settings, stop), limit_s=CUT_LIMIT_S)
        finally:
            stop.set()
        if relays.rows("SELECT to_regclass('oncebox.position') IS NOT NULL") == [(True,)]:
            pairs = dict(relays.rows(PAIRS))
            assert mode == "partition" or pairs == after(max(pairs.values(), default=-1))
    assert cuts == len(points)

    stop = asyncio.Event()
    running = asyncio.create_task(session(settings, stop))
    rows = "SELECT id, amount FROM one UNION ALL SELECT id, amount FROM other"
    try:
        await asyncio.to_thread(
            relays.wait_until, lambda: dict(relays.rows(rows)) == expected, lambda: str(relays.rows(rows))
        )
    finally:
        stop.set()
        await running
    first = sum(1 for number in range(TRANSACTIONS) if number % 9 != 4) + sum(
        1 for number in range(0, TRANSACTIONS, 10) if number % 2 == 0
    )
    assert relays.rows("SELECT count(*), count(DISTINCT (id, pair)) FROM log") == [(first, first)]


async def with_deletes_and_bad_records(one: Coordinators, names: list[str]) -> tuple[dict[str, int], int]:
    """What the tables hold once all that is bad is mended, and how many rows the first topic has. Of a bad transaction
    one record is bad; the next one writes the same rows.
    """
    expected: dict[str, int] = {}
    inserts = 0
    async with Producer(one.bootstrap_servers, one.addresses[0], transactional_id=f"y-{uuid.uuid4().hex[:6]}") as mine:
        for number in range(TRANSACTIONS):
            is_bad, is_delete = number % 12 == 5, number % 4 == 2
            which = number - number % 12 if number % 12 in {5, 6} else number % 7
            kind = "mended" if number % 12 in {5, 6} else "a"
            rows = {f"{kind}{which}": number, f"{kind}-other{which}": -number}
            async with mine.transaction() as transaction:
                for topic, (row, amount) in zip(names, rows.items(), strict=True):
                    told = "bad" if is_bad and amount < 0 else amount
                    value = json.dumps({"id": row, "pair": number, "amount": told}).encode()
                    gone = is_delete and topic == names[1]
                    await transaction.send(topic, None if gone else value, key=row.encode())
                    expected[row] = MENDED if told == "bad" else amount
                    if gone:
                        del expected[row]
            inserts += 1
    return expected, inserts


MENDED = 7
MEND = (
    "UPDATE oncebox.dead_letter SET state = 'queued', "
    f"value = convert_to(replace(convert_from(value, 'utf8'), '\"bad\"', '{MENDED}'), 'utf8') "
    "WHERE state = 'parked' AND unit IN "
    "(SELECT unit FROM oncebox.dead_letter WHERE state = 'parked' ORDER BY unit LIMIT {})"
)


@pytest.mark.parametrize(
    ("mode", "points"),
    [
        ("transaction", range(20, POINTS + 1, 3)),
        ("partition", range(30, POINTS + 1, 6)),
        pytest.param("transaction", range(1, POINTS + 1), marks=pytest.mark.long),
        pytest.param("partition", range(1, POINTS + 1), marks=pytest.mark.long),
    ],
    ids=["transaction", "partition", "transaction-all", "partition-all"],
)
async def test_a_cut_while_rows_are_deleted_parked_and_replayed(
    shared_coordinator: Coordinators, new_topic: TopicFactory, relays: Relays, cutter: Cutter, mode: str, points: range
) -> None:
    one = shared_coordinator
    names = [new_topic(), new_topic(partitions=2)]
    for table in ("one", "other"):
        relays.run(f"CREATE TABLE {table} (id text PRIMARY KEY, pair bigint, amount bigint, {GUARD})")
    relays.run("CREATE TABLE log (id text, pair bigint, amount bigint)")
    expected, inserts = await with_deletes_and_bad_records(one, names)
    sections: list[dict[str, Any]] = [
        {"topic": topic, "table": table, "key": ["id"]} for topic, table in zip(names, ("one", "other"), strict=True)
    ]
    sections.append({"topic": names[0], "table": "log", "insert_mode": "insert", "guard": False})
    relays.configure(
        sections, mode=mode, feed_topic=one.feed_topic, limits={"batch_rows": 6}, session_ms=6000, on_error="park"
    )
    settings = load(RelaySettings, file=relays.config)
    cuts = 0
    for point in points:
        stop = asyncio.Event()
        cutter.left = point
        try:
            cuts += await cutter.run(session(settings, stop), limit_s=CUT_LIMIT_S)
        finally:
            stop.set()
        if relays.rows("SELECT to_regclass('oncebox.dead_letter') IS NOT NULL") == [(True,)]:
            assert relays.rows("SELECT count(*) - count(DISTINCT pair) FROM log") == [(0,)]
            # The next session has one to replay, and most of the time some to park.
            relays.run(MEND.format(1))
    assert cuts == len(points)

    stop = asyncio.Event()
    running = asyncio.create_task(session(settings, stop))
    rows = "SELECT id, amount FROM one UNION ALL SELECT id, amount FROM other"

    def is_done() -> bool:
        relays.run(MEND.format(1000))
        return dict(relays.rows(rows)) == expected and not relays.rows(
            "SELECT FROM oncebox.dead_letter WHERE state <> 'replayed'"
        )

    try:
        await asyncio.to_thread(relays.wait_until, is_done, lambda: str(relays.rows(rows)))
    finally:
        stop.set()
        await running
    assert relays.rows("SELECT count(*), count(DISTINCT pair) FROM log") == [(inserts, inserts)]
    replayed = "SELECT count(*) > 0, count(*) = count(DISTINCT (source, record_offset)) FROM oncebox.dead_letter"
    assert relays.rows(replayed) == [(True, True)]
