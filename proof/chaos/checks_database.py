"""What PostgreSQL must not show: it holds whole transactions at every instant, and in the end what the topics hold."""

from collections.abc import Iterator

from proof.chaos.book import Book
from proof.chaos.checks_kafka import Anomaly
from proof.chaos.history import ABORTED, Look, operation_of
from proof.chaos.workload import BANKS


def row_twice(book: Book) -> Iterator[Anomaly]:
    for item, rows in book.rows.items():
        if len(rows) > 1:
            yield f"{item} has {len(rows)} rows", [*_of(book, item), *map(book.say_row, rows)]


def aborted_row(book: Book) -> Iterator[Anomaly]:
    """A row of an aborted transaction."""
    for operation in book.with_outcome(ABORTED):
        rows = book.rows_of_operation.get(operation.op)
        if rows:
            yield f"{operation.op} is aborted, and has rows", [*book.proof_of(operation), *map(book.say_row, rows)]


def torn_transaction(book: Book) -> Iterator[Anomaly]:
    """In the end, or at one look, there is a part of it."""
    for line, look in book.looks:
        if _is_torn(look):
            text = ", ".join(f"{table}: {each.rows} rows, {each.amount} money" for table, each in look.sums.items())
            yield f"{look.reader} saw a part of a transaction", [book.say(line, text)]
    if book.finished is None:
        return
    for op, rows in book.rows_of_operation.items():
        operation = book.operations.get(op)
        found = {each.row.item for each in rows}
        missing = [write.item for write in operation.invoke.writes if write.item not in found] if operation else []
        if operation is not None and missing:
            proof = [*book.proof_of(operation), *map(book.say_row, rows)]
            yield f"{op} has rows, but none for {', '.join(missing)}", proof


def _is_torn(look: Look) -> bool:
    """Each transfer stands once in each of its bank's tables: as many rows, of the same operations."""
    return any(
        len({(look.sums[table].rows, look.sums[table].digest) for table in bank if table in look.sums}) > 1
        for bank in BANKS
    )


def step_back(book: Book) -> Iterator[Anomaly]:
    """Rows are only ever added: fewer than before means that a commit was undone."""
    before: dict[str, tuple[str, int]] = {}
    for line, look in book.looks:
        for table, each in look.sums.items():
            text = book.say(line, f"{look.reader} counts {each.rows} rows in {table}")
            last = before.get(table)
            if last is not None and each.rows < last[1]:
                yield f"{table} went from {last[1]} rows to {each.rows}", [last[0], text]
            before[table] = (text, each.rows)


def money(book: Book) -> Iterator[Anomaly]:
    """The sum of all accounts changed: at a look, or in the end."""
    total = book.finished.money if book.finished else 0
    for line, look in book.looks:
        for bank in BANKS:
            amounts = [look.sums[table].amount for table in bank if table in look.sums]
            if len(set(amounts)) > 1:
                yield f"{total} in all accounts changed by {amounts[1] - amounts[0]}", [book.say(line, str(look.sums))]
    if book.finished is None:
        return
    for bank in BANKS:
        sums = dict.fromkeys(bank, 0)
        for each in (row for rows in book.rows.values() for row in rows if row.row.table in sums):
            sums[each.row.table] += each.row.amount
        if len(set(sums.values())) > 1:
            debits, credited, _ = sums.values()
            yield f"{total} became {total - debits + credited} in PostgreSQL", [str(sums)]


def row_without_record(book: Book) -> Iterator[Anomaly]:
    if book.finished is None:
        return
    for item, rows in book.rows.items():
        if item not in book.final:
            yield f"{item} has a row, and no committed record", [*_of(book, item), *map(book.say_row, rows)]


def record_without_row(book: Book) -> Iterator[Anomaly]:
    if book.finished is None:
        return
    for item, seen in book.final.items():
        if item not in book.rows:
            yield f"{item} stands in the topic, and has no row", [*_of(book, item), *map(book.say_seen, seen)]


def other_amount(book: Book) -> Iterator[Anomaly]:
    """The row is there, with another content than the record."""
    for item, seen in book.final.items():
        for each in book.rows.get(item, ()):
            if each.row.amount != seen[0].record.amount:
                yield (
                    f"{item} is {seen[0].record.amount} in the topic and {each.row.amount} in the table",
                    [book.say_seen(seen[0]), book.say_row(each)],
                )


def _of(book: Book, item: str) -> list[str]:
    operation = book.operations.get(operation_of(item))
    return book.proof_of(operation) if operation else []
