"""SASL and TLS on the way to the brokers, for the producer and for who reads its transactions."""

import asyncio
import base64
import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

import oncebox
from oncebox.errors import BrokersUnavailableError
from oncebox.local import LocalKafka
from oncebox.local.kafka import QUICK_START
from oncebox.producer import Producer
from oncebox.settings import KafkaSection
from oncebox.wire import KafkaSettings
from oncebox.wire.settings import SaslToken
from tests.support.certificates import Authority
from tests.support.coordinator import Coordinators, values, wait_for_markers
from tests.support.kafka import create_topic

pytestmark = pytest.mark.kafka

ROOT = Path(__file__).parents[3]
NAME, PASSWORD = "teller", "count-the-beans"
PLAIN_LOGIN = f'org.apache.kafka.common.security.plain.PlainLoginModule required user_{NAME}="{PASSWORD}";'

# The broker takes any token that is not signed: what is tested is how it gets there.
MECHANISMS = {
    "listener.name.secure.sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512,PLAIN,OAUTHBEARER",
    "listener.name.secure.scram-sha-512.sasl.jaas.config": (
        "org.apache.kafka.common.security.scram.ScramLoginModule required;"
    ),
    "listener.name.secure.plain.sasl.jaas.config": PLAIN_LOGIN,
    "listener.name.secure.oauthbearer.sasl.jaas.config": (
        "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required "
        'unsecuredLoginStringClaim_sub="broker";'
    ),
}


@pytest.fixture(scope="module")
def secure_kafka(tmp_path_factory: pytest.TempPathFactory):
    with LocalKafka(
        tmp_path_factory.mktemp("secure"), secure=True, properties=MECHANISMS, jvm_options=[QUICK_START]
    ) as kafka:
        yield kafka


def settings(kafka: LocalKafka, **changed: Any) -> KafkaSettings:
    fields = {
        "sasl_mechanism": "SCRAM-SHA-256",
        "sasl_username": kafka.username,
        "sasl_password": kafka.password,
        "ssl_ca_location": str(kafka.ca_path),
        **changed,
    }
    return KafkaSettings(bootstrap_servers=kafka.secure_servers, security_protocol="SASL_SSL", **fields)


def of_a_service(reached: KafkaSettings) -> dict[str, str]:
    """The same for a coordinator."""
    names = [name for name in KafkaSection.model_fields if name in KafkaSettings.__dataclass_fields__]
    given = {f"kafka__{name}": getattr(reached, name) for name in names if name != "bootstrap_servers"}
    if not reached.security_protocol.startswith("SASL"):
        del given["kafka__sasl_mechanism"]
    return {name: value for name, value in given.items() if value is not None}


async def there_and_back(reached: KafkaSettings, plain_servers: str, folder: Path) -> None:
    """All that reaches for the brokers does it so: the coordinator, the producer, a transform and a reader."""
    topic, copies = [await asyncio.to_thread(create_topic, plain_servers, partitions=2) for _ in range(2)]
    with Coordinators(reached.bootstrap_servers, folder, **of_a_service(reached)) as coordinators:
        process = await asyncio.to_thread(coordinators.start)
        async with Producer(reached, coordinators.addresses, transactional_id="secure") as mine:
            for number in range(10):
                async with mine.transaction() as transaction:
                    await transaction.send(topic, b"%d" % number, partition=number % 2)
        seen = await asyncio.to_thread(values, plain_servers, topic)
        stop = asyncio.Event()

        async def copy(record: oncebox.Record, transaction: oncebox.Transaction) -> None:
            await transaction.send(copies, record.value, partition=record.partition)

        copying = oncebox.transform(topic, topic, copy, kafka=reached, coordinators=coordinators.addresses, stop=stop)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(copying)
            async with asyncio.timeout(120):
                while len(await asyncio.to_thread(values, plain_servers, copies)) < 10:
                    pass
            stop.set()
        read: list[bytes] = []
        async with oncebox.read_transactions(
            copies, reached, feed_topic=coordinators.feed_topic, until_end=True
        ) as reader:
            async for whole in reader:
                read += [record.value or b"" for records in whole.records.values() for record in records]
        assert sorted(read) == sorted(seen) == [b"%d" % number for number in range(10)]
        assert await asyncio.to_thread(process.stop) == 0
        if reached.sasl_password:
            assert reached.sasl_password not in process.log.read_text()


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_passwords_over_tls(secure_kafka: LocalKafka, tmp_path: Path, mechanism: str):
    reached = settings(secure_kafka, sasl_mechanism=mechanism)
    if mechanism == "PLAIN":
        reached = settings(secure_kafka, sasl_mechanism=mechanism, sasl_username=NAME, sasl_password=PASSWORD)
    if mechanism == "SCRAM-SHA-512":
        reached = settings(secure_kafka, sasl_mechanism=mechanism, sasl_username=NAME, sasl_password=PASSWORD)
        how = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        wanted = UserScramCredentialUpsertion(NAME, how, PASSWORD.encode())
        admin = AdminClient({"bootstrap.servers": secure_kafka.bootstrap_servers})
        await asyncio.to_thread(admin.alter_user_scram_credentials([wanted])[NAME].result, 60)
    await there_and_back(reached, secure_kafka.bootstrap_servers, tmp_path)


