"""What a producer does and refuses before it reaches for anybody."""

import asyncio
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oncebox import blocking
from oncebox.channels import SecureChannel
from oncebox.errors import ProducerFencedError, UsageError
from oncebox.producer import Producer, ProducerSettings
from oncebox.session import Fenced
from oncebox.v1 import coordinator_pb2, transaction_pb2
from oncebox.writer_settings import WriterSettings
from tests.support.certificates import Authority


@pytest.mark.parametrize("kind", [Producer, blocking.Producer])
def test_a_transaction_is_written_to_all_replicas(kind: type[Producer] | type[blocking.Producer]) -> None:
    """A leader that dies after its acknowledgement would leave a committed transaction with records missing."""
    leader_only = ProducerSettings(writer=WriterSettings(acks=1))
    with pytest.raises(UsageError, match="acks"):
        kind("127.0.0.1:1", "127.0.0.1:1", transactional_id="teller", settings=leader_only)
    kind("127.0.0.1:1", settings=leader_only)


def test_other_processes_reach_the_coordinators_in_the_same_way() -> None:
    channel = SecureChannel(ca_location="ca.pem", token_location="token")
    assert pickle.loads(pickle.dumps(channel)) == channel


def test_a_certificate_that_is_just_being_replaced_leaves_the_former_in_place(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    channel = SecureChannel(ca_location=str(authority.ca))
    good, former = authority.ca.read_bytes(), channel._material()
    for broken in (b"", good[:5], None):
        if broken is None:
            authority.ca.unlink()
        else:
            authority.ca.write_bytes(broken)
        assert channel._material() == former
        with pytest.raises(UsageError):
            SecureChannel(ca_location=str(authority.ca))("127.0.0.1:1")
    newer = Authority(tmp_path)
    assert channel._material()[0] == newer.ca.read_bytes() != good
    assert channel == SecureChannel(ca_location=str(authority.ca))


async def test_heartbeats_go_on_after_one_that_could_not_be_sent() -> None:
    class Used:
        """Stands in for Claim: something is registered under its grant."""

        error = None
        has_registered_ahead = True
        grant = transaction_pb2.Grant(number=7)

        def __init__(self) -> None:
            self.beats = 0
            self.renewals = asyncio.Event()

        async def heartbeat(self, grant: object, _begun_ms_ago: object, _timeout_s: float) -> object:
            self.beats += 1
            if self.beats == 1:
                raise UsageError("ca.pem: No such file or directory")
            return grant

        def renewed(self, _grant: object) -> None:
            self.renewals.set()

    claim: Any = Used()
    settings = ProducerSettings(transaction_timeout_ms=3)
    beating = asyncio.create_task(
        Producer("127.0.0.1:1", "127.0.0.1:1", transactional_id="t", settings=settings)._beat(claim)
    )
    async with asyncio.timeout(60):
        await claim.renewals.wait()
    beating.cancel()
    await asyncio.wait([beating])


class Contested:
    """Stands in for Session: while we take the id over another does, and all who listen are told."""

    def __init__(self, number_first: int, *, is_prepared: bool = False) -> None:
        self.fenced: Fenced
        self.number_first = number_first
        # Whoever takes the id over finds number 7 so.
        self.is_prepared = is_prepared

    def tell(self, number_first: int, instance: str = "another") -> None:
        owner = transaction_pb2.Owner(instance=instance, number_first=number_first)
        self.fenced(transaction_pb2.Error(code=transaction_pb2.PRODUCER_FENCED, owner=owner))

    def listen(self, _transactional_id: str, fenced: Fenced) -> Callable[[], None]:
        self.fenced = fenced
        return lambda: None

    async def call(self, _transactional_id: str, name: str, _request: object, *, timeout_s: float) -> object:
        del timeout_s
        assert name == "init_producer"
        self.tell(self.number_first)
        grant = transaction_pb2.Grant(number=7)
        if self.is_prepared:
            prepared = coordinator_pb2.PreparedTransaction(grant=grant)
            return coordinator_pb2.InitProducerResponse(prepared=prepared)
        return coordinator_pb2.InitProducerResponse(grant=grant)

    async def close(self) -> None: ...


async def test_who_takes_an_id_over_is_fenced_by_who_comes_after_and_by_nobody_before() -> None:
    before, after = Contested(6), Contested(8)
    first, second = (Producer("127.0.0.1:1", transactional_id="t", session=each) for each in (before, after))  # type: ignore[arg-type]
    for producer in (first, second):
        await producer._claim("t")
        producer._is_running = True
    before.tell(6)
    assert (await first.begin()).number == 7
    with pytest.raises(ProducerFencedError):
        await second.begin()
    for producer in (first, second):
        await producer._close()


async def test_of_two_who_find_the_same_prepared_the_number_does_not_tell_who_came_first() -> None:
    """Heard of before we are told our own, it may have been either: our next begin will tell. Later there is no doubt,
    but of what tells of ourselves.
    """
    sessions = [Contested(first, is_prepared=True) for first in (8, 9)]
    first, second = (Producer("127.0.0.1:1", transactional_id="t", session=each) for each in sessions)  # type: ignore[arg-type]
    for producer in (first, second):
        await producer._claim("t")
        producer._is_running = True
    sessions[0].tell(8, first.instance)
    with pytest.raises(UsageError, match="recover"):
        await first.begin()
    sessions[0].tell(8)
    for producer in (first, second):
        with pytest.raises(ProducerFencedError):
            await producer.begin()
        assert producer.prepared is not None
        await producer._close()


def test_transactions_need_a_coordinator() -> None:
    with pytest.raises(UsageError, match="coordinator"):
        Producer("127.0.0.1:1", transactional_id="teller")
