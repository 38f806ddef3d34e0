"""`oncebox outbox`: PostgreSQL → Kafka, exactly once and in commit order."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from oncebox.cli import new_app
from oncebox.cli.show import JSON, print_json

if TYPE_CHECKING:
    from relay.outbox.config import OutboxSettings

app = new_app("PostgreSQL to Kafka: the outbox relay, and commits over both.")

CONFIG = typer.Option(None, "--config", help="A YAML file with settings.", dir_okay=False, exists=True)
DSN = typer.Option(None, help="postgresql://… of the source database (or ONCEBOX_DSN).")
SERVERS = typer.Option(None, help="Kafka brokers, host:port,… (or ONCEBOX_BOOTSTRAP_SERVERS).")
COORDINATORS = typer.Option(None, help="host:port,… of coordinators.")
NAME = typer.Option(None, help="Of the relay; `default` unless told otherwise.")
Result = TypeVar("Result")


class OutboxCommandError(Exception):
    """What was asked for could not be done."""


# Settings that a command does not use need not be given to it.
NO_KAFKA = "unused:9"


@app.command(epilog="Example: oncebox outbox init --dsn postgresql://localhost/shop --yes")
def init(
    config: Path | None = CONFIG,
    dsn: str | None = DSN,
    name: str | None = NAME,
    source: str | None = typer.Option(None, help="logical or commit_seq."),
    yes: bool = typer.Option(False, "--yes", help="Run what is shown without asking."),
) -> None:
    """Show what the database needs for an outbox, and make it."""
    from relay.outbox import setup

    settings = _settings(config, dsn, name=name, bootstrap_servers=None, needs_kafka=False, source=source)
    statements = _run(setup.plan(settings))
    for statement in statements:
        print(f"-- {statement.what}\n{statement.text}\n")
    if not yes:
        typer.confirm("Run this?", abort=True)
    _run(setup.run(settings, statements))
    print(f"the outbox {settings.table_schema}.{settings.table} is ready: oncebox outbox run")


@app.command(
    epilog="Examples: oncebox outbox run --dsn postgresql://localhost/shop --bootstrap-servers localhost:9092 | "
    "oncebox outbox run --config outbox.yaml --http-port 9101"
)
def run(
    config: Path | None = CONFIG,
    dsn: str | None = DSN,
    bootstrap_servers: str | None = SERVERS,
    coordinators: str | None = COORDINATORS,
    name: str | None = NAME,
    http_port: int | None = typer.Option(None, help="For metrics; 0: any free one."),
    log_level: str | None = typer.Option(None, help="DEBUG, INFO, WARNING or ERROR."),
) -> None:
    """Publish the outbox until Ctrl-C or SIGTERM. A second one stands by and takes over.

    SIGHUP reads the log level anew.
    """
    from relay.outbox.service import serve

    serve(
        lambda: _settings(
            config,
            dsn,
            name=name,
            bootstrap_servers=bootstrap_servers,
            coordinators=coordinators,
            http_port=http_port,
            log_level=log_level,
        )
    )


@app.command(epilog="Example: oncebox outbox status --dsn postgresql://localhost/shop")
def status(config: Path | None = CONFIG, dsn: str | None = DSN, json: bool = JSON) -> None:
    """Say what the relays of a database do, how much log their slots keep, and what is parked."""
    from relay.outbox import control
    from relay.outbox.token import COMMIT_SEQ, RESYNC_BEGUN, SLOT_TAKEN

    settings = _settings(config, dsn, name=None, bootstrap_servers=None, needs_kafka=False)
    found = _run(control.status(settings.postgres.dsn.get_secret_value()))
    if json:
        print_json(found)
        return
    for relay in found:
        print(f"{relay.name}: {relay.state}{' (to be paused)' if relay.is_paused else ''}")
        if relay.message:
            print(f"  {relay.message}")
        print(f"  owner {relay.owner or 'none'} since {relay.owner_since:%Y-%m-%d %H:%M:%S %Z}")
        print(f"  {relay.rows_published} rows published, {relay.parked_rows} parked; told {relay.updated_at:%H:%M:%S}")
        if relay.kept_bytes is not None:
            print(
                f"  slot {relay.source}: keeps {relay.kept_bytes} bytes of the log ({relay.wal_status}), "
                f"{relay.age_transactions} transactions old"
            )
        elif relay.source == RESYNC_BEGUN:
            print("  a resync was begun and has not come to its end: oncebox outbox resync --apply")
        elif relay.source == SLOT_TAKEN:
            print("  somebody else has moved its slot, and rows may be missing: oncebox outbox resync")
        elif relay.source != COMMIT_SEQ:
            print(f"  slot {relay.source}: does not exist")


@app.command(epilog="Example: oncebox outbox parked --dsn postgresql://localhost/shop --retry")
def parked(
    config: Path | None = CONFIG,
    dsn: str | None = DSN,
    name: str | None = NAME,
    retry: bool = typer.Option(False, "--retry", help="Publish all of them after all, as one transaction."),
    discard: bool = typer.Option(False, "--discard", help="Drop all of them."),
    limit: int = typer.Option(100, min=1, help="Show at most so many."),
    json: bool = JSON,
) -> None:
    """Show the rows that could not be published and those behind them, oldest first; or settle them."""
    from relay.outbox import parked as work

    if retry and discard:
        raise typer.BadParameter("--retry and --discard exclude each other")
    settings = _settings(config, dsn, name=name, bootstrap_servers=None, needs_kafka=False)
    if retry:
        print(f"{_run(work.retry(settings))} rows are handed back to the relay")
    elif discard:
        print(f"{_run(work.discard(settings))} rows dropped")
    else:
        rows = _run(work.listed(settings, limit))
        if json:
            print_json(rows)
            return
        for row in rows:
            print(f"{row.position} id {row.row_id}: {row.reason}")


@app.command(epilog="Example: oncebox outbox pause --dsn postgresql://localhost/shop")
def pause(config: Path | None = CONFIG, dsn: str | None = DSN, name: str | None = NAME) -> None:
    """Let the relay stop after the group in hand; its position stays. The slot goes on keeping the log."""
    _set_paused(config, dsn, name, is_paused=True)


@app.command(epilog="Example: oncebox outbox resume --dsn postgresql://localhost/shop")
def resume(config: Path | None = CONFIG, dsn: str | None = DSN, name: str | None = NAME) -> None:
    """Let a paused relay go on."""
    _set_paused(config, dsn, name, is_paused=False)


@app.command(
    epilog="Example: oncebox outbox resync --dsn postgresql://localhost/shop --bootstrap-servers localhost:9092 --apply"
)
def resync(
    config: Path | None = CONFIG,
    dsn: str | None = DSN,
    bootstrap_servers: str | None = SERVERS,
    coordinators: str | None = COORDINATORS,
    name: str | None = NAME,
    apply: bool = typer.Option(False, "--apply", help="Publish what is missing and go on from here; else only look."),
    json: bool = JSON,
) -> None:
    """Compare what is published with the table, after a restore, a fail-over or a lost slot."""
    from relay.outbox import resync as work

    settings = _settings(config, dsn, name=name, bootstrap_servers=bootstrap_servers, coordinators=coordinators)
    report = _run(work.resync(settings, apply=apply))
    if json:
        print_json(report)
        return
    print(
        f"{report.rows} rows in the table: {report.published} are published, {report.coming} come from the source, "
        f"{report.parked} are parked"
    )
    for line in report.bad:
        print(f"  {line}")
    if report.settled:
        print(
            f"{len(report.settled)} that were parked are published already, and {'are' if apply else 'will be'} let go"
        )
    told = ", ".join(report.missing[:20]) + (" …" if len(report.missing) > 20 else "")
    print(f"{len(report.missing)} are missing{': ' + told if told else ''}")
    if apply:
        print("they are published now; start the relay again")
    elif report.missing:
        print("publish them and go on from here with --apply")


@app.command(epilog="Example: oncebox outbox resolve --dsn postgresql://localhost/shop --coordinators localhost:7171")
def resolve(
    config: Path | None = CONFIG,
    dsn: str | None = DSN,
    coordinators: str | None = COORDINATORS,
    prefix: str = typer.Option("", help="Only transactional ids that begin so."),
    older_than_s: float = typer.Option(60.0, min=0, help="Younger ones are left to their owners."),
    prune_days: int | None = typer.Option(None, min=1, help="Forget commits that are complete and older than this."),
) -> None:
    """Decide what is prepared in Kafka together with this database and was left behind: as the database says."""
    from oncebox import resolver

    settings = _settings(config, dsn, bootstrap_servers=None, needs_kafka=False, coordinators=coordinators)
    given = settings.postgres.dsn.get_secret_value()
    addresses = settings.coordinators.split(",")
    opens = settings.opens_channels(resolver.CONNECT_TIMEOUT_MS)
    found = _run(resolver.resolve(given, addresses, prefix=prefix, older_than_s=older_than_s, open_channel=opens))
    for resolved in found.resolved:
        told = resolved.result or f"not decided: {resolved.error}"
        print(f"{resolved.transactional_id} transaction {resolved.number}: {told}")
    for unheard in found.unheard:
        print(f"the coordinator at {unheard.address} does not answer ({unheard.error}): what it leads is not looked at")
    for unserved in found.unserved:
        print(f"nobody serves log partition {unserved.log_partition} just now: what is in it is not looked at")
    left = sum(resolved.result is None for resolved in found.resolved)
    if found.resolved:
        print(f"{len(found.resolved) - left} decided")
    elif not found.unheard and not found.unserved:
        print("nothing waits for a decision of this database")
    if prune_days is not None:
        print(f"{_run(resolver.prune(given, prune_days))} tokens forgotten")
    if left or found.unheard or found.unserved:
        told = f"{left} could not be decided, {len(found.unheard)} coordinators do not answer"
        if found.unserved:
            told += f", {len(found.unserved)} log partitions are not served"
        raise OutboxCommandError(f"{told}: run it again")


def _set_paused(config: Path | None, dsn: str | None, name: str | None, *, is_paused: bool) -> None:
    from relay.outbox import control

    settings = _settings(config, dsn, name=name, bootstrap_servers=None, needs_kafka=False)
    _run(control.set_paused(settings, is_paused=is_paused))
    print(f"{settings.name} {'pauses' if is_paused else 'goes on'}")


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    """What the database or a coordinator says is told in one line, without a password."""
    import grpc
    import psycopg

    try:
        return asyncio.run(work)
    except psycopg.Error as error:
        raise OutboxCommandError(f"the database: {str(error).partition(chr(10))[0]}") from error
    except grpc.RpcError as error:
        raise OutboxCommandError(f"the coordinator: {error.details()}") from error


def _settings(
    config: Path | None,
    dsn: str | None,
    *,
    bootstrap_servers: str | None,
    needs_kafka: bool = True,
    **flags: object,
) -> "OutboxSettings":
    import os

    from oncebox.settings import load
    from relay.outbox.config import OutboxSettings

    if not needs_kafka and config is None and "ONCEBOX_BOOTSTRAP_SERVERS" not in os.environ:
        bootstrap_servers = NO_KAFKA
    given = {"postgres.dsn": dsn, "kafka.bootstrap_servers": bootstrap_servers, **flags}
    return load(OutboxSettings, file=config, flags=given)
