"""Every example runs as its text says, on a real broker and a real coordinator."""

import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from psycopg import sql

from oncebox.local import LocalPostgres
from tests.integration.client.conftest import fresh
from tests.support.coordinator import Coordinators
from tests.support.postgres import run as run_sql

EXAMPLES = Path(__file__).parents[3] / "examples"


def run(one: Coordinators, name: str, prefix: str, count: int, *more: str) -> str:
    arguments = ["--kafka", one.bootstrap_servers, "--coordinators", ",".join(one.addresses), "--feed", one.feed_topic]
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments, "--prefix", prefix, "--count", str(count), *more],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_transfer(one: Coordinators):
    told = run(one, "transfer.py", fresh("transfer"), 60)
    found = re.search(r"(\d+) transfers committed, (\d+) given up half-way; (\d+) read, in balance each time", told)
    assert found is not None
    assert int(found[1]) + int(found[2]) == 60
    assert found[1] == found[3]


def test_order_fanout_goes_on_where_it_stopped(one: Coordinators):
    prefix = fresh("orders")
    assert run(one, "order_fanout.py", prefix, 20) == "orders 1 to 20 sent\n20 whole orders read\n"
    assert run(one, "order_fanout.py", prefix, 5) == "orders 21 to 25 sent\n25 whole orders read\n"


def test_word_count_goes_on_where_it_stopped(one: Coordinators):
    prefix = fresh("words")
    told = run(one, "word_count.py", prefix, 30)
    assert told == "160 words of 30 lines\nthe 50, cat 20, mat 20, on 20\n"
    told = run(one, "word_count.py", prefix, 15)
    assert told == "240 words of 45 lines\nthe 75, cat 30, mat 30, on 30\n"


def test_atomic_transfer(one: Coordinators, database: str):
    told = run(one, "atomic_transfer.py", fresh("atomic"), 40, "--dsn", database)
    found = re.search(r"(\d+) transfers made, (\d+) refused: the journal gives the database's balances", told)
    assert found is not None
    assert int(found[1]) + int(found[2]) == 40
    assert int(found[2])


def test_mirror(one: Coordinators, database: str, postgres: LocalPostgres):
    copy = f"copy_{uuid.uuid4().hex[:12]}"
    run_sql(postgres, sql.SQL("CREATE DATABASE {}").format(sql.Identifier(copy)))
    told = run(one, "mirror.py", fresh("mirror"), 60, "--dsn", database, "--copy", postgres.dsn_of(copy))
    run_sql(postgres, sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(copy)))
    found = re.search(r"60 transfers; .* the same at the end\n(\d+) states were seen", told)
    assert found is not None
    assert int(found[1])


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "common.py"))
def test_every_example_has_a_test(example: str):
    assert example.removesuffix(".py") in Path(__file__).read_text()
