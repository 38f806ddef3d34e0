"""The application's database, as far as it decides: tokens under a unique key, which the real settle() asks for.

A row that is not committed yet holds its key, and nobody sees it. A session that does nothing for too long is ended,
and its row with it. Requests travel as all others do: a COMMIT may come when its client has long given it up, or never.
"""

import asyncio
from collections.abc import Callable, Mapping
from math import inf
from random import Random
from typing import Any

from oncebox.atomic_commit import drive
from oncebox.atomic_commit import settle as settle_steps
from oncebox.transaction_tools import TransactionName
from proof.checker import history as h
from proof.sim.loop import VirtualLoop
from proof.sim.network import Network, Reply
from proof.sim.recorder import Recorder

DATABASE_ID = "the only one"
TIMEOUT_S = 1.0
# A session ends after that, its client alive or not, if it has a row that it does not commit.
IDLE_MAX_S = 5.0

Token = tuple[str, int]


class DatabaseError(Exception):
    """It says no: another session holds the key, or this one has ended."""


class Database:
    def __init__(self, loop: VirtualLoop, rng: Random, network: Network, recorder: Recorder) -> None:
        self.network = network
        self._loop = loop
        self._rng = rng
        self._recorder = recorder
        # Whether the application has committed, or another has decided in its place.
        self._tokens: dict[Token, bool] = {}
        self._held: dict[Token, Session] = {}

    def connect(self) -> "Session":
        return Session(self)

    def insert(self, session: "Session", token: Token, *, committed: bool, reply: Reply) -> None:
        if session.has_ended:
            reply(DatabaseError("the session has ended"))
        elif token in self._tokens:
            reply([])
        elif self._held.setdefault(token, session) is not session:
            reply(DatabaseError("another session holds the key"))
        else:
            session.row = token, committed
            self._loop.after(IDLE_MAX_S * self._rng.random(), self.end, session)
            reply([("committed" if committed else "aborted",)])

    def result(self, token: Token, reply: Reply) -> None:
        reply([("committed" if self._tokens[token] else "aborted",)] if token in self._tokens else [])

    def commit(self, session: "Session", reply: Reply) -> None:
        if session.has_ended:
            reply(DatabaseError("the session has ended"))
            return
        if session.row is not None:
            token, committed = session.row
            self._tokens[token] = committed
            self._recorder.history.append(
                h.DatabaseDecided(transactional_id=token[0], number=token[1], committed=committed)
            )
        self.end(session)
        reply([])

    def end(self, session: "Session") -> None:
        """Without a commit its row is gone."""
        session.has_ended = True
        if session.row is not None:
            self._held.pop(session.row[0], None)
            session.row = None


class Session:
    """A connection: of oncebox.databases.Database, what settle() needs."""

    def __init__(self, database: Database) -> None:
        # As the database knows it.
        self.row: tuple[Token, bool] | None = None
        self.has_ended = False
        self._database = database
        self._commits = False

    def begin(self) -> None:
        """Goes with the first statement."""

    async def execute(self, name: str, values: Mapping[str, Any]) -> list[Any]:
        database = self._database
        match name:
            case "commit_token" | "abort_token":
                token, committed = _token(values), name == "commit_token"
                return await self._ask(lambda reply: database.insert(self, token, committed=committed, reply=reply))
            case "result":
                return await self._ask(lambda reply: database.result(_token(values), reply))
            case _:
                return [(DATABASE_ID,)]

    async def commit(self) -> None:
        self._commits = True
        await self._ask(lambda reply: self._database.commit(self, reply))

    def close(self) -> None:
        """What comes behind a COMMIT that is late comes later still: the session ends with that, or by itself."""
        if not self._commits:
            self._database.end(self)

    def another(self) -> "Session":
        return self._database.connect()

    def sleep(self, seconds: float) -> Any:
        return asyncio.sleep(seconds)

    async def _ask(self, serve: Callable[[Reply], None]) -> list[Any]:
        rows: list[Any] = await self._database.network.ask(serve, timeout_s=TIMEOUT_S)
        return rows


def _token(values: Mapping[str, Any]) -> Token:
    return values["transactional_id"], values["number"]


async def settle(database: Database, transactional_id: str, number: int) -> bool:
    """What the database says of a prepared transaction, once somebody has decided there; whether it has committed."""
    name = TransactionName(transactional_id=transactional_id, number=number)
    steps = settle_steps(database.connect(), DATABASE_ID, name, inf)  # type: ignore[arg-type]
    return await drive(steps) == "committed"
