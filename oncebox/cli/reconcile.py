"""`oncebox reconcile`: is the database what the committed topics say, and if not, what is wrong and how to mend it."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from oncebox.cli import new_app
from oncebox.cli.show import JSON, print_json

app = new_app("Compare PostgreSQL with the committed topics; explain and mend what differs.")

CONFIG = typer.Option(None, "--config", help="A YAML file with settings.")
SERVERS = typer.Option(None, help="Kafka brokers, host:port,… (or ONCEBOX_BOOTSTRAP_SERVERS).")
DSN = typer.Option(None, help="The database, postgresql://… (or ONCEBOX_DSN).")
RELAY = typer.Option(None, help="Whose tables; needed where there are several relays.")
MASTER = typer.Option(None, help="Spark's master: local[*], spark://host:7077, …")
FEED = typer.Option(None, help="The coordinator's feed of commits.")
LOG = typer.Option(None, help="The coordinator's log.")
FOLDER = typer.Option(None, help="Where reports are written.", file_okay=False)


def _settings(config: Path | None, **flags: Any) -> Any:
    from oncebox.settings import load
    from spark_jobs.config import ReconcileSettings

    names = {"bootstrap_servers": "kafka.bootstrap_servers", "dsn": "postgres.dsn"}
    return load(ReconcileSettings, file=config, flags={names.get(name, name): each for name, each in flags.items()})


@contextmanager
def _exit_codes() -> Iterator[None]:
    """An error is one sentence and exit code 4, for 1 means findings; 2 where nothing could be concluded."""
    from psycopg import Error

    from oncebox.dsn import DsnError
    from oncebox.settings import SettingsError
    from spark_jobs.errors import CannotCheckError, ReconcileError, unforeseen
    from spark_jobs.verdict import EXIT_CODES, EXIT_ERROR, Verdict

    try:
        yield
    except CannotCheckError as error:
        print(f"nothing could be concluded: {error}")
        raise typer.Exit(EXIT_CODES[Verdict.INCOMPLETE]) from error
    except Error as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        print(f"oncebox: the database refuses: {lines[0]}; nothing is changed", file=sys.stderr)
        raise typer.Exit(EXIT_ERROR) from error
    except (ReconcileError, SettingsError, DsnError, OSError) as error:
        print(f"oncebox: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_ERROR) from error
    except Exception as error:
        print(f"oncebox: {unforeseen(error)}", file=sys.stderr)
        raise typer.Exit(EXIT_ERROR) from error


@app.command(
    epilog="Exit codes: 0 clean, 1 findings, 2 not everything could be checked, 3 only behind, 4 error. "
    "Examples: oncebox reconcile run --bootstrap-servers localhost:9092 --dsn postgresql://localhost/shop | "
    "oncebox reconcile run --config reconcile.yaml --full --json"
)
def run(
    config: Path | None = CONFIG,
    bootstrap_servers: str | None = SERVERS,
    dsn: str | None = DSN,
    relay: str | None = RELAY,
    full: bool | None = typer.Option(None, "--full", help="Everything anew, not only what is new."),
    master: str | None = MASTER,
    feed_topic: str | None = FEED,
    log_topic: str | None = LOG,
    report_folder: Path | None = FOLDER,
    metrics_file: Path | None = typer.Option(None, help="Write metrics here, for Prometheus.", dir_okay=False),
    every: float | None = typer.Option(None, min=1, help="Run again every so many seconds, until Ctrl-C."),
    as_json: bool = JSON,
) -> None:
    """Compare, say the verdict, and write the report. Changes no row."""
    with _exit_codes():
        settings = _settings(
            config,
            bootstrap_servers=bootstrap_servers,
            dsn=dsn,
            relay=relay,
            full=full,
            master=master,
            feed_topic=feed_topic,
            log_topic=log_topic,
            report_folder=report_folder,
            metrics_file=metrics_file,
        )
    stop = _Stop()
    signal.signal(signal.SIGTERM, stop)
    try:
        while True:
            begun_s = time.monotonic()
            code = _once(settings, stop, as_json=as_json)
            if every is None or stop.is_asked or not _waited(max(every - (time.monotonic() - begun_s), 1)):
                break
    except KeyboardInterrupt:
        print("stopped; nothing was concluded", file=sys.stderr)
        code = 4
    raise typer.Exit(code)


class _Stop:
    """Ends a run as Ctrl-C does: Spark is stopped in good order. An interrupt that comes while an object of Java is
    given up is lost; then the run ends with its next step.
    """

    def __init__(self) -> None:
        self.is_asked = False

    def __call__(self, *_: object) -> None:
        self.is_asked = True
        raise KeyboardInterrupt


def _waited(seconds: float) -> bool:
    """False: told to stop. What the last run concluded stands."""
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:
        return False
    return True


def _progress(stop: _Stop | None = None) -> Callable[[str], None]:
    begun_s = time.monotonic()

    def tell(text: str) -> None:
        if stop is not None and stop.is_asked:
            raise KeyboardInterrupt
        print(f"[{time.monotonic() - begun_s:6.1f} s] {text}", file=sys.stderr, flush=True)

    tell("starting Spark")
    return tell


def _once(settings: Any, stop: _Stop, *, as_json: bool) -> int:
    from spark_jobs.jobs.reconcile import run as run_job
    from spark_jobs.result import to_json

    tell = _progress(stop)
    try:
        with _exit_codes():
            result, files = run_job(settings, tell)
    except typer.Exit as ended:
        return ended.exit_code
    if as_json:
        print_json({**to_json(result), "files": {name: str(file) for name, file in files.items()}})
        return result.exit_code
    print(result.sentence)
    for finding in result.findings:
        print(f"  {finding.amount:>8}  {finding.kind.value} in {finding.where}")
    print(f"report: {files['html']}")
    return result.exit_code


@app.command(
    epilog="Exit codes: 0 all that is wrong is known, 2 not everything could be checked, 4 error. "
    "Example: oncebox reconcile plan --dsn postgresql://localhost/shop --plan plan.json"
)
def plan(
    config: Path | None = CONFIG,
    bootstrap_servers: str | None = SERVERS,
    dsn: str | None = DSN,
    relay: str | None = RELAY,
    master: str | None = MASTER,
    feed_topic: str | None = FEED,
    log_topic: str | None = LOG,
    plan: Path = typer.Option(Path("plan.json"), help="Write the plan here.", dir_okay=False),
    limit: int = typer.Option(1_000, min=1, max=100_000, help="At most so many rows."),
) -> None:
    """Compare everything, and list what a repair would do. Changes no row."""
    from spark_jobs.jobs.repair import make_plan
    from spark_jobs.verdict import EXIT_CODES, Verdict

    with _exit_codes():
        settings = _settings(
            config,
            bootstrap_servers=bootstrap_servers,
            dsn=dsn,
            relay=relay,
            master=master,
            feed_topic=feed_topic,
            log_topic=log_topic,
            full=True,
        )
        made = make_plan(settings, limit=limit, progress=lambda text: print(text, file=sys.stderr, flush=True))
        plan.write_text(json.dumps(made, indent=2))
    print(made["sentence"])
    for action in made["actions"]:
        print(f"{action['do']:>7} {action['table']} {action['key_text']}: {action['why']}")
    print(f"{len(made['actions'])} actions in {plan}; carry them out with: oncebox reconcile repair {plan}")
    for note in made["left_out"]:
        print(f"left out: {note}")
    for note in made["unchecked"]:
        print(f"not checked: {note}")
    raise typer.Exit(EXIT_CODES[Verdict.INCOMPLETE] if made["unchecked"] else 0)


@app.command(
    epilog="Examples: oncebox reconcile repair plan.json --dsn postgresql://localhost/shop | "
    "oncebox reconcile repair undo.json --undo --dsn postgresql://localhost/shop"
)
def repair(
    plan: Path = typer.Argument(
        help="What `oncebox reconcile plan` wrote, or an undo file.", exists=True, dir_okay=False
    ),
    dsn: str = typer.Option(..., envvar="ONCEBOX_DSN", help="The database, postgresql://…"),
    undo: bool = typer.Option(False, "--undo", help="The file is an undo file: put back what a repair has replaced."),
    undo_file: Path = typer.Option(Path("undo.json"), help="Write here how to undo it.", dir_okay=False),
    dry_run: bool = typer.Option(False, "--dry-run", help="Do all of it, and roll back."),
) -> None:
    """Carry a plan out in one transaction, past the relay's fence; what has changed since the plan is left alone."""
    from oncebox.dsn import checked
    from spark_jobs.errors import ReconcileError
    from spark_jobs.repair import apply_plan, apply_undo

    def keep(document: dict[str, Any]) -> None:
        try:
            with open(undo_file, "x", encoding="utf-8") as stream:
                json.dump(document, stream, indent=2)
                stream.flush()
                os.fsync(stream.fileno())
        except FileExistsError:
            raise ReconcileError(
                f"{undo_file} is there already and may undo an earlier repair: name another with --undo-file; "
                "nothing is changed"
            ) from None

    with _exit_codes():
        try:
            document = json.loads(plan.read_text())
        except ValueError:
            raise ReconcileError(f"{plan} is not JSON: give the file that `oncebox reconcile plan` wrote") from None
        if undo:
            print(f"{apply_undo(checked(dsn), document, is_dry=dry_run)} rows put back")
            return
        done = apply_plan(checked(dsn), document, keep=keep, is_dry=dry_run)
    for skipped in done["skipped"]:
        print(f"left alone: {skipped}")
    how = "rolled back, nothing is changed" if dry_run else f"to undo: oncebox reconcile repair {undo_file} --undo"
    print(f"{done['done']} rows mended" + (f"; {how}" if done["done"] else ""))
    raise typer.Exit(0 if not done["skipped"] else 1)


