"""`oncebox chaos`: real parts, real faults, and everything checked. It is in `proof`, which only a checkout has."""

import secrets
from pathlib import Path

import typer

from oncebox.cli import new_app
from oncebox.cli.bar import bar
from oncebox.cli.checkout import needs_checkout

app = new_app()

FOLDER = Path(".oncebox/chaos")


@app.command(
    epilog="Examples: oncebox chaos --seconds 600 | oncebox chaos --seconds 60 --seed 7 --faults broker,kill-relay"
)
def chaos(
    seconds: int = typer.Option(60, min=1, help="How long faults come; healing and reading come on top."),
    seed: int | None = typer.Option(None, min=0, help="Of the schedule of faults; else a random one."),
    faults: str = typer.Option(
        "",
        help="Only these, with commas: names (kill-broker), parts (relay), verbs (kill, cut); a wrong name lists them.",
    ),
    planted: str = typer.Option("", help="Plant this bug; exit code 0: it was caught. A wrong name lists them."),
    json_path: Path | None = typer.Option(None, "--json", help="Write the summary here, too.", dir_okay=False),
    keep: Path | None = typer.Option(
        None, help=f"A new folder for history and logs; else {FOLDER}, which is emptied first.", file_okay=False
    ),
) -> None:
    """Run brokers, coordinators, relays both ways, copiers, PostgreSQL and clients; kill, pause and cut them off by a
    schedule; heal, read everything, and look for anomalies. Exit code 1: there are some. Root has more faults: brokers
    that lose each other.
    """
    needs_checkout("chaos")
    from proof.chaos.nemesis import UnknownFaultError, chosen
    from proof.chaos.planted import BUGS
    from proof.chaos.run import Chaos, prepare_folder, prepare_hosts

    if planted and planted not in BUGS:
        listed = "; ".join(f"{name}: {bug.what}" for name, bug in BUGS.items())
        raise typer.BadParameter(f"no bug {planted!r}; there are {listed}")
    try:
        names = chosen(faults or (BUGS[planted].faults if planted else ""))
    except UnknownFaultError as error:
        raise typer.BadParameter(str(error)) from error
    folder = (keep or FOLDER).absolute()
    prepare_folder(folder, is_ours=keep is None)
    names = prepare_hosts(names)
    chosen_seed = secrets.randbelow(10_000) if seed is None else seed
    with bar("faults", seconds, "s") as move:
        run = Chaos(folder, seconds=seconds, seed=chosen_seed, faults=names, planted=planted, move=move)
        is_well = run.run(json_path=json_path)
    if not is_well:
        raise typer.Exit(1)
