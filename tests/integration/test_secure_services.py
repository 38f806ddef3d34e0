"""Relay and outbox with SASL and TLS to the brokers and TLS to PostgreSQL; TLS to a relay's control. Their logs name
transactions in fields, and no password. The coordinator and clients: tests/integration/client/test_secure.py.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import psycopg
import pytest
import yaml

from oncebox.channels import SecureChannel
from oncebox.local import LocalKafka
from oncebox.local.kafka import QUICK_START
from oncebox.outbox import INSERT, event
from oncebox.producer import Producer
from oncebox.session import open_plain_channel
from oncebox.v1 import relay_pb2
from oncebox.v1.relay_pb2_grpc import RelayStub
from proof.faults.process import ChildProcess
from tests.support.certificates import Authority, Pair
from tests.support.coordinator import Coordinators, values
from tests.support.kafka import create_topic
from tests.support.relay import GUARD, Relays
from tests.support.tls_postgres import tls_in_front

pytestmark = pytest.mark.kafka

ONCEBOX = str(Path(sys.executable).with_name("oncebox"))


@pytest.fixture(scope="module")
def secure_kafka(tmp_path_factory: pytest.TempPathFactory):
    with LocalKafka(tmp_path_factory.mktemp("secure"), secure=True, jvm_options=[QUICK_START]) as kafka:
        yield kafka


def section(kafka: LocalKafka) -> dict[str, str]:
    """For the file of a service."""
    return {
        "bootstrap_servers": kafka.secure_servers,
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-256",
        "sasl_username": kafka.username,
        "sasl_password": kafka.password,
        "ssl_ca_location": str(kafka.ca_path),
    }


@pytest.fixture(scope="module")
def coordinators(secure_kafka: LocalKafka, tmp_path_factory: pytest.TempPathFactory):
    with Coordinators(secure_kafka.bootstrap_servers, tmp_path_factory.mktemp("secure-coordinator")) as started:
        started.start()
        yield started


async def write(kafka: LocalKafka, coordinators: Coordinators, transactional_id: str, topic: str, value: bytes) -> None:
    async with (
        Producer(kafka.bootstrap_servers, coordinators.addresses, transactional_id=transactional_id) as producer,
        producer.transaction() as transaction,
    ):
        await transaction.send(topic, value)


def lines_of(process: ChildProcess) -> list[dict[str, Any]]:
    """What it has logged; beside that it only prints where it can be called."""
    first, *rest = process.log.read_text().splitlines()
    assert " runs as " in first or " serves at " in first
    return [json.loads(line) for line in rest]


def shown(ca: Path, pair: Pair) -> SecureChannel:
    return SecureChannel(ca_location=str(ca), certificate_location=str(pair.certificate), key_location=str(pair.key))


async def called(channel: Any, method: str) -> relay_pb2.GetStatusResponse:
    request = getattr(relay_pb2, f"{method}Request")()
    answer: relay_pb2.GetStatusResponse = await getattr(RelayStub(channel), method)(request, timeout=60)
    return answer


async def until_told(process: ChildProcess, text: str) -> None:
    await asyncio.to_thread(process.wait_ready, partial(process.log_contains, text))


@pytest.mark.postgres
@pytest.mark.parametrize("mode", ["transaction", "partition"])
async def test_a_relay_over_sasl_and_tls_on_both_sides(
    secure_kafka: LocalKafka, coordinators: Coordinators, database: str, tmp_path: Path, mode: str
):
    """Its log is JSON with the transaction's id; level and mistakes in the file are told while it runs."""
    topic = await asyncio.to_thread(create_topic, secure_kafka.bootstrap_servers)
    authority = Authority(tmp_path)
    with Relays(secure_kafka.secure_servers, database, tmp_path) as relays:
        relays.run(f"CREATE TABLE paid (id bigint PRIMARY KEY, {GUARD})")
        async with tls_in_front(database, authority.issue("postgres"), authority.ca) as dsn:
            tables = [{"topic": topic, "table": "paid", "key": "id"}]
            reached = {"kafka": section(secure_kafka), "postgres": {"dsn": dsn}, "feed_topic": coordinators.feed_topic}
            relays.configure(tables, **reached, mode=mode, on_error="park", log_format="json")
            relay = await asyncio.to_thread(relays.start)
            await write(secure_kafka, coordinators, f"good-{mode}", topic, b'{"id": 1}')
            await asyncio.to_thread(relays.wait_for, "SELECT id FROM paid", [(1,)])
            await write(secure_kafka, coordinators, f"bad-{mode}", topic, b'{"id": "no number"}')
            await asyncio.to_thread(relays.wait_for, "SELECT state FROM oncebox.dead_letter", [("parked",)])
            await until_told(relay, "parked")

            relays.configure(tables, on_error="skip", log_level="WARNING")
            os.kill(relay.pid, signal.SIGHUP)
            await until_told(relay, "used only after a restart: on_error")
            relays.configure(tables, on_error="nonsense")
            os.kill(relay.pid, signal.SIGHUP)
            await until_told(relay, "the settings are not read anew: .*on_error")
            assert await asyncio.to_thread(relay.stop) == 0
        (parked,) = [line for line in lines_of(relay) if "parked" in line["message"]]
        assert parked["level"] == "WARNING"
        assert f"{topic} partition 0 offset" in parked["message"]
        # By partitions, it is the record that counts and not whose transaction it was.
        expected = (f"bad-{mode}", 1) if mode == "transaction" else (None, None)
        assert (parked.get("transactional_id"), parked.get("number")) == expected
        assert not relay.log_contains("settings read anew"), "that would be of level INFO"
        for secret in (secure_kafka.password, urlsplit(database).password):
            assert secret
            assert secret not in relay.log.read_text()


