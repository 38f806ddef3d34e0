"""One commit over Kafka and PostgreSQL: `async with oncebox.atomic(producer, connection) as (transaction, connection)`.

A token row in the database transaction → prepare in Kafka → commit of the database → commit in Kafka. The row decides:
whoever finds a prepared transaction later inserts an "aborted" row under the same key, and does in Kafka what the row
that is there says. So a crash anywhere leaves nothing in doubt once recover() or `oncebox outbox resolve` has run. The
row goes first, since it brings the id of the database that it is in, and the prepared transaction names that one.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from oncebox.claim import is_decided
from oncebox.databases import database_of
from oncebox.errors import OnceboxError, UsageError
from oncebox.producer import Producer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Generator
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from types import TracebackType

    from oncebox import blocking
    from oncebox.databases import Database
    from oncebox.transaction import Transaction, TransactionName

SETTLE_S = 30.0
SETTLE_PAUSE_S = 0.2
LOCK_TIMEOUT_S = 5.0
KEY = "oncebox.atomic"
# SQLSTATEs of a table or schema that is missing.
NOT_THERE = {"42P01", "3F000"}
NO_TABLES = (
    "the database has no tables for commits together with Kafka (oncebox.atomic_token): run oncebox outbox init, or "
    "oncebox.atomic_schema.ATOMIC_SCHEMA in a migration"
)

Connection = TypeVar("Connection")
Result = TypeVar("Result")
Decision = Literal["committed", "aborted"]
# Yields what may have to be awaited, is sent what came of it: one text for async and blocking code.
Steps = "Generator[Any, Any, Result]"


class InDoubtError(OnceboxError):
    """The database did not say whether it has committed. The transaction stays prepared, and holds back read_committed
    readers of its partitions, until recover() or `oncebox outbox resolve` has decided it.
    """


class PendingError(OnceboxError):
    """The database has committed; Kafka's part could not be told yet. It follows with recover() or
    `oncebox outbox resolve`: do not do the work again.
    """


class TornError(OnceboxError):
    """The database has committed, and an administrator has aborted Kafka's part, which was prepared: what was sent is
    never seen. Send it again, without the work in the database.
    """


def wrap_metadata(database_id: str, metadata: bytes) -> bytes:
    """Says, with the prepared transaction, which database decides on it."""
    return json.dumps({KEY: database_id, "metadata": base64.b64encode(metadata).decode()}).encode()


def unwrap_metadata(data: bytes) -> tuple[str | None, bytes]:
    """The database that decides, and the application's own metadata; None: it was not prepared by atomic()."""
    try:
        given = json.loads(data)
        return str(given[KEY]), base64.b64decode(given["metadata"], validate=True)
    except (ValueError, KeyError, TypeError):
        return None, data


# --- the steps --------------------------------------------------------------------------------------------------------


def _ask(database: Database, name: str, values: dict[str, object]) -> Generator[Any, Any, str]:
    """A block of atomic.sql that tells the database's id."""
    try:
        rows = yield database.execute(name, values)
    except Exception as error:
        if _sqlstate(error) not in NOT_THERE:
            raise
        raise UsageError(NO_TABLES) from error
    if not rows or rows[0][0] is None:
        raise UsageError(NO_TABLES)
    return str(rows[0][0])


def _sqlstate(error: Exception) -> str | None:
    """By psycopg, or by the driver that SQLAlchemy has wrapped."""
    driver = getattr(error, "orig", None) or error
    return getattr(driver, "sqlstate", None) or getattr(driver, "pgcode", None)


def identify(database: Database) -> Generator[Any, Any, str]:
    yield database.begin()
    try:
        return (yield from _ask(database, "database_id", {}))
    finally:
        with suppress(Exception):
            yield database.rollback()


def _finish(transaction: Any, database: Database, settle_s: float) -> Generator[Any, Any, None]:
    try:
        yield database.flush()
        if transaction.is_empty:
            yield database.commit()
            # It is done, whatever the coordinator says: the next begin finds out what became of the grant.
            with suppress(OnceboxError):
                yield transaction.abort()
            return
        # What is written has its number for good.
        yield transaction.flush()
        name = transaction.name
        values = {"transactional_id": name.transactional_id, "number": name.number}
        database_id = yield from _ask(database, "commit_token", values)
        yield transaction.prepare(metadata=wrap_metadata(database_id, transaction.metadata))
    except BaseException:
        # The database was not asked to commit, so it never will.
        yield from _give_up(transaction, database)
        raise
    try:
        yield database.commit()
    except BaseException as error:
        with suppress(Exception):
            yield database.rollback()
        decision = yield from settle(database, database_id, name, settle_s)
        if decision == "aborted":
            with suppress(OnceboxError):
                yield transaction.abort()
            raise
        if not isinstance(error, Exception):
            # It has committed; what interrupted us goes on after Kafka was told.
            with suppress(OnceboxError):
                yield transaction.commit()
            raise
    try:
        yield transaction.commit()
    except OnceboxError as error:
        if is_decided(error):
            raise TornError(
                f"{name.transactional_id} transaction {name.number}: the database has committed, Kafka's part was "
                f"aborted in spite of its preparation; send it again: {error}"
            ) from error
        raise PendingError(
            f"{name.transactional_id} transaction {name.number}: the database has committed, Kafka follows with "
            f"recover(): {error}"
        ) from error


def _give_up(transaction: Any, database: Database) -> Generator[Any, Any, None]:
    with suppress(Exception):
        yield database.rollback()
    with suppress(OnceboxError):
        yield transaction.abort()


