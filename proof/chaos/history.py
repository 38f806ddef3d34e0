"""What happened in a run on real parts, one JSON object per line. Each process writes a file of its own as it goes, so
that one that is killed loses nothing but the line in its hand; afterwards they are merged by time.

A record is written as an *item*: "operation#index", unique for ever. `at_ns` is the machine's monotonic clock.
"""

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TextIO

COMMITTED, ABORTED, UNKNOWN = "committed", "aborted", "unknown"
# Of a marker in a history from when it was not noted.
EPOCH_UNKNOWN = -1


class HistoryError(Exception):
    """A file is no history; the text says where."""


class Write(NamedTuple):
    topic: str
    item: str
    amount: int


class Placed(NamedTuple):
    """A record where it stands."""

    partition: str
    offset: int
    item: str
    amount: int


class Row(NamedTuple):
    table: str
    item: str
    amount: int


class Sum(NamedTuple):
    """Of one table at one instant; `digest` adds up a hash of each row's operation."""

    rows: int
    amount: int
    digest: int


class Ending(NamedTuple):
    """A marker, and what it ended on its partition: the epochs of the batches, the items in them."""

    partition: str
    offset: int
    producer_id: int
    is_commit: bool
    epochs: list[int]
    items: list[str]
    marker_epoch: int = EPOCH_UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Invoke:
    """A client begins an operation: one transaction that is to write these."""

    at_ns: int
    op: str
    client: str
    transactional_id: str
    number: int
    writes: tuple[Write, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Only from here on may anybody see it. The number: what it was begun with may have expired unused."""

    at_ns: int
    op: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What its client, or whoever asked later, was told became of it: Jepsen's ok, fail and info.

    `unnumbered`: it ended before the coordinator heard of it, and the next operation got its number.
    """

    at_ns: int
    op: str
    outcome: str
    by: str
    error: str = ""
    unnumbered: bool = False
    places: tuple[Placed, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """What a stock read_committed consumer got in one call. It never seeks."""

    at_ns: int
    reader: str
    records: tuple[Placed, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """All tables of the copy in PostgreSQL at one instant."""

    at_ns: int
    reader: str
    sums: dict[str, Sum]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalRecords:
    at_ns: int
    records: tuple[Placed, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalCopies:
    """Of the topic that the lists are copied to: the same items."""

    at_ns: int
    records: tuple[Placed, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalMarkers:
    """Of all topics, those of one partition in its order."""

    at_ns: int
    endings: tuple[Ending, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalLog:
    """Of the coordinators' log, all partitions together: how many records are left of how many."""

    at_ns: int
    left: int
    written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalRows:
    at_ns: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    at_ns: int
    fault: str
    target: str
    until_ns: int
    # False: nothing came that it was meant for, or it came to nothing.
    had_effect: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Healed:
    """No fault from here on."""

    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """Something did not come to pass in its time, or a part ended by itself."""

    at_ns: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBack:
    """A partition whose readers still wait for a transaction to end, long after its timeout."""

    at_ns: int
    partition: str
    offset_stable: int
    offset_next: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Everything has been asked for, and read to its end."""

    at_ns: int
    money: int = field(default=0)


Event = (
    Invoke
    | Commit
    | Told
    | Poll
    | Look
    | FinalRecords
    | FinalCopies
    | FinalMarkers
    | FinalLog
    | FinalRows
    | Fault
    | Healed
    | Stuck
    | HeldBack
    | Finished
)
_KINDS: dict[str, type[Event]] = {
    "invoke": Invoke,
    "commit": Commit,
    "told": Told,
    "poll": Poll,
    "look": Look,
    "final-records": FinalRecords,
    "final-copies": FinalCopies,
    "final-markers": FinalMarkers,
    "final-log": FinalLog,
    "final-rows": FinalRows,
    "fault": Fault,
    "healed": Healed,
    "stuck": Stuck,
    "held-back": HeldBack,
    "finished": Finished,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_ITEMS: dict[str, Any] = {"writes": Write, "places": Placed, "records": Placed, "rows": Row, "endings": Ending}


class Line(NamedTuple):
    """An event, and where it stands in its file."""

    number: int
    event: Event


def now_ns() -> int:
    return time.monotonic_ns()


def operation_of(item: str) -> str:
    return item.rpartition("#")[0]


def encode(event: Event) -> str:
    return json.dumps({"event": _NAMES[type(event)], **asdict(event)}, separators=(",", ":"))


def decode(text: str) -> Event:
    try:
        fields = json.loads(text)
        kind = _KINDS[fields.pop("event")]
        for name, item in _ITEMS.items():
            if name in fields:
                fields[name] = tuple(item(*each) for each in fields[name])
        if kind is Look:
            fields["sums"] = {table: Sum(*each) for table, each in fields["sums"].items()}
        return kind(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HistoryError(f"no event of a history: {text[:100]!r} ({error})") from None


class Recorder:
    """Appends events to a file; each is with the operating system before `add` returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("a", buffering=1)

    def add(self, event: Event) -> None:
        self._file.write(encode(event) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read(path: Path) -> Iterator[Line]:
    """The events of a file. A last line without its end is what a killed process had in its hand."""
    with path.open() as file:
        for number, text in enumerate(file, start=1):
            if not text.endswith("\n"):
                return
            try:
                yield Line(number, decode(text))
            except HistoryError as error:
                raise HistoryError(f"{path}, line {number}: {error}") from None


def merge(paths: Iterable[Path], target: Path) -> None:
    events = [line.event for path in paths for line in read(path)]
    events.sort(key=lambda event: event.at_ns)
    with Recorder(target) as recorder:
        for event in events:
            recorder.add(event)
