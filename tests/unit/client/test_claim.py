"""A claim in doubt keeps nothing alive."""

from typing import Any

import pytest

from oncebox.claim import Claim, ProducerSettings, Registered
from oncebox.errors import BrokersUnavailableError, RetriableError
from oncebox.v1 import coordinator_pb2, transaction_pb2
from oncebox.wire import TopicPartition

AHEAD = Registered(partitions=frozenset({TopicPartition("orders", 0)}))


class Coordinator:
    """Answers as told, in the place of a session."""

    def __init__(self) -> None:
        self.is_away = False
        self.calls: list[str] = []

    async def call(self, _transactional_id: str, name: str, request: Any, *, timeout_s: float) -> Any:
        self.calls.append(name)
        if self.is_away:
            raise BrokersUnavailableError("nobody answers")
        if name == "init_producer":
            return coordinator_pb2.InitProducerResponse(grant=transaction_pb2.Grant(number=9, producer_id=1, epoch=4))
        granted = transaction_pb2.Grant(number=request.grant.number + 1, producer_id=2, epoch=0)
        return coordinator_pb2.EndResponse(next=granted, next_registered=True)


def keeps(claim: Claim) -> bool:
    return claim.has_registered_ahead


async def test_what_is_registered_under_a_grant_in_doubt_is_not_kept_alive() -> None:
    """The answer to a commit is lost, and the call itself was, too: the transaction has data, and nobody will end it.
    Were it said to be alive and unused, it would never time out, and hold back every reader.
    """
    coordinator = Coordinator()
    claim = Claim(coordinator, "teller", ProducerSettings())  # type: ignore[arg-type]
    await claim.take()
    assert not keeps(claim)
    await claim.end(claim.grant, transaction_pb2.COMMITTED, ahead=AHEAD)
    assert keeps(claim)
    coordinator.is_away = True
    with pytest.raises(RetriableError):
        await claim.end(claim.grant, transaction_pb2.COMMITTED, ahead=AHEAD)
    assert not keeps(claim)
    coordinator.is_away = False
    await claim.settle()
    assert coordinator.calls[-1] == "init_producer"
    assert not keeps(claim)
