"""One noun for one thing: the core's names and numbers are those of the public contract."""

from enum import IntEnum

import pytest
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from coordinator.core.commands import ErrorCode
from coordinator.core.records import Cause, Origin, Result
from coordinator.core.state import TransactionState
from oncebox.v1 import log_pb2, transaction_pb2
from oncebox.wire import ErrorCode as KafkaErrorCode


@pytest.mark.parametrize(
    ("ours", "theirs", "unspecified"),
    [
        pytest.param(TransactionState, transaction_pb2.TransactionState, {"TRANSACTION_STATE_UNSPECIFIED"}, id="state"),
        pytest.param(Result, transaction_pb2.Result, set(), id="result"),
        pytest.param(Cause, transaction_pb2.Cause, set(), id="cause"),
        pytest.param(Origin, log_pb2.IdState.Origin, set(), id="origin"),
    ],
)
def test_enum_agrees_with_the_contract(ours: type[IntEnum], theirs: EnumTypeWrapper, unspecified: set[str]) -> None:
    """Every name and number of the contract is the core's, and the other way round."""
    contract = {name.removeprefix("CAUSE_"): number for name, number in theirs.items() if name not in unspecified}
    assert {member.name: member.value for member in ours} == contract


def test_the_core_answers_only_errors_of_the_contract() -> None:
    """Each error that the core names is in the contract under the same number."""
    contract = dict(transaction_pb2.ErrorCode.items())
    assert {code.name: contract.get(code.name) for code in ErrorCode} == {code.name: code.value for code in ErrorCode}


def test_errors_have_kafkas_names_and_numbers() -> None:
    """Where Kafka has the error, name and number are Kafka's; ours start at 10001."""
    kafka = {code.name: code.value for code in KafkaErrorCode}
    for code in ErrorCode:
        assert code.value == kafka.get(code.name) or (code.value > 10_000 and code.name not in kafka), code
