"""Whether a DSN can be read, asked before it is used: what PostgreSQL's own library says of one that cannot quotes
pieces of it, and those may be of the password. Nothing here tells any of it, or connects.
"""

import re

WANTED = (
    "should be postgresql://user:password@host/database, with %40 for @, %2F for / and %25 for % in the password, "
    "or host=… dbname=… user=… password='…'"
)
_PORTS = re.compile(r"[0-9,]*")


class DsnError(Exception):
    """A DSN that cannot be read; says what one looks like."""


def problem_of(dsn: str) -> str | None:
    """None where it can be read. A password that was not escaped often can, too: its pieces are host and port then."""
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        parts = conninfo_to_dict(dsn)
    except psycopg.Error:
        return WANTED
    spilt = "@" in str(parts.get("host", "")) or not _PORTS.fullmatch(str(parts.get("port", "")))
    return WANTED if spilt else None


def checked(dsn: str) -> str:
    if problem := problem_of(dsn):
        raise DsnError(f"--dsn or ONCEBOX_DSN: {problem}")
    return dsn
