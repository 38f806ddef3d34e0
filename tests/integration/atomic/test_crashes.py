"""The crash matrix: the service, the database, the coordinator, each at every step. (Brokers: test_brokers.)"""

import asyncio
import json
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

import oncebox
from oncebox import resolver
from oncebox.atomic_commit import InDoubtError, PendingError
from oncebox.databases import _AsyncPsycopg
from oncebox.local import LocalPostgres
from oncebox.local.ports import free_ports
from proof.faults.process import ChildProcess
from tests.integration.atomic.conftest import Bank, agree, connect, make_bank, transfer
from tests.integration.atomic.killed import KINDS, POINTS, at, opened, opened_blocking, transfer_blocking
from tests.integration.atomic.killed import transfer as transfer_once
from tests.support.coordinator import Coordinators


@pytest.mark.parametrize(
    ("by", "kind"), [("resolve", "psycopg"), ("recover", "psycopg"), *(("recover", kind) for kind in list(KINDS)[1:])]
)
async def test_the_client_is_killed_at_every_step(bank: Bank, tmp_path: Path, by: str, kind: str):
    """The crash matrix: whoever comes next finds both sides saying the same."""
    given = {
        "servers": bank.one.bootstrap_servers,
        "addresses": bank.one.addresses,
        "dsn": bank.dsn,
        "id": bank.transactional_id,
        "topic": bank.topic,
    }
    expected = set()
    for point, (_, _, _, happens) in POINTS.items():
        child = ChildProcess(
            [sys.executable, "-m", "tests.integration.atomic.killed", json.dumps(given), kind, point, point],
            log=tmp_path / f"{point}.log",
            directory=Path(__file__).parents[3],
        )
        with child:
            assert await asyncio.to_thread(child.wait) == -9, child.log_tail()
        if happens:
            expected.add(point)
        if by == "recover":
            await asyncio.to_thread(recover_blocking, bank, kind) if "blocking" in kind else await recover(bank, kind)
        else:
            await resolver.resolve(bank.dsn, bank.one.addresses, prefix=bank.transactional_id, older_than_s=0)
        left = [each async for each in resolver.prepared(bank.one.addresses, bank.transactional_id, 0)]
        assert left == []
        assert bank.in_database() == expected
    async with bank.producer():
        pass  # aborts what "before prepare" left open
    await agree(bank, *expected)


async def recover(bank: Bank, kind: str) -> None:
    async with bank.producer() as producer, opened(bank, kind) as (connection, _):
        await oncebox.recover(producer, connection)


def recover_blocking(bank: Bank, kind: str) -> None:
    with bank.blocking_producer() as producer, opened_blocking(bank, kind) as (connection, _):
        oncebox.recover(producer, connection)


