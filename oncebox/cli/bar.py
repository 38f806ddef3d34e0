"""How far long work is, where its amount is known and somebody looks on: a bar at the foot of the terminal, below all
that is printed meanwhile. Elsewhere, in a pipe or a log, there is none, and the work tells lines of its own.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Move = Callable[[float], None]  # to so much of the total


@contextmanager
def bar(what: str, total: float, unit: str) -> Iterator[Move | None]:
    """Counts in the unit given ("seeds"), and goes when the work is over; None: nobody looks on."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_interactive:
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    counted = TextColumn("{task.completed:,.0f} of {task.total:,.0f} " + unit)
    columns = (TextColumn("{task.description}"), BarColumn(), counted, TimeElapsedColumn(), TimeRemainingColumn())
    # What goes to a file must stay there, and what goes to the terminal must stand above the bar.
    with Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()) as shown:
        task = shown.add_task(what, total=total)
        yield lambda done: shown.update(task, completed=done)
