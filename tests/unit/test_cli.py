"""The frame of the command: quick, clear about errors, and it imports a sub-command only to run it."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

import oncebox
from oncebox import cli
from oncebox.cli import show

if TYPE_CHECKING:
    from collections.abc import Iterator


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int | str | None, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(args)
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_version(capsys: pytest.CaptureFixture[str]):
    assert run(capsys, "--version") == (0, f"oncebox {oncebox.__version__}\n", "")


def test_help_lists_every_sub_command_and_imports_none():
    code = (
        "import sys; from oncebox import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'rich', 'grpc', 'pydantic', 'confluent_kafka', 'psycopg', 'pyspark', 'aiokafka', 'asyncio'}\n"
        "heavy |= {'sqlalchemy', 'jinja2', 'google.protobuf'}\n"
        "heavy |= {row.module for row in cli.COMMANDS.values()}\n"
        "print('imported:', sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.endswith("imported: []\n")
    for name, row in cli.COMMANDS.items():
        assert f"  {name}" in out
        assert row.help.split()[0] in out


def leaves(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    below = getattr(command, "commands", None)
    if below is None:
        yield " ".join(path), command
    else:
        for name, each in below.items():
            yield from leaves(each, (*path, name))


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    """All of them, with those below them; the long name → what typer knows."""
    return dict(leaf for name in cli.COMMANDS for leaf in leaves(cli._load(name), (name,)))


def test_the_help_of_every_command_shows_an_example(commands: dict[str, Any]):
    assert len(commands) > 40
    without = [name for name, command in commands.items() if f"oncebox {name}" not in (command.epilog or "")]
    assert without == []


def test_what_shows_something_shows_it_to_programs_too(commands: dict[str, Any]):
    """Those that only do something say so by their exit code."""
    does = {
        "coordinator run", "demo", "relay run", "relay pause", "relay resume", "relay rewind", "relay rebuild",
        "relay dead-letters fix", "relay dead-letters replay", "relay dead-letters discard", "local up", "local down",
        "local env", "local topic", "outbox init", "outbox run", "outbox pause", "outbox resume", "outbox resolve",
        "reconcile backfill", "reconcile plan", "reconcile repair", "sim",
    }  # fmt: skip
    shows = {name for name, command in commands.items() if any("--json" in each.opts for each in command.params)}
    assert shows == commands.keys() - does


def test_records_times_and_bytes_are_json_too(capsys: pytest.CaptureFixture[str]):
    row = cli.Row(module="m", help="é", extra="")
    at = datetime(2026, 1, 31, 12, tzinfo=UTC)
    show.print_json({"rows": [row], "at": at, "key": b"\xff", "none": None})
    assert json.loads(capsys.readouterr().out) == {
        "rows": [{"module": "m", "help": "é", "extra": ""}],
        "at": "2026-01-31T12:00:00+00:00",
        "key": "/w==",
        "none": None,
    }
    with pytest.raises(TypeError, match="no JSON for object"):
        show.print_json(object())


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_sub_command_has_help(capsys: pytest.CaptureFixture[str], name: str):
    code, out, err = run(capsys, name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: oncebox {name}")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["locl"], "No such command 'locl'. Did you mean 'local'?"),
        (["--nonsense"], "No such option: --nonsense"),
        (["local", "up", "--brokers", "two"], "should be a valid integer"),
        (["local", "up", "--brokers", "2"], "2 is not 1 or 3"),
        (["local", "up", "--no-kafka", "--no-postgres"], "nothing to start"),
        (["local", "up", "--no-kafka", "--dsn", "postgresql://x"], "nothing to start"),
    ],
)
def test_wrong_usage_is_exit_code_2(capsys: pytest.CaptureFixture[str], args: list[str], message: str):
    code, _out, err = run(capsys, *args)
    assert code == 2
    assert message in err


class ExampleError(Exception):
    __module__ = "oncebox.example"


def raising(error: BaseException) -> object:
    def load(_name: str) -> object:
        raise error

    return load


@pytest.mark.parametrize("error", [ExampleError("it is so"), OSError("it is so")])
def test_an_expected_failure_is_one_line_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
):
    monkeypatch.setattr(cli, "_load", raising(error))
    assert run(capsys, "local") == (1, "", "oncebox: it is so\n")


def test_a_package_that_is_not_installed_is_named_with_its_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cli, "_load", raising(ModuleNotFoundError("No module named 'x'", name="x.y")))
    assert run(capsys, "local") == (
        1,
        "",
        "oncebox: `oncebox local` needs the package x.y: pip install 'oncebox[local]'\n",
    )


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    for error in (ZeroDivisionError(), ModuleNotFoundError("No module named 'relay.x'", name="relay.x")):
        monkeypatch.setattr(cli, "_load", raising(error))
        with pytest.raises(type(error)):
            cli.main(["local"])


def test_ctrl_c_is_no_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cli, "_load", raising(KeyboardInterrupt()))
    assert run(capsys, "local") == (130, "", "")
