"""Each story in stories/ must print what it says. REWRITE_GOLDENS=1 writes down what it prints now."""

import os
from pathlib import Path

import pytest

from tests.scenarios.runner import rewrite

STORIES = sorted((Path(__file__).parent / "stories").glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path) -> None:
    told = rewrite(path)
    if os.environ.get("REWRITE_GOLDENS"):
        path.write_text(told)
    assert told == path.read_text()
