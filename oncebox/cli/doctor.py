"""`oncebox doctor`: looks at Kafka, PostgreSQL, the coordinators and the settings, and says what to mend.

Changes nothing. Useful before anything of Oncebox runs: each part that is named is looked at, the others are left out.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from oncebox.cli import new_app
from oncebox.cli.line import Line, LineError, connected
from oncebox.cli.show import JSON, print_findings

app = new_app()

CONNECT_TIMEOUT_S = 10
POSTGRES_MIN = 14


@app.command(
    epilog="Examples: oncebox doctor --bootstrap-servers localhost:9092 --dsn postgresql://me@localhost/app | "
    "oncebox doctor --config coordinator.yaml | oncebox doctor --coordinators localhost:7171. "
    "Exit code: 0 fit, 1 not"
)
@connected
def doctor(
    line: Line,
    config: Path | None = typer.Option(None, help="The coordinator's settings.", dir_okay=False, exists=True),
    bootstrap_servers: str | None = typer.Option(
        None, envvar="ONCEBOX_BOOTSTRAP_SERVERS", help="Kafka brokers, host:port,…"
    ),
    dsn: str | None = typer.Option(None, envvar="ONCEBOX_DSN", help="PostgreSQL; better as a variable."),
    strict: bool = typer.Option(False, "--strict", help="Warnings count as problems."),
    skip_coordinator: bool = typer.Option(False, "--skip-coordinator", help="None is running yet."),
    json: bool = JSON,
) -> None:
    """Look at Kafka, PostgreSQL, the coordinators and the settings, and say what to mend. Changes nothing."""
    from coordinator.cluster import Finding, Severity

    findings: list[Finding] = []
    if config or bootstrap_servers:
        findings += _kafka(config, bootstrap_servers, strict=strict)
    else:
        findings.append(_note("Kafka was not looked at", "name it with --bootstrap-servers or --config"))
    if dsn:
        findings += _postgres(dsn)
    else:
        findings.append(_note("PostgreSQL was not looked at", "name it with --dsn or the variable ONCEBOX_DSN"))
    if not skip_coordinator:
        findings += _coordinators(line)
    print_findings(findings, as_json=json)
    worst = max(each.severity for each in findings)
    raise typer.Exit(1 if worst >= (Severity.WARNING if strict else Severity.PROBLEM) else 0)


def _finding(severity: str, what: str, why: str = "", *mend: str) -> Any:
    from coordinator.cluster import Finding, Severity

    return Finding(severity=Severity[severity], what=what, why=why, mend=mend)


def _note(what: str, why: str) -> Any:
    return _finding("NOTE", what, why)


def _kafka(config: Path | None, bootstrap_servers: str | None, *, strict: bool) -> Iterator[Any]:
    from coordinator.config import CoordinatorSettings
    from coordinator.instance import check_only
    from oncebox.settings import SettingsError, load
    from oncebox.wire import WireError

    flags = {"kafka.bootstrap_servers": bootstrap_servers, "strict": strict or None}
    try:
        settings = load(CoordinatorSettings, file=config, flags=flags)
    except SettingsError as error:
        yield _finding("PROBLEM", "the coordinator's settings cannot be used", "", *str(error).splitlines())
        return
    yield _finding("OK", "the coordinator's settings are complete and agree with each other")
    yield from _security(settings)
    try:
        findings, _refusal = asyncio.run(check_only(settings))
    except WireError as error:
        yield _finding("PROBLEM", f"Kafka does not answer at {settings.kafka.bootstrap_servers}", str(error))
        return
    yield from findings


def _security(settings: Any) -> Iterator[Any]:
    from coordinator.api.auth import Gate
    from oncebox.access.identity import KeysError
    from oncebox.access.permissions import PolicyError
    from oncebox.certificates import ServerCertificates, TlsError

    try:
        if settings.tls:
            ServerCertificates(settings.tls)
        Gate(settings)
    except (TlsError, PolicyError, KeysError) as error:
        yield _finding("PROBLEM", "certificates, token keys or rules cannot be used", str(error))
        return
    if settings.tls is None:
        yield _note("calls to the coordinator are not encrypted", "set tls before anything but this machine calls it")
    elif settings.rules_location is None:
        yield _note("everybody who is let in may use every transactional id", "set rules_location to say who may what")
    else:
        yield _finding("OK", "TLS, identity and rules of the coordinator can be used")


def _coordinators(line: Line) -> Iterator[Any]:
    from oncebox.errors import CoordinatorError

    try:
        leaders = asyncio.run(line.leaders())
    except (LineError, CoordinatorError) as error:
        yield _finding("PROBLEM", "no coordinator answers", str(error), "oncebox coordinator run --bootstrap-servers …")
        return
    instances = {leader.instance for leader in leaders}
    bad = [leader for leader in leaders if leader.state != "serving"]
    for leader in bad:
        yield _finding(
            "PROBLEM" if leader.state == "failed" else "WARNING",
            f"log partition {leader.log_partition} is {leader.state} at {leader.address}",
            "its transactional ids cannot commit; the instance's log says why",
        )
    if not leaders:
        yield _finding(
            "PROBLEM", "no log partition has a leader", "instances may still be starting; look at their logs"
        )
    elif not bad:
        yield _finding("OK", f"{len(leaders)} log partitions are served by {len(instances)} instances")
    if len(instances) == 1:
        yield _finding("WARNING", "there is a single coordinator instance", "with a second one a crash costs no pause")
    debts = sum(leader.debts for leader in leaders)
    if debts > 1_000:
        yield _finding("WARNING", f"{debts} decided transactions still owe markers", "is a broker or partition down?")


def _postgres(dsn: str) -> Iterator[Any]:
    import psycopg

    from oncebox.dsn import problem_of

    if problem := problem_of(dsn):
        yield _finding("PROBLEM", "the DSN cannot be read", problem)
        return
    try:
        with psycopg.connect(dsn, connect_timeout=CONNECT_TIMEOUT_S, autocommit=True) as connection:
            yield from _database(connection)
    except psycopg.Error as error:
        # Of a DSN that can be read, libpq's text names host and user, never the password.
        yield _finding("PROBLEM", "PostgreSQL cannot be reached", str(error).strip().splitlines()[0])


def _database(connection: Any) -> Iterator[Any]:
    def value(statement: str) -> Any:
        return connection.execute(statement).fetchone()[0]

    version = connection.info.server_version // 10_000
    if version < POSTGRES_MIN:
        yield _finding("PROBLEM", f"PostgreSQL is version {version}", f"at least {POSTGRES_MIN} is needed")
    else:
        yield _finding("OK", f"PostgreSQL {version} answers")
    if not value("SELECT pg_catalog.has_database_privilege(current_database(), 'CREATE')"):
        yield _finding(
            "PROBLEM",
            "the user may not create a schema in this database",
            "the relay keeps its positions in a schema of its own",
            "GRANT CREATE ON DATABASE … TO …;",
        )
    if value("SHOW wal_level") != "logical":
        yield _finding(
            "WARNING",
            "wal_level is not logical",
            "the way back to Kafka (outbox) reads the write-ahead log",
            "ALTER SYSTEM SET wal_level = logical;  -- and restart the server",
        )
    role = "SELECT rolreplication OR rolsuper FROM pg_catalog.pg_roles WHERE rolname = current_user"
    if not value(role):
        yield _finding(
            "WARNING", "the user may not replicate", "the outbox needs a replication slot", "ALTER ROLE … REPLICATION;"
        )
    if value("SHOW fsync") != "on" or value("SHOW full_page_writes") != "on":
        yield _finding("PROBLEM", "fsync or full_page_writes is off", "a crash of the server may lose committed rows")
    if value("SHOW synchronous_commit") == "off":
        yield _finding(
            "PROBLEM",
            "synchronous_commit is off",
            "a commit that was acknowledged may be lost: positions and rows would go back together, but what left "
            "the database would not",
            "ALTER ROLE … SET synchronous_commit = on;",
        )
    remote = not connection.info.hostaddr.startswith("127.") and connection.info.hostaddr not in {"", "::1"}
    if remote and not connection.pgconn.ssl_in_use:
        yield _finding(
            "WARNING", "the connection to PostgreSQL is not encrypted", "", "add sslmode=verify-full to the DSN"
        )
