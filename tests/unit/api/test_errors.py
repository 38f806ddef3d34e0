"""Refusals as clients see them: every code has a status, every failed call its typed error, and no more than that."""

import logging

import grpc
import pytest

from coordinator.api.errors import STATUS, unexpected
from coordinator.api.replies import error_of
from coordinator.core.commands import ErrorCode, Refused
from coordinator.core.records import Cause, Grant, Outcome, Owner, Result
from oncebox.v1 import coordinator_pb2 as pb
from oncebox.v1 import transaction_pb2
from tests.unit.api.bench import Bench, refused_by


def test_every_error_of_the_contract_has_a_status():
    assert set(STATUS) == {code for code in transaction_pb2.ErrorCode.values() if code != transaction_pb2.NONE}
    assert grpc.StatusCode.OK not in STATUS.values()


def test_all_that_a_refusal_says_is_told():
    owner = Owner(instance="b", address="10.0.0.2:1", since_ms=5, number_first=9, cause=Cause.NEWER_INSTANCE)
    grant = Grant(number=3, producer_id=1, epoch=2)
    outcome = Outcome(grant=grant, result=Result.ABORTED, cause=Cause.TIMEOUT, decided_at_ms=7)
    refused = Refused(
        code=ErrorCode.PRODUCER_FENCED,
        message="m" * 5_000,
        retriable=True,
        owner=owner,
        outcome=outcome,
        leader_address="elsewhere:1",
    )
    error = error_of(refused, "tid", 3)
    assert (error.transactional_id, error.number, error.retriable) == ("tid", 3, True)
    assert error.leader_address == "elsewhere:1"
    assert (error.owner.instance, error.owner.number_first) == ("b", 9)
    assert error.owner.cause == transaction_pb2.NEWER_INSTANCE
    assert (error.outcome.transactional_id, error.outcome.number) == ("tid", 3)
    assert (error.outcome.result, error.outcome.cause) == (transaction_pb2.ABORTED, transaction_pb2.TIMEOUT)
    assert len(error.message) == 1_000


def test_what_nobody_expected_stands_in_the_log_alone(caplog):
    with caplog.at_level(logging.ERROR):
        refused = unexpected(ValueError("password=hunter2"), "End")
    assert refused.code is ErrorCode.UNKNOWN_SERVER_ERROR
    assert "hunter2" not in refused.message
    assert "Traceback" not in refused.message
    error_id = refused.message.split()[2].rstrip(":")
    assert error_id in caplog.text
    assert "hunter2" in caplog.text


async def test_an_unexpected_exception_is_internal_and_tells_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise ValueError("password=hunter2")

    monkeypatch.setattr(bench.calls, "call", broken)
    call = bench.coordinator.GetOutcome(pb.GetOutcomeRequest(transactional_id="tid", number=1))
    status, error = await refused_by(call)
    assert status is grpc.StatusCode.INTERNAL
    assert "hunter2" not in await call.details()
    assert error.code == transaction_pb2.UNKNOWN_SERVER_ERROR
    assert "internal error" in error.message


@pytest.mark.parametrize("code", list(ErrorCode))
async def test_each_refusal_reaches_the_client_by_name(bench: Bench, code):
    bench.calls.refusal = Refused(code=code, message="so it is: ä", retriable=True)
    call = bench.coordinator.End(
        pb.EndRequest(
            transactional_id="tid",
            grant=transaction_pb2.Grant(number=4, producer_id=1),
            result=transaction_pb2.ABORTED,
        )
    )
    status, error = await refused_by(call)
    assert status is STATUS[code]
    assert (error.code, error.message, error.retriable) == (code, "so it is: ä", True)
    assert (error.transactional_id, error.number) == ("tid", 4)
    assert await call.details() == f"{code.name}: so it is: ä"
