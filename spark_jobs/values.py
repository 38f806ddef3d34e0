"""A record's values as SQL that PostgreSQL converts by itself. Pure.

What is alarmed was seen by both ways from a record to its row; what is written goes this one. See spark_jobs.records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psycopg import sql

from spark_jobs.columns import Kind
from spark_jobs.records import value_text

if TYPE_CHECKING:
    from spark_jobs.columns import Column

# To be run first in a transaction that writes what the relay would: so its own sessions read and print values (a time
# without a zone is UTC), also the keys in oncebox.tombstone.
AS_THE_RELAY = (
    "SET LOCAL TimeZone = 'UTC'; SET LOCAL DateStyle = 'ISO'; SET LOCAL IntervalStyle = 'postgres'; "
    "SET LOCAL bytea_output = 'hex'; SET LOCAL extra_float_digits = 1"
)


def value_sql(column: Column, value: Any) -> sql.Composable:
    """The value as the relay would write it, converted by PostgreSQL. The session's time zone has to be UTC."""
    if value is None:
        return sql.SQL("NULL::{}").format(sql.SQL(column.type.name))
    return text_sql(column, sql.Literal(value_text(column, value)))


def text_sql(column: Column, text: sql.Composable) -> sql.Composable:
    """`text`: an expression for what value_text() gives."""
    kind = sql.SQL(column.type.name)  # as format_type() writes it
    if column.type.is_array:
        return sql.SQL("{}::text[]::{}").format(text, kind)
    if column.unit is not None:
        # With the type's own precision, which the relay's staging table has too.
        return sql.SQL("{}::{}").format(_time_sql(column.type.kind, text, column.unit), kind)
    if column.type.kind is Kind.TIMESTAMP:  # by itself it would ignore the zone that a text names
        return sql.SQL("({}::timestamptz AT TIME ZONE 'UTC')::{}").format(text, kind)
    if column.type.kind is Kind.FLOAT4:  # as the relay reads a number: rounded twice
        return sql.SQL("{}::double precision::{}").format(text, kind)
    return sql.SQL("{}::{}").format(text, kind)


def _time_sql(kind: Kind, value: sql.Composable, unit: str) -> sql.Composable:
    step = {"s": "1000000", "ms": "1000", "us": "1", "ns": "0.001", "days": "86400000000"}[unit]
    micros = sql.SQL("floor({}::numeric * {}::numeric)").format(value, step)
    moment = sql.SQL("(TIMESTAMP '1970-01-01' + {} * INTERVAL '1 microsecond')").format(micros)
    if kind is Kind.DATE:
        return sql.SQL("{}::date").format(moment)
    return sql.SQL("({} AT TIME ZONE 'UTC')").format(moment) if kind is Kind.TIMESTAMPTZ else moment
