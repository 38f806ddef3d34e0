"""An instance as operators run it: TLS between all, rules, metrics, JSON logs, everything reloaded while it works."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from prometheus_client.parser import text_string_to_metric_families

from coordinator.telemetry import CATALOGUE, PREFIX
from oncebox import Producer, ProducerSettings, SecureChannel
from oncebox.errors import (
    AuthenticationFailedError,
    CoordinatorNotAvailableError,
    ProducerFencedError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailedError,
)
from oncebox.v1 import admin_pb2, gateway_pb2, transaction_pb2
from oncebox.v1.admin_pb2_grpc import AdminStub
from oncebox.v1.gateway_pb2_grpc import GatewayStub
from tests.support.certificates import AUDIENCE, ISSUER, Authority, claims, public_pem, token
from tests.support.coordinator import Coordinators, values

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from oncebox.local import LocalKafka
    from tests.support.kafka import TopicFactory

RULES = """\
rules:
  - principals: ["cert:coordinator"]
    peer: true
  - principals: ["cert:orders", "token:orders"]
    transactional_ids: [{prefix: orders}]
    topics: [{prefix: test-}]
  - principals: ["cert:operator"]
    admin: write
"""
QUICK = ProducerSettings(call_timeout_ms=20_000)


class Secured:
    """Two instances that trust one authority, and clients of it."""

    def __init__(self, kafka: LocalKafka, folder: Path) -> None:
        self.kafka = kafka
        self.folder = folder
        self.authority = Authority(folder)
        self.server = self.authority.issue("coordinator")
        self.token_key = ec.generate_private_key(ec.SECP256R1())
        self.rules, keys = folder / "rules.yaml", folder / "keys.pem"
        self.config = folder / "coordinator.yaml"
        self.rules.write_text(RULES)
        keys.write_bytes(public_pem(self.token_key))
        self.all = Coordinators(
            kafka.bootstrap_servers,
            folder,
            tls__certificate_location=str(self.server.certificate),
            tls__key_location=str(self.server.key),
            tls__client_ca_location=str(self.authority.ca),
            tokens__keys_location=str(keys),
            tokens__audience=AUDIENCE,
            tokens__issuer=ISSUER,
            tokens__leeway_s="0",
            rules_location=str(self.rules),
            log_format="json",
            limits__calls_per_principal="20",
        )

    def channel(self, name: str, **fields: Any) -> SecureChannel:
        pair = self.authority.issue(name)
        shown = {"certificate_location": str(pair.certificate), "key_location": str(pair.key), **fields}
        return SecureChannel(**{"ca_location": str(self.authority.ca), **shown})

    def producer(self, name: str, transactional_id: str, settings: ProducerSettings = QUICK, **fields: Any) -> Producer:
        return Producer(
            self.kafka.bootstrap_servers,
            self.all.addresses,
            transactional_id=transactional_id,
            settings=settings,
            open_channel=self.channel(name, **fields),
        )

    def signal(self, number: signal.Signals) -> None:
        for process in self.all.processes:
            os.kill(process.pid, number)

    def log(self) -> str:
        return "".join(process.log.read_text() for process in self.all.processes)

    def metrics(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        """Of all instances together."""
        summed: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for port in self.all.http_ports:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
                text = response.read().decode()
            for family in text_string_to_metric_families(text):
                summed.setdefault(f"family {family.name}", {})
                for sample in family.samples:
                    found = summed.setdefault(sample.name, {})
                    labels = tuple(sorted(sample.labels.items()))
                    found[labels] = found.get(labels, 0.0) + sample.value
        return summed


@pytest.fixture(scope="module")
def secured(kafka: LocalKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    secured = Secured(kafka, tmp_path_factory.mktemp("secured"))
    with secured.all as instances:
        instances.start()
        instances.start()
        yield secured


async def commit(producer: Producer, topic: str, *sent: bytes) -> None:
    async with producer.transaction() as transaction:
        for value in sent:
            await transaction.send(topic, value)


async def test_whom_the_rules_let_through(secured: Secured, new_topic: TopicFactory):
    topic = await asyncio.to_thread(new_topic)
    async with secured.producer("orders", "orders-1") as producer:
        await commit(producer, topic, b"1", b"2")
        with pytest.raises(TopicAuthorizationFailedError, match="rules_location"):
            await commit(producer, await asyncio.to_thread(new_topic, f"other-{topic}"), b"3")
    with pytest.raises(TransactionalIdAuthorizationFailedError, match="cert:orders"):
        await secured.producer("orders", "payments-1").start()
    with pytest.raises(TransactionalIdAuthorizationFailedError):
        await secured.producer("stranger", "orders-1").start()
    assert await asyncio.to_thread(values, secured.kafka.bootstrap_servers, topic) == [b"1", b"2"]


async def test_a_token_counts_more_than_a_certificate(secured: Secured, new_topic: TopicFactory, tmp_path: Path):
    topic = await asyncio.to_thread(new_topic)
    file = tmp_path / "token"
    file.write_text(token(secured.token_key, claims("orders")))
    async with secured.producer("stranger", "orders-token", token_location=str(file)) as producer:
        await commit(producer, topic, b"1")
    file.write_text("no.good.token")
    with pytest.raises(AuthenticationFailedError, match="token is not valid"):
        await secured.producer("orders", "orders-token", token_location=str(file)).start()


async def test_a_producer_outlives_its_tokens(secured: Secured, new_topic: TopicFactory, tmp_path: Path):
    """Each is good for eight seconds; the file always holds a newer one, and no commit fails."""
    topic = await asyncio.to_thread(new_topic)
    file, fresh = tmp_path / "token", tmp_path / "fresh"

    async def renew() -> None:
        while True:
            fresh.write_text(token(secured.token_key, claims("orders", exp=int(time.time()) + 8)))
            os.replace(fresh, file)
            await asyncio.sleep(0.5)

    renewing = asyncio.create_task(renew())
    await asyncio.sleep(0)
    ends_at_s = time.monotonic() + 14
    committed = 0
    async with secured.producer("stranger", "orders-renewed", token_location=str(file)) as producer:
        while time.monotonic() < ends_at_s:
            await commit(producer, topic, b"%d" % committed)
            committed += 1
    renewing.cancel()
    seen = await asyncio.to_thread(values, secured.kafka.bootstrap_servers, topic)
    assert sorted(seen) == sorted(b"%d" % number for number in range(committed))


async def test_without_a_certificate_there_is_nobody_to_talk_to(secured: Secured):
    plain = Producer(
        secured.kafka.bootstrap_servers,
        secured.all.addresses,
        transactional_id="orders-1",
        settings=ProducerSettings(call_timeout_ms=1_500),
    )
    with pytest.raises(CoordinatorNotAvailableError):
        await plain.start()


async def test_instances_know_each_other(secured: Secured):
    async with secured.channel("operator")(secured.all.addresses[0]) as channel, asyncio.timeout(60):
        while True:  # partitions may be on their way from one to the other
            leaders = (await AdminStub(channel).ListLeaders(admin_pb2.ListLeadersRequest())).leaders
            if len({leader.address for leader in leaders}) == 2 and len(leaders) == 4:
                break
            await asyncio.sleep(0.05)


async def test_the_gateway_asks_the_same_gate(secured: Secured, new_topic: TopicFactory):
    """Also where one instance hands a batch on to the other, which leads its id."""
    topic, foreign = await asyncio.to_thread(new_topic), await asyncio.to_thread(new_topic, f"other-{uuid4().hex}")

    def batch(name: str, *topics: str) -> gateway_pb2.CommitBatchRequest:
        records = [gateway_pb2.Record(topic=each, value=name.encode()) for each in topics]
        return gateway_pb2.CommitBatchRequest(transactional_id=name, request_id=uuid4().hex, records=records)

    names = [f"orders-batch-{number}" for number in range(8)]
    for address in secured.all.addresses:
        async with secured.channel("orders")(address) as channel:
            stub = GatewayStub(channel)
            for name in names:
                await committed_once(stub, batch(name, topic))
            for refused in (batch("orders-batch-0", topic, foreign), batch("payments", topic)):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await stub.CommitBatch(refused, timeout=30)
                assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
            stream = stub.Transact()
            answers = []
            for request in (
                gateway_pb2.TransactRequest(request_id=1, open=gateway_pb2.Open(transactional_id="payments")),
                gateway_pb2.TransactRequest(request_id=2, open=gateway_pb2.Open(transactional_id="orders-stream")),
                gateway_pb2.TransactRequest(request_id=3, begin=gateway_pb2.Begin()),
                gateway_pb2.TransactRequest(
                    request_id=4, send=gateway_pb2.Send(records=[gateway_pb2.Record(topic=foreign, value=b"x")])
                ),
                gateway_pb2.TransactRequest(request_id=5, abort=gateway_pb2.AbortTransaction()),
            ):
                await stream.write(request)
                answers.append(await stream.read())
            stream.cancel()
            codes = [transaction_pb2.ErrorCode.Name(answer.error.code) for answer in answers]
            assert codes[:4] == ["TRANSACTIONAL_ID_AUTHORIZATION_FAILED", "NONE", "NONE", "TOPIC_AUTHORIZATION_FAILED"]
    seen = await asyncio.to_thread(values, secured.kafka.bootstrap_servers, topic)
    assert sorted(seen) == sorted(2 * [name.encode() for name in names])
    assert await asyncio.to_thread(values, secured.kafka.bootstrap_servers, foreign) == []


async def committed_once(stub: GatewayStub, request: gateway_pb2.CommitBatchRequest) -> None:
    """Asked again while partitions are on their way from one instance to the other, as clients do."""
    async with asyncio.timeout(60):
        while True:
            try:
                await stub.CommitBatch(request, timeout=30)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            else:
                return
            await asyncio.sleep(0.05)


async def test_everything_changes_while_it_works(secured: Secured, new_topic: TopicFactory):
    """Certificates and rules, with a producer that commits all the time; the log level: test_reload.py."""
    topic = await asyncio.to_thread(new_topic)
    stopped = asyncio.Event()
    committed = 0

    async def work() -> None:
        nonlocal committed
        async with secured.producer("orders", "orders-busy") as producer:
            while not stopped.is_set():
                await commit(producer, topic, b"%d" % committed)
                committed += 1

    working = asyncio.create_task(work())
    renewed = secured.authority.issue("coordinator", file="renewed")
    os.replace(renewed.key, secured.server.key)
    os.replace(renewed.certificate, secured.server.certificate)
    secured.rules.write_text(RULES.replace("{prefix: orders}", "{prefix: orders}, late"))
    secured.signal(signal.SIGHUP)
    await until(lambda: secured.log().count("settings read anew") >= 2)
    async with secured.producer("orders", "late") as producer:
        await commit(producer, topic, b"late")
    secured.rules.write_text("rules: nonsense")
    secured.signal(signal.SIGHUP)
    await until(lambda: secured.log().count("not used: ") >= 2)
    before = committed
    await until(lambda: committed >= before + 20 or working.done())
    secured.rules.write_text(RULES)
    secured.signal(signal.SIGHUP)
    stopped.set()
    await working
    seen = await asyncio.to_thread(values, secured.kafka.bootstrap_servers, topic)
    assert sorted(seen) == sorted([b"late", *(b"%d" % number for number in range(committed))])


async def until(condition: Any, timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - it is in other processes
            await asyncio.sleep(0.05)


async def test_every_metric_after_real_work(secured: Secured, new_topic: TopicFactory):
    topic = await asyncio.to_thread(new_topic)
    before = await asyncio.to_thread(secured.metrics)
    async with secured.producer("orders", "orders-first") as first:
        await commit(first, topic, b"1")
        await commit(first, topic, b"2")
        open_transaction = await first.begin()
        await open_transaction.send(topic, b"3")
        await open_transaction.flush()
        # A newer instance fences it.
        async with secured.producer("orders", "orders-first"):
            with pytest.raises(ProducerFencedError):
                await open_transaction.commit()
    impatient = ProducerSettings(transaction_timeout_ms=5_000, call_timeout_ms=20_000)
    async with secured.producer("orders", "orders-slow", impatient) as slow:
        transaction = await slow.begin()
        await transaction.send(topic, b"4")
        await transaction.flush()
        await until(lambda: "transaction aborted: TIMEOUT" in secured.log())
        with pytest.raises(Exception, match="TXN_STATE"):
            await transaction.commit()
    kept = secured.producer("orders", "orders-kept")
    await kept.start()
    waiting = await kept.begin()
    await waiting.send(topic, b"5")
    await waiting.prepare()
    async with secured.channel("operator")(secured.all.addresses[0]) as channel:
        await watch_too_much(channel)
    with pytest.raises(TransactionalIdAuthorizationFailedError):
        await secured.producer("stranger", "orders-x").start()
    with pytest.raises(AuthenticationFailedError):
        await secured.producer("orders", "orders-x", token="bad.token.here").start()
    async with asyncio.timeout(60):
        while True:  # what is looked at is kept for some seconds, and markers of what was ended may be under way
            after = await asyncio.to_thread(secured.metrics)
            is_waiting = after[PREFIX + "open_transactions"][(("state", "PREPARED"),)]
            if is_waiting and not sum(after[PREFIX + "debts"].values()):
                break
            await asyncio.sleep(0.5)
    await waiting.commit()
    await kept.stop()

    def value(name: str, **labels: str) -> float:
        found = after.get(PREFIX + name) or after[f"family {PREFIX}{name.removesuffix('_total')}"]
        return sum(each for known, each in found.items() if labels.items() <= dict(known).items())

    def grown(name: str, **labels: str) -> float:
        found = before.get(PREFIX + name, {})
        return value(name, **labels) - sum(
            each for known, each in found.items() if labels.items() <= dict(known).items()
        )

    expected = {
        "requests": grown("requests_total", method="End", code="NONE") >= 2
        and grown("requests_total", method="FindCoordinator", code="TRANSACTIONAL_ID_AUTHORIZATION_FAILED") >= 1,
        "request_duration_seconds": grown("request_duration_seconds_count", method="InitProducer") >= 4,
        "commit_duration_seconds": grown("commit_duration_seconds_count") == 2
        and 0 < grown("commit_duration_seconds_sum") < 10
        and grown("commit_duration_seconds_bucket", le="+Inf") == 2,
        "transactions": grown("transactions_total", result="COMMITTED") == 2
        and grown("transactions_total", cause="TIMEOUT") == 1
        and grown("transactions_total", cause="NEWER_INSTANCE") == 1,
        "fenced": grown("fenced_total", cause="NEWER_INSTANCE") >= 1,
        "open_transactions": value("open_transactions", state="PREPARED") == 1,
        "oldest_transaction_age_seconds": 0 < value("oldest_transaction_age_seconds", state="PREPARED") < 120,
        "transactional_ids": value("transactional_ids") >= 3,
        "debts": value("debts") == 0,
        "markers": value("markers") == 0 and len(after[PREFIX + "markers"]) == 3,
        "marker_oldest_retry_seconds": value("marker_oldest_retry_seconds") == 0,
        "append_duration_seconds": grown("append_duration_seconds_count", topic="log") >= 8
        and grown("append_duration_seconds_count", topic="feed") >= 1,
        "appended_records": grown("appended_records_total", topic="feed") >= 2,
        # None of these here: test_metrics_in_trouble.py.
        "append_failures": value("append_failures_total") == 0,
        "replay_duration_seconds": value("replay_duration_seconds_count") >= 4,
        "partitions": value("partitions", state="serving") == 4 and value("partitions", state="failed") == 0,
        "sessions": value("sessions") >= 1,
        "authentication_failures": grown("authentication_failures_total") >= 1,
        "authorization_denials": grown("authorization_denials_total", permission="READ_ID") >= 1,
        "throttled": grown("throttled_total") >= 1,
        "hanging_transactions": value("hanging_transactions") == 0,
        "certificate_expiry_timestamp_seconds": value("certificate_expiry_timestamp_seconds") > 2 * 1.7e9,
        "build_info": value("build_info") == 2,
    }
    assert set(expected) == {metric.name for metric in CATALOGUE}
    assert [name for name, holds in expected.items() if not holds] == []
    assert after["process_resident_memory_bytes"]


async def watch_too_much(channel: Any) -> None:
    stub = AdminStub(channel)
    watches = [stub.WatchTransactions(admin_pb2.WatchTransactionsRequest()) for _ in range(25)]
    for watch in watches:
        with suppress(grpc.aio.AioRpcError):
            await watch.initial_metadata()
    for watch in watches:
        watch.cancel()


async def test_log_lines_are_json_and_name_their_transaction(secured: Secured):
    async with secured.producer("orders", "orders-logged"), secured.producer("orders", "orders-logged"):
        pass
    lines = [json.loads(line) for line in secured.log().splitlines() if line.startswith("{")]
    fenced = [line for line in lines if line.get("transactional_id") == "orders-logged"]
    assert "is fenced (NEWER_INSTANCE)" in fenced[0]["message"]
    assert (fenced[0]["level"], fenced[0]["logger"]) == ("INFO", "coordinator.telemetry")
    assert fenced[0]["number"] >= 1


async def test_no_secret_in_any_output(secured: Secured):
    """Keys, tokens and their parts, over all that this module's instances have written and shown."""
    good = token(secured.token_key, claims("nobody"))
    for shown in ("bad.token.here", good):
        with pytest.raises((AuthenticationFailedError, TransactionalIdAuthorizationFailedError)) as refused:
            await secured.producer("orders", "orders-x", token=shown).start()
        assert shown not in str(refused.value)
    metrics = await asyncio.to_thread(secured.metrics)
    written = secured.log() + json.dumps({name: str(found) for name, found in metrics.items()})
    for secret in ("PRIVATE KEY", "bad.token.here", "no.good.token", good.split(".")[0], good.split(".")[2]):
        assert secret not in written
    assert "Traceback" not in written
