"""What read_committed consumers saw: committed records only, all of them, once, in order."""

from collections.abc import Iterator

from proof.checker.history import Result, Stored
from proof.checker.index import Index, Transaction, named


def aborted_read(index: Index) -> Iterator[str]:
    """A consumer got a record of a transaction that was aborted (G1a)."""
    writers = _writers(index)
    for _, read in index.reads:
        writer = writers.get((read.partition, read.offset, read.value))
        if writer is not None and index.result_of(writer) is Result.ABORTED:
            yield f"{read.reader} read {read.value!r} at {read.partition}:{read.offset} of {named(writer)}, aborted"


def read_before_commit(index: Index) -> Iterator[str]:
    """A consumer got a record before the commit was durable in the log, or without any."""
    writers = _writers(index)
    for at, read in index.reads:
        writer = writers.get((read.partition, read.offset, read.value))
        where = f"{read.reader} read {read.value!r} at {read.partition}:{read.offset}"
        if writer is None:
            yield f"{where}, which no known transaction wrote"
        elif index.decided_at(writer) > at:
            yield f"{where} of {named(writer)}, not decided yet"


def lost_write(index: Index) -> Iterator[str]:
    """A record was acknowledged, its transaction committed, and no consumer ever got it."""
    if not index.is_finished:
        return
    read = {(read.partition, read.offset): read.value for _, read in index.reads}
    for event in index.acknowledged:
        transaction = (event.transactional_id, event.grant.number)
        if event.partition not in index.deleted and index.result_of(transaction) is Result.COMMITTED:
            found = read.get((event.partition, event.offset))
            if found != event.value:
                yield (
                    f"{event.value!r} of {named(transaction)}, committed, is not at {event.partition}:{event.offset}: "
                    f"{found!r} was read there"
                )


def duplicate(index: Index) -> Iterator[str]:
    """A message was read twice: at two offsets, or under two attempts to write it."""
    places: dict[str, tuple[str, int]] = {}
    for _, read in index.reads:
        identity = read.value.partition("#")[0]
        place = (read.partition, read.offset)
        if places.setdefault(identity, place) != place:
            yield f"{identity!r} was read at {places[identity]} and at {place} as {read.value!r}"


def inconsistent_offsets(index: Index) -> Iterator[str]:
    """One offset, two values."""
    values: dict[tuple[str, int], str] = {}
    for _, read in index.reads:
        known = values.setdefault((read.partition, read.offset), read.value)
        if known != read.value:
            yield f"{read.partition}:{read.offset} was read as {known!r} and as {read.value!r}"


def step_back(index: Index) -> Iterator[str]:
    """A consumer got an offset that is not above its last one."""
    positions: dict[tuple[str, str], int] = {}
    for _, read in index.reads:
        key = (read.reader, read.partition)
        if read.offset <= positions.get(key, -1):
            yield f"{read.reader} read {read.partition}:{read.offset} after {positions[key]}"
        positions[key] = read.offset


def _writers(index: Index) -> dict[tuple[str, int, str], Transaction]:
    """Which transaction wrote which record, by the producer id and epoch that the broker took it with."""
    writers = {}
    for event in index.events:
        if isinstance(event, Stored):
            transaction = index.transaction_of.get((event.producer_id, event.epoch))
            if transaction is not None:
                for offset, value in enumerate(event.values, event.offset):
                    writers[event.partition, offset, value] = transaction
    return writers
