"""`oncebox relay`: runs a relay from Kafka to PostgreSQL, checks its configuration, and tells it what to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from oncebox.cli import new_app
from oncebox.cli.show import JSON, confirm, print_json

if TYPE_CHECKING:
    from relay.config import RelaySettings
    from relay.control import Control

app = new_app("The relay from Kafka to PostgreSQL.")
letters_app = new_app("Records that could not be applied.")
app.add_typer(letters_app, name="dead-letters")

# To tell how fast the relay is.
MEASURE_S = 1.0
CONFIG = typer.Option(..., "--config", help="The relay's YAML file.", dir_okay=False, exists=True)
TOPICS = typer.Option(..., "--topic", help="A topic of the relay; may be given more than once.")


def _load(config: Path, **flags: object) -> "RelaySettings":
    from oncebox.settings import load
    from relay.config import RelaySettings

    return load(RelaySettings, file=config, flags=flags)


class RelayCommandError(Exception):
    """The database or Kafka could not be asked."""


@contextmanager
def _control(settings: "RelaySettings") -> "Iterator[Control]":
    """What the database or Kafka says is told in one line, without a password."""
    import psycopg
    from confluent_kafka import KafkaException

    from relay.control import Control
    from relay.kafka import explained

    try:
        with Control(settings) as control:
            yield control
    except psycopg.Error as error:
        raise RelayCommandError(f"the database: {str(error).partition(chr(10))[0]}") from error
    except (KafkaException, TimeoutError) as error:
        raise RelayCommandError(explained(error, settings.kafka.bootstrap_servers)) from error


@app.command(epilog="Example: oncebox relay run --config orders.yaml")
def run(
    config: Path = CONFIG,
    listen_port: int | None = typer.Option(None, help="For gRPC; 0: any free one."),
    http_port: int | None = typer.Option(None, help="For /live, /ready and /metrics; 0: any free one."),
    log_level: str | None = typer.Option(None, help="DEBUG, INFO, WARNING or ERROR."),
) -> None:
    """Run one process until Ctrl-C or SIGTERM. Several of them share the work, or stand by for each other.

    SIGHUP reads the log level, the rules and the keys of tokens anew.
    """
    from relay.__main__ import serve

    serve(lambda: _load(config, listen_port=listen_port, http_port=http_port, log_level=log_level))


@app.command(epilog="Example: oncebox relay check --config orders.yaml")
def check(
    config: Path = CONFIG,
    records: int = typer.Option(100, help="Records of each partition to try."),
    json: bool = JSON,
) -> None:
    """Try the configuration on the live topics and tables. Changes nothing; exit code 1 where something is wrong."""
    from relay.checking import check as run_check

    findings = run_check(_load(config), records=records)
    if json:
        print_json(findings)
    else:
        for finding in findings:
            print(f"{'ok     ' if finding.is_ok else 'problem'} {finding.text}")
    if not all(finding.is_ok for finding in findings):
        raise typer.Exit(1)


@app.command(
    epilog="Examples: oncebox relay status --config orders.yaml | oncebox relay status --config orders.yaml --json"
)
def status(config: Path = CONFIG, json: bool = JSON) -> None:
    """Where it stands, from its tables and the topics; the relay need not run."""
    with _control(_load(config)) as control:
        found = control.status(measure_s=MEASURE_S)
    if json:
        print_json(found)
        return
    owner = f", active: {found.owner}" if found.owner else ""
    print(f"{found.relay}: {found.mode} mode, {'paused' if found.is_paused else 'not paused'}{owner}")
    print(f"applies {found.offsets_per_second or 0:.0f} offsets/s")
    print(f"dead letters to settle: {found.open_letters}")
    for each in found.partitions:
        print(
            f"{each.topic}:{each.partition}  at {each.next_offset} of {each.end_offset}, lag {each.lag_records} records"
            f"{f', {each.lag_ms / 1000:.1f} s' if each.lag_records else ''}{f', {each.owner}' if each.owner else ''}"
        )


@app.command(epilog="Example: oncebox relay pause --config orders.yaml")
def pause(config: Path = CONFIG) -> None:
    """Stop all its processes after the batch in hand, until `resume`. Positions stay."""
    _set_paused(config, paused=True)


@app.command(epilog="Example: oncebox relay resume --config orders.yaml")
def resume(config: Path = CONFIG) -> None:
    """Go on after `pause`."""
    _set_paused(config, paused=False)


def _set_paused(config: Path, *, paused: bool) -> None:
    with _control(_load(config)) as control:
        control.set_paused(paused=paused)


@app.command(
    epilog="Examples: oncebox relay rewind --config orders.yaml --topic orders --to earliest | "
    "--to 1200 --partition 3 | --to 2026-01-31T12:00:00Z"
)
def rewind(
    config: Path = CONFIG,
    topics: list[str] = TOPICS,
    to: str = typer.Option(..., "--to", help="earliest, latest, an offset (with --partition), or a time (ISO 8601)."),
    partition: int | None = typer.Option(None, help="Only this one."),
) -> None:
    """Apply records again from there. Rows that are newer stay as they are."""
    place = _place(to)
    with _control(_load(config)) as control:
        _tell(control.rewind(*topics, to=place, partition=partition))


def _place(to: str) -> "int | datetime":
    if to in {"earliest", "latest"}:
        return -2 if to == "earliest" else -1
    try:
        return int(to) if to.isdigit() else datetime.fromisoformat(to)
    except ValueError:
        raise typer.BadParameter("--to is earliest, latest, an offset or a time like 2026-01-31T12:00:00Z") from None


@app.command(epilog="Example: oncebox relay rebuild --config orders.yaml --topic orders --yes")
def rebuild(
    config: Path = CONFIG,
    topics: list[str] = TOPICS,
    yes: bool = typer.Option(False, "--yes", help="Do not ask: the tables of the topic are emptied."),
) -> None:
    """Empty the topic's tables and fill them anew from what the topic has. Where a foreign key joins tables of several
    topics, name them all.
    """
    settings = _load(config)
    tables = ", ".join(str(each.target()) for each in settings.tables if each.topic in topics)
    if tables:
        confirm(f"Empty {tables} and fill it from {', '.join(topics)} again?", yes=yes)
    with _control(settings) as control:
        _tell(control.rebuild(*topics))


def _tell(targets: dict[tuple[str, int], Any]) -> None:
    for (topic, partition), offset in sorted(targets.items()):
        print(f"{topic}:{partition}  from {offset}")


@letters_app.command("list", epilog="Example: oncebox relay dead-letters list --config orders.yaml")
def list_letters(
    config: Path = CONFIG,
    everything: bool = typer.Option(False, "--all", help="Those that are settled too."),
    limit: int = typer.Option(100, min=1, help="At most so many."),
    json: bool = JSON,
) -> None:
    """What is parked, and what is held behind it."""
    from relay.control import STATES

    with _control(_load(config)) as control:
        found = control.letters(states=STATES if everything else STATES[:3], limit=limit)
    if json:
        print_json(found)
        return
    for letter in found:
        unit = f" (with {letter['unit']})" if letter["unit"] != letter["id"] else ""
        print(
            f"{letter['id']}{unit}  {letter['state']}  {letter['topic']} partition {letter['partition']} "
            f"offset {letter['record_offset']}: {letter['error']}"
        )
    if not found:
        print("none")


@letters_app.command(epilog="Example: oncebox relay dead-letters fix 7 --value mended.json --config orders.yaml")
def fix(
    letter: int = typer.Argument(help="Its number in the list."),
    value: Path = typer.Option(..., help="A file with the record's new value.", dir_okay=False, exists=True),
    config: Path = CONFIG,
) -> None:
    """Give a parked record another value; then `replay` it."""
    with _control(_load(config)) as control:
        control.fix(letter, value.read_bytes())


@letters_app.command(epilog="Example: oncebox relay dead-letters replay 7 --config orders.yaml | … replay --all")
def replay(
    letter: int | None = typer.Argument(None, help="Its number in the list."),
    everything: bool = typer.Option(False, "--all", help="All that are parked."),
    config: Path = CONFIG,
) -> None:
    """Have the running relay apply it again, and then what is held behind it."""
    if (letter is None) != everything:
        raise typer.BadParameter("name one letter, or --all")
    with _control(_load(config)) as control:
        print(f"{control.replay(letter)} queued")


@letters_app.command(epilog="Example: oncebox relay dead-letters discard 7 --config orders.yaml")
def discard(letter: int = typer.Argument(help="Its number in the list."), config: Path = CONFIG) -> None:
    """Give it up, with its whole transaction; what is held behind it is applied."""
    with _control(_load(config)) as control:
        print(f"{control.discard(letter)} discarded")
