"""The copy of the bank's books in PostgreSQL: looked at while it is written, and compared in the end."""

import threading
import time
from typing import LiteralString, Self

import psycopg

from proof.demo.bank import TOPICS
from proof.demo.parts import DemoFailedError

LOOK_EVERY_S = 0.05
# One statement, so one instant: what has left some account must have arrived at another.
SUMS: LiteralString = """
    SELECT coalesce((SELECT sum(amount) FROM debits), 0), coalesce((SELECT sum(amount) FROM credits), 0),
           coalesce((SELECT sum(amount) FROM journal), 0)
"""


class Reader:
    """Somebody who asks PostgreSQL for the sums again and again, while everything else goes on."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="reader")
        self.looks = 0
        self.torn: tuple[int, int, int] | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _read(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while not self._over.wait(LOOK_EVERY_S):
                debited, credited, journaled = connection.execute(SUMS).fetchone() or (0, 0, 0)
                self.looks += 1
                if not debited == credited == journaled:
                    self.torn = (debited, credited, journaled)
                    return


def await_tables(dsn: str, timeout_s: float) -> None:
    """Until the relay has made them."""
    deadline_s = time.monotonic() + timeout_s
    with psycopg.connect(dsn, autocommit=True) as connection:
        while any(
            connection.execute("SELECT to_regclass(%s) IS NULL", [each]).fetchone() == (True,) for each in TOPICS
        ):
            if time.monotonic() > deadline_s:
                raise DemoFailedError("the relay has not made its tables")
            time.sleep(LOOK_EVERY_S)


def await_rows(dsn: str, transfers: set[str], timeout_s: float) -> None:
    """Until each table holds exactly these transfers; says what is wrong if that does not come to pass."""
    deadline_s = time.monotonic() + timeout_s
    with psycopg.connect(dsn, autocommit=True) as connection:
        while problem := _difference(connection, transfers):
            if time.monotonic() > deadline_s:
                raise DemoFailedError(problem)
            time.sleep(LOOK_EVERY_S)


def _difference(connection: psycopg.Connection, transfers: set[str]) -> str:
    from psycopg import sql

    for table in TOPICS:
        query = sql.SQL("SELECT transfer FROM {}").format(sql.Identifier(table))
        found = {row[0] for row in connection.execute(query)}
        if found != transfers:
            return f"{table}: {len(transfers - found)} rows are missing, {len(found - transfers)} should not be there"
    return ""
