"""An order becomes a payment, a parcel and an invoice line for each thing in it: all of them, or none.

    python examples/order_fanout.py --kafka localhost:9092 --coordinators localhost:7171

The order's number travels as the commit's metadata: a shop that starts again asks for its resume token and goes on with
the order after the last one committed, whatever killed it.
"""

# ruff: noqa: T201 - an example prints what it found

import asyncio
import json

from common import arguments, create_topics

import oncebox

THINGS = ["lamp", "chair", "kettle", "rug", "clock"]


async def main() -> None:
    given = arguments("orders fanned out to several topics")
    payments, parcels, invoices = (f"{given.prefix}-{what}" for what in ("payments", "parcels", "invoices"))
    create_topics(given.kafka, payments, parcels, invoices)
    async with oncebox.Producer(given.kafka, given.coordinators, transactional_id=f"{given.prefix}-shop") as producer:
        first = int(producer.resume_token or b"0") + 1
        for order in range(first, first + given.count):
            key = str(order).encode()
            things = THINGS[: order % len(THINGS) + 1]
            async with producer.transaction(metadata=key, wait="decided") as transaction:
                await transaction.send(
                    payments, json.dumps({"order": order, "sum": 10 * len(things)}).encode(), key=key
                )
                await transaction.send(parcels, json.dumps({"order": order, "things": things}).encode(), key=key)
                for thing in things:
                    await transaction.send(invoices, json.dumps({"order": order, "thing": thing}).encode(), key=key)
    print(f"orders {first} to {first + given.count - 1} sent")
    whole = 0
    async with oncebox.read_transactions([payments, parcels, invoices], given.kafka, feed_topic=given.feed) as reader:
        async for transaction in reader:
            by_topic = {
                where.topic: [json.loads(r.value or b"{}") for r in records]
                for where, records in transaction.records.items()
            }
            (payment,) = by_topic[payments]
            (parcel,) = by_topic[parcels]
            lines = [line["thing"] for line in by_topic[invoices]]
            if lines != parcel["things"] or payment["sum"] != 10 * len(lines):
                raise SystemExit(f"order {payment['order']} is not whole")
            whole += 1
            if int(transaction.metadata) == first + given.count - 1:
                break
    print(f"{whole} whole orders read")


asyncio.run(main())