@app.command(
    epilog="Exit codes: 0 done (or rolled back), 2 could not be done now, 4 cannot be done; with 2 and 4 nothing is "
    "changed. Example: oncebox reconcile backfill shop.orders --config reconcile.yaml --apply"
)
def backfill(
    table: str = typer.Argument(help="The table, as schema.name; without a schema: of public."),
    apply: bool = typer.Option(False, "--apply", help="Do it. Otherwise all of it is done and rolled back."),
    config: Path | None = CONFIG,
    bootstrap_servers: str | None = SERVERS,
    dsn: str | None = DSN,
    relay: str | None = RELAY,
    master: str | None = MASTER,
    feed_topic: str | None = FEED,
) -> None:
    """Rebuild a table from its topics at the point where the relay is, which then goes on from there."""
    from spark_jobs.jobs.backfill import run as run_job
    from spark_jobs.jobs.backfill import told

    with _exit_codes():
        settings = _settings(
            config, bootstrap_servers=bootstrap_servers, dsn=dsn, relay=relay, master=master, feed_topic=feed_topic
        )
        changes = run_job(settings, table, _progress(), is_dry=not apply)
    print(told(table, changes, is_dry=not apply))


@app.command(epilog="Example: oncebox reconcile audit --bootstrap-servers localhost:9092")
def audit(
    config: Path | None = CONFIG,
    bootstrap_servers: str | None = SERVERS,
    master: str | None = MASTER,
    feed_topic: str | None = FEED,
    log_topic: str | None = LOG,
    hours: float = typer.Option(24.0, min=0.01, help="Of the last so many hours."),
    as_json: bool = JSON,
) -> None:
    """Durations, aborts by cause and hot partitions of transactions, from the feed and the log."""
    from spark_jobs.jobs.audit import audit as run_audit
    from spark_jobs.jobs.audit import render

    with _exit_codes():
        settings = _settings(
            config,
            bootstrap_servers=bootstrap_servers,
            dsn="postgresql://",
            master=master,
            feed_topic=feed_topic,
            log_topic=log_topic,
        )
        figures = run_audit(settings, hours=hours)
    if as_json:
        print_json(figures)
    else:
        print(render(figures))


