"""For services that write an outbox: the statement, and a model for SQLAlchemy.

    connection.execute(INSERT, event("order", "17", "OrderMade", {"total": 30}))     # psycopg
    class Outbox(OutboxMixin, Base): ...                                             # SQLAlchemy

Write it in the same transaction as the change it tells of; the relay does the rest.
"""

import json
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oncebox.outbox_model import OutboxMixin

__all__ = ["EMIT", "INSERT", "OutboxMixin", "event", "message"]

# For psycopg, into the table that `oncebox outbox init` makes.
INSERT = (
    "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, headers) "
    "VALUES (%(id)s, %(aggregatetype)s, %(aggregateid)s, %(type)s, %(payload)s, %(headers)s)"
)
# The same without a table: only in the write-ahead log, and gone with it.
EMIT = "SELECT pg_logical_emit_message(true, 'outbox', %(message)s)"


def event(
    aggregatetype: str,
    aggregateid: str,
    kind: str,
    payload: Any,
    *,
    headers: Mapping[str, str] | None = None,
    event_id: uuid.UUID | None = None,
) -> dict[str, Any]:
    """The values of INSERT. A payload of None becomes a tombstone."""
    return {
        "id": event_id or uuid.uuid4(),
        "aggregatetype": aggregatetype,
        "aggregateid": aggregateid,
        "type": kind,
        "payload": None if payload is None else json.dumps(payload),
        "headers": None if headers is None else json.dumps(dict(headers)),
    }


def message(
    aggregatetype: str, aggregateid: str, kind: str, payload: Any, *, headers: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The value of EMIT."""
    given = {
        "id": str(uuid.uuid4()),
        "aggregatetype": aggregatetype,
        "aggregateid": aggregateid,
        "type": kind,
        "payload": payload,
        "headers": None if headers is None else dict(headers),
    }
    return {"message": json.dumps(given)}


def __getattr__(name: str) -> Any:
    if name == "OutboxMixin":
        from oncebox.outbox_model import OutboxMixin

        return OutboxMixin
    raise AttributeError(f"module 'oncebox.outbox' has no attribute {name!r}")
