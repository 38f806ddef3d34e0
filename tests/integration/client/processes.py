"""Copies a topic to another in two processes, until it is told to stop.

The coordinator's address is known to open_channel() alone: who does not ask it finds nobody.
"""

import os
import sys

import grpc

from oncebox import Record, Transaction, TransformSettings, transform_in_processes
from oncebox.partitioner import sticky
from oncebox.session import open_plain_channel


def open_channel(_address: str) -> grpc.aio.Channel:
    return open_plain_channel(os.environ["COORDINATOR"])


async def copy(record: Record, transaction: Transaction) -> None:
    if record.value == b"poison":
        raise ValueError(record.value)
    await transaction.send(os.environ["TARGET"], record.value, partition=record.partition)


if __name__ == "__main__":
    servers, coordinator, group, source, target = sys.argv[1:]
    os.environ["COORDINATOR"] = coordinator
    os.environ["TARGET"] = target
    transform_in_processes(
        2,
        source,
        group,
        copy,
        kafka=servers,
        coordinators="127.0.0.1:1",
        settings=TransformSettings(transaction_records=50, consumer={"session.timeout.ms": 10_000}),
        partitioner=sticky(),
        open_channel=open_channel,
    )
    print("stopped", flush=True)
