"""Decides prepared transactions whose owners did not come back, beside the database that they belong to.

Finds them with the coordinators' Admin service and knows its own by the database's id in their metadata. Takes nobody's
transactional id: an owner that is alive goes on, with the same decision.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import grpc

from oncebox.atomic_commit import SETTLE_S, Decision, drive, identify, settle, unwrap_metadata
from oncebox.databases import database_of
from oncebox.errors import OnceboxError
from oncebox.session import OpenChannel, Session, open_plain_channel
from oncebox.transaction import TransactionName
from oncebox.v1 import admin_pb2, admin_pb2_grpc, coordinator_pb2, transaction_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from oncebox.databases import Database

CALL_TIMEOUT_S = 30.0
# One that is far away, or busy, is not taken for one that is gone.
CONNECT_TIMEOUT_MS = 10_000
open_patiently = partial(open_plain_channel, connect_timeout_ms=CONNECT_TIMEOUT_MS)
RESULTS = {"committed": transaction_pb2.COMMITTED, "aborted": transaction_pb2.ABORTED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    transactional_id: str
    number: int
    # None: it could not be decided now, and is tried again by the next run.
    result: Decision | None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unheard:
    """A coordinator that does not answer: what it leads is not looked at, until a later run."""

    address: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unserved:
    """A log partition that nobody serves just now: what is in it is not looked at, either."""

    log_partition: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    resolved: list[Resolved] = field(default_factory=list)
    unheard: list[Unheard] = field(default_factory=list)
    unserved: list[Unserved] = field(default_factory=list)


async def resolve(
    dsn: str,
    coordinators: Sequence[str],
    *,
    prefix: str = "",
    older_than_s: float = 60.0,
    settle_s: float = SETTLE_S,
    open_channel: OpenChannel = open_patiently,
) -> Resolution:
    """All that are prepared together with this database and older than that. One that cannot be decided holds up no
    other, nor does a coordinator that is away.
    """
    import psycopg

    session = Session(coordinators, open_channel=open_channel)
    resolution = Resolution()
    try:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            database = database_of(connection, is_async=True)
            database_id = await drive(identify(database))
            async for found in prepared(coordinators, prefix, int(older_than_s * 1000), open_channel):
                if isinstance(found, Unheard):
                    resolution.unheard.append(found)
                    continue
                if isinstance(found, Unserved):
                    resolution.unserved.append(found)
                    continue
                if unwrap_metadata(found.metadata)[0] != database_id:
                    continue
                try:
                    decision, error = await _decide(session, database, database_id, found, settle_s), ""
                except OnceboxError as raised:
                    decision, error = None, str(raised)
                resolution.resolved.append(
                    Resolved(transactional_id=found.transactional_id, number=found.number, result=decision, error=error)
                )
    finally:
        await session.close()
    return resolution


async def _decide(
    session: Session, database: Database, database_id: str, found: admin_pb2.TransactionSummary, settle_s: float
) -> Decision:
    name = TransactionName(transactional_id=found.transactional_id, number=found.number)
    decision = await drive(settle(database, database_id, name, settle_s))
    grant = transaction_pb2.Grant(number=found.number, producer_id=found.producer_id, epoch=found.epoch)
    request = coordinator_pb2.EndRequest(transactional_id=found.transactional_id, grant=grant, result=RESULTS[decision])
    await session.call(found.transactional_id, "end", request, timeout_s=CALL_TIMEOUT_S)
    return decision


async def prepared(
    coordinators: Sequence[str], prefix: str, age_min_ms: int, open_channel: OpenChannel = open_patiently
) -> AsyncIterator[admin_pb2.TransactionSummary | Unheard | Unserved]:
    """The transactions that wait for a decision, on all instances that answer."""
    listed = await _leaders(coordinators, open_channel)
    served = {leader.log_partition for leader in listed.leaders if leader.state == "serving"}
    for log_partition in range(listed.log_partition_count):
        if log_partition not in served:
            yield Unserved(log_partition=log_partition)
    for address in sorted({leader.address for leader in listed.leaders} or set(coordinators)):
        token = ""
        async with open_channel(address) as channel:
            while True:
                request = admin_pb2.ListRequest(
                    prefix=prefix, states=[transaction_pb2.PREPARED], age_min_ms=age_min_ms, page_token=token
                )
                try:
                    page = await admin_pb2_grpc.AdminStub(channel).List(request, timeout=CALL_TIMEOUT_S)
                except grpc.aio.AioRpcError as error:
                    yield Unheard(address=address, error=f"{error.code().name}: {error.details()}")
                    break
                for found in page.transactions:
                    yield found
                token = page.next_page_token
                if not token:
                    break


async def _leaders(coordinators: Sequence[str], open_channel: OpenChannel) -> admin_pb2.ListLeadersResponse:
    """As the first sees it that answers."""
    *others, last = coordinators
    for address in others:
        with suppress(grpc.aio.AioRpcError):
            return await _leaders_by(address, open_channel)
    return await _leaders_by(last, open_channel)


async def _leaders_by(address: str, open_channel: OpenChannel) -> admin_pb2.ListLeadersResponse:
    async with open_channel(address) as channel:
        request = admin_pb2.ListLeadersRequest()
        listed: admin_pb2.ListLeadersResponse = await admin_pb2_grpc.AdminStub(channel).ListLeaders(
            request, timeout=CALL_TIMEOUT_S
        )
        return listed


async def prune(dsn: str, days: int) -> int:
    """Forgets tokens of commits that are surely complete; how many."""
    import psycopg

    from oncebox.databases import PLACEHOLDERS

    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        return (await connection.execute(PLACEHOLDERS["prune"].encode(), {"days": days})).rowcount
