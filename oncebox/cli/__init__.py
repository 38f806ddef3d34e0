"""The `oncebox` command. This file is only its frame: each sub-command is a module that is imported when it is called,
so that `oncebox --help` stays quick. An expected failure is told in one line (exit code 1), wrong usage likewise (2).
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

import oncebox

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    module: str  # has a typer.Typer called `app`
    help: str
    extra: str  # what `pip install 'oncebox[...]'` must have brought for it


COMMANDS = {
    "coordinator": Row(module="oncebox.cli.coordinator", help="The transaction coordinator.", extra="coordinator"),
    "demo": Row(module="oncebox.cli.demo", help="The main job end to end, on real parts.", extra="local"),
    "txn": Row(module="oncebox.cli.txn", help="Transactions: list, describe, abort, watch.", extra="coordinator"),
    "leaders": Row(module="oncebox.cli.leaders", help="Who leads which log partition.", extra="coordinator"),
    "partition": Row(module="oncebox.cli.partition", help="Who blocks a partition's readers.", extra="coordinator"),
    "doctor": Row(module="oncebox.cli.doctor", help="Check all parts; say what to mend.", extra="coordinator,relay"),
    "relay": Row(module="oncebox.cli.relay", help="The relay from Kafka to PostgreSQL.", extra="relay"),
    "local": Row(module="oncebox.cli.local", help="A real Kafka and PostgreSQL on this machine.", extra="local"),
    "outbox": Row(module="oncebox.cli.outbox", help="PostgreSQL to Kafka, exactly once.", extra="relay"),
    "reconcile": Row(
        module="oncebox.cli.reconcile", help="Compare PostgreSQL with the topics; explain and mend.", extra="spark"
    ),
    "sim": Row(module="oncebox.cli.sim", help="The coordinator simulated, with faults by seed.", extra="coordinator"),
    "chaos": Row(module="oncebox.cli.chaos", help="Real parts, real faults, everything checked.", extra="local"),
    "check": Row(module="oncebox.cli.check", help="Look for anomalies in a history of chaos.", extra="local"),
    "bench": Row(module="oncebox.cli.bench", help="Measure against the peers.", extra="local"),
}
# Errors of these packages are written for the user; any other exception is a fault of ours and shows its traceback.
OUR_PACKAGES = {"oncebox", "coordinator", "relay", "spark_jobs", "proof"}


class LazyGroup(TyperGroup):
    """Lists the table above; imports a sub-command's module only to run it."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, row in COMMANDS.items():
            self.commands[name] = TyperCommand(name, help=row.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _listed, rest = super().resolve_command(ctx, args)
        return name, None if name is None else _load(name), rest


def _load(name: str) -> Any:
    command = typer.main.get_command(importlib.import_module(COMMANDS[name].module).app)
    command.name = name
    return command


def new_app(description: str | None = None) -> typer.Typer:
    """The `app` of a sub-command's module; with a single command in it, that is the sub-command itself."""
    return typer.Typer(
        help=description,
        no_args_is_help=description is not None,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode=None,  # rich would take longer to import than everything else together
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"oncebox {oncebox.__version__}")
        raise typer.Exit


@app.callback(epilog="Begin with: oncebox local up")
def frame(
    version: bool = typer.Option(False, "--version", help="Show the version.", is_eager=True, callback=_show_version),
) -> None:
    """Exactly-once, from a gRPC call to Kafka to PostgreSQL and back."""


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command and ends the process with its exit code."""
    try:
        app(args, prog_name="oncebox")
    except ModuleNotFoundError as error:
        message = _how_to_get(error, sys.argv[1:] if args is None else args)
        if message is None:
            raise
    except Exception as error:
        if not (isinstance(error, OSError) or type(error).__module__.partition(".")[0] in OUR_PACKAGES):
            raise
        message = str(error)
    print(f"oncebox: {message}", file=sys.stderr)
    sys.exit(1)


def _how_to_get(error: ModuleNotFoundError, args: Sequence[str]) -> str | None:
    """A package of an extra that is not installed; None where it is our own module, a fault of ours."""
    name = next((word for word in args if word in COMMANDS), None)
    if name is None or error.name is None or error.name.partition(".")[0] in OUR_PACKAGES:
        return None
    return f"`oncebox {name}` needs the package {error.name}: pip install 'oncebox[{COMMANDS[name].extra}]'"
