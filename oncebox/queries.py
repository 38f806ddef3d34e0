"""SQL in named blocks: each begins with a line `-- name: what_it_does` and ends where the next begins."""

import re
from functools import cache
from importlib import resources
from typing import LiteralString, cast

NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


@cache
def queries(package: str, file: str) -> dict[str, LiteralString]:
    """The blocks of a file in a package's folder `sql`. They are ours, never made of what users send."""
    text = resources.files(package).joinpath("sql", file).read_text(encoding="utf-8")
    _head, *parts = NAME.split(text)
    return {name: cast("LiteralString", body.strip()) for name, body in zip(parts[::2], parts[1::2], strict=True)}
