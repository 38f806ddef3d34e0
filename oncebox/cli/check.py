"""`oncebox check`: judges a history that `oncebox chaos` has kept. The checker is in `proof`, in a checkout only."""

from pathlib import Path

import typer

from oncebox.cli import new_app
from oncebox.cli.checkout import needs_checkout
from oncebox.cli.show import JSON, print_json

app = new_app()


@app.command(epilog="Examples: oncebox check .oncebox/chaos/history.jsonl | oncebox check history.jsonl --json")
def check(
    history: Path = typer.Argument(help="A history: JSON lines.", exists=True, dir_okay=False),
    json: bool = JSON,
) -> None:
    """Look for anomalies in a history and print each with the operations that prove it. Exit code 1: there are some."""
    needs_checkout("check")
    from proof.chaos import summary
    from proof.chaos.book import Book
    from proof.chaos.checks import check as run_checks
    from proof.chaos.history import read

    book = Book(read(history))
    findings = run_checks(book)
    if json:
        print_json(summary.as_json(book, findings))
    else:
        print(summary.as_text(book, findings))
    if findings:
        raise typer.Exit(1)
