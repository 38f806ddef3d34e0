"""What clients were told: one outcome for each transaction, that of the data, and in the end always one."""

from collections.abc import Iterator
from math import inf

from proof.chaos.book import Book, Operation
from proof.chaos.checks_kafka import Anomaly
from proof.chaos.history import ABORTED, COMMITTED, UNKNOWN, HeldBack, Stuck
from proof.chaos.workload import PASSER_BY

# After healing, until every client has committed something that it has begun since.
PROGRESS_S = 120.0


def decision_divergence(book: Book) -> Iterator[Anomaly]:
    """Two outcomes of one transaction: told to two who asked, or told and seen."""
    for operation in book.operations.values():
        told = {told.outcome for _, told in operation.told} - {UNKNOWN}
        if len(told) > 1:
            yield f"{operation.op} is both {' and '.join(sorted(told))}", book.proof_of(operation)
        if book.finished is None:
            continue
        seen = {each.record.item for each in book.final_of_operation.get(operation.op, ())}
        if told == {COMMITTED} and not seen:
            yield f"{operation.op} was told to be committed, and nothing of it stands", book.proof_of(operation)
        if told == {ABORTED} and len(seen) == len(operation.invoke.writes):
            proof = [*book.proof_of(operation), *map(book.say_seen, book.final_of_operation[operation.op])]
            yield f"{operation.op} was told to be aborted, and all of it stands", proof


def number_twice(book: Book) -> Iterator[Anomaly]:
    """Two committed transactions of one id with the same number."""
    owner: dict[tuple[str, int], str] = {}
    for operation in book.with_outcome(COMMITTED):
        number = getattr(operation.commit.event, "number", 0) if operation.commit else 0
        name = (operation.invoke.transactional_id, number)
        other = owner.setdefault(name, operation.op)
        if other != operation.op:
            proof = [*book.proof_of(book.operations[other]), *book.proof_of(operation)]
            yield f"{other} and {operation.op} were both committed as number {number}", proof


def unknown_outcome(book: Book) -> Iterator[Anomaly]:
    """Nobody could say what became of it, although everything has healed."""
    if book.finished is None:
        return
    for operation in book.with_outcome(UNKNOWN):
        yield f"{operation.op} has no outcome", book.proof_of(operation)


def hanging_transaction(book: Book) -> Iterator[Anomaly]:
    """One that nobody ends any more: readers of committed data get nothing that stands behind it."""
    for line, event in book.troubles:
        if isinstance(event, HeldBack):
            text = f"{event.partition} is held back at {event.offset_stable} of {event.offset_next}"
            yield text, [book.say(line, text)]


def no_progress(book: Book) -> Iterator[Anomaly]:
    """A client to which nothing is done any more gets nothing through."""
    limit_ns = book.healed_ns + int(PROGRESS_S * 1e9)
    if not book.healed_ns or (book.finished is None and book.ended_ns <= limit_ns):
        return
    last: dict[str, Operation] = {}
    gone_on: set[str] = set()
    for operation in book.operations.values():
        # A client and its successors have one name, and count their incarnations behind it.
        name = operation.invoke.client.rpartition(".")[0]
        if operation.invoke.client.startswith(PASSER_BY):
            continue
        last[name] = operation
        if operation.invoke.at_ns > book.healed_ns and _committed_ns(operation) <= limit_ns:
            gone_on.add(name)
    for name in last.keys() - gone_on:
        yield (
            f"{name} committed nothing that it began in the {PROGRESS_S:.0f} s after healing",
            book.proof_of(last[name]),
        )


def _committed_ns(operation: Operation) -> float:
    """When its own client was told so."""
    mine = (told for _, told in operation.told if told.by == operation.invoke.client)
    return min((told.at_ns for told in mine if told.outcome == COMMITTED), default=inf)


def stuck(book: Book) -> Iterator[Anomaly]:
    """Something did not come to pass in its time, or a part ended by itself."""
    for line, event in book.troubles:
        if isinstance(event, Stuck):
            yield event.what, [book.say(line, event.what)]
