"""The naive model: for each id a dict of number -> result, and what each call must therefore get.

Written from the protocol's sentences, not from the core: no slots, no records, no debts, no log. It keeps everything
for ever, and is told from outside only which numbers still owe something.
"""

from dataclasses import dataclass, field

from coordinator.core.commands import (
    Abort,
    Accepted,
    Blocked,
    Command,
    Complete,
    Decision,
    End,
    Ended,
    ErrorCode,
    Expire,
    ForceFence,
    GetOutcome,
    Granted,
    Heartbeat,
    InitProducer,
    Prepare,
    Refused,
    Register,
    Registered,
    Timeout,
)
from coordinator.core.records import Cause, Contents, Grant, GroupPartition, Result, Tombstone, TopicPartition

Registrable = TopicPartition | GroupPartition
OK = None


@dataclass(slots=True)
class Book:
    """One id."""

    number: int
    instance: str
    number_first: int
    grants: dict[int, Grant]
    results: dict[int, tuple[Result, Cause]] = field(default_factory=dict)
    registered: frozenset[Registrable] = frozenset()
    prepared: Contents | None = None
    token: bytes = b""
    # Numbers that may be the newest its owner has heard of: Init is granted to whoever holds one.
    claims: set[int] = field(default_factory=set)
    # The number that the newest Init named: naming it again gets the same answer, as long as nothing came of that.
    named: int = 0
    # The number that its owner found PREPARED, not being whom it was granted to.
    found: int = 0


