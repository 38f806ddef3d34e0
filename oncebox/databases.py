"""The connections that a commit over Kafka and a database can be made on: psycopg and SQLAlchemy, async and blocking.

One small class for each, with the same methods; those of an async connection return awaitables. A library is imported
only where a connection of it is brought: who brings one has it.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

from oncebox.errors import UsageError
from oncebox.queries import queries

if TYPE_CHECKING:
    from collections.abc import Mapping

SQL = queries("oncebox", "atomic.sql")
PARAMETER = re.compile(r"(?<![:\w]):(\w+)(?![:\w])")
READ_COMMITTED = "READ COMMITTED"
# psycopg.pq.TransactionStatus: idle, and unknown, since the connection is lost. What is done on that one says so.
NOT_IN_TRANSACTION = {0, 4}
PLACEHOLDERS = {name: PARAMETER.sub(r"%(\1)s", text.replace("%", "%%")) for name, text in SQL.items()}


class Database(Protocol):
    """Each method does its work, or returns an awaitable that does."""

    def in_transaction(self) -> bool: ...
    def begin(self) -> Any: ...
    def flush(self) -> Any:
        """What an ORM has not written yet."""
        ...

    def execute(self, name: str, values: Mapping[str, object]) -> Any:
        """A named block of atomic.sql; its rows."""
        ...

    def commit(self) -> Any: ...
    def rollback(self) -> Any: ...
    def another(self) -> Any:
        """A connection of its own to the same database, as a Database."""
        ...

    def close(self) -> Any: ...
    def sleep(self, seconds: float) -> Any: ...


def _psycopg_cursor(connection: Any, plain: str, binding: str) -> Any:
    """One of our own: the application's may make anything of a row, and read placeholders in another way."""
    import psycopg
    from psycopg.rows import tuple_row

    # Whoever binds parameters in the client may be behind a pooler that knows no prepared statements.
    is_binding = issubclass(connection.cursor_factory, getattr(psycopg, binding))
    return getattr(psycopg, binding if is_binding else plain)(connection, row_factory=tuple_row)


def _check_left_committed(transaction: Any) -> None:
    """A block of psycopg whose connection is known to be lost is left without a word."""
    if transaction.status.value != "committed":
        import psycopg

        raise psycopg.OperationalError("the connection is lost, and nothing was committed on it")


def _giving_up() -> tuple[Any, Any, None]:
    """An exception that a block of psycopg is rolled back for, and does not raise."""
    import psycopg

    return psycopg.Rollback, psycopg.Rollback(), None


class _BlockingPsycopg:
    def __init__(self, connection: Any) -> None:
        self._connection = connection
        # A connection that is lost does not say any more where it led.
        self._where = (connection.info.dsn, connection.info.password)
        # psycopg's block and its transaction.
        self._begun: tuple[Any, Any] | None = None

    def in_transaction(self) -> bool:
        return self._connection.info.transaction_status not in NOT_IN_TRANSACTION

    def begin(self) -> None:
        """By psycopg's own block: the first one of the application would else be the outermost, and commit on leaving.
        It sends the BEGIN that the first statement would send, and refuses commit() within.
        """
        block = self._connection.transaction()
        self._begun = (block, block.__enter__())

    def flush(self) -> None:
        """There is nothing but what was executed."""

    def execute(self, name: str, values: Mapping[str, object]) -> list[Any]:
        with _psycopg_cursor(self._connection, "Cursor", "ClientCursor") as cursor:
            cursor.execute(PLACEHOLDERS[name], values)
            return cursor.fetchall() if cursor.description else []

    def commit(self) -> None:
        begun, self._begun = self._begun, None
        if begun is None:
            self._connection.commit()
        else:
            begun[0].__exit__(None, None, None)
            _check_left_committed(begun[1])

    def rollback(self) -> None:
        begun, self._begun = self._begun, None
        if begun is None:
            # It could not be committed.
            self._connection.rollback()
        else:
            begun[0].__exit__(*_giving_up())

    def another(self) -> _BlockingPsycopg:
        dsn, password = self._where
        return _BlockingPsycopg(type(self._connection).connect(dsn, password=password, autocommit=True))

    def close(self) -> None:
        self._connection.close()
        if self._begun is not None:
            # Nothing is sent any more: the block is only not left open.
            self.rollback()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class _AsyncPsycopg:
    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._where = (connection.info.dsn, connection.info.password)
        self._begun: tuple[Any, Any] | None = None

    def in_transaction(self) -> bool:
        return self._connection.info.transaction_status not in NOT_IN_TRANSACTION

    async def begin(self) -> None:
        block = self._connection.transaction()
        self._begun = (block, await block.__aenter__())

    def flush(self) -> None:
        """There is nothing but what was executed."""

    async def execute(self, name: str, values: Mapping[str, object]) -> list[Any]:
        async with _psycopg_cursor(self._connection, "AsyncCursor", "AsyncClientCursor") as cursor:
            await cursor.execute(PLACEHOLDERS[name], values)
            return await cursor.fetchall() if cursor.description else []

    async def commit(self) -> None:
        begun, self._begun = self._begun, None
        if begun is None:
            await self._connection.commit()
        else:
            await begun[0].__aexit__(None, None, None)
            _check_left_committed(begun[1])

    async def rollback(self) -> None:
        begun, self._begun = self._begun, None
        if begun is None:
            await self._connection.rollback()
        else:
            await begun[0].__aexit__(*_giving_up())

    async def another(self) -> _AsyncPsycopg:
        dsn, password = self._where
        return _AsyncPsycopg(await type(self._connection).connect(dsn, password=password, autocommit=True))

    async def close(self) -> None:
        await self._connection.close()
        if self._begun is not None:
            await self.rollback()

    def sleep(self, seconds: float) -> Any:
        return asyncio.sleep(seconds)


