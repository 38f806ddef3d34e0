"""`oncebox outbox resolve` with something to decide; and coordinators that do not answer."""

import asyncio
import subprocess
import sys
from typing import Any

import psycopg

from oncebox import resolver
from oncebox.session import open_plain_channel
from proof.bench.instances import wait_until_shared
from tests.integration.atomic.conftest import Bank, agree, connect, make_bank
from tests.integration.atomic.test_resolver import leave_prepared
from tests.support.coordinator import LOG_PARTITIONS, Coordinators

NOBODY = "127.0.0.1:9"
# The command as it is, but for its patience with a commit that hangs.
IMPATIENT = """
import functools
from oncebox import atomic_commit, cli, resolver
atomic_commit.LOCK_TIMEOUT_S = 0.1
resolver.resolve = functools.partial(resolver.resolve, settle_s=0.1)
cli.main()
"""
DECIDED = "INSERT INTO oncebox.atomic_token VALUES (%s, %s, 'committed')"


def run(bank: Bank, *arguments: str, coordinators: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", IMPATIENT, "outbox", "resolve", "--dsn", bank.dsn]
    command += ["--coordinators", ",".join(coordinators), "--older-than-s", "0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


async def leave_some(bank: Bank, count: int) -> list[tuple[str, int]]:
    prefix, left = bank.transactional_id, []
    for index in range(count):
        bank.transactional_id = f"{prefix}-{index}"
        name = await leave_prepared(bank, str(index))
        left.append((name.transactional_id, name.number))
    bank.transactional_id = prefix
    return left


async def test_the_command_decides_as_the_database_says(bank: Bank):
    aborted, committed, hanging = await leave_some(bank, 3)
    prefix, addresses = ("--prefix", bank.transactional_id), [NOBODY, *bank.one.addresses]
    async with await connect(bank) as holding:
        with psycopg.connect(bank.dsn) as connection:
            connection.execute(DECIDED, committed)
            connection.execute("INSERT INTO transfer (name) VALUES ('1')")
        await holding.execute(DECIDED, hanging)
        done = await asyncio.to_thread(run, bank, *prefix, coordinators=addresses)
        assert f"{aborted[0]} transaction {aborted[1]}: aborted\n" in done.stdout
        assert f"{committed[0]} transaction {committed[1]}: committed\n" in done.stdout
        assert f"{hanging[0]} transaction {hanging[1]}: not decided: " in done.stdout
        assert "2 decided\n" in done.stdout
        assert (done.returncode, done.stderr) == (
            1,
            "oncebox: 1 could not be decided, 0 coordinators do not answer: run it again\n",
        )
        await holding.rollback()
    done = await asyncio.to_thread(run, bank, *prefix, coordinators=addresses)
    assert (done.returncode, done.stdout) == (0, f"{hanging[0]} transaction {hanging[1]}: aborted\n1 decided\n")
    await agree(bank, "1")


async def test_no_coordinator_at_all_is_told(bank: Bank):
    done = await asyncio.to_thread(run, bank, coordinators=[NOBODY])
    assert done.returncode == 1
    assert done.stderr.startswith("oncebox: the coordinator: ")
    assert done.stderr.count("\n") == 1


async def test_a_leader_that_is_away_holds_up_no_other(database: str, coordinators: Coordinators):
    for _ in range(2):
        await asyncio.to_thread(coordinators.start)
    await asyncio.to_thread(wait_until_shared, coordinators.addresses, LOG_PARTITIONS)
    bank = make_bank(database, coordinators)
    first, second = coordinators.addresses
    prefix, left = bank.transactional_id, set[str]()
    while not await leads_some(prefix, first) or not await leads_some(prefix, second):
        bank.transactional_id = f"{prefix}-{len(left)}"
        left.add((await leave_prepared(bank, "a")).transactional_id)

    def without_second(address: str) -> Any:
        return open_plain_channel(NOBODY if address == second else address)

    async def aborted(**given: Any) -> tuple[set[str], list[str]]:
        found = await resolver.resolve(bank.dsn, [second, first], prefix=prefix, older_than_s=0, **given)
        assert {each.result for each in found.resolved} == {"aborted"}
        return {each.transactional_id for each in found.resolved}, [each.address for each in found.unheard]

    by_first, unheard = await aborted(open_channel=without_second)
    assert unheard == [second]
    by_second, unheard = await aborted()
    assert unheard == []
    assert (by_first | by_second, by_first & by_second) == (left, set())


async def leads_some(prefix: str, address: str) -> bool:
    """Whether this instance leads any that is prepared."""

    def only(asked: str) -> Any:
        return open_plain_channel(asked if asked == address else NOBODY)

    found = [each async for each in resolver.prepared([address], prefix, 0, only)]
    return any(not isinstance(each, resolver.Unheard | resolver.Unserved) for each in found)