@pytest.fixture(scope="module")
def other_listeners(tmp_path_factory: pytest.TempPathFactory):
    """Client certificates on one listener, passwords without TLS on the other; and who signs the certificates."""
    authority = Authority(tmp_path_factory.mktemp("authority"))
    properties = {
        "listener.security.protocol.map": "CLIENT:SASL_PLAINTEXT,BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURE:SSL",
        "listener.name.client.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.client.plain.sasl.jaas.config": PLAIN_LOGIN,
        "listener.name.secure.ssl.client.auth": "required",
        "listener.name.secure.ssl.truststore.type": "PEM",
        "listener.name.secure.ssl.truststore.location": str(authority.ca),
    }
    folder = tmp_path_factory.mktemp("others")
    with LocalKafka(folder, secure=True, properties=properties, jvm_options=[QUICK_START]) as kafka:
        yield kafka, authority


async def test_passwords_without_tls(other_listeners: tuple[LocalKafka, Authority], tmp_path: Path):
    kafka, _ = other_listeners
    reached = KafkaSettings(
        bootstrap_servers=kafka.bootstrap_servers,
        security_protocol="SASL_PLAINTEXT",
        sasl_username=NAME,
        sasl_password=PASSWORD,
    )
    await there_and_back(reached, kafka.internal_servers, tmp_path)


async def test_client_certificates(other_listeners: tuple[LocalKafka, Authority], tmp_path: Path):
    kafka, authority = other_listeners
    pair = authority.issue(NAME)
    reached = KafkaSettings(
        bootstrap_servers=kafka.secure_servers,
        security_protocol="SSL",
        ssl_ca_location=str(kafka.ca_path),
        ssl_certificate_location=str(pair.certificate),
        ssl_key_location=str(pair.key),
    )
    await there_and_back(reached, kafka.internal_servers, tmp_path)
    with pytest.raises(BrokersUnavailableError):
        await Producer(replace(reached, ssl_certificate_location=None, ssl_key_location=None)).start()


async def test_the_program_on_the_page(secure_kafka: LocalKafka, tmp_path: Path):
    topic = await asyncio.to_thread(create_topic, secure_kafka.bootstrap_servers)
    (program,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs/client.md").read_text(), re.DOTALL)
    given = {
        "broker-1.example.com:9093": secure_kafka.secure_servers,
        "/etc/ssl/kafka-ca.pem": str(secure_kafka.ca_path),
        '"teller"': f'"{secure_kafka.username}"',
        '"debits"': f'"{topic}"',
    }
    for shown, real in given.items():
        assert shown in program
        program = program.replace(shown, real)
    script = tmp_path / "program.py"
    await asyncio.to_thread(script.write_text, program)
    environment = {**os.environ, "KAFKA_PASSWORD": secure_kafka.password}
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert await asyncio.to_thread(values, secure_kafka.bootstrap_servers, topic) == [b"30"]


class AwayError(Exception):
    """As libraries raise that fetch tokens: no OSError."""


def unsigned_token() -> tuple[str, float]:
    now = time.time()
    claims = {"sub": "teller", "iat": int(now), "exp": int(now) + 300}
    parts = (base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in ({"alg": "none"}, claims))
    return b".".join([*parts, b""]).decode(), now + 300


def with_token(kafka: LocalKafka, token: SaslToken) -> KafkaSettings:
    return KafkaSettings(
        bootstrap_servers=kafka.secure_servers,
        security_protocol="SASL_SSL",
        sasl_mechanism="OAUTHBEARER",
        sasl_token=token,
        ssl_ca_location=str(kafka.ca_path),
    )


async def test_a_token_that_cannot_be_had_for_a_moment_is_asked_for_again(secure_kafka: LocalKafka):
    topic = await asyncio.to_thread(create_topic, secure_kafka.bootstrap_servers)
    failures = iter([False, True, False, True])

    def token() -> tuple[str, float]:
        if next(failures, False):
            raise AwayError("the issuer does not answer")
        return unsigned_token()

    async with Producer(with_token(secure_kafka, token)) as producer:
        assert (await producer.send_and_wait(topic, b"1", partition=0)).offset == 0
    assert next(failures, None) is None

    def never() -> tuple[str, float]:
        raise AwayError("the issuer does not answer")

    with pytest.raises(BrokersUnavailableError, match="sasl_token has raised AwayError"):
        await Producer(with_token(secure_kafka, never)).start()


async def test_transactions_with_a_bearer_token(secure_kafka: LocalKafka, tmp_path: Path):
    """The producer's connections and the reader's both ask for it."""
    topic = await asyncio.to_thread(create_topic, secure_kafka.bootstrap_servers)
    asked: list[str] = []

    def token() -> tuple[str, float]:
        asked.append(threading.current_thread().name)
        return unsigned_token()

    reached = with_token(secure_kafka, token)
    with Coordinators(secure_kafka.bootstrap_servers, tmp_path) as coordinators:
        await asyncio.to_thread(coordinators.start)
        async with Producer(reached, coordinators.addresses, transactional_id="tokens") as mine:
            async with mine.transaction() as transaction:
                await transaction.send(topic, b"1")
            asked_by_producer = len(asked)
            assert asked_by_producer
        await asyncio.to_thread(wait_for_markers, secure_kafka.bootstrap_servers, topic)
        async with oncebox.read_transactions(
            topic, reached, feed_topic=coordinators.feed_topic, until_end=True
        ) as reader:
            read = [record.value async for whole in reader for records in whole.records.values() for record in records]
    assert read == [b"1"]
    assert len(asked) > asked_by_producer


async def test_a_wrong_password_is_told_at_the_start(secure_kafka: LocalKafka):
    with pytest.raises(BrokersUnavailableError, match=r"(?i)authentication"):
        await Producer(settings(secure_kafka, sasl_password="wrong")).start()
