"""What the topics must not show: each check yields a sentence and the lines of the history that prove it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from proof.chaos.book import READER_FINAL, Book, Operation, Seen
from proof.chaos.history import ABORTED, COMMITTED, Placed, operation_of
from proof.chaos.workload import BANKS, LISTS

Anomaly = tuple[str, list[str]]


def duplicate(book: Book) -> Iterator[Anomaly]:
    """One record at two places."""
    for item, seen in book.seen_of_item.items():
        places = {(each.record.partition, each.record.offset): each for each in seen}
        if len(places) > 1:
            yield f"{item} stands at {len(places)} places", [*_of(book, item), *map(book.say_seen, places.values())]


def aborted_read(book: Book) -> Iterator[Anomaly]:
    """A record of an aborted transaction was given to a read_committed reader (G1a)."""
    for operation in book.with_outcome(ABORTED):
        seen = [each for write in operation.invoke.writes for each in book.seen_of_item.get(write.item, ())]
        if seen:
            yield f"{operation.op} is aborted, and was read", [*book.proof_of(operation), book.say_seen(seen[0])]


def read_before_commit(book: Book) -> Iterator[Anomaly]:
    """A record was read before its client asked to commit, or although it never did."""
    for item, seen in book.seen_of_item.items():
        operation = book.operations.get(operation_of(item))
        if operation is None:
            yield f"{item} was read, and nobody wrote it", [book.say_seen(seen[0])]
            continue
        first = min(seen, key=lambda each: each.line.event.at_ns)
        if operation.commit is None or first.line.event.at_ns < operation.commit.event.at_ns:
            yield f"{item} was read before its commit", [*book.proof_of(operation), book.say_seen(first)]


def lost_write(book: Book) -> Iterator[Anomaly]:
    """Committed, with a place below what was read of its partition, and not there."""
    if book.finished is None:
        return
    ends = _ends(book)
    for operation in book.with_outcome(COMMITTED):
        for place in _places(operation):
            if place.item not in book.final and place.offset <= ends.get(place.partition, -1):
                where = f"{place.partition}:{place.offset}"
                read_to = f"the final read went to {place.partition}:{ends[place.partition]}"
                yield f"{place.item} was committed at {where} and is gone", [*book.proof_of(operation), read_to]


def unseen(book: Book) -> Iterator[Anomaly]:
    """Committed, and the final read ended without it."""
    if book.finished is None:
        return
    ends = _ends(book)
    for operation in book.with_outcome(COMMITTED):
        lost = {place.item for place in _places(operation) if place.offset <= ends.get(place.partition, -1)}
        missing = [w.item for w in operation.invoke.writes if w.item not in book.final and w.item not in lost]
        if missing:
            yield f"{', '.join(missing)} was committed, and the final read ended without it", book.proof_of(operation)


def torn_transaction(book: Book) -> Iterator[Anomaly]:
    """The final read found a part of it."""
    if book.finished is None:
        return
    for op, seen in book.final_of_operation.items():
        operation = book.operations.get(op)
        if operation is None:
            continue
        found = {each.record.item for each in seen}
        missing = [write.item for write in operation.invoke.writes if write.item not in found]
        if missing:
            proof = [*book.proof_of(operation), *map(book.say_seen, seen)]
            yield f"{op} stands without {', '.join(missing)}", proof


def inconsistent_offsets(book: Book) -> Iterator[Anomaly]:
    """One offset, two records: read so by two readers, or told otherwise to the writer."""
    at: dict[tuple[str, int], tuple[str, str]] = {}
    told = [
        (place, f"{operation.invoke.client} was told that {place.item} is at {place.partition}:{place.offset}")
        for operation in book.with_outcome(COMMITTED)
        for place in _places(operation)
    ]
    seen = [(each.record, book.say_seen(each)) for reader in book.seen.values() for each in reader]
    for place, text in told + seen:
        item, before = at.setdefault((place.partition, place.offset), (place.item, text))
        if item != place.item:
            yield f"{place.partition}:{place.offset} is both {item} and {place.item}", [before, text]


def step_back(book: Book) -> Iterator[Anomaly]:
    """A reader that never seeks got an offset that is not above its last one."""
    for before, after in _steps(book):
        if after.record.offset <= before.record.offset:
            record = after.record
            yield (
                f"{after.reader} went back on {record.partition}: {before.record.offset}, then {record.offset}",
                [book.say_seen(before), book.say_seen(after)],
            )


def skip(book: Book) -> Iterator[Anomaly]:
    """A reader that never seeks passed over a record that the final read found."""
    final: dict[str, list[Seen]] = {}
    for each in book.seen.get(READER_FINAL, ()):
        final.setdefault(each.record.partition, []).append(each)
    yield from _skipped_at_first(book, final)
    numbered = {
        partition: {seen.record.offset: place for place, seen in enumerate(of_partition)}
        for partition, of_partition in final.items()
    }
    for before, after in _steps(book):
        places = numbered.get(after.record.partition, {})
        first, last = places.get(before.record.offset), places.get(after.record.offset)
        if first is not None and last is not None and last > first + 1:
            skipped = final[after.record.partition][first + 1]
            yield (
                f"{after.reader} passed over {skipped.record.item}",
                [book.say_seen(before), book.say_seen(after), book.say_seen(skipped)],
            )


def _skipped_at_first(book: Book, final: Mapping[str, Sequence[Seen]]) -> Iterator[Anomaly]:
    """Every reader began where the partition begins."""
    for reader in book.seen.values():
        first: dict[str, Seen] = {}
        for each in reader:
            first.setdefault(each.record.partition, each)
        for partition, each in first.items():
            skipped = final[partition][0] if partition in final else each
            if each.record.offset > skipped.record.offset:
                text = f"{each.reader} began behind {skipped.record.item}"
                yield text, [book.say_seen(each), book.say_seen(skipped)]


def order(book: Book) -> Iterator[Anomaly]:
    """One client's records stand in a partition in another order than it has written them."""
    last: dict[tuple[str, str], tuple[tuple[int, int], Seen]] = {}
    for each in book.seen.get(READER_FINAL, ()):
        operation = book.operations.get(operation_of(each.record.item))
        if operation is None:
            continue
        index = int(each.record.item.rpartition("#")[2])
        key, place = (each.record.partition, operation.invoke.client), (operation.invoke.at_ns, index)
        before = last.get(key)
        if before is not None and before[0] > place:
            yield (
                f"{each.record.item} was written before {before[1].record.item} and stands behind it",
                [book.say_seen(before[1]), book.say_seen(each)],
            )
        last[key] = (place, each)


