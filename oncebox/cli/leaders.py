"""`oncebox leaders`: which instance leads which log partition."""

import asyncio

from oncebox.cli import new_app
from oncebox.cli.line import Line, connected
from oncebox.cli.show import JSON, as_json, print_json, print_table

app = new_app()


@app.command(epilog="Example: oncebox leaders --coordinators localhost:7171")
@connected
def leaders(line: Line, json: bool = JSON) -> None:
    """Show which instance leads which log partition, how many ids it holds and what it still owes."""
    found = asyncio.run(line.leaders())
    if json:
        print_json([as_json(leader) for leader in found])
        return
    print_table(
        ("log partition", "instance", "address", "state", "epoch", "ids", "debts"),
        [
            (
                leader.log_partition,
                leader.instance,
                leader.address,
                leader.state,
                leader.coordinator_epoch,
                leader.transactional_ids,
                leader.debts,
            )
            for leader in found
        ],
    )