@pytest.mark.postgres
async def test_a_relay_does_not_talk_to_a_database_that_it_cannot_trust(
    secure_kafka: LocalKafka, database: str, tmp_path: Path
):
    topic = await asyncio.to_thread(create_topic, secure_kafka.bootstrap_servers)
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    with Relays(secure_kafka.secure_servers, database, tmp_path) as relays:
        relays.run(f"CREATE TABLE paid (id bigint PRIMARY KEY, {GUARD})")
        async with tls_in_front(database, authority.issue("postgres"), other.ca) as dsn:
            reached = {"kafka": section(secure_kafka), "postgres": {"dsn": dsn}}
            relays.configure([{"topic": topic, "table": "paid", "key": "id"}], **reached)
            relay = await asyncio.to_thread(relays.start)
            await until_told(relay, "waits and tries again: .*certificate verify failed")
            assert relays.rows("SELECT to_regclass('oncebox.relay')") == [(None,)]


@pytest.mark.postgres
async def test_a_relays_control_wants_a_certificate_and_a_right(
    secure_kafka: LocalKafka, database: str, tmp_path: Path
):
    topic = await asyncio.to_thread(create_topic, secure_kafka.bootstrap_servers)
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    server = authority.issue("relay")
    tls = {"certificate_location": server.certificate, "key_location": server.key, "client_ca_location": authority.ca}
    with Relays(secure_kafka.bootstrap_servers, database, tmp_path) as relays:
        relays.run(f"CREATE TABLE paid (id bigint PRIMARY KEY, {GUARD})")
        tables = [{"topic": topic, "table": "paid", "key": "id"}]
        rules = tmp_path / "rules.yaml"
        operator = {"principals": ["cert:operator"], "relays": [relays.name]}
        auditor = {"principals": ["cert:auditor"], "readable_relays": [{"prefix": "relay-"}]}
        neighbour = {"principals": ["cert:neighbour"], "relays": [relays.name[:-1], f"{relays.name}b"]}
        rules.write_text(yaml.safe_dump({"rules": [operator, auditor, neighbour]}))
        relays.configure(tables, tls={name: str(file) for name, file in tls.items()}, rules_location=str(rules))
        relay = await asyncio.to_thread(relays.start)
        told = re.search(r"serves at (\S+),", relay.log.read_text())
        assert told
        await asyncio.to_thread(relays.wait_for, "SELECT paused FROM oncebox.relay", [(False,)])

        mine, foreign = authority.issue("operator"), other.issue("operator")
        for open_channel in (
            open_plain_channel,
            SecureChannel(ca_location=str(authority.ca)),
            shown(authority.ca, foreign),
        ):
            async with open_channel(told[1]) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await called(channel, "Pause")
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert relays.rows("SELECT paused FROM oncebox.relay") == [(False,)]

        for name, method in (("auditor", "Pause"), ("neighbour", "Pause"), ("neighbour", "GetStatus")):
            async with shown(authority.ca, authority.issue(name))(told[1]) as channel:
                with pytest.raises(grpc.aio.AioRpcError, match=f"no rule allows 'cert:{name}' this") as refused:
                    await called(channel, method)
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert relays.rows("SELECT paused FROM oncebox.relay") == [(False,)]
        async with shown(authority.ca, authority.issue("auditor"))(told[1]) as channel:
            assert (await called(channel, "GetStatus")).name == relays.name

        async with shown(authority.ca, mine)(told[1]) as channel:
            assert (await called(channel, "Pause")).name == relays.name
            assert relays.rows("SELECT paused FROM oncebox.relay") == [(True,)]
            await until_told(relay, "'cert:operator' asks for Pause")
            # Taken away while it runs, and while the operator is connected.
            rules.write_text(yaml.safe_dump({"rules": [auditor]}))
            os.kill(relay.pid, signal.SIGHUP)
            await until_told(relay, "settings read anew")
            with pytest.raises(grpc.aio.AioRpcError, match="no rule allows 'cert:operator' this"):
                await called(channel, "Resume")
        assert relays.rows("SELECT paused FROM oncebox.relay") == [(True,)]


