"""Creates and widens target tables where the settings ask for it, through SQLAlchemy. Never drops anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

from relay.database import added_columns, describe, given_type, is_passing
from relay.types import RelayError

if TYPE_CHECKING:
    from relay.config import RelaySettings, TableSection
    from relay.database import Connection
    from relay.types import SchemaChangeError

CREATION_LOCK = 0x6F6E6365_7461626C


def create_missing(connection: Connection, settings: RelaySettings) -> None:
    """Tables with auto_create, and the guard's columns with auto_evolve."""
    with connection.transaction():
        # One after the other: of two that create a table at the same time PostgreSQL refuses one, IF NOT EXISTS or not.
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [CREATION_LOCK])
        for section in settings.tables:
            present = {column.name for column in describe(connection, section.target())}
            if not present and section.auto_create:
                connection.execute(create_table(section))
            elif present and section.auto_evolve and not present >= section.own_columns.keys():
                name = section.target()
                connection.execute(
                    sql.SQL("ALTER TABLE {} {}").format(
                        sql.Identifier(name.schema, name.name), sql.SQL(added_columns(section))
                    )
                )


def change_table(connection: Connection, change: SchemaChangeError) -> None:
    """Adds a column or widens one; nothing where somebody has changed it since the record was looked at."""
    table = sql.Identifier(change.table.schema, change.table.name)
    column, type_name = sql.Identifier(change.column), sql.SQL(change.type)
    try:
        with connection.transaction():
            connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(table))
            types = {each.name: each.type for each in describe(connection, change.table)}
            if types.get(change.column) != change.before:
                return
            how = "ADD COLUMN {} {}" if change.before is None else "ALTER COLUMN {} TYPE {}"
            connection.execute(sql.SQL("ALTER TABLE {} " + how).format(table, column, type_name))
    except psycopg.Error as error:
        if is_passing(error):
            raise
        raise RelayError(f"{change}, and PostgreSQL refuses: {str(error).strip()}: change it by hand") from error


def create_table(section: TableSection) -> str:
    """The statement, compiled by SQLAlchemy: names are quoted there, types are checked names."""
    from sqlalchemy import Column, MetaData, PrimaryKeyConstraint, Table
    from sqlalchemy.dialects import postgresql
    from sqlalchemy.schema import CreateTable
    from sqlalchemy.types import UserDefinedType

    class Named(UserDefinedType[object]):
        cache_ok = True

        def __init__(self, name: str) -> None:
            self.name = name

        def get_col_spec(self, **_: object) -> str:
            return self.name

    if not section.columns:
        raise RelayError(f"{section.target()} is to be created: name its `columns` with their types")
    columns = [
        Column(name, Named(given_type(name, given.type)), nullable=name not in section.key)
        for name, given in section.columns.items()
    ]
    columns += [Column(name, Named(type_name)) for name, type_name in section.own_columns.items()]
    keys = [PrimaryKeyConstraint(*section.key)] if section.key else []
    target = section.target()
    table = Table(target.name, MetaData(), *columns, *keys, schema=target.schema)
    return str(CreateTable(table, if_not_exists=True).compile(dialect=postgresql.dialect()))  # type: ignore[no-untyped-call]
