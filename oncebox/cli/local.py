"""`oncebox local`: the embedded Kafka and PostgreSQL. Each of the two can be the user's own instead."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from oncebox.cli import new_app
from oncebox.cli.show import print_json

if TYPE_CHECKING:
    from oncebox.local.state import State
    from oncebox.local.supervisor import Options

app = new_app("A real Kafka and PostgreSQL on this machine.")

FOLDER = typer.Option(Path(".oncebox/local"), "--dir", help="Where data and logs are kept.", file_okay=False)
POLL_S = 0.1


@app.command(
    epilog="Examples: oncebox local up --brokers 3 | oncebox local up --detach --fresh | "
    "oncebox local up --dsn postgresql://me@db/mine"
)
def up(
    folder: Path = FOLDER,
    brokers: int = typer.Option(1, help="1, or 3 with replication factor 3 and min ISR 2."),
    secure: bool = typer.Option(False, "--secure", help="Also a listener with TLS and a password (SASL_SSL, SCRAM)."),
    detach: bool = typer.Option(False, "--detach", help="Return when all is ready, and leave it running."),
    fresh: bool = typer.Option(False, "--fresh", help="Throw away the data that is there."),
    kafka: bool = typer.Option(True, "--kafka/--no-kafka", help="Start a Kafka."),
    postgres: bool = typer.Option(True, "--postgres/--no-postgres", help="Start a PostgreSQL."),
    bootstrap_servers: str | None = typer.Option(
        None, envvar="ONCEBOX_BOOTSTRAP_SERVERS", help="Your own Kafka; none is started."
    ),
    dsn: str | None = typer.Option(None, envvar="ONCEBOX_DSN", help="Your own PostgreSQL; none is started."),
) -> None:
    """Start Kafka and PostgreSQL, and stay with them until Ctrl-C."""
    from oncebox.local.supervisor import Options, run

    if brokers not in {1, 3}:
        raise typer.BadParameter(f"{brokers} is not 1 or 3", param_hint="--brokers")
    if (bootstrap_servers or not kafka) and (dsn or not postgres):
        raise typer.BadParameter("there is nothing to start: both parts are your own or switched off")
    options = Options(
        folder=folder.absolute(),
        brokers=brokers,
        secure=secure,
        fresh=fresh,
        kafka=kafka,
        postgres=postgres,
        bootstrap_servers=bootstrap_servers or None,
        dsn=dsn or None,
    )
    if detach:
        _detach(options)
    else:
        run(options, _say, lambda state: _show_ready(state, folder, "Ctrl-C ends it."))


@app.command(epilog="Example: oncebox local down")
def down(folder: Path = FOLDER) -> None:
    """End what runs in the folder; its data stays."""
    from oncebox.local.supervisor import down as end

    _say(f"Ended what ran in {folder}" if end(folder.absolute()) else f"Nothing runs in {folder}")


@app.command(epilog="Examples: oncebox local status | oncebox local status --json")
def status(
    folder: Path = FOLDER, as_json: bool = typer.Option(False, "--json", help="For programs; without passwords.")
) -> None:
    """Show each part with its address and process. Exit code 1 when nothing runs."""
    from oncebox.local.state import is_alive, read_state

    state = read_state(folder.absolute())
    parts = () if state is None else state.parts
    rows = [{**asdict(part), "running": part.pid is None or is_alive(part.pid, part.started)} for part in parts]
    if as_json:
        for row in rows:
            del row["started"]
        print_json({"running": state is not None, "ready": state is not None and state.ready, "parts": rows})
    elif state is None:
        print(f"Nothing runs in {folder}")
    elif not state.ready:
        print(f"Starting (pid {state.pid})")
    else:
        _show_parts(state)
    raise typer.Exit(0 if state is not None else 1)


@app.command(epilog='Example: eval "$(oncebox local env)"')
def env(folder: Path = FOLDER) -> None:
    """Print the addresses as shell variables."""
    for name, value in _environment(folder).items():
        print(f"export {name}={shlex.quote(value)}")


@app.command(epilog="Example: oncebox local topic orders payments --partitions 3")
def topic(
    names: list[str] = typer.Argument(help="Their names."),
    partitions: int = typer.Option(1, min=1, help="Of each."),
    folder: Path = FOLDER,
) -> None:
    """Create topics in this Kafka; those that exist stay as they are."""
    from oncebox.local import LocalError
    from oncebox.local.kafka import create_topics

    servers = _environment(folder).get("ONCEBOX_BOOTSTRAP_SERVERS")
    if servers is None:
        raise LocalError(f"no Kafka is up in {folder}")
    created = create_topics(servers, names, partitions)
    for name in names:
        _say(f"Created {name}" if name in created else f"{name} exists already")


def _environment(folder: Path) -> dict[str, str]:
    from oncebox.local import LocalError
    from oncebox.local.state import read_state

    state = read_state(folder.absolute())
    if state is None or not state.ready:
        raise LocalError(f"nothing is up in {folder}: oncebox local up")
    return state.environment


def _say(line: str) -> None:
    print(line, flush=True)


def _show_parts(state: State) -> None:
    for part in state.parts:
        print(f"  {part.name:15} {part.address:22} {f'pid {part.pid}' if part.pid is not None else 'your own'}")


def _show_ready(state: State, folder: Path, ending: str) -> None:
    print("Ready:")
    _show_parts(state)
    _say(f'In another shell: eval "$(oncebox local env --dir {shlex.quote(str(folder))})". {ending}')


def _detach(options: Options) -> None:
    """Leaves the run to a child in a session of its own; returns when that is ready, fails when it fails."""
    from oncebox.local.state import read_state
    from oncebox.local.supervisor import run

    child = os.fork()
    if child == 0:
        os.setsid()
        run(options, _say, lambda state: _go_to_background(state, options.folder))
    try:
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            state = read_state(options.folder)
            if state is not None and state.pid == child and state.ready:
                return
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        raise
    sys.exit(1)  # the child has said why


def _go_to_background(state: State, folder: Path) -> None:
    _show_ready(state, folder, "`oncebox local down` ends it.")
    log = os.open(folder / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