@dataclass(slots=True)
class Ledger:
    outcomes_kept: int
    books: dict[str, Book] = field(default_factory=dict)
    # For ever, also of expired ids.
    handed_out: dict[tuple[str, int], Grant] = field(default_factory=dict)
    decided: dict[tuple[str, int], tuple[Result, Cause]] = field(default_factory=dict)

    # --- what must come of a call -----------------------------------------------------------------------------------

    def expect(self, command: Command, indebted: frozenset[int]) -> ErrorCode | None:
        """The error that the call must get; None: it is accepted (or, for want of a slot, held back)."""
        book = self.books.get(command.transactional_id)
        if book is None:
            fine = (InitProducer, Timeout, Complete, Expire)
            claims = isinstance(command, InitProducer) and command.grant is not None
            return OK if isinstance(command, fine) and not claims else ErrorCode.INVALID_PRODUCER_ID_MAPPING
        match command:
            case InitProducer():
                return self._expect_init(book, command, indebted)
            case Register() | Heartbeat() | Prepare() | End():
                return self._expect_owner(book, command, indebted)
            case GetOutcome():
                return OK if 1 <= command.number <= book.number else ErrorCode.INVALID_REQUEST
            case Abort():
                if self.remembers(book, command.number, indebted):
                    return ErrorCode.INVALID_TXN_STATE if book.results[command.number][0] is Result.COMMITTED else OK
                is_open = command.number == book.number and bool(book.registered)
                return OK if is_open else ErrorCode.INVALID_TXN_STATE
            case ForceFence():
                held = book.prepared is not None and not command.abort_prepared
                return ErrorCode.INVALID_TXN_STATE if held else OK
            case _:
                return OK

    def remembers(self, book: Book, number: int, indebted: frozenset[int]) -> bool:
        """Whether the id itself still knows the result: among the last few, or not complete yet."""
        last = sorted(book.results)[-self.outcomes_kept :]
        return number in book.results and (number in last or number in indebted)

    def _identify(self, book: Book, grant: Grant, indebted: frozenset[int]) -> ErrorCode | None:
        if grant.number > book.number:
            return ErrorCode.INVALID_REQUEST
        if grant.number != book.number and not self.remembers(book, grant.number, indebted):
            return ErrorCode.PRODUCER_FENCED if grant.number < book.number_first else ErrorCode.OUTCOME_EXPIRED
        known = book.grants[grant.number]
        if known.producer_id != grant.producer_id:
            return ErrorCode.INVALID_PRODUCER_ID_MAPPING
        return ErrorCode.INVALID_PRODUCER_EPOCH if known.epoch != grant.epoch else None

    def _expect_init(self, book: Book, command: InitProducer, indebted: frozenset[int]) -> ErrorCode | None:
        if command.grant is not None:
            error = self._identify(book, command.grant, indebted)
            number = command.grant.number
            if error is ErrorCode.OUTCOME_EXPIRED:
                # Its result is forgotten, but it may be the last that the owner has heard of: then it is still a claim.
                error = None if number in book.claims else ErrorCode.PRODUCER_FENCED
            if error is not None:
                return error
            is_finder = number == book.found and command.instance == book.instance
            if number < book.number_first and not is_finder:
                return ErrorCode.PRODUCER_FENCED
            if number not in book.claims:
                return OK if number == book.named and not book.registered else ErrorCode.PRODUCER_FENCED
        held = book.prepared is not None and not command.keep_prepared
        return ErrorCode.INVALID_TXN_STATE if held else OK

    def _expect_owner(
        self, book: Book, command: Register | Heartbeat | Prepare | End, indebted: frozenset[int]
    ) -> ErrorCode | None:
        error = self._identify(book, command.grant, indebted)
        if error is not None:
            return error
        number = command.grant.number
        if number in book.results:
            return self._expect_decided(book, command)
        match command:
            case Register():
                return ErrorCode.INVALID_TXN_STATE if book.prepared is not None else OK
            case Prepare():
                if not book.registered or book.prepared not in (None, command.contents):
                    return ErrorCode.INVALID_TXN_STATE
            case End(result=Result.COMMITTED):
                if not book.registered and not command.contents.metadata:
                    return ErrorCode.INVALID_TXN_STATE
        return OK

    def _expect_decided(self, book: Book, command: Register | Heartbeat | Prepare | End) -> ErrorCode | None:
        number = command.grant.number
        result, _ = book.results[number]
        if isinstance(command, End) and command.result is result:
            return OK
        if isinstance(command, Register | Heartbeat) and self._renewed(book, command):
            return OK if book.prepared is None or isinstance(command, Heartbeat) else ErrorCode.INVALID_TXN_STATE
        fenced = number < book.number_first and number != book.found and result is Result.ABORTED
        return ErrorCode.PRODUCER_FENCED if fenced else ErrorCode.INVALID_TXN_STATE

    def _renewed(self, book: Book, command: Register | Heartbeat) -> bool:
        """Expired before anything was written under it: the owner goes on under the newest number."""
        number = command.grant.number
        _, cause = book.results[number]
        unused = cause is Cause.UNSPECIFIED or (cause is Cause.TIMEOUT and command.begun_ms_ago is None)
        return unused and number in book.claims and number >= book.number_first

    # --- what comes of it -------------------------------------------------------------------------------------------

    def follow(self, command: Command, decision: Accepted, grant_now: Grant | None) -> None:
        """Keeps the books; `grant_now` is the id's newest grant after the step."""
        tid = command.transactional_id
        book = self.books.get(tid)
        if any(isinstance(record, Tombstone) for record in decision.records):
            del self.books[tid]
            return
        if isinstance(command, InitProducer) and isinstance(decision.reply, Granted):
            self._follow_init(book, command, decision.reply)
        elif book is not None:
            self._follow_known(book, command, decision)
        if grant_now is not None:
            self._grant(tid, grant_now)

    def _follow_init(self, book: Book | None, command: InitProducer, reply: Granted) -> None:
        if book is None:
            book = Book(number=reply.grant.number, instance="", number_first=0, grants={})
            self.books[command.transactional_id] = book
        elif book.prepared is not None:
            if command.grant is None:
                book.instance, book.number_first, book.found = command.instance, book.number + 1, book.number
                book.claims = {book.number}
            return
        elif command.grant is not None and command.grant.number not in book.claims:
            return
        else:
            by_owner = command.grant is not None
            self._end(command.transactional_id, book, Result.ABORTED, Cause.OWNER if by_owner else Cause.NEWER_INSTANCE)
        book.claims, book.named = {book.number}, command.grant.number if command.grant else 0
        if command.grant is None:
            book.instance, book.number_first, book.found = command.instance, book.number, 0

    def _follow_known(self, book: Book, command: Command, decision: Accepted) -> None:
        tid, reply = command.transactional_id, decision.reply
        match command:
            case Register() if isinstance(reply, Registered):
                if reply.grant.number > book.number:
                    # Skipped: its slot could not be had.
                    self._end(tid, book, Result.ABORTED, Cause.UNSPECIFIED)
                    book.claims = set(range(command.grant.number, book.number + 1))
                book.registered |= command.partitions | command.groups
            case Prepare():
                book.prepared = command.contents
            case End() if isinstance(reply, Ended) and command.grant.number == book.number:
                contents = book.prepared or command.contents
                self._end(tid, book, command.result, Cause.OWNER)
                if command.result is Result.COMMITTED:
                    book.token = contents.metadata or book.token
                book.claims, book.named = {book.number - 1, book.number}, 0
                if reply.next_registered:
                    book.registered = command.next_partitions | command.next_groups
            case Abort() if command.number == book.number:
                self._end(tid, book, Result.ABORTED, Cause.ADMINISTRATOR)
                book.claims.add(book.number)
                book.named = 0
            case Timeout() if command.number == book.number and book.registered and book.prepared is None:
                self._end(tid, book, Result.ABORTED, Cause.TIMEOUT)
                book.claims.add(book.number)
                book.named = 0
            case ForceFence():
                self._end(tid, book, Result.ABORTED, Cause.ADMINISTRATOR)
                book.instance, book.number_first, book.found = command.administrator, book.number, 0
                book.claims, book.named = {book.number}, 0

    def _end(self, tid: str, book: Book, result: Result, cause: Cause) -> None:
        book.results[book.number] = self.decided[tid, book.number] = (result, cause)
        book.number += 1
        book.registered, book.prepared = frozenset(), None

    def _grant(self, tid: str, grant: Grant) -> None:
        """Each number once, each (producer id, epoch) once, in the whole log partition and for ever."""
        known = self.handed_out.setdefault((tid, grant.number), grant)
        if known != grant:
            raise AssertionError(f"{tid}/{grant.number} was {known} and is now {grant}")
        same = [n for n, g in self.handed_out.items() if (g.producer_id, g.epoch) == (grant.producer_id, grant.epoch)]
        if len(same) > 1:
            raise AssertionError(f"{same} share producer id {grant.producer_id} and epoch {grant.epoch}")
        self.books[tid].grants[grant.number] = grant


def verdict(decision: Decision) -> ErrorCode | None:
    """Comparable with what the ledger expects."""
    match decision:
        case Refused():
            return decision.code
        case Accepted() | Blocked():
            return OK
        case _:
            raise AssertionError(decision)
