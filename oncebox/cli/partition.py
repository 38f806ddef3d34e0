"""`oncebox partition`: who holds back the readers of a partition."""

import asyncio
from typing import Any

import typer

from oncebox.cli import new_app
from oncebox.cli.line import CALL_TIMEOUT_S, FOUND, Line, connected
from oncebox.cli.show import JSON, as_json, print_json
from oncebox.cli.txn import show_open
from oncebox.v1 import admin_pb2
from oncebox.v1.admin_pb2_grpc import AdminStub

app = new_app("Partitions of your topics.")


@app.callback()
def frame() -> None:
    """Partitions of your topics."""


@app.command(
    "who-blocks",
    epilog="Example: oncebox partition who-blocks orders:0. Exit code: 0 nobody, 3 somebody",
)
@connected
def who_blocks(
    line: Line,
    partition: str = typer.Argument(help="TOPIC:PARTITION"),
    json: bool = JSON,
) -> None:
    """Show the open transactions that hold back every read_committed reader of a partition."""
    topic, separator, number = partition.rpartition(":")
    if not separator or not topic or not number.isdecimal():
        raise typer.BadParameter(f"{partition} is not TOPIC:PARTITION, such as orders:0")
    request = admin_pb2.DescribePartitionRequest(topic=topic, partition=int(number))

    async def ask() -> Any:
        return await line.any(lambda channel: AdminStub(channel).DescribePartition(request, timeout=CALL_TIMEOUT_S))

    found = asyncio.run(ask())
    if json:
        print_json(as_json(found))
    else:
        behind = found.offset_high_watermark - found.offset_stable
        print(f"readers stand at {found.offset_stable}, {behind} before the end at {found.offset_high_watermark}")
        if found.open:
            show_open(found.open)
            ours = [each for each in found.open if each.kind == admin_pb2.OpenTransaction.ONCEBOX]
            if ours:
                print(f"to end the first of ours: oncebox txn abort '{ours[0].transactional_id}'")
            if any(each.kind == admin_pb2.OpenTransaction.HANGING for each in found.open):
                print(f"to end what hangs: oncebox txn hanging --topic {topic} --end")
        else:
            print("nobody blocks it")
    raise typer.Exit(FOUND if found.open else 0)
