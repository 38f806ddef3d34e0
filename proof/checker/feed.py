"""The feed of manifests: each commit once, with exactly its own offsets."""

from collections.abc import Iterator

from proof.checker.history import Result, Run
from proof.checker.index import Index, Transaction, named


def manifest(index: Index) -> Iterator[str]:
    """A commit without its manifest, with two, or with one that tells of other records than were written."""
    for transaction, events in index.fed.items():
        parts = [event.part for _, event in events]
        if len(set(parts)) != len(parts):
            yield f"the manifest of {named(transaction)} stands twice: parts {parts}"
        if index.result_of(transaction) is not Result.COMMITTED:
            yield f"{named(transaction)} has a manifest and is {index.result_of(transaction).value}"
    if not index.is_finished:
        return
    for transaction, (_, result) in index.decided.items():
        if result is Result.COMMITTED:
            events = index.fed.get(transaction, [])
            if {event.part for _, event in events} != set(range(max((e.part_count for _, e in events), default=1))):
                yield f"{named(transaction)} is committed; its manifest is missing"
    yield from _wrong_runs(index)


def _wrong_runs(index: Index) -> Iterator[str]:
    written: dict[Transaction, set[tuple[str, int]]] = {}
    for event in index.acknowledged:
        written.setdefault((event.transactional_id, event.grant.number), set()).add((event.partition, event.offset))
    for transaction, events in index.fed.items():
        told = {place for _, event in events for run in event.runs for place in _places(run)}
        acknowledged = written.get(transaction, set())
        if told != acknowledged:
            yield f"the manifest of {named(transaction)} names {sorted(told)}; written was {sorted(acknowledged)}"


def _places(run: Run) -> Iterator[tuple[str, int]]:
    for offset in range(run.offset_first, run.offset_next):
        yield run.partition, offset
