"""Real PostgreSQL: `postgres` (the server, started once per run) and `database` (DSN of a fresh one per test)."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql

from oncebox.local import LocalPostgres

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPostgres]:
    """The server, shared by the whole run: tests neither kill nor pause it."""
    server = LocalPostgres(tmp_path_factory.mktemp("postgres"))
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture(scope="session")
def template_database(postgres: LocalPostgres) -> str:
    """The database that `database` is cloned from: empty. A folder's conftest may override this."""
    return "template1"


@pytest.fixture
def database(postgres: LocalPostgres, template_database: str) -> Iterator[str]:
    """The DSN of a database that only this test uses."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    run(
        postgres,
        sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template_database)),
    )
    yield postgres.dsn_of(name)
    run(postgres, sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def run(postgres: LocalPostgres, statement: sql.Composed) -> None:
    """Runs one statement outside of a transaction, in the server's maintenance database."""
    with psycopg.connect(postgres.dsn_of("postgres"), autocommit=True) as connection:
        connection.execute(statement)
