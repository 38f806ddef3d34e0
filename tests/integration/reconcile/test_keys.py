"""Rows are found by the encoded keys that a comparison has told apart, through the index of their own types."""

import psycopg
import pytest
from psycopg import sql

from spark_jobs.database import key_sql, keys_condition
from spark_jobs.targets import by_table, read_target
from tests.unit.spark_jobs.test_parts import mapping

HOSTILE = ["", ";", "a:b", '{"x",NULL}', "NULL", "back\\slash", "two\nlines", "é 漢", "'quoted'"]
COLUMNS = [
    ("a", "bigint"),
    ("b", "text"),
    ("c", "numeric(20,3)"),
    ("d", "uuid"),
    ("e", "boolean"),
    ("f", "character varying(20)"),
]
ROWS = [
    (at - 4, text, at * 1000 + 0.125, f"00000000-0000-0000-0000-{at:012}", at % 2 == 0, text[::-1])
    for at, text in enumerate(HOSTILE)
]


@pytest.mark.postgres
@pytest.mark.parametrize("width", range(1, len(COLUMNS) + 1))
def test_composite_keys_of_any_text(database: str, width: int):
    key = COLUMNS[-width:]
    (table,) = by_table([read_target("t", "public", "t", mapping(COLUMNS, [name for name, _ in key]))])
    with psycopg.connect(database) as connection:
        listed = ", ".join(f"{name} {kind}" for name, kind in COLUMNS)
        connection.execute(f"CREATE TABLE t ({listed})")
        connection.cursor().executemany("INSERT INTO t VALUES (%s, %s, %s, %s, %s, %s)", ROWS)
        asked = sql.SQL("SELECT {} FROM t").format(key_sql(table.first))
        keys = [row[0] for row in connection.execute(asked)]
        assert len(set(keys)) == len(ROWS)
        for wanted in (keys[::2], keys[:1], keys, []):
            found = connection.execute(sql.SQL("{} WHERE {}").format(asked, keys_condition(table, wanted)))
            assert {row[0] for row in found} == set(wanted)
