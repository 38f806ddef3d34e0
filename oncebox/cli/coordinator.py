"""`oncebox coordinator`: runs an instance of the transaction coordinator, or checks the cluster it would run on."""

from pathlib import Path

import typer

from oncebox.cli import new_app
from oncebox.cli.show import JSON, print_findings

app = new_app("The transaction coordinator.")

CONFIG = typer.Option(None, "--config", help="A YAML file with settings.", dir_okay=False, exists=True)
SERVERS = typer.Option(None, help="Kafka brokers, host:port,… (or ONCEBOX_BOOTSTRAP_SERVERS).")
STRICT = typer.Option(None, "--strict", help="Refuse a cluster that is not durable enough.")


@app.command(
    epilog="Examples: oncebox coordinator run --bootstrap-servers localhost:9092 | "
    "oncebox coordinator run --config coordinator.yaml --listen-port 7171"
)
def run(
    config: Path | None = CONFIG,
    bootstrap_servers: str | None = SERVERS,
    listen_host: str | None = typer.Option(None, help="127.0.0.1 unless told otherwise."),
    listen_port: int | None = typer.Option(None, help="For gRPC; 0: any free one."),
    http_port: int | None = typer.Option(None, help="For /live, /ready and /metrics; 0: any free one."),
    advertised_address: str | None = typer.Option(None, help="Where clients reach this instance, host:port."),
    strict: bool | None = STRICT,
    accept_lost_log: bool | None = typer.Option(
        None, "--accept-lost-log", help="Begin anew where the log is gone (read docs/when-the-log-is-lost.md first)."
    ),
    reflection: bool | None = typer.Option(None, "--reflection", help="Lets grpcurl list the services."),
    log_level: str | None = typer.Option(None, help="DEBUG, INFO, WARNING or ERROR."),
) -> None:
    """Run one instance until Ctrl-C or SIGTERM; then it hands over in good order.

    SIGHUP reads the log level, certificates, authorisation rules and token keys anew.
    """
    from coordinator.__main__ import serve
    from coordinator.config import CoordinatorSettings
    from oncebox.settings import load

    flags = {
        "kafka.bootstrap_servers": bootstrap_servers,
        "listen_host": listen_host,
        "listen_port": listen_port,
        "http_port": http_port,
        "advertised_address": advertised_address,
        "strict": strict,
        "accept_lost_log": accept_lost_log,
        "reflection": reflection,
        "log_level": log_level,
    }
    serve(lambda: load(CoordinatorSettings, file=config, flags=flags))


@app.command(epilog="Example: oncebox coordinator check --bootstrap-servers localhost:9092 --strict")
def check(
    config: Path | None = CONFIG,
    bootstrap_servers: str | None = SERVERS,
    strict: bool | None = STRICT,
    json: bool = JSON,
) -> None:
    """Say whether a Kafka cluster is fit, and how to mend it where it is not. Changes nothing."""
    import asyncio

    from coordinator.config import CoordinatorSettings
    from coordinator.instance import check_only
    from oncebox.settings import load

    settings = load(
        CoordinatorSettings, file=config, flags={"kafka.bootstrap_servers": bootstrap_servers, "strict": strict}
    )
    findings, refusal = asyncio.run(check_only(settings))
    print_findings(findings, as_json=json)
    if refusal is not None:
        raise refusal
