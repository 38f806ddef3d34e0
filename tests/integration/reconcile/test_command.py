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


def with_spark(world: World, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that starts a Spark of its own: what a user waits for."""
    coordinators = world.coordinators
    places = ["--bootstrap-servers", world.servers, "--feed-topic", coordinators.feed_topic]
    command = [ONCEBOX, "reconcile", name, *places, "--log-topic", coordinators.log_topic, "--master", "local[2]"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, timeout=250)
    assert "Traceback" not in done.stdout + done.stderr
    return done


def test_run_by_the_command(world: World, capsys: pytest.CaptureFixture[str]):
    """From the command to the report."""
    world.transfer(*range(1, 6))
    world.apply()
    world.run("DELETE FROM accounts WHERE id = 3")
    folder, metrics = world.folder / "reports", world.folder / "reconcile.prom"
    files = ["--report-folder", str(folder), "--metrics-file", str(metrics)]
    done = with_spark(world, "run", "--dsn", world.dsn, *files, "--json")
    assert done.returncode == 1, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["sentence"] == "1 findings: 1 row missing"
    assert told["files"]["html"] == str(folder / "run-1.html")
    assert json.loads((folder / "run-1.json").read_text())["findings"][0]["kind"] == "row missing"
    assert "<svg" in (folder / "run-1.html").read_text()
    assert 'oncebox_reconcile_findings{kind="row missing",relay="test"} 1.0' in metrics.read_text()
    code, out, _ = call(capsys, "history", "--dsn", world.dsn)
    assert code == 0
    assert "findings" in out
    assert "full" in out
    code, out, _ = call(capsys, "history", "--dsn", world.dsn, "--json")
    assert [(each["run"], each["verdict"], each["findings"]) for each in json.loads(out)] == [(1, "findings", 1)]


def test_plan_by_the_command(world: World):
    """What could not be compared is told, and is not taken for right."""
    world.transfer(*range(1, 4))
    world.apply()
    world.run("DELETE FROM accounts WHERE id = 3")
    world.run("ALTER TABLE journal RENAME COLUMN account TO accounts")
    file = world.folder / "plan.json"
    done = with_spark(world, "plan", "--dsn", world.dsn, "--plan", str(file))
    assert done.returncode == 2, done.stderr[-2000:]
    first, action, count, note = done.stdout.splitlines()
    assert first == "1 findings: 1 row missing"
    assert action.startswith("  write public.accounts 3;: row missing")
    assert count.startswith(f"1 actions in {file}")
    assert note.startswith("not checked: public.journal: missing or of another type")
    plan = json.loads(file.read_text())
    assert (plan["verdict"], len(plan["actions"]), len(plan["unchecked"])) == ("findings", 1, 1)


def test_audit_by_the_command(world: World):
    world.transfer(1, 2)
    world.transfer(3, commit=False)
    done = with_spark(world, "audit", "--hours", "1", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout)
    assert figures["committed"] >= 1
    assert figures["aborted_by_cause"]["owner"] >= 1


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
    for text in ("{}", "[]", "null", '{"format": 2, "kind": "plan"}', '{"format": 3, "kind": "undo"}'):
        wrong.write_text(text)
        code, _, err = call(capsys, "repair", str(wrong), "--dsn", "postgresql://nowhere")
        assert (code, "no repair plan" in err) == (4, True)
        code, _, err = call(capsys, "repair", str(wrong), "--undo", "--dsn", "postgresql://nowhere")
        assert (code, "no undo file" in err) == (4, True)
    wrong.write_text('{"format": 2, "kind": "undo", "relay": "r", "config_hash": "", "rows": []}')
    code, _, err = call(capsys, "repair", str(wrong), "--undo", "--dsn", "postgresql://nowhere")
    assert (code, "of an earlier version of oncebox" in err) == (4, True)
    wrong.write_text("not JSON")
    code, _, err = call(capsys, "repair", str(wrong), "--dsn", "postgresql://nowhere")
    assert (code, "is not JSON" in err) == (4, True)


def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ONCEBOX_DSN", raising=False)
    code, _, err = call(capsys, "run", "--bootstrap-servers", "localhost:9092")
    assert (code, "ONCEBOX_DSN" in err) == (4, True)
