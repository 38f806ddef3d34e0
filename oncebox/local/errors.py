"""What goes wrong with a local part: one sentence that says what to do, and the log's tail where there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

TAIL_LINES = 20


class LocalError(Exception):
    """A local part could not be got, started or stopped; the text is meant for the user."""


def with_tail(message: str, log_path: Path, *, offset: int = 0) -> str:
    """`message` followed by the last lines that `log_path` got after `offset`."""
    lines = read_from(log_path, offset).rstrip().splitlines()[-TAIL_LINES:]
    if not lines:
        return f"{message} (its log {log_path} is empty)"
    return "\n".join([f"{message}; the end of {log_path}:", *(f"  | {line}" for line in lines)])


def read_from(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
