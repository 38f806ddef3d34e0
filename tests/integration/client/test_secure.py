"""SASL and TLS on the way to the brokers, for the producer and for who reads its transactions."""

import asyncio
import base64
import json
import threading
import time
from pathlib import Path

import pytest

import oncebox
from oncebox.errors import BrokersUnavailableError
from oncebox.local import LocalKafka
from oncebox.local.kafka import QUICK_START
from oncebox.producer import Producer
from oncebox.wire import KafkaSettings
from tests.support.coordinator import Coordinators, values
from tests.support.kafka import create_topic

pytestmark = pytest.mark.kafka


# The broker takes any token that is not signed: what is tested is how it gets there.
WITH_TOKENS = {
    "listener.name.secure.sasl.enabled.mechanisms": "SCRAM-SHA-256,OAUTHBEARER",
    "listener.name.secure.oauthbearer.sasl.jaas.config": (
        "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required "
        'unsecuredLoginStringClaim_sub="broker";'
    ),
}


@pytest.fixture(scope="module")
def secure_kafka(tmp_path_factory: pytest.TempPathFactory):
    with LocalKafka(
        tmp_path_factory.mktemp("secure"), secure=True, properties=WITH_TOKENS, jvm_options=[QUICK_START]
    ) as kafka:
        yield kafka


def settings(kafka: LocalKafka, **changed: str) -> KafkaSettings:
    fields = {"sasl_password": kafka.password, "ssl_ca_location": str(kafka.ca_path), **changed}
    return KafkaSettings(
        bootstrap_servers=kafka.secure_servers,
        security_protocol="SASL_SSL",
        sasl_mechanism="SCRAM-SHA-256",
        sasl_username=kafka.username,
        **fields,  # type: ignore[arg-type]
    )


async def test_transactions_over_sasl_and_tls(secure_kafka: LocalKafka, tmp_path: Path):
    topic = await asyncio.to_thread(create_topic, secure_kafka.bootstrap_servers, partitions=2)
    with Coordinators(secure_kafka.bootstrap_servers, tmp_path) as coordinators:
        await asyncio.to_thread(coordinators.start)
        async with Producer(settings(secure_kafka), coordinators.addresses, transactional_id="secure") as mine:
            for number in range(10):
                async with mine.transaction() as transaction:
                    await transaction.send(topic, b"%d" % number, partition=number % 2)
        seen = await asyncio.to_thread(values, secure_kafka.bootstrap_servers, topic)
        copies = await asyncio.to_thread(create_topic, secure_kafka.bootstrap_servers, partitions=2)
        stop = asyncio.Event()
        handled = []

        async def copy(record: oncebox.Record, transaction: oncebox.Transaction) -> None:
            await transaction.send(copies, record.value, partition=record.partition)
            handled.append(record)
            if len(handled) == 10:
                stop.set()

        await oncebox.transform(
            topic, "secure", copy, kafka=settings(secure_kafka), coordinators=coordinators.addresses, stop=stop
        )
        read: list[bytes] = []
        async with oncebox.read_transactions(
            copies, settings(secure_kafka), feed_topic=coordinators.feed_topic, until_end=True
        ) as reader:
            async for whole in reader:
                read += [record.value or b"" for records in whole.records.values() for record in records]
    assert sorted(read) == sorted(seen)
    assert sorted(seen) == [b"%d" % number for number in range(10)]


async def test_transactions_with_a_bearer_token(secure_kafka: LocalKafka, tmp_path: Path):
    """The producer's connections and the reader's both ask for it."""
    topic = await asyncio.to_thread(create_topic, secure_kafka.bootstrap_servers)
    asked: list[str] = []

    def token() -> tuple[str, float]:
        asked.append(threading.current_thread().name)
        now = time.time()
        claims = {"sub": "teller", "iat": int(now), "exp": int(now) + 300}
        parts = (base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in ({"alg": "none"}, claims))
        return b".".join([*parts, b""]).decode(), now + 300

    reached = KafkaSettings(
        bootstrap_servers=secure_kafka.secure_servers,
        security_protocol="SASL_SSL",
        sasl_mechanism="OAUTHBEARER",
        sasl_token=token,
        ssl_ca_location=str(secure_kafka.ca_path),
    )
    with Coordinators(secure_kafka.bootstrap_servers, tmp_path) as coordinators:
        await asyncio.to_thread(coordinators.start)
        async with Producer(reached, coordinators.addresses, transactional_id="tokens") as mine:
            async with mine.transaction() as transaction:
                await transaction.send(topic, b"1")
            asked_by_producer = len(asked)
            assert asked_by_producer
        async with oncebox.read_transactions(
            topic, reached, feed_topic=coordinators.feed_topic, until_end=True
        ) as reader:
            read = [record.value async for whole in reader for records in whole.records.values() for record in records]
    assert read == [b"1"]
    assert len(asked) > asked_by_producer


async def test_the_coordinator_over_sasl_and_tls(secure_kafka: LocalKafka, tmp_path: Path):
    """And its password stands in nothing that it writes."""
    topic = await asyncio.to_thread(create_topic, secure_kafka.bootstrap_servers)
    reached = {
        "kafka__security_protocol": "SASL_SSL",
        "kafka__sasl_mechanism": "SCRAM-SHA-256",
        "kafka__sasl_username": secure_kafka.username,
        "kafka__sasl_password": secure_kafka.password,
        "kafka__ssl_ca_location": str(secure_kafka.ca_path),
        "log_level": "DEBUG",
    }
    with Coordinators(secure_kafka.secure_servers, tmp_path, **reached) as coordinators:
        process = await asyncio.to_thread(coordinators.start)
        async with (
            Producer(settings(secure_kafka), coordinators.addresses, transactional_id="secure") as mine,
            mine.transaction() as transaction,
        ):
            await transaction.send(topic, b"1")
        assert await asyncio.to_thread(values, secure_kafka.bootstrap_servers, topic) == [b"1"]
        assert await asyncio.to_thread(process.stop) == 0
        assert secure_kafka.password not in process.log.read_text()


async def test_a_wrong_password_is_told_at_the_start(secure_kafka: LocalKafka):
    with pytest.raises(BrokersUnavailableError, match=r"(?i)authentication"):
        await Producer(settings(secure_kafka, sasl_password="wrong")).start()
