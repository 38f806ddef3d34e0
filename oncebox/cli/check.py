"""`oncebox check`: judges a history that `oncebox chaos` has kept. The checker is in `proof`, in a checkout only."""

from pathlib import Path

import typer

from oncebox.cli import new_app
from oncebox.cli.checkout import needs_checkout
from oncebox.cli.show import JSON, print_json

app = new_app()

UNDECIDED = 4


@app.command(
    epilog="Examples: oncebox check .oncebox/chaos/history.jsonl | oncebox check history.jsonl --json. "
    "Exit code: 0 no anomalies, 1 some, 4 none in a history that is empty or ends before its final read"
)
def check(
    history: Path = typer.Argument(help="A history: JSON lines.", exists=True, dir_okay=False),
    json: bool = JSON,
) -> None:
    """Look for anomalies in a history, and print the first ones of each kind with the operations that prove them."""
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
    if book.finished is None:
        raise typer.Exit(UNDECIDED)
