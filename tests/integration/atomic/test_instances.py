"""Several instances of one service, one of which has not heard of the others."""

from typing import Any

import pytest

import oncebox
from oncebox import resolver
from oncebox.atomic_commit import PendingError
from oncebox.errors import CoordinatorNotAvailableError, UsageError
from oncebox.transaction import Transaction
from oncebox.v1 import transaction_pb2
from tests.integration.atomic.conftest import Bank, agree, connect, transfer


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
            with pytest.raises(UsageError, match="recover"):
                await transfer(bank, second, connection, "by the second")
            assert await prepared_numbers(bank) == [number]
            assert await oncebox.recover(second, connection) == "committed"
            await transfer(bank, second, connection, "by the second")
    await agree(bank, "by the first", "by the second", "by the third")
