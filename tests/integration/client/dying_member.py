"""A named member of a group that is killed in the moment in which the group takes partitions away from it."""

import asyncio
import os
import signal
import sys

from oncebox.group_consumer import GroupConsumer
from oncebox.wire import KafkaSettings


async def main(servers: str, group: str, topic: str, name: str, partitions: str) -> None:
    consumer = GroupConsumer(
        KafkaSettings(bootstrap_servers=servers),
        [topic],
        group,
        config={"group.instance.id": name},
        revoked=lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    )
    await consumer.open()
    seen: set[int] = set()
    while True:
        records, _ = await consumer.gather(100, 0.1)
        seen |= {record.partition for record in records}
        if len(seen) == int(partitions):
            print("has them all", flush=True)


asyncio.run(main(*sys.argv[1:]))
