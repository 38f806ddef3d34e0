"""The named blocks of sql/queries.sql."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import LiteralString

FOLDER = Path(__file__).with_name("sql")
NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
SCHEMA_VERSION = 3


@cache
def _blocks() -> dict[str, str]:
    _, *parts = NAME.split((FOLDER / "queries.sql").read_text())
    return dict(zip(parts[::2], (part.strip() for part in parts[1::2]), strict=True))


def query(name: str) -> LiteralString:
    """Text that we wrote: no value is ever put into it."""
    return _blocks()[name]


def schema() -> LiteralString:
    return (FOLDER / "schema.sql").read_text()
