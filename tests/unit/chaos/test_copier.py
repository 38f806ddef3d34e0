"""A transform that ends without a reason is a finding; one that finds nobody at its start is not."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from oncebox.errors import AbortedError, BrokersUnavailableError, FatalError
from proof.chaos.copier import Copier
from proof.chaos.history import Recorder


class NoTransaction:
    async def send(self, *_: Any, **__: Any) -> None: ...


RECORD: Any = SimpleNamespace(value=b"", key=None, partition=0)


@pytest.mark.parametrize(
    ("error", "has_copied", "is_found"),
    [
        (BrokersUnavailableError("away"), False, False),
        (BrokersUnavailableError("away"), True, True),
        (AbortedError("no more"), False, True),
        (FatalError("by a namesake"), False, True),
        (ValueError("a bug"), False, True),
        (None, True, True),
    ],
)
async def test_what_a_transform_may_end_with(
    tmp_path: Path, error: Exception | None, has_copied: bool, is_found: bool
) -> None:
    with Recorder(tmp_path / "copier.jsonl") as recorder:
        copier = Copier("copier-1", recorder)
        if has_copied:
            await copier.copy(RECORD, cast("Any", NoTransaction()))
        copier.judge(error)
    lines = (tmp_path / "copier.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["stuck"] * is_found


async def test_one_that_was_told_to_stop_may_end(tmp_path: Path) -> None:
    with Recorder(tmp_path / "copier.jsonl") as recorder:
        copier = Copier("copier-1", recorder)
        copier.stop.set()
        copier.judge(None)
    assert (tmp_path / "copier.jsonl").read_text() == ""
