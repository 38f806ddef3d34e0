"""`oncebox txn`: what is open, whose it is, what became of it, and its safe end."""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import typer

from oncebox.cli import new_app
from oncebox.cli.line import CALL_TIMEOUT_S, FOUND, UNDECIDED, Line, LineError, connected
from oncebox.cli.listing import listed
from oncebox.cli.show import JSON, age, as_json, confirm, moment, partitions, print_json, print_table, state_name
from oncebox.v1 import admin_pb2, coordinator_pb2, transaction_pb2
from oncebox.v1.admin_pb2_grpc import AdminStub
from oncebox.v1.coordinator_pb2_grpc import CoordinatorStub

app = new_app("Transactions: what is open, whose it is, what became of it, and its safe end.")

YES = typer.Option(False, "--yes", "-y", help="Do not ask.")
ID = typer.Argument(help="A transactional id.")
STATES = tuple(name for name in transaction_pb2.TransactionState.DESCRIPTOR.values_by_name if "UNSPECIFIED" not in name)
RESULTS = {transaction_pb2.COMMITTED: 0, transaction_pb2.ABORTED: FOUND, transaction_pb2.UNDECIDED: UNDECIDED}
RETRY_S = 1.0
TABLE_ROWS_MAX = 1_000


@app.command(
    "list",
    epilog="Examples: oncebox txn list --state ONGOING --older-than 60 | oncebox txn list --prefix orders- --json | "
    "oncebox txn list --all",
)
@connected
def list_(
    line: Line,
    prefix: str = typer.Option("", help="Only ids that begin so."),
    state: list[str] = typer.Option([], help=f"Only these: {', '.join(STATES)}.", show_default=False),
    older_than: float = typer.Option(0.0, help="Only what is older, in seconds.", min=0.0),
    limit: int = typer.Option(100, help=f"Rows at most; with more than {TABLE_ROWS_MAX:,}, as plain lines.", min=1),
    after: str = typer.Option("", help="Go on after this id."),
    everything: bool = typer.Option(False, "--all", help="All rows, page by page, as plain lines."),
    json: bool = typer.Option(False, "--json", help="For programs: one object a line."),
) -> None:
    """List ids and their transactions over all instances, in order of id."""
    unknown = [name for name in state if name.upper() not in STATES]
    if unknown:
        raise typer.BadParameter(f"no state {unknown[0]}; there are {', '.join(STATES)}")
    request = admin_pb2.ListRequest(
        prefix=prefix,
        states=[name.upper() for name in state],
        age_min_ms=int(older_than * 1_000),
        page_size=1_000 if everything else min(limit, 1_000),
        page_token=after,
    )
    # A table is laid out when all its rows are known: many of them would fill the memory, and take minutes.
    plain = everything or limit > TABLE_ROWS_MAX
    asyncio.run(_list(line, request, None if everything else limit, json=json, plain=plain))


async def _list(line: Line, request: Any, limit: int | None, *, json: bool, plain: bool) -> None:
    rows: list[Any] = []
    shown = 0
    last = ""
    async for summary in listed(line, request):
        if limit is not None and shown >= limit and summary.transactional_id != last:
            break
        shown += 1
        last = summary.transactional_id
        if json:
            print_json(as_json(summary))
        elif plain:
            print("\t".join(_row(summary)))
        else:
            rows.append(_row(summary))
    else:
        last = ""
    if not json and not plain:
        print_table(("id", "number", "state", "age", "producer id", "epoch", "partitions"), rows)
        print(f"{shown} shown" + (f"; more with --after '{last}'" if last else ""))
    elif not json and last:
        print(f"{shown} shown; more with --after '{last}'", file=sys.stderr)


def _row(summary: Any) -> tuple[str, ...]:
    return (
        summary.transactional_id,
        str(summary.number),
        state_name(summary.state),
        age(summary.age_ms),
        str(summary.producer_id),
        str(summary.epoch),
        partitions(summary.partitions),
    )


