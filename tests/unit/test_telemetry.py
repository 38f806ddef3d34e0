"""Counting: right, cheap, and without secrets."""

import io
import json
import logging
import time
import timeit
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from pydantic import BaseModel, SecretStr

from coordinator.core.records import Cause, Grant, Outcome, Result
from coordinator.log.measured import MeasuredStore
from coordinator.log.port import Kind, UnavailableError, Writer
from coordinator.telemetry import CATALOGUE, Histogram, Telemetry
from oncebox.logs import HIDDEN, Formatter, secrets_of
from tests.unit.core.states import id_state

# At the rate of the fastest commits measured, one takes this long; counting it may take two percent of that.
COMMIT_S = 1 / 2_600


def outcome(number: int, result: Result = Result.COMMITTED, cause: Cause = Cause.OWNER) -> Outcome:
    grant = Grant(number=number, producer_id=1, epoch=2 * number)
    return Outcome(grant=grant, result=result, cause=cause, decided_at_ms=1)


def test_histogram():
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    assert histogram.counts == [2, 1, 1]
    assert histogram.total == pytest.approx(7.65)


def test_decisions_are_counted_once_each():
    telemetry = Telemetry()
    before = replace(id_state(), outcomes=(outcome(1),))
    after = replace(before, outcomes=(outcome(1), outcome(2), outcome(3, Result.ABORTED, Cause.TIMEOUT)))
    telemetry.applied(before, after)
    telemetry.applied(after, replace(after, updated_at_ms=99))
    assert telemetry.decided == {(Result.COMMITTED, Cause.OWNER): 1, (Result.ABORTED, Cause.TIMEOUT): 1}


def test_fencing_is_counted_by_cause(caplog: pytest.LogCaptureFixture):
    telemetry = Telemetry()
    before = id_state()
    owner = replace(before.owner, number_first=before.owner.number_first + 1, cause=Cause.ADMINISTRATOR)
    with caplog.at_level(logging.INFO):
        telemetry.applied(before, replace(before, owner=owner))
    assert telemetry.fenced == {Cause.ADMINISTRATOR: 1}
    assert caplog.records[0].__dict__["transactional_id"] == before.transactional_id


class FailingStore:
    async def append(self, *_: Any) -> int:
        raise UnavailableError("no leader")


async def test_failed_appends_are_counted():
    telemetry = Telemetry()
    store = MeasuredStore(FailingStore(), telemetry)  # type: ignore[arg-type]
    with pytest.raises(UnavailableError):
        await store.append(Kind.LOG, 0, Writer(producer_id=1, epoch=0), 0, [(b"", b"")])
    assert telemetry.append_failures == {("log", "Unavailable"): 1}
    assert not telemetry.appends


def test_counting_costs_little():
    telemetry = Telemetry()
    before = replace(id_state(), outcomes=tuple(outcome(number) for number in range(1, 6)))
    after = replace(before, outcomes=tuple(outcome(number) for number in range(2, 7)))

    def count() -> None:
        telemetry.answered("End", 0, 0.004, is_commit=True)
        telemetry.applied(before, after)

    cost_s = min(timeit.repeat(count, timer=time.process_time, number=2_000, repeat=20)) / 2_000
    assert cost_s < 0.02 * COMMIT_S, f"{cost_s * 1e6:.2f} µs"


def test_the_catalogue_has_each_name_once():
    names = [metric.name for metric in CATALOGUE]
    assert len(set(names)) == len(names)
    assert all(metric.help.endswith(".") for metric in CATALOGUE)


class Database(BaseModel):
    dsn: SecretStr


class Settings(BaseModel):
    database: Database
    password: SecretStr | None = None
    name: str = "public"


def lines(secrets: Sequence[str], *, as_json: bool) -> Any:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Formatter(as_json=as_json, secrets=secrets))
    logger = logging.Logger("x")  # noqa: LOG001 - not of the tree, so that nothing else hears of it
    logger.addHandler(handler)
    return logger, stream


@pytest.mark.parametrize("as_json", [True, False])
def test_secrets_are_blotted_out_wherever_they_come_from(as_json):
    settings = Settings(database=Database(dsn=SecretStr("postgresql://me:hunter2@db/x")), password=SecretStr("s3cret"))
    logger, stream = lines(list(secrets_of(settings)), as_json=as_json)
    logger.warning("cannot connect with s3cret to postgresql://me:other-one@db/x, Bearer aaa.bbb.ccc")
    logger.warning("host=db password=in-words user=me; password = 'quoted one'")
    try:
        raise ValueError("postgresql://me:hunter2@db/x")
    except ValueError:
        logger.exception("it failed", extra={"transactional_id": "orders", "number": 7})
    text = stream.getvalue()
    for secret in ("s3cret", "hunter2", "other-one", "aaa.bbb.ccc", "in-words", "quoted one"):
        assert secret not in text
    if as_json:
        last = json.loads(text.splitlines()[-1])
        assert (last["transactional_id"], last["number"], last["level"]) == ("orders", 7, "ERROR")
    else:
        assert "transactional_id='orders' number=7" in text


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("secret", ['quo"ted-secret', "back\\slashed-secret", """both'"\\quotes-secret"""])
def test_so_are_those_that_look_otherwise_when_they_are_quoted(secret: str, as_json: bool):
    logger, stream = lines([secret], as_json=as_json)
    logger.warning("plain %s, quoted %r", secret, secret)
    try:
        raise KeyError(secret)
    except KeyError:
        logger.exception("it failed", extra={"transactional_id": secret})
    text = stream.getvalue()
    assert "-secret" not in text
    assert text.count(HIDDEN) >= 4
    assert not as_json or [json.loads(line)["message"] for line in text.splitlines()][1] == "it failed"
