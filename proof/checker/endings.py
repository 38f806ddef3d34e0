"""How transactions end: one decision, durable first, then the manifest, then markers that say the same everywhere."""

from collections.abc import Iterator

from proof.checker.history import Expired, Kind, Logged, Marked, Open, Result, Stored
from proof.checker.index import Index, Transaction, named


def decision_divergence(index: Index) -> Iterator[str]:
    """Two outcomes of one transaction: in the log, in an answer, in a marker or in a database."""
    for name, events in index.logged.items():
        for _, event in events:
            if isinstance(event, Logged):
                for decided in event.decided:
                    yield from _compare(index, (name, decided.grant.number), decided.result, "a later log record")
    for told in index.told:
        answer = told.answer.decided
        if answer is not None:
            transaction = (told.call.transactional_id, answer.grant.number)
            yield from _compare(index, transaction, answer.result, f"an answer to {told.call.client}")
    for _, marker in index.marked:
        marked = _marked_transaction(index, marker)
        if (
            marked is not None
            and not marker.hanging
            and (marker.commit or _is_manifest_of(index, marked, marker.partition))
        ):
            result = Result.COMMITTED if marker.commit else Result.ABORTED
            yield from _compare(index, marked, result, f"the marker at {marker.partition}:{marker.offset}")
    for transaction, committed in index.database.items():
        if transaction in index.decided:
            result = Result.COMMITTED if committed else Result.ABORTED
            yield from _compare(index, transaction, result, "the database")


def _is_manifest_of(index: Index, transaction: Transaction, partition: str) -> bool:
    """Where a commit wrote nothing, in a topic created after it was decided, an abort only fences."""
    if index.result_of(transaction) is not Result.COMMITTED:
        return True
    return any(run.partition == partition for _, event in index.fed.get(transaction, ()) for run in event.runs)


def _compare(index: Index, transaction: Transaction, result: Result, where: str) -> Iterator[str]:
    known = index.result_of(transaction)
    if known not in {Result.UNDECIDED, result}:
        yield f"{named(transaction)} is {known.value} in the log, {result.value} in {where}"


def marker_before_decision(index: Index) -> Iterator[str]:
    """A marker stands although the log had not decided its transaction yet, or knows none."""
    for at, marker in index.marked:
        transaction = _marked_transaction(index, marker)
        if transaction is None:
            yield f"{marker} ends a transaction that the log does not know"
        elif index.decided_at(transaction) > at:
            yield f"{marker} stands before {named(transaction)} is decided"


def marker_before_manifest(index: Index) -> Iterator[str]:
    """A commit marker stands before the whole manifest does."""
    for at, marker in index.marked:
        transaction = _marked_transaction(index, marker)
        if marker.commit and transaction is not None:
            parts = {event.part for fed_at, event in index.fed.get(transaction, ()) if fed_at < at}
            count = max((event.part_count for _, event in index.fed.get(transaction, ())), default=1)
            if len(parts) < count:
                yield f"{marker} stands before the manifest of {named(transaction)}"


def torn_transaction(index: Index) -> Iterator[str]:
    """Some of a transaction's records are committed and some are not."""
    if not index.is_finished:
        return
    ends: dict[Transaction, dict[str, set[str]]] = {}
    for partition, batch, marker in _ended(index):
        transaction = index.transaction_of.get((batch.producer_id, batch.epoch))
        if transaction is not None and partition not in index.deleted and not batch.stray:
            end = "open" if marker is None else "committed" if marker.commit else "aborted"
            ends.setdefault(transaction, {}).setdefault(end, set()).add(partition)
    for transaction, found in ends.items():
        if len(found) > 1:
            yield f"{named(transaction)} is {', '.join(f'{end} on {sorted(where)}' for end, where in found.items())}"


def cross_transaction_capture(index: Index) -> Iterator[str]:
    """A marker ended records of another transaction."""
    for partition, batch, marker in _ended(index):
        # An abort may take along what came late to a topic of that name: it is aborted, too.
        is_harmless = batch.stray and marker is not None and not marker.commit
        if marker is not None and batch.epoch != marker.epoch - 1 and not is_harmless:
            yield (
                f"{marker} at {partition}:{marker.offset} ended the records at {batch.offset}, which producer id "
                f"{batch.producer_id} wrote in epoch {batch.epoch}"
            )


def hanging_transaction(index: Index) -> Iterator[str]:
    """Open on a partition after everything has healed: consumers are blocked there."""
    for event in index.events:
        if isinstance(event, Open):
            transaction = index.transaction_of.get((event.producer_id, event.epoch))
            result = index.result_of(transaction).value if transaction else "unknown to the log"
            name = named(transaction) if transaction else f"producer id {event.producer_id} epoch {event.epoch}"
            yield f"{event.partition} is open from {event.offset} on: {name}, {result}"


def unknown_outcome(index: Index) -> Iterator[str]:
    """Someone asked to end a transaction, and nobody can say what became of it (an id that expired had none open)."""
    if not index.is_finished:
        return
    expired = {name for name, events in index.logged.items() for _, event in events if isinstance(event, Expired)}
    asked = {(call.transactional_id, call.number) for _, call in index.called if call.kind is Kind.END and call.number}
    for transaction in sorted(asked):
        if transaction not in index.decided and transaction[0] not in expired:
            yield f"the log does not decide {named(transaction)}"


def _marked_transaction(index: Index, marker: Marked) -> Transaction | None:
    return index.transaction_of.get((marker.producer_id, marker.epoch - 1))


def _ended(index: Index) -> Iterator[tuple[str, Stored, Marked | None]]:
    """Each batch that stands, and the marker that ended it, as a broker sees it: all that its producer id had open."""
    for partition, events in index.standing.items():
        open_batches: dict[int, list[Stored]] = {}
        for _, event in events:
            if isinstance(event, Stored):
                open_batches.setdefault(event.producer_id, []).append(event)
            else:
                for batch in open_batches.pop(event.producer_id, ()):
                    yield partition, batch, event
        for batches in open_batches.values():
            for batch in batches:
                yield partition, batch, None
