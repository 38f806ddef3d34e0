"""The coordinator's settings: safe by default, and what contradicts itself is told."""

import os

import pytest

from coordinator.config import CoordinatorSettings, internal_topics
from oncebox.settings import SettingsError, load

MUTUAL = {"certificate_location": __file__, "key_location": __file__, "client_ca_location": __file__}
KAFKA = {"kafka.bootstrap_servers": "localhost:9092"}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch):
    for name in list(os.environ):
        if name.startswith("ONCEBOX_"):
            monkeypatch.delenv(name)


def test_defaults_are_safe():
    settings = load(CoordinatorSettings, flags=KAFKA)
    assert settings.listen_host == "127.0.0.1"
    assert not settings.reflection
    assert not settings.strict
    assert (settings.log_topic, settings.log_partitions, settings.feed_topic) == ("oncebox.log", 16, "oncebox.commits")
    assert settings.limits.transaction_timeout_max_ms == 900_000


def test_variables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ONCEBOX_COORDINATOR_LISTEN_PORT", "0")
    monkeypatch.setenv("ONCEBOX_COORDINATOR_LIMITS__CALLS", "5")
    settings = load(CoordinatorSettings, flags=KAFKA)
    assert (settings.listen_port, settings.limits.calls) == (0, 5)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"listen_host": "0.0.0.0"}, "insecure_listen"),
        ({"http_host": "0.0.0.0"}, "http_host 0.0.0.0 is reachable from other machines"),
        ({"listen_host": "10.0.0.1", "tls": {"certificate_location": __file__, "key_location": __file__}}, "identity"),
        ({"tokens": {"keys_location": __file__, "audience": "a", "issuer": "i"}}, "tokens need tls"),
        ({"rules_location": __file__}, "know who calls"),
        ({"rules_location": __file__, "reflection": True, "tls": MUTUAL}, "reflection"),
        ({"tls.certificate_location": "/absent", "tls.key_location": "/absent"}, "does not point to a file"),
        ({"listen_host": "coordinator.example"}, "insecure_listen"),
        ({"log_topic": "x", "feed_topic": "x"}, "must differ"),
        ({"log_topic": "no topic"}, "log_topic"),
        ({"log_partitions": 0}, "log_partitions"),
        ({"listen_port": 65_536}, "listen_port"),
        ({"limits.calls": 0}, "limits.calls"),
        ({"limits.call_timeout_ms": 400_000}, "call_timeout_max_ms"),
    ],
)
def test_what_contradicts_itself(flags, told):
    with pytest.raises(SettingsError, match=told):
        load(CoordinatorSettings, flags=KAFKA | flags)


def test_listening_wider_must_be_meant():
    settings = load(CoordinatorSettings, flags=KAFKA | {"listen_host": "10.0.0.1", "insecure_listen": True})
    assert settings.listen_host == "10.0.0.1"


def test_with_tls_and_identity_it_may_listen_wider():
    settings = load(CoordinatorSettings, flags=KAFKA | {"listen_host": "10.0.0.1", "tls": MUTUAL})
    assert settings.has_identity


def test_everywhere_is_no_address():
    flags = KAFKA | {"listen_host": "0.0.0.0", "insecure_listen": True}
    with pytest.raises(SettingsError, match="advertised_address"):
        load(CoordinatorSettings, flags=flags)
    settings = load(CoordinatorSettings, flags=flags | {"advertised_address": "coordinator.example:7171"})
    assert settings.advertised_address == "coordinator.example:7171"


def test_internal_topics_follow_the_settings():
    settings = load(CoordinatorSettings, flags=KAFKA | {"log_topic": "my.log"})
    assert {"my.log", "oncebox.commits", "__consumer_offsets", "__transaction_state"} <= internal_topics(settings)
