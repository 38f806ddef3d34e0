"""Every error name has a class of its own, which says what to do next."""

from typing import Any

import pytest

from oncebox import errors
from oncebox.errors import (
    AbortableError,
    AbortedError,
    ClosedError,
    CoordinatorError,
    DeliveryError,
    FatalError,
    GroupFencedError,
    OnceboxError,
    ProducerFencedError,
    RecordsRefusedError,
    RetriableError,
    TransactionTimedOutError,
    UnnamedFatalError,
    UnnamedRetriableError,
    UsageError,
    error_from,
    refused_by_broker,
)
from oncebox.v1 import transaction_pb2


@pytest.mark.parametrize("name", sorted(set(transaction_pb2.ErrorCode.keys()) - {"NONE"}))
def test_every_name_has_its_class(name: str):
    error = error_from(transaction_pb2.Error(code=name, transactional_id="t", number=3, message="because"))
    assert not isinstance(error, UnnamedFatalError | UnnamedRetriableError)
    assert sum(isinstance(error, kind) for kind in (RetriableError, AbortableError, FatalError)) == 1
    assert (error.code, error.transactional_id, error.number) == (name, "t", 3)
    assert error.advice
    assert (type(error).__doc__ or "").strip()
    assert all(part in str(error) for part in (name, "'t'", "3", "because", error.advice))


def test_a_code_of_a_newer_coordinator_is_still_an_error():
    newer: Any = 9_999
    assert isinstance(error_from(transaction_pb2.Error(code=newer, retriable=True)), UnnamedRetriableError)
    unknown = error_from(transaction_pb2.Error(code=newer))
    assert isinstance(unknown, UnnamedFatalError)
    assert unknown.code == "ERROR_9999"


def test_fenced_says_by_whom_and_a_timeout_is_told_as_one():
    owner = transaction_pb2.Owner(
        instance="other", address="10.0.0.1:1", since_ms=1_700_000_000_005, cause=transaction_pb2.ADMINISTRATOR
    )
    fenced = error_from(transaction_pb2.Error(code=transaction_pb2.PRODUCER_FENCED, owner=owner))
    assert isinstance(fenced, ProducerFencedError)
    assert fenced.owner == owner
    assert "since 2023-11-14T22:13:20.005+00:00, cause ADMINISTRATOR" in str(fenced)
    outcome = transaction_pb2.Outcome(result=transaction_pb2.ABORTED, cause=transaction_pb2.TIMEOUT)
    timed_out = error_from(transaction_pb2.Error(code=transaction_pb2.INVALID_TXN_STATE, outcome=outcome))
    assert isinstance(timed_out, TransactionTimedOutError)


@pytest.mark.parametrize(
    "code", ["MESSAGE_TOO_LARGE", "TOPIC_AUTHORIZATION_FAILED", "OUT_OF_ORDER_SEQUENCE_NUMBER", "INVALID_RECORD"]
)
def test_what_the_brokers_refuse_is_abortable_and_says_what_to_do(code: str):
    error = refused_by_broker("orders:0 refuses the records", code)
    assert isinstance(error, DeliveryError)
    assert isinstance(error, AbortableError)
    assert error.code == code
    named = code != "INVALID_RECORD"
    assert (type(error) is not RecordsRefusedError) == named
    assert error.advice.startswith("Abort")
    assert len({refused_by_broker("", each).advice for each in ("INVALID_RECORD", code)}) == 1 + named


@pytest.mark.parametrize("kind", [DeliveryError, GroupFencedError, AbortedError, UsageError, ClosedError])
def test_errors_of_the_client_say_which_transaction_and_what_to_do(kind: type[OnceboxError]):
    error = kind("because")
    assert kind.advice
    assert str(error) == f"because. {kind.advice}"
    error.about("teller", 7)
    error.about("another", 8)
    assert (error.transactional_id, error.number) == ("teller", 7)
    assert str(error) == f"because (transaction 7 of 'teller'). {kind.advice}"
    ahead = kind("because")
    ahead.about("teller", 0)
    assert "(the next transaction of 'teller')" in str(ahead)


def test_every_error_of_the_client_has_advice():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OnceboxError)]
    assert [kind for kind in kinds if not kind.advice] == [OnceboxError, CoordinatorError]
