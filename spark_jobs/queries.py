"""The named blocks of sql/queries.sql."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import LiteralString


@cache
def _blocks() -> dict[str, str]:
    text = (files("spark_jobs") / "sql" / "queries.sql").read_text()
    return dict(re.findall(r"^-- name: (\w+)\n(.*?)(?=^-- name:|\Z)", text, re.MULTILINE | re.DOTALL))


def query(name: str) -> LiteralString:
    """Its text is a file's of ours, never a user's."""
    return _blocks()[name]


def schema() -> LiteralString:
    return (files("spark_jobs") / "sql" / "schema.sql").read_text()
