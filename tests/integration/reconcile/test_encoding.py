"""The canonical text of a row is the same from Spark's SQL and from PostgreSQL's, for every column type."""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from psycopg import sql

from spark_jobs.columns import Column, parse_type
from spark_jobs.encoding import VECTORS, sql_column, sql_digest
from spark_jobs.records import Number
from spark_jobs.session import prepared
from spark_jobs.targets import Target
from spark_jobs.transforms.expected import expected_rows
from spark_jobs.values import value_sql

if TYPE_CHECKING:
    from collections.abc import Sequence

RECORDS = "source int, offset bigint, timestamp timestamp, topic string, partition int, key binary, value binary"
MADE = datetime(2026, 1, 1, tzinfo=UTC)

texts = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=12)
integers = st.integers(-(2**63), 2**63 - 1)
decimals = st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**30), max_value=10**30, places=6)
moments = st.datetimes(timezones=st.just(UTC)).filter(lambda moment: 2 <= moment.day <= 28)
documents = st.recursive(
    st.none() | st.booleans() | integers | texts | st.floats(allow_nan=False, allow_infinity=False, width=32),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
# A value for the column, and how it stands in JSON.
TYPES: dict[str, st.SearchStrategy[Any]] = {
    "bigint": integers,
    "integer": st.integers(-(2**31), 2**31 - 1),
    "numeric": decimals,
    "numeric(20,3)": st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**16), max_value=10**16),
    "text": texts,
    "character varying(20)": texts,
    "boolean": st.booleans(),
    "double precision": st.floats(allow_nan=False, allow_infinity=False),
    "real": st.floats(allow_nan=False, allow_infinity=False, width=32),
    "timestamp with time zone": moments,
    "timestamp without time zone": moments.map(lambda moment: moment.replace(tzinfo=None)),
    "date": st.dates(date(1, 1, 1), date(9999, 12, 31)),
    "uuid": st.uuids(),
    "jsonb": documents,
    "json": documents,
    "bytea": st.binary(max_size=12),
    "integer[]": st.lists(st.none() | st.integers(-(2**31), 2**31 - 1), max_size=4),
    "text[]": st.lists(st.none() | texts, max_size=4),
}
ROWS = st.lists(st.tuples(*(st.none() | strategy for strategy in TYPES.values())), min_size=15, max_size=15)


def in_json(value: Any) -> str:
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, bytes):
        return json.dumps(base64.b64encode(value).decode())
    if isinstance(value, uuid.UUID | date | datetime):
        return json.dumps(value.isoformat() if isinstance(value, date) else str(value))
    return json.dumps(value, ensure_ascii=False)


def columns_of(types: Sequence[str]) -> tuple[Column, ...]:
    made = []
    for index, name in enumerate(types):
        column_type = parse_type(name)
        assert column_type is not None
        made.append(Column(name=f"c{index}", type=column_type, path=(f"c{index}",)))
    return tuple(made)


def target_of(columns: tuple[Column, ...]) -> Target:
    return Target(
        topic="t",
        schema="public",
        table="t",
        format="json",
        insert_mode="insert",
        guard=False,
        ordering=None,
        delete_on_tombstone=True,
        key=(),
        key_size=0,
        columns=columns,
    )


def by_spark(spark: Any, columns: tuple[Column, ...], values: Sequence[str]) -> list[int | None]:
    rows = [(1, at, MADE, "t", 0, None, bytearray(value.encode())) for at, value in enumerate(values)]
    found = expected_rows(spark.createDataFrame(rows, RECORDS), target_of(columns))
    return [row.digest for row in sorted(found.collect(), key=lambda row: row.offset)]


@pytest.fixture(scope="module")
def connection(postgres):
    with psycopg.connect(postgres.dsn, autocommit=True, options="-c timezone=UTC") as opened:
        yield opened


def test_the_published_vectors_in_sql(connection: psycopg.Connection[Any]):
    for type_name, value, text in VECTORS:
        (column,) = columns_of([type_name])
        raw = json.loads(value or "null", parse_float=Number, parse_int=Number)
        if type_name == "json" and value:
            raw = Number(value)
        statement = sql.SQL("SELECT {} FROM (SELECT {} AS v) AS t")
        found = connection.execute(
            statement.format(sql.SQL(sql_column(column.type, "v")), value_sql(column, raw))
        ).fetchone()
        assert found == (text,), (type_name, value)


