"""How transactions end: one decision, durable first, then the manifest, then markers that say the same everywhere."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from operator import itemgetter

from proof.checker.history import Answered, Called, Event, Finished, Kind, Logged, Marked, Open, Result, Stored
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
    """Somebody asked what became of a transaction and was not told, though it is known; or asked to end it, and nobody
    can say.
    """
    yield from _not_told(index)
    if not index.is_finished:
        return
    unused = set(_unused(index))
    for transaction in sorted(untold(index.events)):
        if transaction in index.decided:
            if _is_known(index, transaction, len(index.events)):
                result = index.result_of(transaction).value
                yield f"{named(transaction)} is {result}, and nobody was ever told"
        elif transaction not in unused:
            yield f"the log does not decide {named(transaction)}"


def untold(events: Iterable[Event]) -> set[Transaction]:
    """Whose end was asked for before the run was over, and whose outcome no answer says: others (too late, not here,
    fenced) settle nothing.
    """
    calls: dict[int, str] = {}
    asked: set[Transaction] = set()
    told: set[Transaction] = set()
    for event in events:
        if isinstance(event, Called):
            calls[event.call] = event.transactional_id
            if event.kind is Kind.END:
                asked.add((event.transactional_id, event.number))
        elif isinstance(event, Answered) and event.decided is not None:
            told.add((calls[event.call], event.decided.grant.number))
        elif isinstance(event, Finished):
            break
    return asked - told


def _unused(index: Index) -> Iterator[Transaction]:
    """The number that an id had last when it expired: the only one that the log need not decide."""
    for name, events in index.logged.items():
        newest = 0
        for _, event in events:
            if isinstance(event, Logged):
                newest = event.grant.number
            else:
                yield name, newest


def _not_told(index: Index) -> Iterator[str]:
    for told in index.told:
        call, answer = told.call, told.answer
        # Other errors say that the answer has to be had elsewhere, or later.
        is_answer = answer.error in {"", "INVALID_PRODUCER_ID_MAPPING"}
        if call.kind is Kind.OUTCOME and is_answer and answer.decided is None:
            transaction = (call.transactional_id, call.number)
            # What it was in between, it was all the time: a number is forgotten for good.
            if all(_is_known(index, transaction, at) for at in (told.called_at, told.answered_at)):
                what = "open" if answer.undecided else "forgotten"
                result = index.result_of(transaction).value
                yield f"{call.client} was told that {named(transaction)} is {what}; it is {result}"


def _is_known(index: Index, transaction: Transaction, at: int) -> bool:
    """Before `at`: as long as it is among the outcomes of its id's record, and as a commit for ever, by the feed."""
    name, number = transaction
    events = index.logged.get(name, [])
    before = bisect_left(events, at, key=itemgetter(0))
    newest = events[before - 1][1] if before else None
    is_recorded = isinstance(newest, Logged) and number in {decided.grant.number for decided in newest.decided}
    return is_recorded or any(fed_at < at for fed_at, _ in index.fed.get(transaction, ()))


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
