"""The guide's configuration is one that the relay takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from oncebox.settings import load
from relay.config import RelaySettings

if TYPE_CHECKING:
    import pytest

PAGE = Path(__file__).parents[3] / "docs" / "relay.md"


def test_the_file_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCEBOX_BOOTSTRAP_SERVERS", "localhost:9092")
    monkeypatch.setenv("ONCEBOX_DSN", "postgresql://localhost/x")
    whole, two_topics = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    file = tmp_path / "relay.yaml"
    file.write_text(whole)
    settings = load(RelaySettings, file=file)
    assert settings.topics == ["orders", "payments"]
    assert settings.tables[1].columns["order_id"].path == "order.id"
    head, _, _ = whole.partition("tables:")
    file.write_text(head + two_topics)
    first, second = load(RelaySettings, file=file).tables
    assert first.target() == second.target()
    assert first.ordering == second.ordering == "at"
    assert first.columns == second.columns