@app.command(epilog="Example: oncebox txn describe orders-1")
@connected
def describe(line: Line, transactional_id: str = ID, json: bool = JSON) -> None:
    """Show an id: its owner, its open transactions and its last outcomes."""
    described = asyncio.run(_describe(line, transactional_id))
    if json:
        print_json(as_json(described))
        return
    owner, grant = described.owner, described.grant
    print_table(
        ("", ""),
        [
            ("id", described.transactional_id),
            ("state", state_name(described.state)),
            ("owner", f"{owner.instance} at {owner.address} since {moment(owner.since_ms)}"),
            (
                "newest grant",
                f"number {grant.number}, producer id {grant.producer_id}, epoch {grant.epoch}",
            ),
            ("timeout", age(described.transaction_timeout_ms)),
            ("resume token", "yes" if described.has_resume_token else "no"),
            ("log partition", described.log_partition),
            ("changed", moment(described.updated_at_ms)),
        ],
    )
    if described.transactions:
        print_table(
            ("number", "state", "age", "producer id", "epoch", "partitions"),
            [_row(each)[1:] for each in described.transactions],
            title="\nnot complete",
        )
    if described.outcomes:
        print_table(
            ("number", "result", "cause", "decided"),
            [(each.number, *_result(each), moment(each.decided_at_ms)) for each in described.outcomes],
            title="\nlast outcomes",
        )


async def _describe(line: Line, transactional_id: str) -> Any:
    request = admin_pb2.DescribeRequest(transactional_id=transactional_id)
    return await line.leader(lambda channel: AdminStub(channel).Describe(request, timeout=CALL_TIMEOUT_S))


def _result(outcome: Any) -> tuple[str, str]:
    cause = transaction_pb2.Cause.Name(outcome.cause) if outcome.cause else "-"
    return transaction_pb2.Result.Name(outcome.result), cause


@app.command(
    epilog="Example: oncebox txn outcome orders-1 42. Exit code: 0 committed, 3 aborted, 4 undecided, 1 unknown"
)
@connected
def outcome(
    line: Line,
    transactional_id: str = ID,
    number: int = typer.Argument(help="The transaction's number.", min=1),
    json: bool = JSON,
) -> None:
    """Say what became of a transaction."""
    request = coordinator_pb2.GetOutcomeRequest(transactional_id=transactional_id, number=number)

    async def ask() -> Any:
        return await line.leader(lambda channel: CoordinatorStub(channel).GetOutcome(request, timeout=CALL_TIMEOUT_S))

    found = asyncio.run(ask()).outcome
    _show_outcome(found, json=json)
    raise typer.Exit(RESULTS[found.result])


def _show_outcome(found: Any, *, json: bool) -> None:
    if json:
        print_json(as_json(found))
        return
    result, cause = _result(found)
    why = f" ({cause})" if cause != "-" else ""
    decided = f" at {moment(found.decided_at_ms)}" if found.decided_at_ms else ""
    owed = f"; markers owed on {partitions(found.owed)}" if found.owed else ""
    print(f"{found.transactional_id} {found.number}: {result}{why}{decided}{owed}")


@app.command(
    epilog="Examples: oncebox txn abort orders-1 | oncebox txn abort orders-1 --number 42 --yes | "
    "oncebox txn abort orders-1 --fence --yes"
)
@connected
def abort(
    line: Line,
    transactional_id: str = ID,
    number: int | None = typer.Option(None, help="Only if this is the open one.", min=1),
    fence: bool = typer.Option(False, "--fence", help="Also end its owner's claim to the id."),
    abort_prepared: bool = typer.Option(
        False, "--abort-prepared", help="With --fence: also what waits for a decision."
    ),
    yes: bool = YES,
    json: bool = JSON,
) -> None:
    """Abort the open transaction of an id. Its owner stays the owner, unless it is fenced."""
    described = asyncio.run(_describe(line, transactional_id))
    if number is None and not fence:
        if described.state not in {transaction_pb2.ONGOING, transaction_pb2.PREPARED}:
            raise LineError(f"{transactional_id} has no open transaction; it is {state_name(described.state)}")
        number = described.grant.number
    what = f"the claim of {described.owner.instance} at {described.owner.address}" if fence else f"transaction {number}"
    confirm(f"End {what} of {transactional_id} ({state_name(described.state)})?", yes=yes)

    async def end(channel: Any) -> Any:
        if fence:
            request = admin_pb2.ForceFenceRequest(transactional_id=transactional_id, abort_prepared=abort_prepared)
            return await AdminStub(channel).ForceFence(request, timeout=CALL_TIMEOUT_S)
        asked = admin_pb2.AbortRequest(transactional_id=transactional_id, number=number or 0)
        return await AdminStub(channel).Abort(asked, timeout=CALL_TIMEOUT_S)

    async def run() -> Any:
        return await line.leader(end)

    _show_outcome(asyncio.run(run()).outcome, json=json)


