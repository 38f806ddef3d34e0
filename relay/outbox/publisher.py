"""From the source to Kafka: each database transaction whole in one Kafka transaction, in commit order, with the token.

The order that makes it exact: records → commit with the token → clean-up → the source moves on. A crash between any two
only means that the same is read again, and skipped by the token. While a group is being committed, the next one of the
same look is filled, and committed after it; the next look begins when all of this one is committed. Ends only with
errors; starting anew is the relay's.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from oncebox.errors import OnceboxError, RecordsRefusedError, UsageError
from oncebox.producer import Producer, Transaction
from relay.outbox.config import OutboxSettings
from relay.outbox.database import Database, Retry, ids_in_table
from relay.outbox.logical import Source
from relay.outbox.mapping import BadRowError, Mapping
from relay.outbox.plan import Piece, Row
from relay.outbox.token import StopError, Token, encode

logger = logging.getLogger(__name__)

DELETED_AT_ONCE_MAX = 50_000
# The source shows as many published rows again before it moves on, while others follow them at once: an advance costs
# the server as much as some hundred rows.
SHOWN_AGAIN_ROWS = 128

BEHIND = "waits behind a parked row of its key"
# What brokers refuse a record for. Anything else (rights of this relay, trouble of theirs) is no row's fault.
FOR_THE_RECORD = frozenset(
    {
        "INVALID_RECORD",
        "INVALID_TIMESTAMP",
        "INVALID_TOPIC_EXCEPTION",
        "MESSAGE_TOO_LARGE",
        "POLICY_VIOLATION",
        "RECORD_LIST_TOO_LARGE",
        "TOPIC_AUTHORIZATION_FAILED",
    }
)

Step = Callable[[str], None]


def no_step(_name: str) -> None:
    """Tests look, and end the process, at each step."""


class _AgainError(Exception):
    """This look at the source is to be taken again, knowing better."""


@dataclass(slots=True, kw_only=True)
class Group:
    """What the open Kafka transaction holds."""

    transaction: Transaction | None = None
    rows: int = 0
    size_bytes: int = 0
    # The last database transaction that it holds whole.
    position: int = 0
    end: int | None = None
    commit_time_us: int = 0
    transactions: int = 0
    # Rows to clean up after the commit. None: too many to remember, they are found again by another look.
    to_delete: list[bytes] | None = field(default_factory=list)
    # The retry of parked rows that it is.
    retry: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committing:
    """A group that is on its way, with the token that it brings."""

    group: Group
    transaction: Transaction
    token: Token
    decided: asyncio.Task[Any]


@dataclass(slots=True, kw_only=True)
class Counters:
    rows: int = 0
    transactions: int = 0
    kafka_transactions: int = 0
    parked_rows: int = 0
    commit_time_us: int = 0


class Publisher:
    def __init__(
        self,
        *,
        settings: OutboxSettings,
        producer: Producer,
        source: Source,
        database: Database,
        token: Token,
        on_step: Step = no_step,
    ) -> None:
        """`token` says from where; its position and end move on with each commit."""
        self.counters = Counters()
        self.token = token
        self._settings = settings
        self._producer = producer
        self._source = source
        self._database = database
        self._mapping = Mapping(settings.mapping)
        self._on_step = on_step
        self._group = Group()
        self._committing: Committing | None = None
        # Not known to be committed, whatever was tried.
        self._failed: Transaction | None = None
        self._bad: dict[int, BadRowError] = {}
        self._parked: set[int] = set()
        self._parked_rows = 0
        self._held: set[tuple[bytes | None, bytes | None]] = set()
        self._is_retry_asked = False
        # Rows of the transaction that is being parked, which may come in several pieces.
        self._parking: list[Row] = []
        # Transactions that are put aside because of a key that only a later row of theirs has.
        self._behind: set[int] = set()
        # A transaction that is partly sent: more of it comes with the next piece.
        self._sending: int | None = None
        self._is_careful = False
        # Up to here somebody may have published without cleaning up: a former owner, or we if there was too much.
        self._unclean = token.position if settings.cleanup == "delete" else 0
        self._must_look_again = False
        # Up to here all is published, but the source has not moved on; it shows so many rows again.
        self._end: int | None = None
        self._shown_again_rows = 0
        self._is_polling = True
        self._mark = 0
        # Where the log stood when there was nothing in it for us.
        self._nothing_at = -1

    async def reload_parked(self) -> None:
        """At the start, and since: an operator may have discarded them, or want them published."""
        found = await self._database.parked()
        self._parked, self._held, self._is_retry_asked = found.positions, found.keys, found.is_retry_asked
        self._parked_rows = found.rows

    @property
    def has_parked(self) -> bool:
        return bool(self._parked)

    async def cycle(self, should_stop: Callable[[], bool], *, may_idle: bool = False) -> bool:
        """One look at the source; publishes what is there. Whether there was anything, or may be behind the look's
        limit; if not, idle() may follow where it was announced.
        """
        self._group, self._sending = Group(), None
        # Right after a look that had something there is no need to ask whether another is worth while.
        mark = await self._source.mark() if self._is_polling or may_idle else -1
        if self._is_polling and mark == self._nothing_at and not may_idle:
            return False
        try:
            found = await self._look(should_stop)
        except _AgainError:
            return True
        finally:
            await self._abort()
        self._is_careful = False
        self._mark = mark
        found = found or self._source.was_cut
        self._is_polling = not found
        self._nothing_at = -1 if found else mark
        return found

    async def idle(self) -> None:
        """After a cycle with may_idle that found nothing."""
        self._on_step("before idle")
        await self._source.idle(self._mark)
        self._on_step("after idle")

    async def _look(self, should_stop: Callable[[], bool]) -> bool:
        try:
            return await self._publish_all(should_stop)
        except (_AgainError, OnceboxError):
            # What was decided meanwhile counts; if it was refused, that is why the one filled behind it failed.
            await self._settle()
            raise

    async def _publish_all(self, should_stop: Callable[[], bool]) -> bool:
        end, found, is_new, rows_before = 0, False, False, self.counters.rows
        self._must_look_again = False
        async with aclosing(self._source.peek(self.token.position, self._unclean)) as pieces:
            self._on_step("peek")
            async for piece in pieces:
                # Also one that is published already: others may be behind it.
                found = True
                if piece.is_published:
                    await self._clean_again(piece)
                else:
                    is_new = True
                    await self._take(piece)
                if piece.end is None:
                    continue
                end = piece.end
                if self._is_full():
                    await self._commit_soon()
                    if should_stop():
                        break
        await self._commit()
        if end and not self._must_look_again:
            self._end = end
        self._shown_again_rows += self.counters.rows - rows_before
        if not is_new or self._source.was_cut or self._shown_again_rows >= SHOWN_AGAIN_ROWS:
            await self._advance()
        return found

    async def _advance(self) -> None:
        """The source moves on to what was published before."""
        end, self._end, self._shown_again_rows = self._end, None, 0
        if end is not None:
            self._on_step("before advance")
            await self._source.done(end)
            self._on_step("after advance")

    def _is_full(self) -> bool:
        group, settings = self._group, self._settings
        return group.rows >= settings.group_rows_max or group.size_bytes >= settings.group_bytes_max

    # --- a transaction of the database --------------------------------------------------------------------------------

    async def _take(self, piece: Piece) -> None:
        group, is_aside = self._group, self._is_aside(piece)
        if is_aside:
            await self._put_aside(piece)
        elif piece.rows:
            await self._send(piece)
            group.rows += len(piece.rows)
        self._sending = piece.position if piece.end is None else None
        if self._settings.cleanup == "delete" and group.to_delete is not None:
            group.to_delete += ids_in_table(piece.rows)
            if len(group.to_delete) > DELETED_AT_ONCE_MAX:
                group.to_delete = None
        if piece.end is not None:
            group.position, group.end, group.commit_time_us = piece.position, piece.end, piece.commit_time_us
            group.transactions += not is_aside

    def _is_aside(self, piece: Piece) -> bool:
        """A later transaction with a key of a parked one waits behind it, so that each key keeps its order."""
        if self._parking or piece.position in self._bad or piece.position in self._parked:
            return True
        if not self._held or all((row.aggregatetype, row.aggregateid) not in self._held for row in piece.rows):
            return piece.position in self._behind
        if piece.position == self._sending:
            # Its first rows are sent: now it is known to be put aside from its beginning.
            self._behind.add(piece.position)
            raise _AgainError
        return True

    async def _send(self, piece: Piece) -> None:
        group, record = self._group, self._mapping.record
        if group.transaction is None:
            self._on_step("begin")
            group.transaction = await self._producer.begin()
        send, careful, size = group.transaction.send, self._is_careful, 0
        for row in piece.rows:
            try:
                topic, key, value, headers = record(row)
                await send(topic, value, key=key, headers=headers)
                if careful:
                    await group.transaction.flush()
            except BadRowError as error:
                self._found_bad(piece, error)
            except UsageError as error:
                self._found_bad(piece, BadRowError(row, str(error)))
            except RecordsRefusedError as error:
                self._refused(piece, row, error)
            size += len(value) if value else 0
        group.size_bytes += size
        self._on_step("sent")

    def _found_bad(self, piece: Piece, error: BadRowError) -> NoReturn:
        """What came before it is published first; then the policy decides. So all is read once more."""
        self._bad[piece.position] = error
        raise _AgainError from error

    def _refused(self, piece: Piece, row: Row, error: RecordsRefusedError) -> NoReturn:
        if self._is_careful and error.code in FOR_THE_RECORD:
            self._found_bad(piece, BadRowError(row, str(error)))
        self._look_for_the_row(error)

    def _look_for_the_row(self, error: RecordsRefusedError) -> NoReturn:
        """A broker refuses whole batches: to know which row it was, each is sent by itself."""
        if error.code not in FOR_THE_RECORD:
            raise error
        logger.warning("%s; looking for the row that is to blame", error)
        self._is_careful = True
        raise _AgainError from error

    async def _put_aside(self, piece: Piece) -> None:
        bad = self._bad.get(piece.position)
        if bad is not None and self._settings.bad_row == "stop" and piece.position not in self._parked:
            await self._commit()
            raise StopError(f"{bad}. Mend the cause and start again, or set bad_row: park")
        if bad is None and piece.position not in self._parked and not self._parking:
            await self._check_held(piece)
        self._parking += piece.rows
        if piece.position not in self._parked:
            await self._check_room(bad)
        if piece.end is None:
            return
        rows, self._parking = self._parking, []
        if piece.position not in self._parked:
            reason = bad.reason if bad else BEHIND
            self._on_step("before park")
            await self._database.park(piece.position, rows, reason)
            self._on_step("after park")
            self.counters.parked_rows += len(rows)
            self._parked_rows += len(rows)
            named = {"transactional_id": self._settings.transactional_id}
            logger.warning(
                "parked a transaction of %s rows at %s: %s", len(rows), piece.position, bad or reason, extra=named
            )
        self._parked.add(piece.position)
        self._held.update((row.aggregatetype, row.aggregateid) for row in rows)

    async def _check_room(self, bad: BadRowError | None) -> None:
        """Of all that are parked, not of one transaction: a key that stays bad parks whatever follows."""
        rows_max = self._settings.parked_rows_max
        if self._parked_rows + len(self._parking) <= rows_max:
            return
        # Some may have been let go since.
        await self.reload_parked()
        if self._parked_rows + len(self._parking) > rows_max:
            await self._commit()
            raise StopError(
                f"more than {rows_max} rows would be parked (parked_rows_max), {self._parked_rows} are: settle them "
                f"(oncebox outbox parked); the reason for the next: {bad or BEHIND}"
            )

    async def _check_held(self, piece: Piece) -> None:
        """What it waits behind may have been let go since: then it is looked at once more."""
        await self.reload_parked()
        if piece.position not in self._behind and not self._is_aside(piece):
            raise _AgainError

    # --- parked rows that are to be published after all ---------------------------------------------------------------

    async def retry_parked(self) -> None:
        """Between two looks, all of them in one Kafka transaction: whatever else has a key of theirs is not read yet.
        The token names the retry, so that after a crash it is known to be done.
        """
        retry = await self._database.retry_asked(self.token.retried) if self._is_retry_asked else None
        if retry is None or retry.position > self.token.position:
            return
        self._on_step("before retry")
        bad = None if retry.name == self.token.retried else await self._publish_retry(retry)
        self._on_step("after retry")
        if bad is None:
            await self._database.forget_retried(retry)
        else:
            logger.warning("what is parked stays so: %s", bad)
            await self._database.refuse_retry(retry, bad)
        await self.reload_parked()

    async def _publish_retry(self, retry: Retry) -> BadRowError | None:
        """What is wrong with one of them, if anything: then none is published."""
        token = self.token
        piece = Piece(position=token.position, commit_time_us=0, rows=retry.rows, is_published=False, end=token.end)
        while True:
            self._group = Group(rows=len(retry.rows), position=token.position, end=token.end, retry=retry.name)
            try:
                await self._send(piece)
                await self._commit()
            except _AgainError:
                bad = self._bad.pop(token.position, None)
                if bad is not None:
                    return bad
            else:
                return None
            finally:
                await self._abort()

    # --- ending -------------------------------------------------------------------------------------------------------

    async def _commit(self) -> None:
        await self._commit_soon()
        await self._settle()

    async def _commit_soon(self) -> None:
        """Only ever between two database transactions, and one after the other."""
        await self._settle()
        group = self._group
        if group.end is None:
            return
        token = replace(self.token, position=group.position, end=group.end, retried=group.retry or self.token.retried)
        transaction = group.transaction = group.transaction or await self._producer.begin()
        self._on_step("before commit")
        decided = transaction.commit_soon(metadata=encode(token), wait="decided")
        self._committing = Committing(group=group, transaction=transaction, token=token, decided=decided)
        self._group = Group()

    async def _settle(self) -> None:
        """Until the group that is being committed is so; then cleans up behind it."""
        committing = self._committing
        if committing is None:
            return
        self._committing, self._failed = None, committing.transaction
        try:
            await committing.decided
        except RecordsRefusedError as error:
            self._look_for_the_row(error)
        self._failed = None
        self._on_step("after commit")
        group, transaction = committing.group, committing.transaction
        named = {"transactional_id": self._settings.transactional_id, "number": transaction.number}
        logger.debug("published %s rows, up to %s", group.rows, group.position, extra=named)
        self.token = committing.token
        self.counters.rows += group.rows
        self.counters.transactions += group.transactions
        self.counters.kafka_transactions += 1
        self.counters.commit_time_us = group.commit_time_us or self.counters.commit_time_us
        if group.to_delete is None:
            self._must_look_again = True
            self._unclean = group.position
        else:
            await self._database.delete(group.to_delete)
        self._on_step("after clean-up")

    async def _clean_again(self, piece: Piece) -> None:
        """Published by somebody who may have died before the clean-up."""
        if piece.position <= self._unclean:
            await self._database.delete(ids_in_table(piece.rows))

    async def _abort(self) -> None:
        self._parking = []
        if self._committing is not None:
            # Whoever starts anew learns from the token whether it was decided.
            self._committing.decided.cancel()
            await asyncio.gather(self._committing.decided, return_exceptions=True)
            self._failed = self._committing.transaction
        unfinished = (self._group.transaction, self._failed)
        self._group, self._committing, self._failed = Group(), None, None
        for transaction in unfinished:
            if transaction is not None and transaction.is_open:
                with suppress(OnceboxError):
                    await transaction.abort()
