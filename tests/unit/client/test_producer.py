"""What a producer refuses before it reaches for anybody."""

import pickle

import pytest

from oncebox import blocking
from oncebox.channels import SecureChannel
from oncebox.errors import UsageError
from oncebox.producer import Producer, ProducerSettings
from oncebox.writer_settings import WriterSettings


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


def test_transactions_need_a_coordinator() -> None:
    with pytest.raises(UsageError, match="coordinator"):
        Producer("127.0.0.1:1", transactional_id="teller")
