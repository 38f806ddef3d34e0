"""How commands talk: tables for people, JSON for programs, and the question before what cannot be taken back."""

import json
import sys
import time
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime
from typing import Any

import typer

from oncebox.v1 import transaction_pb2

# Of every command that shows something: what people read is not for programs.
JSON = typer.Option(False, "--json", help="For programs.")


def confirm(question: str, *, yes: bool) -> None:
    """Before what cannot be taken back, unless it was said to be meant."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise typer.BadParameter("nobody can be asked here: say --yes if it is meant")
    typer.confirm(question, abort=True, err=True)


def as_json(message: Any) -> dict[str, Any]:
    """All fields by the names of the .proto files: enums by name, bytes as base64, numbers as numbers."""
    return {
        field.name: [_plain(field, each) for each in getattr(message, field.name)]
        if field.is_repeated
        else _plain(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
    }


def _plain(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return as_json(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known else value
    return b64encode(value).decode() if isinstance(value, bytes) else value


def print_json(value: Any) -> None:
    """One line. Records by their fields, bytes as base64, times as ISO 8601."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, default=_jsonable) + "\n")
    sys.stdout.flush()


def _jsonable(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"no JSON for {type(value).__name__}")


def print_findings(findings: Sequence[Any], *, as_json: bool) -> None:
    """Of the checks that are made before a coordinator starts, and by the doctor."""
    from coordinator.cluster import render

    if as_json:
        print_json([{**asdict(each), "severity": each.severity.name} for each in findings])
    else:
        print(render(findings))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        # Text: what stands in names is shown as it is, never taken for markup.
        table.add_row(*(Text(str(cell)) for cell in row))
    console = Console(highlight=False)
    if not console.is_terminal:
        # Nothing is cut to a width that nobody has.
        console.width = 400
    console.print(table)


def state_name(state: int) -> str:
    return transaction_pb2.TransactionState.Name(state)


def age(milliseconds: int) -> str:
    seconds = milliseconds / 1_000
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"


def moment(at_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_ms / 1_000)) if at_ms else "-"


def partitions(entries: Any) -> str:
    shown = [f"{entry.topic}:{','.join(map(str, entry.partitions))}" for entry in entries]
    return " ".join(shown) or "-"