@app.command(epilog="Example: oncebox reconcile history --dsn postgresql://localhost/shop")
def history(
    dsn: str = typer.Option(..., envvar="ONCEBOX_DSN", help="The database, postgresql://…"),
    relay: str = typer.Option("", help="Of this relay only."),
    limit: int = typer.Option(20, min=1, max=1_000, help="At most so many, the newest."),
    as_json: bool = JSON,
) -> None:
    """Earlier runs, newest first."""
    from oncebox.dsn import checked
    from spark_jobs.publish import history as read

    with _exit_codes():
        runs = read(checked(dsn), relay, limit)
    if as_json:
        print_json(runs)
        return
    if not runs:
        print("no run is stored in this database yet: oncebox reconcile run")
        return
    print(
        f"{'run':>6}  {'started (UTC)':19}  {'kind':11}  {'verdict':10}  {'rows':>13}  {'findings':>8}  {'lag':>9}  "
        "seconds"
    )
    for each in runs:
        seconds = (each["finished_at"] - each["started_at"]).total_seconds()
        print(
            f"{each['run']:>6}  {each['started_at']:%Y-%m-%d %H:%M:%S}  {each['kind']:11}  {each['verdict']:10}  "
            f"{each['rows']:>13,}  {each['findings']:>8,}  {each['lag']:>9,}  {seconds:.1f}"
        )
