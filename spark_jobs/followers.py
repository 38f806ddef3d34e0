"""What a delete would change besides: rows that refer to the deleted one ON DELETE CASCADE, SET NULL or SET DEFAULT.

They may be right, and nobody has looked at them: no undo would bring them back. So such a row is not deleted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psycopg import sql

from spark_jobs.errors import ReconcileError
from spark_jobs.queries import query

if TYPE_CHECKING:
    import psycopg


class FollowersError(ReconcileError):
    """Others refer to what is to be deleted."""


def refuse_followers(connection: psycopg.Connection[Any], schema: str, table: str, place: sql.Composable) -> None:
    """`place`: the condition of the rows that are to be deleted, which are locked: nobody comes to refer to them."""
    names = {"schema": schema, "table": table}
    for child_schema, child, columns, referenced in connection.execute(query("followers"), names).fetchall():
        itself = place if (child_schema, child) == (schema, table) else sql.SQL("false")
        statement = sql.SQL(
            "SELECT count(*) FROM {child} WHERE ({mine}) IN (SELECT {theirs} FROM {parent} WHERE {place}) "
            "AND NOT ({itself})"
        ).format(
            child=sql.Identifier(child_schema, child),
            mine=_listed(columns),
            theirs=_listed(referenced),
            parent=sql.Identifier(schema, table),
            place=place,
            itself=itself,
        )
        ((count,),) = connection.execute(statement).fetchall()
        if count:
            raise FollowersError(
                f"{count} rows of {child_schema}.{child} refer to a row of {schema}.{table} that is to be deleted, and "
                "would be deleted or changed with it (ON DELETE): look at them, and change or delete them first"
            )


def _listed(names: list[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, names))