def test_the_published_vectors_in_spark(spark: Any):
    """One document per vector, in which all other columns are null: one job for all of them."""
    columns = columns_of([type_name for type_name, _, _ in VECTORS])
    documents_text = [f'{{"c{at}": {value or "null"}}}' for at, (_, value, _) in enumerate(VECTORS)]
    wanted = [
        "".join(text if other == at else "~" for other in range(len(VECTORS)))
        for at, (_, _, text) in enumerate(VECTORS)
    ]
    digests = [int(hashlib.md5(text.encode()).hexdigest()[:15], 16) for text in wanted]
    found = by_spark(spark, columns, documents_text)
    wrong = [VECTORS[at] for at in range(len(VECTORS)) if found[at] != digests[at]]
    assert wrong == []


def test_documents_past_the_bounds_of_sparks_parser(spark: Any):
    """A number of more than 1000 digits, also where nobody asks for it: an RSA key of 4096 bits has as many."""
    columns = columns_of(["bigint", "numeric"])
    digits = "7" * 1_234
    values = [f'{{"c0": 1, "c1": 2, "x": {digits}}}', f'{{"c0": 1, "c1": {digits}}}']
    wanted = ["1;2;", f"1;{digits};"]
    assert by_spark(spark, columns, values) == [int(hashlib.md5(text.encode()).hexdigest()[:15], 16) for text in wanted]


def test_fields_that_differ_only_in_case(spark: Any):
    columns = tuple(
        replace(column, name=name, path=(name,))
        for column, name in zip(columns_of(["bigint", "text", "text"]), ("id", "Id", "ID"), strict=True)
    )
    value = '{"ID": "upper", "id": 1, "Id": "both"}'
    digest = int(hashlib.md5(b"1;4:both5:upper").hexdigest()[:15], 16)
    assert by_spark(prepared(spark), columns, [value]) == [digest]


def test_a_key_that_is_the_document_null(spark: Any):
    columns = tuple(replace(column, origin="key", path=()) for column in columns_of(["json", "jsonb"]))
    rows = [(1, 0, MADE, "t", 0, bytearray(b"null"), bytearray(b"{}"))]
    (found,) = expected_rows(spark.createDataFrame(rows, RECORDS), target_of(columns)).collect()
    assert found.digest == int(hashlib.md5(b"4:null4:null").hexdigest()[:15], 16)


@settings(
    max_examples=10,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # each example is a Spark job of 25 rows: shrinking would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(rows=ROWS)
def test_both_sides_agree(spark: Any, connection: psycopg.Connection[Any], rows):
    """Each value by itself, in a document whose other columns are null: so a difference names its type."""
    types = list(TYPES)
    columns = columns_of(types)
    values = [(at, value) for row in rows for at, value in enumerate(row)]
    by_sql = []
    for at, value in values:
        text = sql_column(columns[at].type, "v")
        found = connection.execute(
            f"SELECT {sql_digest(f'%s || ({text}) || %s')} FROM (SELECT CAST(%s AS {types[at]}) AS v) AS t",
            ["~" * at, "~" * (len(types) - at - 1), _parameter(types[at], value)],
        ).fetchone()
        assert found is not None
        by_sql.append(found[0])
    digests = by_spark(spark, columns, [f'{{"c{at}": {in_json(value)}}}' for at, value in values])
    wrong = [
        (types[at], value)
        for (at, value), one, other in zip(values, digests, by_sql, strict=True)
        if one != other and not is_left_to_the_database(types[at], one)
    ]
    assert wrong == []


def is_left_to_the_database(type_name: str, digest: int | None) -> bool:
    """What Spark says it cannot tell is settled by PostgreSQL."""
    return digest is None and type_name == "real"


def _parameter(type_name: str, value: Any) -> Any:
    if type_name in {"json", "jsonb"} and value is not None:
        return json.dumps(value, ensure_ascii=False)
    return value
