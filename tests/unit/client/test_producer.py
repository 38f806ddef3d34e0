"""What a producer does and refuses before it reaches for anybody."""

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest

from oncebox import blocking
from oncebox.channels import SecureChannel
from oncebox.errors import UsageError
from oncebox.producer import Producer, ProducerSettings
from oncebox.v1 import transaction_pb2
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


def test_transactions_need_a_coordinator() -> None:
    with pytest.raises(UsageError, match="coordinator"):
        Producer("127.0.0.1:1", transactional_id="teller")
