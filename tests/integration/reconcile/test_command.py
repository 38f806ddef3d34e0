"""The commands as a user calls them: exit codes, what they print, and what they leave behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from oncebox import cli

if TYPE_CHECKING:
    from tests.support.reconcile import World

ONCEBOX = str(Path(sys.executable).with_name("oncebox"))


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["reconcile", *arguments])
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def test_run_by_the_command(world: World, capsys: pytest.CaptureFixture[str]):
    """The only test that starts a Spark of its own: what a user waits for, from the command to the report."""
    world.transfer(*range(1, 6))
    world.apply()
    world.run("DELETE FROM accounts WHERE id = 3")
    folder = world.folder / "reports"
    places = ["--bootstrap-servers", world.servers, "--dsn", world.dsn, "--report-folder", str(folder)]
    topics = ["--feed-topic", world.coordinators.feed_topic, "--log-topic", world.coordinators.log_topic]
    metrics = world.folder / "reconcile.prom"
    command = [ONCEBOX, "reconcile", "run", *places, *topics, "--master", "local[2]", "--metrics-file", str(metrics)]
    command.append("--json")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 1, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["sentence"] == "1 findings: 1 row missing"
    assert told["files"]["html"] == str(folder / "run-1.html")
    assert "Traceback" not in done.stdout + done.stderr
    assert json.loads((folder / "run-1.json").read_text())["findings"][0]["kind"] == "row missing"
    assert "<svg" in (folder / "run-1.html").read_text()
    assert 'oncebox_reconcile_findings{kind="row missing",relay="test"} 1.0' in metrics.read_text()
    code, out, _ = call(capsys, "history", "--dsn", world.dsn)
    assert code == 0
    assert "findings" in out
    assert "full" in out
    code, out, _ = call(capsys, "history", "--dsn", world.dsn, "--json")
    assert [(each["run"], each["verdict"], each["findings"]) for each in json.loads(out)] == [(1, "findings", 1)]


def test_without_anything_to_show(database: str, capsys: pytest.CaptureFixture[str]):
    code, out, _ = call(capsys, "history", "--dsn", database)
    assert (code, "no run is stored" in out) == (0, True)


def test_a_database_that_does_not_answer(capsys: pytest.CaptureFixture[str]):
    code, _, err = call(capsys, "history", "--dsn", "postgresql://nobody:secret@127.0.0.1:1/none")
    assert code == 4
    assert err.count("\n") == 1
    assert "refuse" in err
    assert "secret" not in err


def test_files_that_are_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    code, _, err = call(capsys, "repair", str(wrong), "--dsn", "postgresql://nowhere")
    assert (code, "no repair plan" in err) == (4, True)
    code, _, err = call(capsys, "repair", str(wrong), "--undo", "--dsn", "postgresql://nowhere")
    assert (code, "no undo file" in err) == (4, True)
    wrong.write_text("not JSON")
    code, _, err = call(capsys, "repair", str(wrong), "--dsn", "postgresql://nowhere")
    assert (code, "is not JSON" in err) == (4, True)


def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ONCEBOX_DSN", raising=False)
    code, _, err = call(capsys, "run", "--bootstrap-servers", "localhost:9092")
    assert (code, "ONCEBOX_DSN" in err) == (4, True)