def _is_begun(connection: Any) -> bool:
    """Of SQLAlchemy; also the connection a session is bound to: the session would leave the commit to its owner."""
    bound = connection.get_bind() if hasattr(connection, "get_bind") else connection
    return bool(connection.in_transaction() or (hasattr(bound, "in_transaction") and bound.in_transaction()))


def _check_transactional(connection: Any) -> None:
    """Of SQLAlchemy, begun: in AUTOCOMMIT each statement would be committed by itself, whatever becomes of the rest."""
    if getattr(connection.connection.dbapi_connection, "autocommit", False):
        raise UsageError(
            "this connection of SQLAlchemy has the isolation level AUTOCOMMIT, so nothing on it is one transaction: "
            "take one with another level"
        )


class _BlockingAlchemy:
    """A Connection or a Session."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def in_transaction(self) -> bool:
        return _is_begun(self._connection)

    def begin(self) -> None:
        # Not left to the first statement: one that the application begins within the block is refused, else it would
        # be committed on leaving.
        self._connection.begin()
        session = hasattr(self._connection, "get_bind")
        try:
            _check_transactional(self._connection.connection() if session else self._connection)
        except BaseException:
            self.rollback()
            raise

    def flush(self) -> None:
        if hasattr(self._connection, "flush"):
            self._connection.flush()

    def execute(self, name: str, values: Mapping[str, object]) -> list[Any]:
        result = self._connection.execute(_text(name), values)
        return list(result.fetchall()) if result.returns_rows else []

    def commit(self) -> None:
        self._connection.commit()

    def rollback(self) -> None:
        self._connection.rollback()

    def another(self) -> _BlockingAlchemy:
        engine = self._connection.get_bind() if hasattr(self._connection, "get_bind") else self._connection
        return _BlockingAlchemy(engine.engine.connect().execution_options(isolation_level=READ_COMMITTED))

    def close(self) -> None:
        self._connection.close()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class _AsyncAlchemy:
    """An AsyncConnection or an AsyncSession."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def in_transaction(self) -> bool:
        return _is_begun(self._connection)

    async def begin(self) -> None:
        await self._connection.begin()
        session = hasattr(self._connection, "get_bind")
        try:
            connection = await self._connection.connection() if session else self._connection
            _check_transactional(connection.sync_connection)
        except BaseException:
            await self.rollback()
            raise

    async def flush(self) -> None:
        if hasattr(self._connection, "flush"):
            await self._connection.flush()

    async def execute(self, name: str, values: Mapping[str, object]) -> list[Any]:
        result = await self._connection.execute(_text(name), values)
        return list(result.fetchall()) if result.returns_rows else []

    async def commit(self) -> None:
        await self._connection.commit()

    async def rollback(self) -> None:
        await self._connection.rollback()

    async def another(self) -> _AsyncAlchemy:
        from sqlalchemy.ext.asyncio import AsyncEngine

        bound = self._connection.get_bind() if hasattr(self._connection, "get_bind") else None
        engine = AsyncEngine(bound.engine) if bound is not None else self._connection.engine
        connection = await engine.connect()
        return _AsyncAlchemy(await connection.execution_options(isolation_level=READ_COMMITTED))

    async def close(self) -> None:
        await self._connection.close()

    def sleep(self, seconds: float) -> Any:
        return asyncio.sleep(seconds)


def _text(name: str) -> Any:
    from sqlalchemy import text

    return text(SQL[name])


# Where a class is defined, its name, and what wraps it. Blocking Session and Connection come last: the others have
# another module.
_KINDS: tuple[tuple[str, str, Any, bool], ...] = (
    ("psycopg", "AsyncConnection", _AsyncPsycopg, True),
    ("psycopg", "Connection", _BlockingPsycopg, False),
    ("sqlalchemy.ext.asyncio", "AsyncConnection", _AsyncAlchemy, True),
    ("sqlalchemy.ext.asyncio", "AsyncSession", _AsyncAlchemy, True),
    ("sqlalchemy", "Connection", _BlockingAlchemy, False),
    ("sqlalchemy.orm", "Session", _BlockingAlchemy, False),
)


def database_of(connection: Any, *, is_async: bool) -> Database:
    """Wraps a connection; refuses one that does not go with the producer."""
    for module, name, wrapper, for_async in _KINDS:
        found = getattr(sys.modules.get(module), name, None)
        if found is not None and isinstance(connection, found):
            if for_async is not is_async:
                right = "an async connection" if is_async else "a blocking connection"
                raise UsageError(f"this producer needs {right}, not {module}.{name}")
            wrapped: Database = wrapper(connection)
            return wrapped
    raise UsageError(
        f"{type(connection).__name__} is not known here: give a connection of psycopg, or a connection or session of "
        "SQLAlchemy"
    )
