"""Foreign keys between rows of different transactions, in transaction mode."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import TYPE_CHECKING, Any

from oncebox.producer import Producer
from tests.support.relay import GUARD, Relays, commit

if TYPE_CHECKING:
    from tests.support.coordinator import Coordinators
    from tests.support.kafka import TopicFactory


def prepare(relays: Relays, one: Coordinators, parents: str, children: str, **settings: Any) -> None:
    relays.run(f"CREATE TABLE parents (id text PRIMARY KEY, {GUARD})")
    relays.run(f"CREATE TABLE children (id text PRIMARY KEY, parent text REFERENCES parents, {GUARD})")
    sections = [
        {"topic": children, "table": "children", "key": ["id"]},
        {"topic": parents, "table": "parents", "key": ["id"]},
    ]
    relays.configure(sections, mode="transaction", feed_topic=one.feed_topic, **settings)


async def test_a_reference_that_comes_later_is_waited_for(
    shared_coordinator: Coordinators, new_topic: TopicFactory, relays: Relays
) -> None:
    """The child's transaction is committed before the parent's; the database sees them together."""
    one = shared_coordinator
    parents, children = new_topic(), new_topic()
    prepare(relays, one, parents, children)
    for number, (topic, value) in enumerate(
        [(children, {"id": "c", "parent": "p"}), (parents, {"id": "p"}), (children, {"id": "c2", "parent": "p"})]
    ):
        await commit(one, f"family-{number}", topic, value)
    await asyncio.to_thread(relays.start)
    await asyncio.to_thread(relays.wait_for, "SELECT count(*) FROM children", [(2,)])


async def test_a_reference_that_never_comes_stalls_nothing(
    shared_coordinator: Coordinators, new_topic: TopicFactory, relays: Relays
) -> None:
    """Writers go on all the time, so that some commit is always known and not applied: the child waits only for those
    that were known when it was met.
    """
    one = shared_coordinator
    parents, children = new_topic(), new_topic()
    prepare(relays, one, parents, children, on_error="park")
    await asyncio.to_thread(relays.start)
    is_over = asyncio.Event()

    async def keep_writing(writer: int) -> int:
        number = 0
        async with Producer(
            one.bootstrap_servers, one.addresses[0], transactional_id=f"busy-{writer}-{uuid.uuid4().hex[:6]}"
        ) as mine:
            while not is_over.is_set():
                async with mine.transaction() as transaction:
                    name = f"{writer}-{number}"
                    await transaction.send(
                        children, json.dumps({"id": name, "parent": name}).encode(), key=name.encode()
                    )
                    await transaction.send(parents, json.dumps({"id": name}).encode(), key=name.encode())
                number += 1
                await asyncio.sleep(0.01)  # the relay has to keep up
        return number

    busy = [asyncio.create_task(keep_writing(writer)) for writer in range(3)]
    try:
        await asyncio.to_thread(relays.wait_for, "SELECT count(*) > 20 FROM children", [(True,)])
        await commit(one, "orphan", children, {"id": "orphan", "parent": "nobody"})
        parked = "SELECT state, error LIKE '%violates foreign key%' FROM oncebox.dead_letter"
        await asyncio.to_thread(relays.wait_for, parked, [("parked", True)])
    finally:
        is_over.set()
    written = sum(await asyncio.gather(*busy))
    await asyncio.to_thread(relays.wait_for, "SELECT count(*) FROM children", [(written,)], timeout_s=120)