def settle(
    database: Database, database_id: str, name: TransactionName, settle_s: float
) -> Generator[Any, Any, Decision]:
    """Decides in the database of this id, on a connection like the one given: an "aborted" row, unless the
    application's own row is there first. Waits for a commit that is under way.
    """
    values = {"transactional_id": name.transactional_id, "number": name.number}
    deadline = time.monotonic() + settle_s
    while True:
        try:
            another = yield database.another()
            try:
                decision = yield from _settle_once(another, database_id, values)
            finally:
                with suppress(Exception):
                    yield another.close()
            return decision
        except Exception as error:
            if time.monotonic() > deadline:
                raise InDoubtError(
                    f"{name.transactional_id} transaction {name.number} is prepared in Kafka, and the database does "
                    f"not say whether it has committed: {error}. recover() or oncebox outbox resolve will decide it"
                ) from error
        yield database.sleep(SETTLE_PAUSE_S)


def _settle_once(database: Database, database_id: str, values: dict[str, object]) -> Generator[Any, Any, Decision]:
    yield database.begin()
    yield database.execute("limit_wait", {"lock_timeout": f"{int(LOCK_TIMEOUT_S * 1000)}ms"})
    if (yield from _ask(database, "database_id", {})) != database_id:
        # Its name leads elsewhere since. There is no row of it, which would mean "aborted".
        raise UsageError("a new connection leads to another database")
    rows = yield database.execute("abort_token", values)
    if not rows:
        rows = yield database.execute("result", values)
    yield database.commit()
    decision: Decision = rows[0][0]
    return decision


def _recover(producer: Any, database: Database, settle_s: float) -> Generator[Any, Any, Decision | None]:
    transaction = producer.prepared
    if transaction is None:
        return None
    if database.in_transaction():
        raise UsageError("the connection is in a transaction: commit or roll it back first")
    database_id = yield from identify(database)
    whose, _metadata = unwrap_metadata(transaction.metadata)
    if whose != database_id:
        raise UsageError(
            f"transaction {transaction.number} was not prepared together with this database: decide it where it was"
        )
    decision = yield from settle(database, database_id, transaction.name, settle_s)
    if decision == "committed":
        yield transaction.commit()
    else:
        yield transaction.abort()
    return decision


# --- for async and for blocking code ----------------------------------------------------------------------------------


async def drive(steps: Generator[Any, Any, Result]) -> Result:
    value, error = None, None
    while True:
        try:
            todo = steps.send(value) if error is None else steps.throw(error)
        except StopIteration as done:
            result: Result = done.value
            return result
        value, error = None, None
        try:
            value = await todo if inspect.isawaitable(todo) else todo
        except BaseException as raised:  # noqa: BLE001 - the steps know what to do about it
            error = raised


def drive_blocking(steps: Generator[Any, Any, Result]) -> Result:
    """What the steps call has done its work, or raised, when it returns."""
    value = None
    while True:
        try:
            value = steps.send(value)
        except StopIteration as done:
            result: Result = done.value
            return result


class _Atomic:
    def __init__(self, producer: Any, connection: Any, settle_s: float) -> None:
        self._producer = producer
        self._connection = connection
        self._settle_s = settle_s
        self._database = database_of(connection, is_async=isinstance(producer, Producer))
        self._transaction: Any = None

    def _begin(self) -> Generator[Any, Any, tuple[Any, Any]]:
        if self._database.in_transaction():
            raise UsageError("the connection is in a transaction already: commit or roll it back first")
        self._transaction = yield self._producer.begin()
        try:
            yield self._database.begin()
        except BaseException:
            with suppress(OnceboxError):
                yield self._transaction.abort()
            raise
        return self._transaction, self._connection

    def _end(self, failed: bool) -> Generator[Any, Any, None]:
        if failed:
            return _give_up(self._transaction, self._database)
        return _finish(self._transaction, self._database, self._settle_s)


class _AsyncAtomic(_Atomic):
    async def __aenter__(self) -> tuple[Any, Any]:
        return await drive(self._begin())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Carried through even when we are cancelled: half of it would leave the other half to recover().
        ending = asyncio.ensure_future(drive(self._end(kind is not None)))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            if not ending.done():
                with suppress(Exception):
                    await ending
            raise


class _BlockingAtomic(_Atomic):
    def __enter__(self) -> tuple[Any, Any]:
        return drive_blocking(self._begin())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        drive_blocking(self._end(kind is not None))


@overload
def atomic(
    producer: Producer, connection: Connection, *, settle_s: float = SETTLE_S
) -> AbstractAsyncContextManager[tuple[Transaction, Connection]]: ...
@overload
def atomic(
    producer: blocking.Producer, connection: Connection, *, settle_s: float = SETTLE_S
) -> AbstractContextManager[tuple[blocking.Transaction, Connection]]: ...
def atomic(producer: Any, connection: Any, *, settle_s: float = SETTLE_S) -> Any:
    """What is sent and executed within the block is committed in Kafka and in the database, or in neither.

    The connection (psycopg's, or SQLAlchemy's connection or session) must be in no transaction, and must not be
    committed within the block. `settle_s`: how long a commit that the database did not answer is asked after.
    """
    made = _AsyncAtomic if isinstance(producer, Producer) else _BlockingAtomic
    return made(producer, connection, settle_s)


@overload
def recover(producer: Producer, connection: Any, *, settle_s: float = SETTLE_S) -> Awaitable[Decision | None]: ...
@overload
def recover(producer: blocking.Producer, connection: Any, *, settle_s: float = SETTLE_S) -> Decision | None: ...
def recover(producer: Any, connection: Any, *, settle_s: float = SETTLE_S) -> Any:
    """After a start with keep_prepared=True, or an error of atomic(): decides what waits for a decision, as the
    database says. None: nothing did.
    """
    is_async = isinstance(producer, Producer)
    steps = _recover(producer, database_of(connection, is_async=is_async), settle_s)
    return drive(steps) if is_async else drive_blocking(steps)
