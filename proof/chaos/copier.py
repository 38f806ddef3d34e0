"""Copies the topic of the lists with oncebox.transform, partition by partition, until it is told to stop.

`python -m proof.chaos.copier SERVERS COORDINATORS NAME`
"""

import asyncio
import signal
import sys

import oncebox
from oncebox import Transaction, TransformSettings
from oncebox.reader import Record
from proof.chaos.workload import COPIES, COPY_RECORDS_MAX, LISTS

GROUP = "copiers"
SESSION_MS = 6_000
RETRY_S = 0.5


async def copy(record: Record, transaction: Transaction) -> None:
    await transaction.send(COPIES, record.value, key=record.key, partition=record.partition)


async def main(servers: str, coordinators: str, name: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    settings = TransformSettings(
        transaction_records=COPY_RECORDS_MAX,
        consumer={"group.instance.id": name, "session.timeout.ms": SESSION_MS},
    )
    print("serves at no port", flush=True)
    while not stop.is_set():
        try:
            await oncebox.transform(
                LISTS,
                GROUP,
                copy,
                kafka=servers,
                coordinators=coordinators.split(","),
                transactional_id=name,
                stop=stop,
                settings=settings,
            )
        except oncebox.OnceboxError as error:
            print(f"starts again: {type(error).__name__}: {error}", flush=True)
            await asyncio.sleep(RETRY_S)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
