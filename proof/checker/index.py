"""A history, read once and arranged by what the checks ask for. A position is an event's place in the history."""

from collections.abc import Iterable
from typing import NamedTuple

from proof.checker.history import (
    Acknowledged,
    Answered,
    Called,
    DatabaseDecided,
    Deleted,
    Event,
    Expired,
    Fed,
    Finished,
    Grant,
    Logged,
    Lost,
    Marked,
    Read,
    Result,
    Stored,
)

# Names a transaction for ever.
Transaction = tuple[str, int]
# What the data of one transaction carries.
Producer = tuple[int, int]


class Told(NamedTuple):
    """An answer, and the call that it answers."""

    call: Called
    called_at: int
    answer: Answered
    answered_at: int


class Index:
    def __init__(self, history: Iterable[Event]) -> None:
        self.events = list(history)
        self.told: list[Told] = []
        self.called: list[tuple[int, Called]] = []
        self.logged: dict[str, list[tuple[int, Logged | Expired]]] = {}
        # First durable decision of each transaction, and where.
        self.decided: dict[Transaction, tuple[int, Result]] = {}
        self.transaction_of: dict[Producer, Transaction] = {}
        self.fed: dict[Transaction, list[tuple[int, Fed]]] = {}
        # What stands in each partition in the end, by offset; and all markers that ever stood anywhere.
        self.standing: dict[str, list[tuple[int, Stored | Marked]]] = {}
        self.marked: list[tuple[int, Marked]] = []
        self.deleted: set[str] = set()
        self.acknowledged: list[Acknowledged] = []
        self.reads: list[tuple[int, Read]] = []
        self.database: dict[Transaction, bool] = {}
        self.is_finished = False
        calls: dict[int, tuple[int, Called]] = {}
        for at, event in enumerate(self.events):
            self._add(at, event, calls)

    def _add(self, at: int, event: Event, calls: dict[int, tuple[int, Called]]) -> None:
        match event:
            case Called():
                calls[event.call] = (at, event)
                self.called.append((at, event))
            case Answered():
                called_at, call = calls[event.call]
                self.told.append(Told(call, called_at, event, at))
            case Logged():
                self._add_logged(at, event)
            case Expired():
                self.logged.setdefault(event.transactional_id, []).append((at, event))
            case Fed():
                self.fed.setdefault((event.transactional_id, event.grant.number), []).append((at, event))
            case Stored():
                self.standing.setdefault(event.partition, []).append((at, event))
            case Marked():
                self.standing.setdefault(event.partition, []).append((at, event))
                self.marked.append((at, event))
            case Lost():
                kept = [
                    entry for entry in self.standing.get(event.partition, ()) if entry[1].offset < event.offset_next
                ]
                self.standing[event.partition] = kept
            case Deleted():
                self.deleted.add(event.partition)
            case Acknowledged():
                self.acknowledged.append(event)
            case Read():
                self.reads.append((at, event))
            case DatabaseDecided():
                self.database[event.transactional_id, event.number] = event.committed
            case Finished():
                self.is_finished = True
            case _:
                pass

    def _add_logged(self, at: int, event: Logged) -> None:
        name = event.transactional_id
        self.logged.setdefault(name, []).append((at, event))
        self._know(name, event.grant)
        for decided in event.decided:
            self._know(name, decided.grant)
            self.decided.setdefault((name, decided.grant.number), (at, decided.result))

    def _know(self, transactional_id: str, grant: Grant) -> None:
        self.transaction_of.setdefault((grant.producer_id, grant.epoch), (transactional_id, grant.number))

    def result_of(self, transaction: Transaction) -> Result:
        return self.decided.get(transaction, (0, Result.UNDECIDED))[1]

    def decided_at(self, transaction: Transaction) -> int:
        """Where its decision became durable; past the end if it never did."""
        return self.decided.get(transaction, (len(self.events), Result.UNDECIDED))[0]


def named(transaction: Transaction) -> str:
    return f"{transaction[0]}/{transaction[1]}"