# Where a session of the database ends, and whether the transfer happens all the same.
LOST = {
    "before prepare": False,
    "before the database's commit": False,
    "after the database's commit": True,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("point", LOST)
async def test_the_databases_session_ends_at_a_step(bank: Bank, monkeypatch, kind: str, point: str):
    """The service finds out by itself, on another connection of the same kind, and goes on."""
    end_sessions = (
        "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
    )

    def end() -> Any:
        with psycopg.connect(bank.dsn, autocommit=True) as connection:
            connection.execute(end_sessions)
        if LOST[point]:
            raise psycopg.OperationalError("the answer is lost")

    async def end_soon() -> None:
        await asyncio.to_thread(end)

    is_blocking, names = "blocking" in kind, ["in doubt", "after"]
    with monkeypatch.context() as patch, nullcontext() if LOST[point] else pytest.raises(Exception, match="terminat"):

        def before() -> None:
            patch.setattr(*at(point, end if is_blocking else end_soon, kind))

        if is_blocking:
            await asyncio.to_thread(transfer_blocking, bank, kind, names[0], before)
        else:
            await transfer_once(bank, kind, names[0], before)
    left = [each async for each in resolver.prepared(bank.one.addresses, bank.transactional_id, 0)]
    assert left == []
    async with bank.producer() as producer, await connect(bank) as connection:
        await transfer(bank, producer, connection, names[1])
    await agree(bank, *names[0 if LOST[point] else 1 :])


@pytest.mark.parametrize("lost", ["request", "answer"])
async def test_the_databases_connection_breaks_at_the_commit(bank: Bank, monkeypatch, lost: str):
    real = _AsyncPsycopg.commit
    async with bank.producer() as producer, await connect(bank) as connection:
        await transfer(bank, producer, connection, "before")

        async def broken(self: _AsyncPsycopg) -> None:
            if self._connection is not connection:
                await real(self)
                return
            if lost == "answer":
                await real(self)
            await connection.close()
            raise psycopg.OperationalError("the connection is lost")

        monkeypatch.setattr(_AsyncPsycopg, "commit", broken)
        if lost == "request":
            with pytest.raises(psycopg.OperationalError, match="is lost"):
                await transfer(bank, producer, connection, "in doubt")
        else:
            await transfer(bank, producer, connection, "in doubt")
        monkeypatch.undo()
        async with await connect(bank) as again:
            await transfer(bank, producer, again, "after")
    await agree(bank, *(["before", "after"] + (["in doubt"] if lost == "answer" else [])))


# Where a commit of the database is under way when the server is gone.
IN_DOUBT = [point for point in POINTS if "Kafka" not in point]


async def test_the_database_server_crashes_at_every_step(shared_coordinator: Coordinators, tmp_path: Path, monkeypatch):
    with LocalPostgres(tmp_path / "postgres") as server:
        bank = make_bank(server.dsn, shared_coordinator)
        expected = set()
        async with bank.producer() as producer:
            for point, (_, _, _, happens) in POINTS.items():
                is_in_doubt = point in IN_DOUBT

                async def crash(point: str = point) -> None:
                    await asyncio.to_thread(server.kill)
                    if point == "after the database's commit":
                        raise psycopg.OperationalError("the answer is lost")

                async with await connect(bank) as connection:
                    # As careless as can be: the commit is made durable all the same.
                    await connection.execute("SET synchronous_commit = off")
                    await connection.commit()
                    with monkeypatch.context() as patch, suppress(psycopg.OperationalError):
                        patch.setattr(*at(point, crash))
                        if is_in_doubt:
                            with pytest.raises(InDoubtError, match="recover"):
                                await transfer(bank, producer, connection, point, settle_s=0.3)
                        else:
                            await transfer(bank, producer, connection, point)
                await asyncio.to_thread(server.restart)
                async with await connect(bank) as connection:
                    decision = await oncebox.recover(producer, connection)
                if is_in_doubt:
                    assert decision == ("committed" if happens else "aborted"), point
                if happens:
                    expected.add(point)
                assert bank.in_database() == expected
        await agree(bank, *expected)


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=[] if point.startswith("before") and "commit" in point else pytest.mark.long)
        for point in POINTS
    ],
)
async def test_the_coordinator_is_killed_at_every_step(
    coordinators: Coordinators, database: str, monkeypatch, point: str
):
    # The next instance is found at an address that is known from the start: the same one, which no connection takes.
    coordinators._settings["listen_port"] = str(free_ports(1)[0])
    coordinators.start()
    bank = make_bank(database, coordinators)
    starting: list[asyncio.Task[Any]] = []

    async def replaced() -> None:
        await asyncio.to_thread(coordinators.processes[0].kill)
        starting.append(asyncio.create_task(asyncio.to_thread(coordinators.start)))

    async with bank.producer() as producer, await connect(bank) as connection:
        monkeypatch.setattr(*at(point, replaced))
        await transfer(bank, producer, connection, "a")
        monkeypatch.undo()
        assert len(starting) == 1
        await starting[0]
        await transfer(bank, producer, connection, "b")
    await agree(bank, "a", "b")


async def test_a_coordinator_that_stays_away_leaves_it_pending(bank: Bank, monkeypatch):
    from oncebox.errors import CoordinatorNotAvailableError
    from oncebox.transaction import Transaction
    from oncebox.v1 import transaction_pb2

    async def away(*_args: Any, **_named: Any) -> None:
        raise CoordinatorNotAvailableError(transaction_pb2.Error(message="gone"))

    async with bank.producer() as producer, await connect(bank) as connection:
        with monkeypatch.context() as patch:
            patch.setattr(Transaction, "commit", away)
            with pytest.raises(PendingError, match="the database has committed"):
                await transfer(bank, producer, connection, "a")
        assert await asyncio.to_thread(bank.in_kafka, has_open=True) == []
        assert await oncebox.recover(producer, connection) == "committed"
    await agree(bank, "a")