def money(book: Book) -> Iterator[Anomaly]:
    """What left some account has not arrived at another."""
    if book.finished is None:
        return
    for bank in BANKS:
        sums = dict.fromkeys(bank, 0)
        for each in book.seen.get(READER_FINAL, ()):
            topic = each.record.partition.rpartition("-")[0]
            if topic in sums:
                sums[topic] += each.record.amount
        if len(set(sums.values())) > 1:
            total, (debits, credited, _) = book.finished.money, sums.values()
            yield f"{total} in all accounts became {total - debits + credited} in Kafka", [str(sums)]


def copied(book: Book) -> Iterator[Anomaly]:
    """A record of the lists has no copy or two, or the copies of a partition stand in another order."""
    if book.finished is None:
        return
    if book.copies is None:
        listed = [each for of_partition in _lists(book).values() for each in of_partition]
        if listed:
            yield f"nobody read the copies of the {len(listed)} records of the lists", [book.say_seen(listed[0])]
        return
    by_partition: dict[str, list[Seen]] = {}
    for each in book.copies:
        by_partition.setdefault(each.record.partition.rpartition("-")[2], []).append(each)
    for number, sources in _lists(book).items():
        copies = by_partition.pop(number, [])
        places: dict[str, list[Seen]] = {}
        for each in copies:
            places.setdefault(each.record.item, []).append(each)
        for each in sources:
            found = places.pop(each.record.item, [])
            if len(found) != 1:
                proof = [book.say_seen(each), *map(book.say_seen, found)]
                yield f"{each.record.item} was copied {len(found)} times", proof
        for item, found in places.items():
            yield f"{item} is a copy of nothing", list(map(book.say_seen, found))
        items = [each.record.item for each in sources]
        wrong = next((pair for pair in zip(copies, items, strict=False) if pair[0].record.item != pair[1]), None)
        if wrong is not None and len(copies) == len(sources):
            yield f"a copy stands where {wrong[1]} should", [book.say_seen(wrong[0])]
    for number, copies in by_partition.items():
        yield f"partition {number} has copies and no source", [book.say_seen(copies[0])]


def _lists(book: Book) -> dict[str, list[Seen]]:
    found: dict[str, list[Seen]] = {}
    for each in book.seen.get(READER_FINAL, ()):
        topic, _, number = each.record.partition.rpartition("-")
        if topic == LISTS:
            found.setdefault(number, []).append(each)
    return found


def _steps(book: Book) -> Iterator[tuple[Seen, Seen]]:
    """Each two records that one reader got of one partition one after the other."""
    for reader in book.seen.values():
        by_partition: dict[str, list[Seen]] = {}
        for each in reader:
            by_partition.setdefault(each.record.partition, []).append(each)
        for of_partition in by_partition.values():
            yield from pairwise(of_partition)


def _of(book: Book, item: str) -> list[str]:
    operation = book.operations.get(operation_of(item))
    return book.proof_of(operation) if operation else []


def _places(operation: Operation) -> Iterator[Placed]:
    for _, told in operation.told:
        yield from told.places


def highest(seen: Iterable[Seen]) -> dict[str, Seen]:
    """Of each partition the one at the highest offset."""
    found: dict[str, Seen] = {}
    for each in seen:
        before = found.setdefault(each.record.partition, each)
        if each.record.offset > before.record.offset:
            found[each.record.partition] = each
    return found


def _ends(book: Book) -> dict[str, int]:
    """How far the final read went."""
    return {partition: each.record.offset for partition, each in highest(book.seen.get(READER_FINAL, ())).items()}
