"""The secure listener lets in who knows the password and trusts the CA, and nobody else."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaError
from confluent_kafka.admin import AdminClient

from oncebox.local import LocalError, LocalKafka
from oncebox.local.certificates import make_certificates
from oncebox.local.kafka import QUICK_START

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.kafka


@pytest.fixture(scope="module")
def secure_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalKafka]:
    with LocalKafka(tmp_path_factory.mktemp("secure"), secure=True, jvm_options=[QUICK_START]) as kafka:
        yield kafka


@pytest.fixture
def config(secure_kafka: LocalKafka) -> dict[str, Any]:
    return {
        "bootstrap.servers": secure_kafka.secure_servers,
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": secure_kafka.username,
        "sasl.password": secure_kafka.password,
        "ssl.ca.location": str(secure_kafka.ca_path),
        "log_level": 0,
    }


def first_error(config: dict[str, Any]) -> int:
    errors: list[KafkaError] = []
    admin = AdminClient(config, error_cb=errors.append)
    deadline = time.monotonic() + 60
    while not errors and time.monotonic() < deadline:
        admin.poll(0.1)
    return errors[0].code()


def test_the_right_password_and_ca_open_the_door(config: dict[str, Any]):
    assert set(AdminClient(config).list_topics(timeout=60).brokers) == {1}


def test_a_wrong_password_does_not(config: dict[str, Any]):
    assert first_error({**config, "sasl.password": "wrong"}) == KafkaError._AUTHENTICATION


def test_another_ca_does_not(config: dict[str, Any], tmp_path: Path):
    make_certificates(ca_path=tmp_path / "ca.pem", keystore_path=tmp_path / "keystore.pem")
    assert first_error({**config, "ssl.ca.location": str(tmp_path / "ca.pem")}) == KafkaError._SSL


def test_a_folder_keeps_what_it_was_made_for(secure_kafka: LocalKafka):
    with pytest.raises(LocalError, match="with a secure listener: take another folder"):
        LocalKafka(secure_kafka.folder).start()
