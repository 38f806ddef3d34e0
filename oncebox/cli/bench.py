"""`oncebox bench`: measures against the peers. What measures is the package `proof`, which only a checkout has."""

import inspect
import shlex
import sys
import time
from functools import partial
from pathlib import Path

import typer

from oncebox.cli import new_app
from oncebox.cli.bar import bar
from oncebox.cli.checkout import needs_checkout

app = new_app()

ROUNDS_HELP = (
    "Counted rounds of each side (5; quick: 3). What takes long is measured once or twice, and what differs little "
    "more often: each bench says so, and each row how many figures it has if they are not as many."
)


@app.command(
    epilog="Examples: oncebox bench coordinator --quick | oncebox bench all --json bench.json --plot bench.svg"
)
def bench(
    name: str = typer.Argument(help="A bench, or `all`; a wrong name lists them."),
    quick: bool = typer.Option(False, "--quick", help="Shorter and fewer rounds: minutes, not an hour."),
    rounds: int | None = typer.Option(None, min=1, help=ROUNDS_HELP),
    json: Path | None = typer.Option(None, help="Write the results here as a JSON list.", dir_okay=False),
    plot: Path | None = typer.Option(None, help="Write the ratios here as .png or .svg.", dir_okay=False),
    markdown: Path | None = typer.Option(None, help="Write a page here.", dir_okay=False),
) -> None:
    """Measure Oncebox against its peers, in turn on the same parts, and show the ratios."""
    needs_checkout("bench", "bench")
    from rich.console import Console

    from proof.bench import context, machine, registry, report
    from proof.bench.missed import WHY

    names = list(registry.BENCHES) if name == "all" else [name]
    if unknown := set(names) - set(registry.BENCHES):
        raise typer.BadParameter(f"no bench {unknown.pop()}; there are {', '.join(registry.BENCHES)} and all")
    if plot and plot.suffix not in {".png", ".svg"}:
        raise typer.BadParameter("--plot writes .png or .svg")

    benches = {each: registry.find(each) for each in names}
    results = []
    start_s = time.monotonic()
    rounds = rounds or (context.ROUNDS_QUICK if quick else context.ROUNDS)
    duration_s = context.DURATION_QUICK_S if quick else context.DURATION_S
    with context.Context(quick=quick, rounds=rounds, duration_s=duration_s) as given:
        try:
            with bar("measuring", len(benches), "benches") as move:
                for number, (each, run) in enumerate(benches.items(), 1):
                    given.progress = partial(_tell, start_s, each)
                    for result in run(given):
                        results.append(result)  # one by one: a failure keeps those before it
                        given.progress(f"{result.name} done")
                    if move:
                        move(number)
        except BaseException as error:
            kept = " and ".join(str(path) for path in (markdown, plot) if path)
            given.progress(f"failed: {error!r}{f'; {kept} not written: a page is of a whole run' if kept else ''}")
            raise
        finally:
            described = machine.describe() | given.parts
            if results:
                console = Console(highlight=False)
                console.print(report.table(results, rounds))
                console.print("; ".join(f"{part} {what}" for part, what in described.items()))
                if json:
                    report.write_json(results, json)
        if plot:
            report.write_plot(results, plot)
        if markdown:
            explained = {each: inspect.cleandoc(run.__doc__ or "") for each, run in benches.items()}
            command = shlex.join(["oncebox", *sys.argv[1:]])
            report.write_markdown(
                results,
                markdown,
                explained=explained,
                why=WHY,
                machine=described,
                command=command,
                rounds=rounds,
                plot=plot,
            )


def _tell(start_s: float, bench_name: str, text: str) -> None:
    print(f"[{time.monotonic() - start_s:6.1f} s] {bench_name}: {text}", file=sys.stderr, flush=True)