@app.command(
    epilog="Examples: oncebox txn hanging | oncebox txn hanging --topic orders --end. "
    "Exit code: 0 none, 3 some were found"
)
@connected
def hanging(
    line: Line,
    topic: list[str] = typer.Option([], help="Only on these; else on all.", show_default=False),
    end: bool = typer.Option(False, "--end", help="End them: COMMIT where the feed has a manifest, else ABORT."),
    yes: bool = YES,
    json: bool = JSON,
) -> None:
    """Find transactions that are open on a partition and known to no coordinator, Kafka's own included."""
    if end:
        confirm("End all hanging transactions that are found?", yes=yes)
    request = admin_pb2.FindHangingRequest(topics=topic, end=end)

    async def ask() -> Any:
        return await line.any(lambda channel: AdminStub(channel).FindHanging(request, timeout=10 * CALL_TIMEOUT_S))

    answer = asyncio.run(ask())
    found = answer.hanging
    for each in answer.unexamined:
        print(f"not examined: {each.topic}:{each.partition}, {each.why}", file=sys.stderr)
    if json:
        print_json([as_json(each) for each in found])
    else:
        show_open(found)
        print(f"{len(found)} hanging" + (f", {sum(each.ended for each in found)} ended" if end else ""))
    # What was not examined is not called clean.
    raise typer.Exit(FOUND if any(not each.ended for each in found) else int(bool(answer.unexamined)))


def show_open(entries: Any) -> None:
    kinds = admin_pb2.OpenTransaction.Kind
    print_table(
        ("partition", "from offset", "producer id", "epoch", "age", "kind", "id", "number", "ends as"),
        [
            (
                f"{each.topic}:{each.partition}",
                each.offset_first,
                each.producer_id,
                each.epoch,
                age(each.age_ms),
                kinds.Name(each.kind),
                each.transactional_id or "-",
                each.number or "-",
                transaction_pb2.Result.Name(each.ends_as) if each.ends_as else "-",
            )
            for each in entries
        ],
    )


@app.command(epilog="Example: oncebox txn watch --prefix orders-")
@connected
def watch(
    line: Line,
    prefix: str = typer.Option("", help="Only ids that begin so."),
    count: int | None = typer.Option(None, help="End after so many.", min=1),
    json: bool = typer.Option(False, "--json", help="For programs: one object a line."),
) -> None:
    """Show each state that a transaction reaches, as it happens, on all instances, until Ctrl-C."""
    asyncio.run(_watch(line, prefix, count, json=json))


async def _watch(line: Line, prefix: str, count: int | None, *, json: bool) -> None:
    shown = 0
    async for event in _events(line, prefix):
        if json:
            print_json(as_json(event))
        else:
            summary = event.transaction
            cause = f" ({transaction_pb2.Cause.Name(event.cause)})" if event.cause else ""
            print(
                f"{moment(event.at_ms)}  {summary.transactional_id} {summary.number}  "
                f"{state_name(summary.state)}{cause}  {partitions(summary.partitions)}"
            )
        sys.stdout.flush()
        shown += 1
        if count is not None and shown >= count:
            return


async def _events(line: Line, prefix: str) -> AsyncIterator[Any]:
    """Of all instances; one that is gone is looked for again."""
    events: asyncio.Queue[Any] = asyncio.Queue(10_000)
    followed: dict[str, asyncio.Task[None]] = {}

    async def follow(address: str) -> None:
        async def read(channel: Any) -> None:
            async for event in AdminStub(channel).WatchTransactions(admin_pb2.WatchTransactionsRequest(prefix=prefix)):
                await events.put(event)

        try:
            await line.ask(address, read)
        except LineError as error:
            print(f"oncebox: {error}", file=sys.stderr)

    try:
        while True:
            for address in {leader.address for leader in await line.leaders()}:
                if address not in followed or followed[address].done():
                    if address in followed:
                        followed[address].result()
                    followed[address] = asyncio.create_task(follow(address))
            try:
                async with asyncio.timeout(RETRY_S):
                    while True:
                        yield await events.get()
            except TimeoutError:
                continue
    finally:
        for task in followed.values():
            task.cancel()
        await asyncio.gather(*followed.values(), return_exceptions=True)
