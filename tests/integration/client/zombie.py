"""A client that sends one record after another in one transaction; the test pauses it. Prints what becomes of it."""

import asyncio
import sys

from oncebox.errors import OnceboxError
from oncebox.producer import Producer, ProducerSettings


async def main(bootstrap_servers: str, coordinators: str, transactional_id: str, topic: str) -> None:
    settings = ProducerSettings(transaction_timeout_ms=60_000)
    async with Producer(
        bootstrap_servers, coordinators, transactional_id=transactional_id, settings=settings
    ) as producer:
        transaction = await producer.begin()
        try:
            while True:
                await transaction.send_and_wait(topic, b"zombie")
                print("sent", flush=True)
        except OnceboxError as error:
            print(f"ended by {type(error).__name__}: {error}", flush=True)


asyncio.run(main(*sys.argv[1:]))
