"""The local PostgreSQL is a real one, set up for logical decoding, and keeps what was committed over a crash."""

from __future__ import annotations

import importlib.util
from contextlib import closing
from typing import TYPE_CHECKING

import psycopg
import pytest

from oncebox.local import LocalError, LocalPostgres
from oncebox.local.postgres import VERSION_MIN, find_binaries

if TYPE_CHECKING:
    from pathlib import Path


def test_it_can_decode_and_prepare_and_is_safe(database: str):
    with psycopg.connect(database) as connection:
        names = ["wal_level", "fsync", "listen_addresses", "unix_socket_directories"]
        found = [connection.execute(f"SHOW {name}").fetchone()[0] for name in names]  # type: ignore[index]
        prepared = connection.execute("SHOW max_prepared_transactions").fetchone()
    assert found == ["logical", "on", "127.0.0.1", ""]
    assert prepared != ("0",)


def test_each_test_has_its_own_database(database: str, postgres: LocalPostgres):
    with psycopg.connect(database) as connection:
        assert connection.info.dbname.startswith("test_")
        connection.execute("CREATE TABLE t (a int)")  # would fail on the second run in a shared database


def test_no_entry_without_the_password(postgres: LocalPostgres):
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(host=postgres.host, port=postgres.port, user=postgres.user, dbname="postgres")


def test_a_server_of_the_machine_serves_where_the_wheel_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    try:
        find_binaries()
    except LocalError as error:
        assert "pip install 'oncebox[local]' brings one" in str(error)  # noqa: PT017 - both outcomes are right
    else:
        with LocalPostgres(tmp_path) as server, psycopg.connect(server.dsn) as connection:
            assert connection.info.server_version >= VERSION_MIN * 10_000


def test_a_crash_keeps_what_was_committed(tmp_path: Path):
    with LocalPostgres(tmp_path / "a folder, with ünusual name") as server:
        with psycopg.connect(server.dsn) as connection:
            connection.execute("CREATE TABLE t AS SELECT 7 AS a")
        with closing(psycopg.connect(server.dsn)) as busy:
            busy.execute("INSERT INTO t VALUES (8)")
            dsn = server.dsn
            server.kill()
            assert not server.running
            server.restart()
            assert server.dsn == dsn
            with psycopg.connect(dsn) as connection:
                assert connection.execute("SELECT a FROM t").fetchall() == [(7,)]
