"""A finished comparison leaves its report, whatever the database thinks of storing it."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from pydantic import SecretStr

from oncebox.settings import KafkaSection, PostgresSection
from relay.database import migrate
from spark_jobs.config import ReconcileSettings
from spark_jobs.cut import cut_source
from spark_jobs.publish import store, trend, write_files
from spark_jobs.verdict import Verdict
from tests.unit.spark_jobs.test_cut import cut, facts, position
from tests.unit.spark_jobs.test_parts import result

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def reader(database: str) -> Iterator[str]:
    """The address of a role that may only read."""
    role = f"reader_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'reader' IN ROLE pg_read_all_data")
    yield make_conninfo(database, user=role, password="reader")
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(f"DROP ROLE {role}")


@pytest.mark.postgres
@pytest.mark.parametrize("is_there", [True, False])
def test_a_result_that_cannot_be_stored(reader: str, tmp_path: Path, *, is_there: bool):
    dsn = reader if is_there else "postgresql://nobody@127.0.0.1:1/none"
    settings = ReconcileSettings(
        kafka=KafkaSection(bootstrap_servers="localhost:1"),
        postgres=PostgresSection(dsn=SecretStr(dsn)),
        report_folder=tmp_path,
    )
    clean = result(findings=(), run=None, verdict=Verdict.CLEAN, sentence="clean")
    told = store(settings, clean, cut())
    assert (told.exit_code, told.run, told.told[:-1]) == (0, None, clean.told)
    assert told.sentence.startswith("clean; the result could not be stored in the database, and leaves no mark: ")
    assert ("permission denied" in told.sentence) == is_there
    written = write_files(settings, told, trend(settings, told))
    # Named by the time: the next one must not replace it.
    assert written["html"].name.startswith("run-20")
    assert "could not be stored" in written["html"].read_text()
    assert json.loads(written["json"].read_text())["told"][-1] == told.told[-1]


@pytest.mark.postgres
@pytest.mark.parametrize("is_fenced", [True, False])
def test_what_was_verified_leaves_no_mark_if_the_relay_went_back_meanwhile(
    database: str, tmp_path: Path, *, is_fenced: bool
):
    settings = ReconcileSettings(
        kafka=KafkaSection(bootstrap_servers="localhost:1"),
        postgres=PostgresSection(dsn=SecretStr(database)),
        report_folder=tmp_path,
    )
    clean = result(findings=(), run=None, verdict=Verdict.CLEAN, relay="r")
    with psycopg.connect(database, autocommit=True) as connection:
        migrate(connection)
        connection.execute("INSERT INTO oncebox.relay (relay, mode, fence) VALUES ('r', 'partition', 7)")
        if is_fenced:
            connection.execute("UPDATE oncebox.relay SET fence = 8")
        stored = store(settings, clean, cut(cut_source(position(), facts(), verified=0), fence=7))
        assert stored.run is not None
        marks = connection.execute("SELECT next_offset FROM oncebox.reconciliation_verified").fetchall()
    assert [tuple(mark) for mark in marks] == ([] if is_fenced else [(100,)])
