"""pyspark's daemon, for local sessions, with workers that do not read Spark's own zip files anew before each task:
importlib.invalidate_caches() does that since Python 3.10, and it takes longer than a small task. No zip is added to a
local session while it runs.
"""

from __future__ import annotations

import zipimport
from typing import Any

from pyspark.daemon import manager


def keep(_importer: Any) -> None:
    """What it has read of its zip."""


if __name__ == "__main__":
    zipimport.zipimporter.invalidate_caches = keep  # type: ignore[method-assign, assignment]
    manager()  # type: ignore[no-untyped-call]
