"""Decides prepared transactions whose owners did not come back, beside the database that they belong to.

Finds them with the coordinators' Admin service and knows its own by the database's id in their metadata. Takes nobody's
transactional id: an owner that is alive goes on, with the same decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from oncebox.atomic_commit import SETTLE_S, Decision, drive, settle, unwrap_metadata
from oncebox.databases import database_of
from oncebox.errors import OnceboxError, UsageError
from oncebox.session import OpenChannel, Session, open_plain_channel
from oncebox.transaction import TransactionName
from oncebox.v1 import admin_pb2, admin_pb2_grpc, coordinator_pb2, transaction_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from oncebox.databases import Database

CALL_TIMEOUT_S = 30.0
RESULTS = {"committed": transaction_pb2.COMMITTED, "aborted": transaction_pb2.ABORTED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    transactional_id: str
    number: int
    # None: it could not be decided now, and is tried again by the next run.
    result: Decision | None
    error: str = ""


async def resolve(
    dsn: str,
    coordinators: Sequence[str],
    *,
    prefix: str = "",
    older_than_s: float = 60.0,
    settle_s: float = SETTLE_S,
    open_channel: OpenChannel = open_plain_channel,
) -> list[Resolved]:
    """All that are prepared together with this database and older than that. One that cannot be decided holds up no
    other.
    """
    import psycopg

    session = Session(coordinators, open_channel=open_channel)
    resolved: list[Resolved] = []
    try:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            database = database_of(connection, is_async=True)
            try:
                ((database_id,),) = await database.execute("database_id", {})
            except psycopg.errors.UndefinedTable:
                raise UsageError("this database has no tables for commits together with Kafka") from None
            async for found in prepared(coordinators, prefix, int(older_than_s * 1000), open_channel):
                if unwrap_metadata(found.metadata)[0] != database_id:
                    continue
                try:
                    decision, error = await _decide(session, database, found, settle_s), ""
                except OnceboxError as raised:
                    decision, error = None, str(raised)
                resolved.append(
                    Resolved(transactional_id=found.transactional_id, number=found.number, result=decision, error=error)
                )
    finally:
        await session.close()
    return resolved


async def _decide(
    session: Session, database: Database, found: admin_pb2.TransactionSummary, settle_s: float
) -> Decision:
    name = TransactionName(transactional_id=found.transactional_id, number=found.number)
    decision = await drive(settle(database.another, database.sleep, name, settle_s))
    grant = transaction_pb2.Grant(number=found.number, producer_id=found.producer_id, epoch=found.epoch)
    request = coordinator_pb2.EndRequest(transactional_id=found.transactional_id, grant=grant, result=RESULTS[decision])
    await session.call(found.transactional_id, "end", request, timeout_s=CALL_TIMEOUT_S)
    return decision


async def prepared(
    coordinators: Sequence[str], prefix: str, age_min_ms: int, open_channel: OpenChannel = open_plain_channel
) -> AsyncIterator[admin_pb2.TransactionSummary]:
    """The transactions that wait for a decision, on all instances."""
    async with open_channel(coordinators[0]) as channel:
        listed = await admin_pb2_grpc.AdminStub(channel).ListLeaders(
            admin_pb2.ListLeadersRequest(), timeout=CALL_TIMEOUT_S
        )
    for address in sorted({leader.address for leader in listed.leaders} or set(coordinators)):
        token = ""
        async with open_channel(address) as channel:
            while True:
                request = admin_pb2.ListRequest(
                    prefix=prefix, states=[transaction_pb2.PREPARED], age_min_ms=age_min_ms, page_token=token
                )
                page = await admin_pb2_grpc.AdminStub(channel).List(request, timeout=CALL_TIMEOUT_S)
                for found in page.transactions:
                    yield found
                token = page.next_page_token
                if not token:
                    break


async def prune(dsn: str, days: int) -> int:
    """Forgets tokens of commits that are surely complete; how many."""
    import psycopg

    from oncebox.databases import PLACEHOLDERS

    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        return (await connection.execute(PLACEHOLDERS["prune"].encode(), {"days": days})).rowcount
