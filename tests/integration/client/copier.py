"""Copies a topic to another with oncebox.transform, partition by partition, until it is killed or asked to stop."""

import asyncio
import signal
import sys

import oncebox
from oncebox import Transaction, TransformSettings
from oncebox.reader import Record


async def main(
    servers: str, coordinators: str, group: str, source: str, target: str, name: str, count: str, pause_s: str
) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    async def copy(record: Record, transaction: Transaction) -> None:
        await transaction.send(target, record.value, key=record.key, partition=record.partition)
        if float(pause_s):
            await asyncio.sleep(float(pause_s))

    print("starting", flush=True)
    await oncebox.transform(
        source,
        group,
        copy,
        kafka=servers,
        coordinators=coordinators.split(","),
        transactional_id=f"{group}-{name}",
        stop=stop,
        settings=TransformSettings(
            # Long enough that it is the count that ends them.
            transaction_ms=5_000,
            transaction_records=int(count),
            # With a name of its own, a member that starts again takes its place at once.
            consumer={"group.instance.id": name, "session.timeout.ms": 10_000},
        ),
    )
    print("stopped", flush=True)


asyncio.run(main(*sys.argv[1:]))
