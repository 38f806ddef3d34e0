"""Whether those who look have looked, and to the end: whoever reads nothing finds nothing."""

from collections.abc import Iterator

from proof.chaos.book import READER_FINAL, Book, Seen
from proof.chaos.checks_kafka import Anomaly, highest


def blind(book: Book) -> Iterator[Anomaly]:
    """A reader that came not as far as the final read, no look that shows what the tables hold in the end, or committed
    records that no commit marker was found for.
    """
    if book.finished is None or not book.healed_ns:
        return
    yield from _readers(book)
    yield from _looks(book)
    yield from _markers(book)


def _readers(book: Book) -> Iterator[Anomaly]:
    """Each of them is waited for until it has all that stands there."""
    ends = highest(book.seen.get(READER_FINAL, ()))
    readers = [reader for reader in book.seen if reader != READER_FINAL]
    if ends and not readers:
        yield "nobody read anything while faults came", [_counted(book)]
    for reader in readers:
        reached = highest(book.seen[reader])
        for partition, end in ends.items():
            at = reached.get(partition)
            if at is None or at.record.offset < end.record.offset:
                far = "read nothing" if at is None else f"read no further than offset {at.record.offset}"
                proof = [book.say_seen(each) for each in (at, end) if each is not None]
                yield f"{reader} {far} of {partition}, which has {end.record.item} at {end.record.offset}", proof


def _looks(book: Book) -> Iterator[Anomaly]:
    """Rows are only added, and the last look comes after all else: it has all that they hold in the end."""
    rows: dict[str, int] = {}
    for each in (row for of_item in book.rows.values() for row in of_item):
        rows[each.row.table] = rows.get(each.row.table, 0) + 1
    after = [(line, look) for line, look in book.looks if look.at_ns > book.healed_ns]
    if not after:
        yield f"nobody looked at PostgreSQL after healing, {len(book.looks)} times before", [_counted(book)]
        return
    line, last = after[-1]
    for table, count in rows.items():
        seen = last.sums[table].rows if table in last.sums else 0
        if seen < count:
            text = f"{last.reader} saw {seen} rows of {table} at last"
            yield f"{text}, which has {count}", [book.say(line, text)]


def _markers(book: Book) -> Iterator[Anomaly]:
    """Whatever the final read was given stands before a commit marker of its partition."""
    ended = {
        (seen.ending.partition, item) for seen in book.endings if seen.ending.is_commit for item in seen.ending.items
    }
    without: dict[str, list[Seen]] = {}
    for each in [*book.seen.get(READER_FINAL, ()), *(book.copies or ())]:
        if (each.record.partition, each.record.item) not in ended:
            without.setdefault(each.record.partition, []).append(each)
    for partition, found in without.items():
        items = f"{found[0].record.item}{f' and {len(found) - 1} more' if len(found) > 1 else ''}"
        yield f"no commit marker was found behind {items} in {partition}", [book.say_seen(found[0])]


def _counted(book: Book) -> str:
    operations, final = len(book.operations), len(book.final)
    return f"{operations} operations, {final} records in the end, {len(book.looks)} looks at PostgreSQL"