@pytest.mark.postgres
async def test_the_outbox_over_sasl_and_tls_on_both_sides(
    secure_kafka: LocalKafka, coordinators: Coordinators, database: str, tmp_path: Path
):
    topic = await asyncio.to_thread(create_topic, secure_kafka.bootstrap_servers)
    authority = Authority(tmp_path)
    config = tmp_path / "outbox.yaml"
    async with tls_in_front(database, authority.issue("postgres"), authority.ca) as dsn:
        given = {
            "kafka": section(secure_kafka),
            "postgres": {"dsn": dsn},
            "coordinators": ",".join(coordinators.addresses),
            "source": "commit_seq",
            "topic": topic,
            "log_format": "json",
            "log_level": "DEBUG",
        }
        config.write_text(yaml.safe_dump(given))
        init = [ONCEBOX, "outbox", "init", "--config", str(config), "--yes"]
        await asyncio.to_thread(subprocess.run, init, check=True, capture_output=True, timeout=60)
        with ChildProcess([*init[:2], "run", *init[3:5]], log=tmp_path / "outbox.log") as relay:
            with psycopg.connect(database) as connection:
                connection.execute(INSERT, event("order", "1", "made", {"a": 1}))
            await until_told(relay, "published 1 rows")
            assert await asyncio.to_thread(values, secure_kafka.bootstrap_servers, topic) == [b'{"a": 1}']
            config.write_text(yaml.safe_dump({**given, "log_level": "INFO"}))
            os.kill(relay.pid, signal.SIGHUP)
            await until_told(relay, "settings read anew")
            assert await asyncio.to_thread(relay.stop) == 0
    (published,) = [line for line in lines_of(relay) if line["message"].startswith("published 1 rows")]
    assert (published["transactional_id"], published["number"]) == ("outbox-default", 1)
    for secret in (secure_kafka.password, urlsplit(database).password):
        assert secret
        assert secret not in relay.log.read_text()
