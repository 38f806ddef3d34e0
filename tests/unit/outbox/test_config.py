"""Who can reach an outbox relay's metrics: this machine, or everybody if that is meant."""

from typing import Any

import pytest

from oncebox.settings import SettingsError, load
from relay.outbox.config import OutboxSettings

NEEDED = {"kafka.bootstrap_servers": "localhost:9092", "postgres.dsn": "postgresql://localhost/shop", "http_port": 9101}


def settings(**flags: Any) -> OutboxSettings:
    return load(OutboxSettings, flags=NEEDED | flags)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_this_machine(host: str):
    assert settings(http_host=host).http_host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.6", "outbox.example"])
def test_other_machines_only_if_it_is_meant(host: str):
    with pytest.raises(SettingsError, match="insecure_listen"):
        settings(http_host=host)
    assert settings(http_host=host, insecure_listen=True).http_host == host
