"""A history, read once and arranged by what the checks ask for; and its events as lines that a person can follow."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from proof.chaos.history import (
    ABORTED,
    COMMITTED,
    EPOCH_UNKNOWN,
    UNKNOWN,
    Commit,
    Ending,
    Fault,
    FinalCopies,
    FinalLog,
    FinalMarkers,
    FinalRecords,
    FinalRows,
    Finished,
    Healed,
    HeldBack,
    Invoke,
    Line,
    Look,
    Placed,
    Poll,
    Row,
    Stuck,
    Told,
    operation_of,
)

READER_FINAL = "final read"


class Seen(NamedTuple):
    """A record as somebody saw it."""

    line: Line
    reader: str
    record: Placed


class SeenEnding(NamedTuple):
    line: Line
    ending: Ending


class SeenRow(NamedTuple):
    line: Line
    row: Row


@dataclass(slots=True)
class Operation:
    op: str
    invoked: Line
    invoke: Invoke
    commit: Line | None = None
    told: list[tuple[Line, Told]] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """The first definite one that anybody was told. One that never asked to commit cannot have been committed."""
        undecided = UNKNOWN if self.commit is not None else ABORTED
        return next((told.outcome for _, told in self.told if told.outcome != UNKNOWN), undecided)


class Book:
    def __init__(self, lines: Iterable[Line]) -> None:
        self.operations: dict[str, Operation] = {}
        # What each reader saw, in its order; the final read is one of them.
        self.seen: dict[str, list[Seen]] = {}
        self.seen_of_item: dict[str, list[Seen]] = {}
        self.final: dict[str, list[Seen]] = {}
        self.final_of_operation: dict[str, list[Seen]] = {}
        # Of the copied topic; None: nobody looked.
        self.copies: list[Seen] | None = None
        self.endings: list[SeenEnding] = []
        self.rows: dict[str, list[SeenRow]] = {}
        self.rows_of_operation: dict[str, list[SeenRow]] = {}
        # None: nobody looked.
        self.log: FinalLog | None = None
        self.looks: list[tuple[Line, Look]] = []
        self.faults: list[Fault] = []
        self.troubles: list[tuple[Line, Stuck | HeldBack]] = []
        self.healed_ns = 0
        self.finished: Finished | None = None
        self.began_ns = 0
        self.ended_ns = 0
        # Answers may stand before their operation: files are merged by clock.
        late: list[tuple[Line, Commit | Told]] = []
        for line in lines:
            self._add(line, late)
        for line, event in late:
            operation = self.operations.get(event.op)
            if operation is not None and isinstance(event, Told):
                operation.told.append((line, event))
            elif operation is not None:
                operation.commit = line

    def _add(self, line: Line, late: list[tuple[Line, Commit | Told]]) -> None:
        event = line.event
        self.began_ns = self.began_ns or event.at_ns
        self.ended_ns = max(self.ended_ns, event.at_ns)
        match event:
            case Invoke():
                self.operations[event.op] = Operation(op=event.op, invoked=line, invoke=event)
            case Commit() | Told():
                late.append((line, event))
            case Poll():
                for record in event.records:
                    self._see(Seen(line, event.reader, record))
            case FinalRecords() | FinalCopies() | FinalMarkers() | FinalRows():
                self._add_final(line, event)
            case FinalLog():
                self.log = event
            case Look():
                self.looks.append((line, event))
            case Fault():
                self.faults.append(event)
            case Stuck() | HeldBack():
                self.troubles.append((line, event))
            case Healed():
                self.healed_ns = event.at_ns
            case Finished():
                self.finished = event

    def _add_final(self, line: Line, event: FinalRecords | FinalCopies | FinalMarkers | FinalRows) -> None:
        match event:
            case FinalRecords():
                for record in event.records:
                    seen = Seen(line, READER_FINAL, record)
                    self._see(seen)
                    self.final.setdefault(record.item, []).append(seen)
                    self.final_of_operation.setdefault(operation_of(record.item), []).append(seen)
            case FinalCopies():
                self.copies = [*(self.copies or ()), *(Seen(line, READER_FINAL, record) for record in event.records)]
            case FinalMarkers():
                self.endings += [SeenEnding(line, ending) for ending in event.endings]
            case FinalRows():
                for row in event.rows:
                    self.rows.setdefault(row.item, []).append(SeenRow(line, row))
                    self.rows_of_operation.setdefault(operation_of(row.item), []).append(SeenRow(line, row))

    def _see(self, seen: Seen) -> None:
        self.seen.setdefault(seen.reader, []).append(seen)
        self.seen_of_item.setdefault(seen.record.item, []).append(seen)

    def with_outcome(self, outcome: str) -> list[Operation]:
        return [operation for operation in self.operations.values() if operation.outcome == outcome]

    # --- for a person -------------------------------------------------------------------------------------------------

    def proof_of(self, operation: Operation) -> list[str]:
        """The operation from its begin to the last answer."""
        invoke = operation.invoke
        items = ", ".join(f"{write.topic}:{write.item}" for write in invoke.writes)
        lines = [
            self.say(operation.invoked, f"{invoke.client} begins {operation.op} (number {invoke.number}): {items}")
        ]
        if operation.commit is not None:
            lines.append(self.say(operation.commit, f"{operation.op} asks to commit"))
        for line, told in operation.told:
            error = f" ({told.error})" if told.error else ""
            lines.append(self.say(line, f"{told.by} is told that {operation.op} is {told.outcome}{error}"))
        return lines

    def say_seen(self, seen: Seen) -> str:
        record = seen.record
        return self.say(seen.line, f"{seen.reader} reads {record.item} at {record.partition}:{record.offset}")

    def say_ending(self, seen: SeenEnding) -> str:
        ending = seen.ending
        kind = "commit" if ending.is_commit else "abort"
        what = f"the {kind} marker of producer {ending.producer_id} at {ending.partition}:{ending.offset}"
        epochs = ", ".join(map(str, ending.epochs))
        own = "" if ending.marker_epoch == EPOCH_UNKNOWN else f", its own is {ending.marker_epoch}"
        return self.say(seen.line, f"{what} ends {', '.join(ending.items)} (epoch {epochs}{own})")

    def say_row(self, seen: SeenRow) -> str:
        return self.say(seen.line, f"the table {seen.row.table} has {seen.row.item}")

    def say(self, line: Line, text: str) -> str:
        return f"line {line.number}, {(line.event.at_ns - self.began_ns) / 1e9:.3f} s: {text}"


def counts(book: Book) -> dict[str, int]:
    return {
        "operations": len(book.operations),
        COMMITTED: len(book.with_outcome(COMMITTED)),
        ABORTED: len(book.with_outcome(ABORTED)),
        UNKNOWN: len(book.with_outcome(UNKNOWN)),
    }
