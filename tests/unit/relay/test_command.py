"""`oncebox relay` where the database or Kafka is not there: one sentence, an exit code, no trace and no password."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

import pytest
import yaml

from oncebox import cli
from relay import kafka
from relay.checking import check
from tests.unit.relay.test_listening import settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NOBODY = "127.0.0.1:1"
GIVEN = {
    "name": "orders",
    "kafka": {"bootstrap_servers": NOBODY},
    "postgres": {"dsn": f"postgresql://me:secret-password@{NOBODY}/shop"},
    "tables": [{"topic": "orders", "table": "orders", "key": "id"}],
}


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    config = tmp_path / "relay.yaml"
    config.write_text(yaml.safe_dump(GIVEN))

    def run(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["relay", *words, "--config", str(config)])
        return int(ended.value.code or 0), capfd.readouterr().err

    return run


@pytest.mark.parametrize(
    "words",
    [
        "status",
        "pause",
        "resume",
        "rewind --topic orders --to earliest",
        "rebuild --topic orders --yes",
        "dead-letters list",
        "dead-letters replay --all",
        "dead-letters discard 7",
    ],
)
def test_a_database_that_does_not_answer(run: Callable[..., tuple[int, str]], words: str):
    code, told = run(*words.split())
    assert code == 1
    assert told.startswith("oncebox: the database: connection failed")
    assert len(told.splitlines()) == 1
    assert "secret-password" not in told


def test_what_cannot_be_meant_is_told_before_anything_is_asked(run: Callable[..., tuple[int, str]]):
    code, told = run("rewind", "--topic", "orders", "--to", "yesterday")
    assert code == 2
    assert "--to is earliest, latest, an offset or a time" in told


def test_nothing_is_emptied_where_nobody_can_be_asked(
    run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.stdin", StringIO())
    code, told = run("rebuild", "--topic", "orders")
    assert code == 2
    assert "say --yes if it is meant" in told


def test_a_kafka_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr(kafka, "TIMEOUT_S", 1.0)
    (finding,) = check(settings(**GIVEN), records=1)
    assert not finding.is_ok
    assert finding.text.startswith(f"Kafka does not answer at {NOBODY}: ")
    assert capfd.readouterr().err == "", "the library has a log of its own"


def test_rules_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(kafka, "TIMEOUT_S", 0.1)
    file = tmp_path / "any"
    file.write_text("rules: [{principals: [operator]}]")
    tls = dict.fromkeys(("certificate_location", "key_location", "client_ca_location"), file)
    first, *_ = check(settings(**GIVEN, tls=tls, rules_location=file), records=1)
    assert (first.is_ok, first.text) == (False, f"who may call it: {file}: no certificate in PEM")
