"""`oncebox demo`: the main job end to end on real parts. The story itself is in `proof`, which only a checkout has."""

import typer

from oncebox.cli import new_app
from oncebox.cli.checkout import needs_checkout

app = new_app()


@app.command(epilog="Examples: oncebox demo | oncebox demo --transfers 500 --clients 2")
def demo(
    transfers: int = typer.Option(2_000, min=10, help="How many transfers the bank makes."),
    clients: int = typer.Option(4, min=1, max=32, help="How many clients make them."),
) -> None:
    """Start Kafka, PostgreSQL, coordinators and relays, move money between accounts, kill a coordinator, a relay and a
    client on the way, count it all again in Kafka and PostgreSQL, and let Spark say whether they agree.
    """
    needs_checkout("demo", "demo")
    from proof.demo import story

    story.tell(transfers=transfers, clients=clients)
