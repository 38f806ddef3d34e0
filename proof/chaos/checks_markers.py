"""What the markers in the topics must not show: they say what was decided, each of one transaction."""

from collections.abc import Iterator

from proof.chaos.book import Book, SeenEnding
from proof.chaos.checks_kafka import Anomaly
from proof.chaos.history import ABORTED, COMMITTED, EPOCH_UNKNOWN, operation_of
from proof.chaos.workload import BANK, LISTS

# A transaction here is one operation. The outbox relay and the copier put many into one, and where that is aborted
# they put the same ones into another.
OF_CLIENTS = {*BANK, LISTS}


def unlike_decision(book: Book) -> Iterator[Anomaly]:
    """A marker commits records of an operation that is aborted, or aborts those of a committed one."""
    for seen in book.endings:
        unlike = ABORTED if seen.ending.is_commit else COMMITTED
        if unlike == COMMITTED and not _is_of_client(seen):
            continue
        for op in _operations(seen):
            operation = book.operations.get(op)
            if operation is not None and operation.outcome == unlike:
                proof = [*book.proof_of(operation), book.say_ending(seen)]
                yield f"{op} is {unlike}, and a marker says otherwise", proof


def capture(book: Book) -> Iterator[Anomaly]:
    """One marker ends records of two transactions, or of one that is not its own: each has an epoch of its own, and its
    marker the one above that.
    """
    for seen in book.endings:
        operations = _operations(seen)
        proof = [line for op in operations if op in book.operations for line in book.proof_of(book.operations[op])]
        where = f"{seen.ending.partition}:{seen.ending.offset}"
        if len(seen.ending.epochs) > 1 or (_is_of_client(seen) and len(operations) > 1):
            yield f"the marker at {where} ends more than one transaction", [book.say_ending(seen), *proof]
        elif _is_of_another(seen):
            yield f"the marker at {where} ends a transaction that is not its own", [book.say_ending(seen), *proof]


def _is_of_another(seen: SeenEnding) -> bool:
    """Kafka's own coordinator, whose markers may have their data's epoch, writes none here."""
    ending = seen.ending
    return ending.marker_epoch != EPOCH_UNKNOWN and any(epoch + 1 != ending.marker_epoch for epoch in ending.epochs)


def _is_of_client(seen: SeenEnding) -> bool:
    return seen.ending.partition.rpartition("-")[0] in OF_CLIENTS


def _operations(seen: SeenEnding) -> list[str]:
    return list(dict.fromkeys(map(operation_of, seen.ending.items)))
