"""Every metric of the outbox relay, after real work."""

import asyncio
import operator
import time
from collections.abc import Callable
from functools import partial

from relay.outbox import control
from relay.outbox.relay import OutboxRelay
from tests.integration.outbox.conftest import POLL_S, WAIT_S, Outbox
from tests.integration.outbox.test_trouble import write_bad


async def wait_until(relay: OutboxRelay, name: str, is_right: Callable[[float], bool], **labels: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            value = relay.metrics.registry.get_sample_value(f"oncebox_outbox_{name}", labels)
            if value is not None and is_right(value):
                return
            await asyncio.sleep(POLL_S)


async def wait_for_all(relay: OutboxRelay, **expected: float) -> None:
    for name, value in expected.items():
        await wait_until(relay, f"{name}_total", partial(operator.eq, value))


async def wait_for_state(relay: OutboxRelay, state: str) -> None:
    await wait_until(relay, "state", lambda value: value == 1, oncebox_outbox_state=state)


async def test_every_metric(outbox: Outbox):
    await outbox.init()
    started_s = time.time()
    await outbox.write(1, 2)
    await outbox.write(3)
    open_one = await outbox.connect(autocommit=False)
    async with open_one, outbox.running(bad_row="park") as relay:
        # What is there at the start comes in one look, and that in one Kafka transaction.
        await wait_for_all(relay, rows=3, transactions=2, kafka_transactions=1, parked_rows=0)
        await wait_until(relay, "published_commit_time_seconds", lambda at_s: started_s <= at_s <= time.time())
        await write_bad(outbox, 4, headers="[1]")
        # The token that is past it is committed, too.
        await wait_for_all(relay, rows=3, transactions=2, kafka_transactions=2, parked_rows=1)
        await wait_for_state(relay, "RUNNING")
        await outbox.write(5, on=open_one)
        await wait_until(relay, "oldest_writer_seconds", lambda age_s: 0 < age_s < WAIT_S)
        await wait_until(relay, "slot_bytes", lambda size: size > 0)
        await wait_until(relay, "slot_age_transactions", lambda age: age >= 1)
        await open_one.rollback()
        await wait_until(relay, "oldest_writer_seconds", lambda age_s: age_s == 0)
        await control.set_paused(outbox.settings(), is_paused=True)
        await wait_for_state(relay, "PAUSED")
    told = {metric.name.removeprefix("oncebox_outbox_") for metric in relay.metrics.registry.collect()}
    assert told == {
        "rows",
        "transactions",
        "kafka_transactions",
        "parked_rows",
        "slot_bytes",
        "slot_age_transactions",
        "oldest_writer_seconds",
        "published_commit_time_seconds",
        "state",
    }


async def test_one_that_stops_by_itself_says_so(outbox: Outbox):
    await outbox.init()
    await write_bad(outbox, 1, headers="[1]")
    relay = OutboxRelay(outbox.settings())
    stopped = await asyncio.gather(relay.run(), return_exceptions=True)
    assert "cannot be published" in str(stopped[0])
    await wait_for_state(relay, "STOPPED")
