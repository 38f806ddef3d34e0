"""Several instances of one service, one of which has not heard of the others."""

from typing import Any

import pytest

import oncebox
from oncebox import resolver
from oncebox.atomic_commit import PendingError
from oncebox.errors import CoordinatorNotAvailableError, ProducerFencedError
from oncebox.transaction import Transaction
from oncebox.v1 import transaction_pb2
from tests.integration.atomic.conftest import INSERT, Bank, agree, connect, transfer


async def leave_prepared(bank: Bank, producer: Any, connection: Any, name: str, monkeypatch: Any) -> None:
    """The database has committed, and Kafka is not told."""

    async def away(*_args: Any, **_named: Any) -> None:
        raise CoordinatorNotAvailableError(transaction_pb2.Error(message="gone"))

    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "commit", away)
        with pytest.raises(PendingError):
            await transfer(bank, producer, connection, name)


async def prepared_numbers(bank: Bank) -> list[int]:
    listed = resolver.prepared(bank.one.addresses, bank.transactional_id, 0)
    return [each.number async for each in listed if not isinstance(each, resolver.Unheard | resolver.Unserved)]


async def test_a_revived_instance_leaves_what_a_newer_one_has_prepared(bank: Bank, monkeypatch):
    async with await connect(bank) as connection:
        async with bank.producer() as first:
            await leave_prepared(bank, first, connection, "by the first", monkeypatch)
        async with bank.producer() as second, await connect(bank) as another:
            assert await oncebox.recover(second, connection) == "committed"
            async with bank.producer() as third:
                await leave_prepared(bank, third, another, "by the third", monkeypatch)
            [number] = await prepared_numbers(bank)
            # It stood still, and missed that it was fenced.
            second._tools.claim.error = None
            with pytest.raises(ProducerFencedError) as fenced:
                await transfer(bank, second, connection, "by the second")
            assert fenced.value.owner.instance == third.instance
            assert await oncebox.recover(second, connection) is None
            assert await prepared_numbers(bank) == [number]
        async with bank.producer() as fourth:
            assert await oncebox.recover(fourth, connection) == "committed"
            await transfer(bank, fourth, connection, "by the fourth")
    await agree(bank, "by the first", "by the third", "by the fourth")


@pytest.mark.parametrize("heard", [True, False])
async def test_of_two_who_find_the_same_prepared_the_newer_goes_on(bank: Bank, monkeypatch, heard: bool):
    async with await connect(bank) as connection:
        async with bank.producer() as first:
            await leave_prepared(bank, first, connection, "by the first", monkeypatch)
        async with bank.producer() as older, bank.producer() as newer:
            assert await oncebox.recover(newer, connection) == "committed"
            if not heard:
                older._tools.claim.error = None
                # Either may decide it, as the row says.
                assert await oncebox.recover(older, connection) == "committed"
            async with oncebox.atomic(newer, connection) as (transaction, _):
                await transaction.send(bank.topic, b"by the newer")
                await connection.execute(INSERT, ["by the newer"])
                await transaction.flush()
                with pytest.raises(ProducerFencedError) as fenced:
                    await older.begin()
                assert fenced.value.owner.instance == newer.instance
            await transfer(bank, newer, connection, "by the newer, again")
    await agree(bank, "by the first", "by the newer", "by the newer, again")
