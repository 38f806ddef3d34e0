"""What a commit over Kafka and a database makes of the connection that it is given."""

import asyncio
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.pq import PGconn, abc

from oncebox.databases import database_of


@pytest.fixture
def lost() -> Iterator[abc.PGconn]:
    """A connection that nobody answers on any more looks to libpq as one that was refused."""
    connection = PGconn.connect(b"host=127.0.0.1 port=1")
    yield connection
    connection.finish()


def test_a_lost_connection_is_called_lost_and_not_in_a_transaction(lost: abc.PGconn) -> None:
    database = database_of(psycopg.Connection(lost), is_async=False)
    assert not database.in_transaction()
    with pytest.raises(psycopg.OperationalError, match="lost"):
        database.begin()


def test_a_lost_async_connection_is_called_lost_and_not_in_a_transaction(lost: abc.PGconn) -> None:
    async def work() -> None:
        database = database_of(psycopg.AsyncConnection(lost), is_async=True)
        assert not database.in_transaction()
        with pytest.raises(psycopg.OperationalError, match="lost"):
            await database.begin()

    asyncio.run(work())
